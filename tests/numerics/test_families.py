"""Every family computes what `transformers` computes: logits, and greedy tokens under every policy."""

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

import xrunner.attention.reference as reference
from tests.numerics.checkpoints import (
    CHECKPOINTS,
    CONTEXT,
    FAMILIES,
    GROUPED,
    VOCABULARY,
    WITH_EXPERTS,
    load_checkpoint,
    save,
)
from tests.numerics.steps import start
from tests.numerics.test_weights import copy_with
from tests.rings import ALL, examples, few
from xgpt.checkpoints.files import read_spec
from xgpt.core.policies import Chunk, LaneSettings, OneLane, Pool, Step
from xgpt.core.schema.families import FAMILIES as ROWS
from xrunner.activations import ACTIVATIONS, GATES
from xrunner.build import BACKENDS, WorkerSettings, build_worker, usable_backends
from xrunner.engine import Engine
from xrunner.generation import Generation
from xrunner.kv_cache import KvCache
from xrunner.models.layers import OffsetRmsNorm, Rotary
from xrunner.packing.choice import LAYOUTS, fastest, layouts_of, pack, shape_name
from xrunner.worker import Worker

HERE = [name for name, layout in LAYOUTS.items() if layout.is_available()]
TOLERANCE = 1e-4
HALF_TOLERANCE = 2e-2
"""Of bfloat16, relative to the norm of the logits: 8 bits of mantissa, a few layers deep."""

INT8_SIMILARITY = 0.98
"""Cosine of the logits in eight bits and in float32: these weights multiply errors more than trained ones."""

FIRST_SHAPES = [next(name for name in CHECKPOINTS if name.startswith(f"{family}-")) for family in FAMILIES]
OTHER_SHAPES = [name for name in CHECKPOINTS if name not in FIRST_SHAPES]
MAIN_FIRST = few([*FIRST_SHAPES, *OTHER_SHAPES], 3)
EACH_FAMILY = few([*FIRST_SHAPES, *OTHER_SHAPES], len(FIRST_SHAPES))
DECODERS = [name for name in FIRST_SHAPES if not name.startswith("t5")]
ROTARY = [name for name in DECODERS if "names" not in ROWS[name.partition("-")[0]]]  # the others learn positions


def make_worker(directory, backend, num_blocks=64, block_size=8, dtype="float32"):
    return build_worker(
        WorkerSettings(
            spec=read_spec(directory),
            dtype=dtype,
            checkpoint=directory,
            num_blocks=num_blocks,
            block_size=block_size,
            backend=backend,
        )
    )


def step_logits(worker, step, records):
    """Execute a step, keeping the logits of the tokens that it samples."""
    sample = worker.sample

    def keep(logits):
        records.append(logits.clone())
        return sample(logits)

    worker.sample = keep
    try:
        return worker.execute(step)
    finally:
        worker.sample = sample


def assert_equal(logits, expected):
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def next_logits(model, prompt, output):
    """What transformers makes of a prompt and the output so far."""
    with torch.inference_mode():
        if not model.config.is_encoder_decoder:
            return model(torch.tensor([[*prompt, *output]])).logits[0, -1]
        fed = torch.tensor([[model.config.decoder_start_token_id, *output]])
        return model(torch.tensor([prompt]), decoder_input_ids=fed).logits[0, -1]


def compare(worker, model, check=assert_equal):
    """Logits of a batch that mixes whole prompts, pieces of prompts and decodes, against transformers' in float32."""
    rng = np.random.default_rng(3)
    prompts = {id_: tuple(rng.integers(0, VOCABULARY, n).tolist()) for id_, n in enumerate((19, 1, 33, 8))}
    start(worker, [Generation(id_, prompt, max_output=4) for id_, prompt in prompts.items()])
    steps = [
        Step((Chunk(0, 0, 19), Chunk(2, 0, 10)), ()),
        Step((Chunk(2, 10, 16), Chunk(1, 0, 1)), (0,)),
        Step((Chunk(2, 26, 7), Chunk(3, 0, 8)), (1, 0)),
        Step((), (3, 2, 1)),
    ]
    outputs = {id_: [] for id_ in prompts}
    for step in steps:
        records = []
        sampled = step_logits(worker, step, records)
        for id_, logits in zip(sampled, records[0], strict=True):
            expected = next_logits(model, prompts[id_], outputs[id_])
            check(logits, expected)
            assert expected.std() >= 1, "logits too small for the tolerance to mean anything"
            outputs[id_].append(sampled[id_])
    worker.release(prompts)


@pytest.mark.parametrize("backend", usable_backends(torch.device("cpu"), torch.float32))
@pytest.mark.parametrize("name", EACH_FAMILY)
def test_logits_equal_transformers(checkpoint, name, backend):
    directory, model = checkpoint(name)
    compare(make_worker(directory, backend), model)


@pytest.mark.parametrize("family, kind", [("llama", "linear"), ("llama", "yarn"), ("qwen2", "yarn"), ("qwen3", "yarn")])
def test_logits_of_scaled_contexts_equal_transformers(family, kind, tmp_path):
    """In both places where config.json may state the scaling. Positions pass the original context, 16 tokens."""
    scaling = {"rope_type": kind, "factor": 8.0} | ({"original_max_position_embeddings": 16} if kind == "yarn" else {})
    directory, model = save(tmp_path / "same", family, GROUPED | {"rope_parameters": scaling | {"rope_theta": 500.0}})
    compare(make_worker(directory, "reference"), model)
    spec = read_spec(directory)
    assert spec.max_context == 8 * (16 if kind == "yarn" else CONTEXT)
    older = {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": scaling}
    assert read_spec(copy_with(directory, tmp_path / "older" / "same", **older)) == spec


@pytest.mark.parametrize("backend", few(usable_backends(torch.device("cpu"), torch.float32)[::-1]))
@pytest.mark.parametrize("name", MAIN_FIRST)
def test_bfloat16_keeps_to_the_float32_logits(name, backend, tmp_path):
    directory, model = save(tmp_path, *name.split("-", 1), torch.bfloat16)
    spec, errors = read_spec(directory), []
    assert spec.default_dtype == "bfloat16"

    def note(logits, expected):
        errors.append(float((logits.float() - expected).norm() / expected.norm()))

    compare(make_worker(directory, backend, dtype="bfloat16"), model, note)
    # Of latent attention one product more lies behind another.
    tolerance = HALF_TOLERANCE * (1.5 if spec.latent else 1.0)
    assert max(but_for_other_experts(name, errors, reverse=True)) <= tolerance


@pytest.mark.skipif(not layouts_of("int8"), reason="this processor cannot multiply in int8")
@pytest.mark.parametrize("name", MAIN_FIRST)
def test_int8_keeps_to_the_float32_logits(checkpoint, name):
    directory, model = checkpoint(name)
    similarities = []

    def note(logits, expected):
        similarities.append(float(torch.nn.functional.cosine_similarity(logits, expected, dim=0)))

    compare(make_worker(directory, "numba" if ALL else "reference", dtype="int8"), model, note)
    assert min(but_for_other_experts(name, similarities)) > INT8_SIMILARITY


def but_for_other_experts(name, figures, *, reverse=False):
    """All but the worst fifth of a model with experts: where two score alike, the other may be chosen, which later
    tokens find in their K/V, too.
    """
    skipped = len(figures) // 5 if name.split("-")[0] in WITH_EXPERTS else 0
    return sorted(figures, reverse=reverse)[skipped:]


def test_norms_of_gemma_add_one_in_float32():
    """As in transformers: in bfloat16, 1 + weight would have eight bits."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    weight = (0.05 * torch.randn(256, generator=generator)).bfloat16()
    ours, theirs = OffsetRmsNorm(torch.empty, 256, 1e-6), Gemma2RMSNorm(256)
    for norm in (ours, theirs):
        norm.weight.data = weight
    assert (ours(x) == theirs(x)).float().mean() > 0.99


@pytest.mark.parametrize("layout", HERE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", few([(96, 70), (33, 2101), (200, 2102)], whole=True), ids=str)
def test_every_layout_multiplies_and_adds_and_activates(layout, activation, shape):
    dtype = LAYOUTS[layout].dtype
    torch.manual_seed(0)
    is_gate = activation in GATES.values()
    weight, bias = outputs_for(activation, torch.randn(shape), torch.randn(shape[0]))
    product = pack(weight, activation, dtype, {shape_name(weight.shape): layout})
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 3e-2}[dtype]
    for rows in (0, 1, 3, 64, 513):
        x = torch.randn(rows, shape[1]) * torch.logspace(-3, 3, rows)[:, None]  # each row has a scale of its own
        for b in (bias, None):
            sums = linear(x, weight, b)
            expected = ACTIVATIONS[activation](sums)
            found = product(x, b)
            assert found.shape == expected.shape and found.is_contiguous()
            # What an error of the gates or of what they gate is multiplied by.
            most = sums.norm(dim=1) if is_gate else 1.0
            assert ((found - expected).norm(dim=1) <= tolerance * most * sums.norm(dim=1)).all()


def outputs_for(activation, *of_outputs):
    """As many outputs as they are; for gates an odd number of pairs. # each [out, ...]"""
    return tuple(torch.cat((each, each.flip(-1))) if activation in GATES.values() else each for each in of_outputs)


@pytest.mark.parametrize("layout", layouts_of("float32"))
@pytest.mark.parametrize("rows", [3, 50, 300])
def test_products_in_float32_are_as_near_as_float32_comes(layout, rows):
    """However a layout makes them; sums over 3,000 numbers of several sizes."""
    torch.manual_seed(0)
    weight, bias = torch.randn(70, 3000) * torch.logspace(-6, 6, 70)[:, None], torch.randn(70)
    x = torch.randn(rows, 3000) * torch.logspace(-2, 2, 3000)
    found = pack(weight, "none", "float32", {shape_name(weight.shape): layout})(x, bias)
    expected = linear(x.double(), weight.double(), bias.double())
    assert ((found - expected).norm(dim=0) < 5e-6 * expected.norm(dim=0)).all()


@pytest.mark.parametrize("layout", few(HERE))
@pytest.mark.parametrize("threads", few([2, 4]))
@pytest.mark.parametrize("activation", few([GATES["silu"], "none"]))
def test_products_of_several_threads_are_those_of_one(layout, activation, threads):
    """Again and again: a thread may find rows that another one has not rounded yet only now and then."""
    torch.manual_seed(0)
    weight, before = torch.randn(600, 500) / 500**0.5, torch.get_num_threads()
    product = pack(weight, activation, LAYOUTS[layout].dtype, {shape_name(weight.shape): layout})
    try:
        for rows in (*range(1, 40, examples(1, 19)), 70, 150):
            x = torch.randn(rows, 500)
            torch.set_num_threads(1)
            alone = product(x, None)
            torch.set_num_threads(threads)
            for _ in range(examples(5, 3)):
                torch.testing.assert_close(product(x, None), alone, rtol=1e-4, atol=1e-3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("layout", HERE)
@pytest.mark.parametrize("rows", [3, 100])
def test_a_row_that_is_no_number_stays_none_and_touches_no_other(layout, rows):
    product = pack(torch.randn(8, 16), "none", LAYOUTS[layout].dtype, {"8x16": layout})
    x = torch.randn(rows, 16)
    x[1, 4] = float("nan")
    assert product(x, None).isnan().any(dim=1).tolist() == [False, True, *[False] * (rows - 2)]


def test_the_fastest_layouts_are_measured_by_shape():
    found = fastest([(96, 70), (96, 70), (64, 128)], "float32")
    assert set(found) == {"64x128", "96x70"} and set(found.values()) <= set(layouts_of("float32"))


def test_where_there_is_one_layout_alone_none_is_chosen(monkeypatch):
    monkeypatch.setattr("xrunner.packing.choice.layouts_of", lambda dtype: ["onednn-int8"])
    assert fastest([(96, 70)], "int8") == {}


def test_a_layout_that_is_not_here_is_done_without(monkeypatch):
    weight, x = torch.randn(7, 5), torch.randn(3, 5)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    torch.testing.assert_close(pack(weight, "none", "float32", {"7x5": "mkl"})(x, None), linear(x, weight))


@pytest.mark.parametrize("name", few(FIRST_SHAPES, 4))
def test_logits_equal_without_prepacked_weights(checkpoint, name):
    directory, model = checkpoint(name)
    loaded = load_checkpoint(directory)
    cache = KvCache(loaded.spec, 64, 8, torch.float32, torch.device("cpu"))
    compare(Worker(loaded, cache, BACKENDS["reference"]()), model)


@pytest.mark.parametrize("name", few(FIRST_SHAPES, 2))
def test_logits_equal_on_processors_without_mkl(checkpoint, name, monkeypatch):
    directory, model = checkpoint(name)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    compare(make_worker(directory, "reference"), model)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("shape", few([(211, 32), (7, 5), (96, 770)], whole=True), ids=str)
def test_a_packed_product_of_any_number_of_rows(shape, activation):
    weight, bias = outputs_for(activation, torch.randn(shape) / shape[1] ** 0.5, torch.randn(shape[0]))
    product = pack(weight, activation)
    for rows in (0, 1, 2, 3, 8, 17, 64, 511, 513, 1000):
        x = torch.randn(rows, shape[1])
        for b in (bias, None):
            torch.testing.assert_close(
                product(x, b), ACTIVATIONS[activation](linear(x, weight, b)), atol=1e-4, rtol=1e-4
            )


def must_differ(directory, model, change=lambda worker: None):
    worker = make_worker(directory, "reference")
    change(worker)
    with pytest.raises(AssertionError, match="not close"):
        compare(worker, model)


@pytest.mark.parametrize("name", few(DECODERS, 3))
def test_the_comparison_notices_a_dropped_causal_mask(checkpoint, name, monkeypatch):
    monkeypatch.setattr(
        reference, "causal_mask", lambda n, context, device, window: torch.zeros(n, context, dtype=torch.bool)
    )
    must_differ(*checkpoint(name))


@pytest.mark.parametrize("name", sorted(set(DECODERS) - set(ROTARY)))
def test_the_comparison_notices_dropped_positions(checkpoint, name):
    must_differ(*checkpoint(name), lambda worker: worker.model.position_embedding.weight.zero_())


@pytest.mark.parametrize("name", few(ROTARY, 3))
def test_the_comparison_notices_a_dropped_rotation(checkpoint, name, monkeypatch):
    monkeypatch.setattr(Rotary, "forward", lambda self, positions, *heads: heads)
    must_differ(*checkpoint(name))


def test_the_comparison_notices_dropped_frequency_scaling(checkpoint):
    directory, model = checkpoint("llama-grouped")
    spec = read_spec(directory)
    plain = Rotary(torch.empty, spec.model_copy(update={"rope_scaling": None}))

    def unscale(worker):
        for layer in worker.model.layers:
            layer.attention.rotary.frequencies.copy_(plain.frequencies)

    assert spec.rope_scaling is not None
    must_differ(directory, model, unscale)


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_the_comparison_notices_a_dropped_norm_of_heads(checkpoint, norm):
    def drop(worker):
        for layer in worker.model.layers:
            setattr(layer.attention, norm, torch.nn.Identity())

    must_differ(*checkpoint("qwen3-grouped"), drop)


@pytest.mark.parametrize("name", few(FIRST_SHAPES, 3))
def test_the_comparison_notices_a_dropped_head(checkpoint, name, monkeypatch):
    attend = reference.attend

    def without_last_head(q, keys, values, hidden, scoring):
        out = attend(q, keys, values, hidden, scoring)
        out[:, -1] = 0
        return out

    monkeypatch.setattr(reference, "attend", without_last_head)
    must_differ(*checkpoint(name))


@pytest.mark.parametrize("name", few([name for name in ROTARY if not name.startswith("deepseek")], 3))  # these have one
def test_the_comparison_notices_a_dropped_head_of_keys(checkpoint, name, monkeypatch):
    attend = reference.attend

    def first_kv_head_for_all(q, keys, values, hidden, scoring):
        return attend(q, keys[:, :1].expand_as(keys), values, hidden, scoring)

    monkeypatch.setattr(reference, "attend", first_kv_head_for_all)
    must_differ(*checkpoint(name))


POLICIES = {
    "rra": LaneSettings(mix=False, encode_every=3, encode_tokens=40.0, decode_batch=6.0),
    "orca": LaneSettings(mix=True, max_batch=7),
    "chunked": LaneSettings(mix=True, token_budget=16, max_batch=9),
    "static": LaneSettings(mix=False, max_batch=6, refill_when_empty=True),
}
OTHERS = ("rra", "orca", "static")
NUM_REQUESTS = examples(60, 12)


@pytest.fixture(scope="module")
def expected_tokens(checkpoint):
    """Checkpoint -> requests with the tokens that transformers generates for each, alone; generated once."""
    tokens = {}

    def generate(name):
        if name not in tokens:
            tokens[name] = [solitary(checkpoint(name)[1], *request) for request in requests()]
        return tokens[name]

    return generate


def requests():
    rng = np.random.default_rng(11)
    for id_ in range(NUM_REQUESTS):
        prompt = tuple(rng.integers(3, VOCABULARY, rng.integers(1, 45)).tolist())
        yield id_, prompt, int(rng.integers(1, 16))


def solitary(model, id_, prompt, max_output):
    with torch.inference_mode():
        text = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_output,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=1,
        )
    return Generation(id_, prompt, max_output), text[0, -max_output:].tolist()


@pytest.mark.parametrize(
    "policy, backend", few([("chunked", "numba"), *((name, "numba") for name in OTHERS), ("chunked", "reference")])
)
@pytest.mark.parametrize("name", few(FIRST_SHAPES, 2))
def test_greedy_tokens_equal_transformers_whatever_shares_the_batch(checkpoint, expected_tokens, name, policy, backend):
    directory, _ = checkpoint(name)
    expected = expected_tokens(name)
    num_blocks, block_size = 60, 8
    worker = make_worker(directory, backend, num_blocks, block_size)
    pool = Pool(num_blocks, block_size, holds_finished=policy == "static")
    engine = Engine(OneLane(POLICIES[policy], pool), worker)
    rng = np.random.default_rng(5)
    waiting = [generation for generation, _ in expected]
    rng.shuffle(waiting)
    outputs = {generation.id: [] for generation in waiting}
    while waiting or not pool.is_idle:
        for _ in range(min(len(waiting), rng.integers(0, 4))):
            engine.submit(waiting.pop(0))
        for token in engine.step() or ():
            outputs[token.id].append(token.token)
    assert outputs == {generation.id: tokens for generation, tokens in expected}
    assert pool.memory.decodes.num_used == 0
    assert len(set().union(*outputs.values())) > 20, "tokens too alike for the comparison to mean anything"
