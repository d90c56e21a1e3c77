"""Every family cut for tensor parallelism and into stages computes what it computes whole. Ranks are threads here."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.numerics.checkpoints import CHECKPOINTS, FAMILIES, WITH_EXPERTS
from tests.numerics.ranks import groups_of, in_parallel, pipes_of
from tests.numerics.steps import start
from tests.rings import few
from xgpt.checkpoints.files import read_spec
from xgpt.core.errors import InputError
from xgpt.core.policies import Chunk, Step
from xrunner.build import WorkerSettings, build_worker
from xrunner.generation import Generation, SamplingParams
from xrunner.parallel import Part
from xrunner.weights import Checkpoint, SeededWeights, load_model

BLOCKS = 24
RNG = np.random.default_rng(11)
PROMPTS = [tuple(RNG.integers(0, 211, int(n)).tolist()) for n in (9, 1, 16, 5)]
STEPS = (
    Step((Chunk(0, 0, 9), Chunk(1, 0, 1)), ()),
    Step((Chunk(2, 0, 16),), (0, 1)),
    Step((), (0, 1, 2)),
    Step((Chunk(3, 0, 5),), (2, 0)),
    Step((), (3, 0, 2)),
)


def split(total, count):
    """[first, last) of each of `count` stages."""
    return [(total * i // count, total * (i + 1) // count) for i in range(count)]


def workers_of(spec, checkpoint, degrees, ep=1):
    """One worker for each rank of each stage; `degrees`: of tensor parallelism; `ep`: parts of the experts."""
    layers, encoder_layers = split(spec.num_layers, len(degrees)), split(spec.num_encoder_layers, len(degrees))
    groups, pipes = groups_of(degrees), pipes_of(degrees)
    return [
        [
            build_worker(
                WorkerSettings(
                    spec=spec,
                    dtype="float32",
                    checkpoint=checkpoint,
                    num_blocks=BLOCKS,
                    block_size=4,
                    backend="reference",
                ),
                part=Part(
                    spec,
                    layers[i],
                    encoder_layers[i],
                    i == 0,
                    i == len(degrees) - 1,
                    rank=rank,
                    degree=degree,
                    ep=ep if degree > 1 else 1,
                ),
                group=groups[i][rank] if degree > 1 else None,
                pipe=pipes[i][rank] if len(degrees) > 1 else None,
            )
            for rank in range(degree)
        ]
        for i, degree in enumerate(degrees)
    ]


def tokens_of(stages, sampling=None):
    """All tokens, step for step; every rank of the last stage must have picked the same."""
    workers = [worker for stage in stages for worker in stage]
    for worker in workers:
        options = {} if sampling is None else {"sampling": sampling}
        start(worker, [Generation(id_, prompt, 8, **options) for id_, prompt in enumerate(PROMPTS)])
    records, last = [], {}
    for step in STEPS:
        for worker in workers:
            worker.set_last_tokens(step.decode, [last[id_] for id_ in step.decode])
        results = in_parallel(*(partial(worker.execute, step) for worker in workers))
        assert all(result == {} for result in results[: -len(stages[-1])])
        assert all(result == results[-1] for result in results[-len(stages[-1]) :])
        last |= results[-1]
        records.append(results[-1])
    return records


FIRST = [f"{family}-{next(iter(shapes))}" for family, shapes in FAMILIES.items()]
"""A checkpoint of each family."""


@pytest.fixture(scope="module")
def alone(checkpoint):
    tokens = {}

    def make(name):
        if name not in tokens:
            directory, _ = checkpoint(name)
            tokens[name] = tokens_of(workers_of(read_spec(directory), directory, [1]))
        return tokens[name]

    return make


@pytest.mark.parametrize(
    ("name", "degrees"),
    few(
        [
            *((name, [2]) for name in FIRST),
            ("opt-untied-odd", [3]),
            ("qwen3-one-kv-head", [5]),
            ("llama-one-kv-head", [1, 1, 1]),
            ("t5-tied", [1, 2]),
            *((name, [2]) for name in CHECKPOINTS if name not in FIRST and not name.endswith("one-head")),
            ("gpt2-untied-odd", [3]),
            ("llama-grouped", [4]),
            ("t5-gated-untied", [3]),
            ("opt-tied", [1, 1]),
            ("opt-tied", [2, 1]),
            ("gpt2-tied", [1, 1]),
            ("llama-grouped", [1, 2]),
            ("t5-gated-untied", [1, 1]),
            ("t5-tied", [2, 1]),
        ],
        8,
    ),
    ids=lambda value: value if isinstance(value, str) else "+".join(map(str, value)),
)
def test_the_parts_make_the_tokens_of_the_whole(checkpoint, alone, name, degrees):
    directory, _ = checkpoint(name)
    spec = read_spec(directory)
    assert tokens_of(workers_of(spec, directory, degrees)) == alone(name)


@pytest.mark.parametrize(
    ("name", "degrees", "ep"),
    few(
        [
            *(
                (name, [2], 2)
                for name in CHECKPOINTS
                if name.startswith(WITH_EXPERTS) and not name.endswith("one-head")
            ),
            ("mixtral-grouped", [4], 2),
            ("mixtral-grouped", [4], 4),
            ("qwen3_moe-one-kv-head", [5], 5),
            ("qwen3_moe-grouped", [2, 1], 2),
            ("qwen3_moe-one-kv-head", [1, 2], 2),
        ],
        3,
    ),
)
def test_divided_experts_make_the_tokens_of_the_whole(checkpoint, alone, name, degrees, ep):
    directory, _ = checkpoint(name)
    assert tokens_of(workers_of(read_spec(directory), directory, degrees, ep)) == alone(name)


def test_a_rank_reads_only_its_experts(checkpoint, monkeypatch):
    directory, _ = checkpoint("mixtral-grouped")
    spec, read = read_spec(directory), set()
    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, weight: (read.add(weight.name), original(self, weight))[1])
    part = Part(spec, (1, 2), (0, 0), is_first=False, is_last=False, rank=1, degree=2, ep=2)
    load_model(spec, "float32", Checkpoint(directory), part=part)
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
    assert experts == {4, 5, 6, 7} and all(".layers.1." in name for name in read)


@pytest.mark.parametrize("degrees", [[2], [1, 2]], ids=str)
def test_drawn_tokens_are_those_of_the_whole(checkpoint, degrees):
    directory, _ = checkpoint("llama-grouped")
    spec = read_spec(directory)
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.5, logprobs=2)
    whole = tokens_of(workers_of(spec, directory, [1]), sampling)
    assert tokens_of(workers_of(spec, directory, degrees), sampling) == whole


@pytest.mark.parametrize("name", ["gpt2-untied-odd", "llama-grouped", "t5-few-buckets"])
def test_seeded_weights_do_not_depend_on_who_loads_them(checkpoint, name):
    spec = read_spec(checkpoint(name)[0])
    whole = dict(load_model(spec, "float32", SeededWeights(3)).named_parameters())
    parts = [
        dict(load_model(spec, "float32", SeededWeights(3), part=part).named_parameters())
        for part in (Part(spec, (0, 1), (0, spec.num_encoder_layers), rank=rank, degree=2) for rank in range(2))
    ]
    down = next(n for n in parts[0] if n.endswith("mlp.down.weight"))
    assert torch.equal(torch.cat([part[down] for part in parts], dim=1), whole[down])
    table = "token_embedding.weight"
    assert torch.equal(torch.cat([part[table] for part in parts]), whole[table])


def test_a_rank_reads_only_its_part(checkpoint, monkeypatch):
    directory, _ = checkpoint("llama-grouped")
    spec = read_spec(directory)
    read = []
    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, weight: (read.append(weight), original(self, weight))[1])
    part = Part(spec, (1, 2), (0, 0), is_first=False, rank=1, degree=2)
    load_model(spec, "float32", Checkpoint(directory), part=part)
    assert not any(".layers.0." in weight.name or "embed_tokens" in weight.name for weight in read)
    whole = 2 * (64 * 64 + 64 * 32) + 3 * 64 * 176 + 211 * 64  # the layer's matrices and the head
    num_values = sum(weight.out.numel() for weight in read if weight.out.dim() > 1)
    assert abs(num_values - whole / 2) <= 64


@pytest.mark.parametrize(("name", "degree"), [("llama-grouped", 3), ("opt-untied-odd", 4), ("llama-one-kv-head", 6)])
def test_degrees_that_do_not_go_with_the_heads_are_refused(checkpoint, name, degree):
    spec = read_spec(checkpoint(name)[0])
    with pytest.raises(InputError, match=rf"stage.tp: {degree} is not accepted; .* take at most"):
        Part(spec, (0, 1), (0, 0), degree=degree)
