"""Sessions: both clocks agree on what turns find in the cache, and when they end."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xgpt
from tests.contract.routed_engines import routed_engines
from tests.rings import examples, few
from xgpt.core import policies
from xgpt.core.io import StepLogWriter
from xgpt.core.schema import PlanDraft, Profile
from xgpt.core.schema.workload import SessionLaw
from xgpt.core.sessions import draw_sessions, workload_of_law
from xgpt.core.workload import TraceLengths
from xgpt.resolve import load_sessions
from xprofiler.store import profile_of
from xsimulator.costs.step_cost import lanes_of
from xsimulator.events import replay
from xsimulator.run import run_requests
from xsimulator.session_rate import RunLength, SessionTrial, loads_s
from xsimulator.session_routes import Route, run_routed
from xsimulator.sessions import TurnTimes, counted_turns, logged_turns

LAW = {
    "turns": {"kind": "uniform", "min": 2, "max": 8},
    "first_input": {"kind": "uniform", "min": 200, "max": 900},
    "added_input": {"kind": "uniform", "min": 20, "max": 400},
    "output": {"kind": "uniform", "min": 1, "max": 200},
    "pause": {"median_s": 2, "p90_s": 8},
    "max_context": 8000,
}


ON = {"model": "llama-3.1-8b", "cluster": "h100x1"}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return xgpt.profile(**ON)


@cache
def _planned(kv: str | None, policy: str, engine: str | None) -> PlanDraft:
    asked: dict[str, Any] = {"latency_bound_s": None, "objective": "saturated", "policy": policy, "kv": kv}
    return xgpt.plan(**ON, workload="azure-conv", engine=engine, **asked)


def _plan(kv: str | None, policy: str, blocks: int, engine: str | None = None) -> PlanDraft:
    plan = _planned(kv, policy, engine)
    return plan.but(stages=tuple(stage.but(kv_blocks=blocks) for stage in plan.stages))


def _sent(count: int, rate: float, **law: object) -> TraceLengths:
    rng = np.random.default_rng(1)
    trace = draw_sessions(SessionLaw.model_validate(LAW | law), count, rng)
    assert trace.sessions is not None
    times = np.zeros(len(trace.input))
    times[trace.sessions.first] = np.cumsum(rng.exponential(1 / rate, count))
    return trace._replace(timestamp_s=times)


@pytest.mark.parametrize("policy", ["chunked", "orca"])
@pytest.mark.parametrize("kv", few(["quantile", "reserve"]))
def test_counts_and_engine_agree_on_every_turn(profile: Profile, kv: str, policy: str) -> None:
    trace = _sent(60, 4.0)
    for blocks in (2500, 1200, 500):  # much, little and hardly any room between turns
        _assert_they_agree(_plan(kv, policy, blocks), profile, trace)


def test_micro_batches_give_back_the_blocks_they_grew_into(profile: Profile) -> None:
    """Each of several micro-batches counted the blocks of all, so that memory filled with blocks of nobody."""
    trace, plan = _sent(60, 4.0), _plan("reserve", "chunked", 1200)
    _assert_they_agree(plan.but(policy=plan.policy.but(microbatches=3)), profile, trace)


def _assert_they_agree(plan: PlanDraft, profile: Profile, trace: TraceLengths) -> None:
    counted = counted_turns(plan, lanes_of(plan, profile), trace)
    engine = logged_turns(plan, trace, run_requests(plan, profile, trace, int(trace.output.max())))
    assert counted is not None
    assert (counted.cached == engine.cached).all()
    assert (counted.end_s == engine.end_s).all() and (counted.first_s == engine.first_s).all()


def test_counts_and_engine_agree_if_steps_run_ahead_and_prompts_go_first() -> None:
    """Blocks of requests that ended in a step behind which another one ran were counted as used for ever."""
    trace = _sent(60, 4.0)
    for blocks in (20_000, 40_000)[: examples(2, 1)]:  # of one token
        plan = _plan(None, "chunked", blocks, "sglang")
        _assert_they_agree(plan, profile_of(plan), trace)


@pytest.mark.parametrize("route", ["session", "prefix", "load"])
def test_counts_and_engines_agree_on_replicas(profile: Profile, route: Route) -> None:
    trace = _sent(40, 8.0)
    for kv, blocks in (("quantile", 500), ("reserve", 1200))[: examples(2, 1)]:
        plan = _plan(kv, "chunked", blocks).but(replicas=3)
        counted, engines = run_routed(plan, profile, trace, route), routed_engines(plan, profile, trace, route)
        assert (counted.cached == engines.cached).all()
        assert (counted.end_s == engines.end_s).all() and (counted.first_s == engines.first_s).all()


def test_turns_find_in_host_memory_what_device_memory_cannot_hold(profile: Profile) -> None:
    plan, trace = _plan("quantile", "chunked", 500), _sent(60, 4.0)
    lanes, sessions = lanes_of(plan, profile), trace.sessions
    assert sessions is not None
    kept, host = counted_turns(plan, lanes, trace), counted_turns(plan, lanes, trace, from_host=True)
    assert kept is not None and host is not None
    later = sessions.after >= 0
    assert (host.cached[later] == sessions.common[later] // plan.block_size * plan.block_size).all()
    assert host.reused_share > 1.5 * kept.reused_share and host.ttft_s.mean() < kept.ttft_s.mean()
    # Llama 3.1 8B: 32 layers of 8 heads of 128 keys and values in 2 bytes, over PCIe 5.0 x16.
    seconds = 10e-6 + sessions.common[later] * 32 * 8 * 128 * 2 * 2 / 64e9
    assert loads_s(plan, trace)[later] == pytest.approx(seconds) and not loads_s(plan, trace)[~later].any()


def test_a_shared_prefix_is_found_by_all_sessions(profile: Profile) -> None:
    trace, plan = _sent(60, 4.0, shared_prefix=1600, left_out=0.5), _plan("quantile", "chunked", 2500)
    counted = counted_turns(plan, lanes_of(plan, profile), trace)
    engine = logged_turns(plan, trace, run_requests(plan, profile, trace, int(trace.output.max())))
    assert counted is not None
    assert counted.reused_share == pytest.approx(engine.reused_share, abs=0.02)
    assert counted.ttft_s.mean() == pytest.approx(engine.ttft_s.mean(), rel=0.05)


def test_a_turn_follows_the_end_of_the_turn_before_it(profile: Profile) -> None:
    plan, trace = (
        _plan("quantile", "chunked", 20_000),
        _sent(30, 2.0, subagents={"share": 0.3, "turns": {"kind": "constant", "value": 2}}),
    )
    log = run_requests(plan, profile, trace, int(trace.output.max()))
    times, sessions = logged_turns(plan, trace, log), trace.sessions
    assert sessions is not None and not sessions.is_plain
    later = np.flatnonzero(sessions.after >= 0)
    gaps = times.arrived_s[later] - times.end_s[sessions.after[later]]
    assert np.allclose(gaps, sessions.pause_s[later], atol=1e-6)
    # With so much memory, a turn finds all whole blocks that it continues, be they its own session's or its parent's.
    # The last token of an answer has no K/V.
    like = sessions.like[later]
    most = np.minimum(trace.input[later] - 1, trace.input[like] + trace.output[like] - 1)
    whole = np.minimum(sessions.common[later], most) // plan.block_size * plan.block_size
    assert (times.cached[later] == whole).all()
    assert replay(policies.build(plan), log) == log


def test_every_turn_is_computed_anew_without_reuse(profile: Profile) -> None:
    plan, trace = _plan("quantile", "chunked", 20_000), _sent(20, 2.0)
    assert trace.sessions is not None
    apart = trace._replace(sessions=replace(trace.sessions, common=np.zeros_like(trace.sessions.common)))
    log = run_requests(plan, profile, apart, int(trace.output.max()))
    assert logged_turns(plan, apart, log).reused_share == 0


@pytest.mark.parametrize(
    ("model", "cluster", "law", "bounds"),
    few(
        [
            (  # above 0.75 times the rate that a run of three lives keeps, sessions find less and less for ten lives
                "llama-3.1-8b",
                "a100x16",
                {
                    "turns": {"kind": "uniform", "min": 1, "max": 3},
                    "first_input": {"kind": "uniform", "min": 32, "max": 130},
                    "added_input": {"kind": "uniform", "min": 80, "max": 480},
                    "output": {"kind": "uniform", "min": 6, "max": 38},
                    "left_out": 0.5,
                    "pause": {"median_s": 0.155, "p90_s": 0.722},
                    "max_context": 4000,
                },
                {"ttft_s": 1.56, "session_wait_s": 12.3, "quantile": 0.95},
            ),
            (
                "opt-13b",
                "h100x8",
                {
                    "turns": {"kind": "uniform", "min": 1, "max": 11},
                    "first_input": {"kind": "uniform", "min": 25, "max": 100},
                    "added_input": {"kind": "uniform", "min": 10, "max": 64},
                    "output": {"kind": "uniform", "min": 6, "max": 40},
                    "left_out": 0.5,
                    "pause": {"median_s": 0.16, "p90_s": 0.31},
                    "max_context": 1500,
                },
                {"ttft_s": 0.72, "session_wait_s": 8.0, "quantile": 0.9},
            ),
        ]
    ),
    ids=["slow", "short"],
)
@pytest.mark.long
def test_a_plans_rate_is_kept_four_times_as_long_and_below_its_ceiling(
    model: str, cluster: str, law: dict[str, object], bounds: dict[str, Any]
) -> None:
    workload = workload_of_law("chats", SessionLaw.model_validate(law))
    plan = xgpt.plan(model=model, cluster=cluster, devices=2, workload=workload, latency_bound_s=None, **bounds)
    found = plan.estimate.sessions
    assert found is not None and plan.search.gap is not None
    assert SessionTrial(plan, profile_of(plan), length=RunLength(64, 80.0, 960_000, 0.005)).keeps(
        0.98 * found.rate_per_s
    )


def test_a_servers_step_log_is_read_in_its_sessions(profile: Profile, tmp_path: Path) -> None:
    plan, trace = _plan("quantile", "chunked", 20_000), _sent(30, 2.0)
    log = run_requests(plan, profile, trace, int(trace.output.max()))
    writer = StepLogWriter(tmp_path / "steps.jsonl")
    for record in log:
        writer(record)
    writer.close()
    found, sessions = load_sessions(str(tmp_path / "steps.jsonl")), trace.sessions
    assert found is not None and found.sessions is not None and sessions is not None
    order = np.argsort(logged_turns(plan, trace, log).arrived_s, kind="stable")
    place = np.append(np.argsort(order), -1)
    assert found.input.tolist() == trace.input[order].tolist()
    assert found.output.tolist() == trace.output[order].tolist()
    assert found.sessions.after.tolist() == place[sessions.after[order]].tolist()
    assert (sessions.common[order] - found.sessions.common < plan.block_size + trace.output.max()).all()


@pytest.mark.parametrize("forks", few([{}, {"subagents": {"share": 0.3, "turns": {"kind": "constant", "value": 2}}}]))
def test_what_counts_has_the_work_of_a_steady_state(profile: Profile, forks: dict[str, object]) -> None:
    """Many sessions pause for longer than a quarter of the run."""
    pauses = {"turns": {"kind": "constant", "value": 3}, "pause": {"median_s": 60, "p90_s": 400}}
    law = SessionLaw.model_validate(LAW | pauses | forks)
    plan = _plan("quantile", "chunked", 20_000)
    plan = plan.but(workload=workload_of_law("pauses", law), constraint=plan.constraint.but(ttft_s=1.0))
    trial = SessionTrial(plan, profile, length=RunLength(4, 0.0, 0, 0.02))
    rate = 0.3 * plan.estimate.throughput_rps / trial.turns
    run = trial.at(rate).times
    span_s = run.trace.turns.num_sessions / rate
    assert (np.bincount(run.trace.turns.session, run.paused_s) > span_s / 4).mean() > 0.2
    counts = (run.arrived_s > span_s / 4) & (run.arrived_s < 3 * span_s / 4)
    assert run.trace.input[counts].sum() == pytest.approx(run.trace.input.sum() / 2, rel=0.03)


def test_turns_that_did_not_begin_find_nothing() -> None:
    """They counted as one token less than none, so that a share could be negative."""
    trace = TraceLengths(np.array([100, 100, 100]), np.array([1, 1, 1]), None)
    nothing = np.zeros(3)
    assert TurnTimes(trace, nothing, nothing, nothing, np.array([0, 50, -1])).reused_share == 0.25
    assert TurnTimes(trace, nothing, nothing, nothing, np.array([0, 0, -1])).reused_share == 0
