"""Keys and values in a type of their own: near those of float32, and the same in every policy and part of a model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import xgpt
from tests.numerics.checkpoints import CHECKPOINTS
from tests.numerics.served import PROMPTS, greedy, served_here, served_on
from tests.numerics.steps import start
from tests.planned import SHORT, cpus, placements_of, planned, problem_of
from tests.rings import ALL
from xgpt.checkpoints.files import read_spec
from xgpt.core.errors import InputError
from xgpt.core.policies import Chunk, Step
from xgpt.serving.engine_process import build_engine
from xgpt.serving.serve import ServeRequest
from xprofiler import analytic
from xrunner.attention import Sequences, make_batch
from xrunner.build import WorkerSettings, build_worker
from xrunner.generation import Generation
from xrunner.vllm.command import launch


@pytest.fixture(autouse=True)
def torch_only(monkeypatch):
    """In the first ring K/V in fewer bits are attended by torch: numba compiles for half a minute for each type."""
    if not ALL:
        monkeypatch.setattr("xrunner.build.default_backend", lambda *_: "reference")


SAME = len(PROMPTS) - 1
"""Requests of PROMPTS whose tokens are the same at least: a number that is rounded the other way may change one."""


def problem_in(directory, num_devices, kv_dtype="int8"):
    problem = problem_of(directory, num_devices)
    profile = analytic.profile(problem.model, problem.cluster, "float32", kv_dtype=kv_dtype)
    return replace(problem, profile=profile)


def num_same(outputs, expected):
    return sum(mine == other for mine, other in zip(outputs, expected, strict=True))


def logits_of(directory, kv_dtype, backend):
    """Of a prompt, of later pieces of one, and of decodes; each decode is fed the same token."""
    spec, found = read_spec(directory), []
    settings = {"spec": spec, "dtype": "float32", "checkpoint": directory, "num_blocks": 20}
    worker = build_worker(WorkerSettings(**settings, kv_dtype=kv_dtype, backend=backend))
    choose = worker.sample
    worker.sample = lambda logits: (found.append(logits.clone()), choose(logits) * 0 + 7)[1]
    start(worker, [Generation(id_, tuple(range(10 + id_, 50 + 3 * id_)), 8) for id_ in (0, 1)])
    steps = [Step((Chunk(0, 0, 40), Chunk(1, 0, 17)), ()), Step((Chunk(1, 17, 25),), (0,)), *[Step((), (0, 1))] * 4]
    for step in steps:
        worker.execute(step)
    return torch.cat(found)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name.endswith(("-tied", "-grouped"))])
def test_logits_stay_near_those_of_float32_and_are_those_of_the_reference(checkpoint, name):
    directory, _ = checkpoint(name)
    if read_spec(directory).is_encoder_decoder:
        pytest.skip("its prompts are not cut; its tokens are compared below")
    exact = logits_of(directory, None, "numba")
    found, again = (logits_of(directory, "int8", backend) for backend in ("numba", "reference"))
    # In the middle: where two experts score alike, a last bit chooses the other one.
    away, apart = ((found - other).norm(dim=1) / exact.norm(dim=1) for other in (exact, again))
    assert 0 < away.median() < 0.06 and apart.median() < 2e-3


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", ["t5-tied", "llama-grouped", "opt-tied"])
def test_every_policy_gives_the_same_tokens(checkpoint, workers, name, kv_dtype):
    directory, _ = checkpoint(name)
    expected = None
    for kind in ("chunked", "rra", "orca", "static"):
        outputs = served_here(planned(problem_in(directory, 1, kv_dtype), kind))
        expected = expected or outputs
        assert num_same(outputs, expected) >= SAME
    for kind in ("static", "waa"):
        problem = problem_in(directory, 2, kv_dtype)
        for placement in {place.layouts: place for place in placements_of(problem, kind)}.values():
            assert num_same(served_on(workers, planned(problem, kind, placement)), expected) >= SAME


def test_plans_have_room_for_as_many_more_tokens(checkpoint):
    directory, _ = checkpoint("llama-grouped")
    plans = {kv: planned(problem_in(directory, 1, kv), "static") for kv in (None, "bfloat16", "int8")}
    of_head = plans[None].model.head_dim
    blocks = {kv: plan.stages[0].kv_blocks for kv, plan in plans.items()}
    assert blocks["bfloat16"] == pytest.approx(2 * blocks[None], rel=1e-3)
    assert blocks["int8"] == pytest.approx(4 * of_head / (of_head + 4) * blocks[None], rel=1e-3)
    engine = build_engine(plans["int8"])
    try:
        cache = engine.executor.cache
        assert cache.layers[0].dtype == torch.int8
        bytes_per_token = sum(layer.nbytes for layer in cache.layers) / (cache.num_blocks * cache.block_size)
        assert bytes_per_token == plans["int8"].model.kv_bytes_per_token("int8")
    finally:
        engine.close()


def test_what_cannot_be_kept_is_refused(checkpoint):
    directory, _ = checkpoint("opt-tied")
    plan = planned(problem_in(directory, 1), "static")
    with pytest.raises(InputError, match=r"plan\.kv_dtype.*use flat"):
        build_engine(plan, batching="rows")
    with pytest.raises(InputError, match=r"plan\.kv_dtype: 'int8' .* float32 or bfloat16: use flat, or plan with"):
        ServeRequest(batching="slots").check_batching(plan)
    with pytest.raises(InputError, match="on cpu keys and values are kept in"):
        build_worker(WorkerSettings(spec=plan.model, dtype="float32", kv_dtype="float8", num_blocks=2))
    with pytest.raises(InputError, match="on a CPU, K/V can only be float32, bfloat16, int8"):
        xgpt.profile(model=directory, kv_dtype="float8")
    with pytest.raises(InputError, match="on a GPU, K/V can only be"):
        xgpt.profile(model=directory, cluster="h100x8", kv_dtype="int8")
    with pytest.raises(InputError, match="vLLM is measured with K/V in the type of"):
        xgpt.profile(model=directory, engine="vllm", kv_dtype="int8")
    given = problem_in(directory, 1).profile
    with pytest.raises(InputError, match="the plan is for K/V in bfloat16"):
        xgpt.plan(
            model=directory, cluster=cpus(1), profile=given, kv_dtype="bfloat16", workload=SHORT, latency_bound_s=None
        )
    planned_again = xgpt.plan(
        model=directory, cluster=cpus(1), profile=given, kv_dtype="int8", workload=SHORT, latency_bound_s=None
    )
    assert planned_again.kv_dtype == "int8"
    with pytest.raises(InputError, match="or float8: plan with one of these"):
        launch(planned_again, plan_path="plan.json")


def test_a_key_that_is_not_finite_leaves_no_number(checkpoint):
    directory, _ = checkpoint("opt-tied")
    spec = read_spec(directory)
    worker = build_worker(WorkerSettings(spec=spec, dtype="float32", kv_dtype="int8", num_blocks=4))
    heads, dim = spec.num_heads, spec.head_dim
    for bad in ("k", "v"):
        cache = worker.cache.layers[0]
        x = {name: torch.randn(3, heads, dim) for name in "qkv"}
        x[bad][1, 0, 0] = float("inf")
        length = np.array([3], np.int32)
        batch = make_batch(
            np.zeros(3, np.int64), Sequences(length, length, np.array([[1]], np.int32)), block_size=16, num_decodes=0
        )
        out = worker.backend.forward(x["q"], x["k"], x["v"], cache, batch).unflatten(1, (heads, dim))
        assert out[:, 1:].isfinite().all() and out[1:, 0].isnan().all()


@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
def test_greedy_is_mostly_that_of_transformers(checkpoint, kv_dtype):
    directory, model = checkpoint("opt-tied")
    outputs = served_here(planned(problem_in(directory, 1, kv_dtype), "chunked"))
    assert num_same(outputs, greedy(model)) >= len(PROMPTS) // 2
