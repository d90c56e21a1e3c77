"""A measured profile is fitted to the steps of a served engine."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from xgpt import served_profile
from xgpt.benchmark import Drawn, Load, Replayed, draw
from xgpt.core.errors import MachineError
from xgpt.core.schema import PACES_AT_REST, EngineKind, Plan, Profile
from xgpt.core.workload import TraceLengths
from xgpt.deciding.ranges import ranges_of
from xgpt.reporting.plan_text import profile_in_words, ranges_in_words
from xgpt.resolve import load_cluster, load_model
from xgpt.served_profile import as_served
from xprofiler import analytic, vllm
from xprofiler.others import Others
from xprofiler.store import new_profile
from xprofiler.vllm import with_scheduler
from xsimulator.calibrate import corrected
from xsimulator.executed import paces
from xsimulator.run import run_requests

SPEC, _ = load_model("opt-125m")
ONE, EIGHT = load_cluster("h200x1"), load_cluster("h200x8")


@pytest.fixture(scope="module")
def measured() -> Profile:
    profile = analytic.profile(SPEC, ONE, "float16")
    return profile.model_copy(update={"source": "measured", "engine": "xgpt"})


@pytest.fixture(autouse=True)
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Others, "cores", lambda _: {})


def serving_at(pace: float, profile: Profile) -> Any:
    """Return what stands in for `replayed`: an engine whose steps take `pace` times as long as the profile says."""

    def replayed(
        plan: Plan, load: Load, rng: np.random.Generator, drawn: Drawn | None = None, *, engine: EngineKind = "xgpt"
    ) -> Replayed:
        assert engine == profile.engine
        drawn = drawn or draw(plan, load, rng)
        lengths = TraceLengths(drawn.inputs, drawn.outputs, drawn.arrivals_s)
        log = run_requests(plan, profile.slowed(pace), lengths, drawn.max_output)
        return Replayed(drawn, [], {}, log)

    return replayed


@pytest.mark.parametrize("pace", [0.9, 1.25])
def test_it_takes_the_pace_of_the_served_steps(measured: Profile, monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
    serve = serving_at(pace, measured)
    monkeypatch.setattr(served_profile, "replayed", serve)
    found = as_served(measured, SPEC, None, ONE)
    assert found.is_served and f"took {pace:.2f} times" in found.provenance["served"]
    plan = served_profile._plan(measured, SPEC, None, ONE)
    log = serve(plan, Load(60, plan.workload), np.random.default_rng(1)).log
    after = paces(plan, found, log)
    assert after is not None and after.ratio == pytest.approx(1.0, abs=0.01)
    assert found.jitter is not None and found.jitter.ratios[0] == pytest.approx(1.0, abs=0.02)


def test_a_disturbed_load_is_served_again_and_the_others_are_kept(
    measured: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load beside another process that used a core was fitted as if the machine were so slow."""
    seen, paces_ = iter([{"cc1plus": 1.0}, {"rsync": 0.1}]), iter([1.5, 1.1])
    monkeypatch.setattr(Others, "cores", lambda _: next(seen))
    monkeypatch.setattr(
        served_profile, "replayed", lambda *given, **named: serving_at(next(paces_), measured)(*given, **named)
    )
    found = as_served(measured, SPEC, None, ONE)
    assert "took 1.10 times" in found.provenance["served"]
    assert found.others == {"rsync": 0.1}


def test_on_a_busy_machine_one_load_is_served(measured: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any, plans promised rates at which steps took a third longer than predicted."""
    paces_ = iter([1.3, 1.0])
    monkeypatch.setattr(Others, "cores", lambda _: {"cc1plus": 1.0})
    monkeypatch.setattr(
        served_profile, "replayed", lambda *given, **named: serving_at(next(paces_), measured)(*given, **named)
    )
    found = as_served(measured.but(is_brief=True), SPEC, None, ONE)
    assert "took 1.30 times" in found.provenance["served"]


def test_the_load_is_short_and_has_steps_of_many_sizes(measured: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = []
    serve = serving_at(1.0, measured)
    monkeypatch.setattr(
        served_profile, "replayed", lambda *given, **named: logs.append(serve(*given, **named)) or logs[-1]
    )
    as_served(measured, SPEC, None, ONE)
    ((drawn, _, _, log),) = logs
    asked_s = served_profile.LOADS["xgpt", "gpu"].stage_s * len(served_profile.STAGES)
    assert log[-1].end_ns / 1e9 < 2 * asked_s and len(drawn.inputs) == len(drawn.outputs)
    assert {1, 4, 8} <= {len(record.decode) for record in log}
    assert any(start for record in log for _, start, _ in record.encode), "pieces of prompts"


def test_it_is_fitted_in_a_notebook_too(measured: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = serving_at(1.2, measured)

    def replayed(*given: Any, **named: Any) -> Replayed:
        asyncio.run(asyncio.sleep(0))  # refused in a thread whose loop runs
        return serve(*given, **named)

    async def cell() -> Profile:
        return as_served(measured, SPEC, None, ONE)

    monkeypatch.setattr(served_profile, "replayed", replayed)
    assert asyncio.run(cell()).is_served


def test_it_stays_as_it_is_if_a_load_says_nothing(measured: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Replayed:
        raise MachineError("the server did not start")

    monkeypatch.setattr(served_profile, "replayed", fail)
    assert as_served(measured, SPEC, None, ONE) == measured
    assert as_served(measured, SPEC, None, EIGHT) == measured


@pytest.fixture(scope="module")
def of_vllm() -> Profile:
    spec, _ = load_model("llama-3.1-8b")
    profile = analytic.profile(spec, load_cluster("h100x1"), "bfloat16")
    return with_scheduler(
        profile.model_copy(update={"source": "measured", "engine": "vllm", "layers": profile.layers[:1]})
    )


def test_a_profile_of_vllm_is_fitted_to_a_load_in_vllm(of_vllm: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plans promised 29% more than vLLM served, whose steps mixed hundreds of decodes with prompts."""
    spec, cluster = load_model("llama-3.1-8b")[0], load_cluster("h100x1")
    by = {"tokens": 1.1, "encode_attention": 2.0, "decode_attention": 1.2, "head": 1.0, "overhead": 2.0}
    truth, logs = corrected(of_vllm, by, "x", "y"), []
    serve = serving_at(1.0, truth)
    monkeypatch.setattr(
        served_profile, "replayed", lambda *given, **named: logs.append(serve(*given, **named)) or logs[-1]
    )
    found = as_served(of_vllm, spec, None, cluster)
    assert found.is_served and (of_vllm.headroom, found.headroom) == (0.30, 0.05)
    assert sum(len(record.decode) >= 200 and bool(record.encode) for record in logs[0].log) > 20
    plan = served_profile._plan(of_vllm, spec, None, cluster)
    log = serve(plan, Load(1500, plan.workload), np.random.default_rng(1), engine="vllm").log
    before, after = (paces(plan, profile, log) for profile in (of_vllm, found))
    assert before is not None and after is not None
    assert before.ratio > 1.15 and after.ratio == pytest.approx(1.0, abs=0.02)


def test_the_load_has_smaller_batches_if_memory_is_short() -> None:
    """A model of 61 GiB on a GPU of 80 GB was not fitted: 512 requests did not fit beside its weights."""
    (spec, _), cluster = load_model("qwen3-32b"), load_cluster("h100x1")
    profile = analytic.profile(spec, cluster, "bfloat16").model_copy(update={"source": "measured", "engine": "vllm"})
    policy = served_profile._plan(profile, spec, None, cluster).policy
    assert policy.kind == "chunked" and 16 <= policy.max_batch < 512


def test_on_several_gpus_one_serves_the_load_of_vllm(of_vllm: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    serve, plans = serving_at(1.2, of_vllm), []
    monkeypatch.setattr(
        served_profile, "replayed", lambda *given, **named: plans.append(given[0]) or serve(*given, **named)
    )
    found = as_served(of_vllm, load_model("llama-3.1-8b")[0], None, load_cluster("h100x8"))
    assert found.is_served and [plan.cluster.num_devices for plan in plans] == [1]


def test_a_new_profile_of_vllm_is_fitted(of_vllm: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "profile", lambda *_, **__: of_vllm)
    local = load_cluster("local")
    found = new_profile("llama-3.1-8b", local, engine="vllm", as_served=lambda profile, *_: profile.but(spread=0.123))
    assert found.spread == 0.123


def test_a_load_in_which_the_engine_was_replaced_is_not_used(
    measured: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new vLLM counts its steps from 0, so the log replays only to its second step. Nothing said so."""
    serve = serving_at(1.2, measured)

    def replayed(*given: Any, **named: Any) -> Replayed:
        found = serve(*given, **named)
        return found._replace(log=[*found.log[:100], *found.log])

    said: list[str] = []
    monkeypatch.setattr(served_profile, "replayed", replayed)
    assert as_served(measured, SPEC, None, ONE, lambda *told: said.append(told[2])) == measured
    assert "it has 1 steps, and 100 are needed" in said[-1]


def test_without_it_plans_leave_more_room_and_say_so(measured: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_profile, "replayed", serving_at(1.1, measured))
    served = as_served(measured, SPEC, None, ONE)
    assert (measured.headroom, served.headroom) == (0.10, 0.05)
    plan = served_profile._plan(served, SPEC, None, ONE)
    assert "steps of a served load" in profile_in_words(plan)
    assert "not fitted to served requests" in profile_in_words(served_profile._plan(measured, SPEC, None, ONE))
    assert ranges_in_words(plan) == []
    ranged = plan.with_estimate(**ranges_of(plan, served))
    fast, slow = PACES_AT_REST
    low, high = ranged.estimate.ranges["throughput_rps"]
    assert (low * slow, high * fast) == pytest.approx((plan.estimate.throughput_rps,) * 2)
    assert f"saturated throughput {low:.3g} to {high:.3g} requests/s" in ranges_in_words(ranged)[0]
