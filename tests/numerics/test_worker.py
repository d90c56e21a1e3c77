"""The worker's own duties: requests that leave early, half precision, and options that cannot take effect."""

import numpy as np
import pytest
import torch

from tests.numerics.steps import start
from tests.rings import ALL
from xgpt.checkpoints.files import read_spec
from xgpt.core.errors import InputError, MachineError
from xgpt.core.policies import Chunk, LaneSettings, OneLane, Pool, Step
from xrunner import sampling as drawing
from xrunner.build import WorkerSettings, build_worker
from xrunner.engine import Engine
from xrunner.generation import NO_TOKEN, Generation, SamplingParams
from xrunner.models import CLASSES


@pytest.fixture
def spec(small_opt):
    return read_spec(small_opt[0])


def run(spec, cancelled):
    """Tokens of eight requests; `cancelled` leave after the third step."""
    worker = build_worker(WorkerSettings(spec=spec, dtype="float32", num_blocks=40, block_size=8))
    pool = Pool(40, 8)
    engine = Engine(OneLane(LaneSettings(mix=True, token_budget=24, max_batch=8), pool), worker)
    rng = np.random.default_rng(2)
    outputs = {id_: [] for id_ in range(8)}
    for id_ in outputs:
        engine.submit(Generation(id_, tuple(rng.integers(0, 211, 20).tolist()), max_output=12))
    steps = 0
    while (tokens := engine.step()) is not None:
        steps += 1
        for token in tokens:
            outputs[token.id].append(token.token)
        if steps == 3:
            for id_ in cancelled:
                engine.cancel(id_)
    assert pool.memory.decodes.num_used == 0
    return outputs


def test_cancelled_requests_free_their_blocks_and_change_no_others_tokens(spec):
    everyone, rest = run(spec, ()), run(spec, (0, 2, 7))  # decoding, encoding, waiting
    assert len(rest[7]) == 0 and len(rest[0]) < 12
    assert all(rest[id_] == everyone[id_] for id_ in (1, 3, 4, 5, 6))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_to_the_float32_logits(spec, dtype):
    step = Step((Chunk(0, 0, 20), Chunk(1, 0, 5)), ())
    logits = {}
    for kind in ("float32", dtype):
        backend = None if ALL else "reference"  # numba takes long to compile for K/V in another type
        worker = build_worker(WorkerSettings(spec=spec, dtype=kind, num_blocks=8, block_size=8, backend=backend))
        worker.sample = lambda rows, kind=kind: logits.setdefault(kind, rows.float()).argmax(dim=-1)
        start(worker, [Generation(0, tuple(range(20)), 4), Generation(1, tuple(range(5)), 4)])
        worker.execute(step)
    torch.testing.assert_close(logits[dtype], logits["float32"], rtol=0, atol=0.1)


def test_a_step_that_samples_nothing(spec):
    worker = build_worker(WorkerSettings(spec=spec, dtype="float32", num_blocks=8, block_size=8))
    start(worker, [Generation(0, tuple(range(20)), 4)])
    assert worker.execute(Step((Chunk(0, 0, 10),), ())) == {}


def test_the_last_layer_keeps_tokens_alone_whose_logits_are_wanted(spec):
    worker = build_worker(WorkerSettings(spec=spec, dtype="float32", num_blocks=12, block_size=8))
    seen = []
    for layer in (worker.model.layers[0], worker.model.layers[-1]):
        layer.mlp.register_forward_pre_hook(lambda mlp, inputs: seen.append(len(inputs[0])))
    start(worker, [Generation(0, tuple(range(20)), 4), Generation(1, tuple(range(5)), 4)])
    for step, expected in (
        (Step((Chunk(0, 0, 10),), ()), [10]),  # none is wanted
        (Step((Chunk(0, 10, 10), Chunk(1, 0, 5)), ()), [15, 2]),
        (Step((), (0, 1)), [2, 2]),
    ):
        worker.execute(step)
        assert seen == expected
        seen.clear()


def test_options_that_cannot_take_effect_are_refused(spec):
    with pytest.raises(InputError, match="give one of numba, reference, triton"):
        build_worker(WorkerSettings(spec=spec, dtype="float32", num_blocks=8, backend="cuda-magic"))
    with pytest.raises(InputError, match="on cpu in float16 give one of reference"):
        build_worker(WorkerSettings(spec=spec, dtype="float16", num_blocks=8, backend="numba"))
    with pytest.raises(InputError, match="on cuda models run in float32, float16, bfloat16"):
        build_worker(WorkerSettings(spec=spec, dtype="int8", num_blocks=8, device="cuda"))
    with pytest.raises(InputError, match=f"own engine runs only {', '.join(sorted(CLASSES))}"):
        build_worker(WorkerSettings(spec=spec.model_copy(update={"family": "mamba"}), dtype="float32", num_blocks=8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that must not be here")
def test_a_device_that_is_not_here(spec):
    with pytest.raises(MachineError, match="no GPU"):
        build_worker(WorkerSettings(spec=spec, dtype="float32", num_blocks=8, device="cuda"))


def refuse_to_draw(monkeypatch):
    """Let sampling fail where one of its requests has a top_k of 9."""
    draw = drawing._draw

    def strict(scores, settings, positions, noise):
        if 9 in settings["top_k"]:
            raise OverflowError("int too big to convert")
        return draw(scores, settings, positions, noise)

    monkeypatch.setattr(drawing, "_draw", strict)


def test_a_request_whose_token_cannot_be_chosen_fails_alone(spec, monkeypatch):
    """The sampler's error ended the engine."""
    worker = build_worker(WorkerSettings(spec=spec, dtype="float32", num_blocks=20, block_size=4))
    refuse_to_draw(monkeypatch)
    asked = [SamplingParams(temperature=0.7, top_k=top_k, seed=3, logprobs=1) for top_k in (5, 9, 0)]
    start(worker, [Generation(id_, (1, 2, 3), 4, sampling=sampling) for id_, sampling in enumerate(asked)])
    step = Step(tuple(Chunk(id_, 0, 3) for id_ in range(3)), ())
    tokens = worker.execute(step)
    assert worker.failed == {1: "no token can be chosen: OverflowError: int too big to convert"}
    assert tokens[1] == NO_TOKEN and tokens[0] >= 0 and tokens[2] >= 0
    assert worker.logprobs.keys() == {0, 2}
    worker.restart()
    start(worker, [Generation(1, (1, 2, 3), 4)])
    assert worker.execute(Step((Chunk(1, 0, 3),), ()))[1] >= 0 and not worker.failed
