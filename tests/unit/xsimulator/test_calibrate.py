"""Calibration: a profile that is wrong by factors is put right from a log of steps."""

from functools import cache

import numpy as np
import pytest

from tests.contract.scenarios import problem
from tests.planned import placements_of, planned
from xgpt.core.errors import InputError
from xgpt.core.schema import Plan
from xscheduler.problem import Problem
from xscheduler.replanning.replanner import BackgroundPlanner
from xscheduler.schedule import Scheduler
from xsimulator.calibrate import PARTS, calibrate, corrected, steps_of
from xsimulator.clock import Span
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.executed import paces, paces_of_workers
from xsimulator.run import simulate
from xsimulator.stages import whole

PROBLEM = problem("opt-13b", "h200x1", "summarization", 6.0)
T5 = problem("t5-11b", "h200x1", "translation", 6.0)


def best(subject: Problem, kind: str) -> Plan:
    return _best(subject is T5, kind)


@cache
def _best(is_t5: bool, kind: str) -> Plan:
    return Scheduler(T5 if is_t5 else PROBLEM).best((kind,))


def factors(**given: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 1.0) | given


@pytest.mark.parametrize(("subject", "kind"), [(PROBLEM, "rra"), (PROBLEM, "chunked"), (T5, "rra"), (T5, "orca")])
def test_a_slower_machine_is_found(subject: Problem, kind: str) -> None:
    plan = best(subject, kind)
    truth = corrected(subject.profile, factors(tokens=1.2, decode_attention=1.5), "calibration", "made up")
    _, log = simulate(plan, truth, plan.workload, 400, np.random.default_rng(0))
    profile, found = calibrate(plan, subject.profile, log)
    assert found.error_before > 0.1 and found.bias_before < -0.1
    assert found.error_after < 0.03 and abs(found.bias_after) < 0.02
    assert found.factors["tokens"] == pytest.approx(1.2, rel=0.05)
    assert "calibration" in profile.provenance
    again = calibrate(plan, profile, log)[1]
    assert again.error_before < 0.03


def test_steps_that_tell_of_the_machine_are_left_out() -> None:
    plan = best(PROBLEM, "rra")
    _, log = simulate(plan, PROBLEM.profile, plan.workload, 400, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    late_ns = 10**9 * np.cumsum(rng.random(len(log)) < 0.03)
    starts_ns = np.concatenate([[0], late_ns[:-1]])
    stalled = [
        r._replace(start_ns=r.start_ns + int(before), end_ns=r.end_ns + int(after))
        for r, before, after in zip(log, starts_ns, late_ns, strict=True)
    ]
    _, found = calibrate(plan, PROBLEM.profile, stalled)
    assert all(factor == pytest.approx(1, abs=0.02) for factor in found.factors.values())


def test_a_log_of_several_replicas_is_that_of_each() -> None:
    """Each replica numbers its own steps: their log, in the order of time, has every number twice."""
    one = best(PROBLEM, "rra")
    plan = one.model_copy(update={"replicas": 2})
    _, log = simulate(one, PROBLEM.profile, one.workload, 400, np.random.default_rng(0))
    slower = [r._replace(start_ns=2 * r.start_ns, end_ns=2 * r.end_ns, replica=1) for r in log]
    both = sorted(log + slower, key=lambda record: record.end_ns)
    first, second, together = (paces(plan, PROBLEM.profile, each) for each in (log, slower, both))
    assert first is not None and second is not None and together is not None
    assert first.ratio == pytest.approx(1) and second.ratio == pytest.approx(2)
    assert len(together.tokens) == 2 * len(log) and together.ratio == pytest.approx(1.5)
    assert together.by_lane == pytest.approx({"replica 0": 1.0, "replica 1": 2.0})
    assert len(steps_of(plan, PROBLEM.profile, both).seconds) == 2 * len(log)


def test_each_lane_of_waa_has_a_pace() -> None:
    subject = problem("t5-11b", "a40x4", "translation")
    places = placements_of(subject, "waa")
    plan = planned(subject, "waa", next(at for at in places if len(at.encode_lane) == len(at.decode_lane) == 1))
    _, log = simulate(plan, subject.profile, plan.workload, 200, np.random.default_rng(0))
    found = paces(plan, subject.profile, log)
    assert found is not None and found.by_lane == pytest.approx({"encode": 1.0, "decode": 1.0}, rel=1e-6)


def test_each_worker_of_a_pipeline_has_a_pace() -> None:
    """Its steps wait for each other, so that the log alone tells none."""
    subject = problem("opt-13b", "a40x4", "summarization")
    plan = planned(subject, "rra", next(at for at in placements_of(subject, "rra") if len(at.decode_lane) > 1))
    assert len(plan.stages) > 1 and plan.replicas == 1
    spans: list[Span] = []
    _, log = simulate(plan, subject.profile, plan.workload, 200, np.random.default_rng(0), None, spans.append)
    assert paces(plan, subject.profile, log) is None
    busy = {f"worker {stage.devices[0]}": 0.0 for stage in plan.stages}
    for span in spans:
        busy[f"worker {plan.stages[span.stage].devices[0]}"] += (1 + span.stage) * (span.end_ns - span.start_ns) / 1e9
    found = paces_of_workers(plan, subject.profile, log, {"engine": 0.0, **busy})
    assert found is not None
    expected = {f"worker {stage.devices[0]}": 1.0 + number for number, stage in enumerate(plan.stages)}
    assert found.by_lane == pytest.approx(expected, rel=1e-6)
    assert paces_of_workers(plan, subject.profile, log, {"engine": 0.0}) is None
    assert paces_of_workers(plan, subject.profile, [*log, *log], busy) is None, "workers that were started anew"


def test_several_devices_calibrate_nothing() -> None:
    subject = problem("opt-13b", "h200x8", "summarization", 6.0)
    plan = next(p for p in (Scheduler(subject).best((kind,)) for kind in ("waa", "rra")) if p.devices_per_replica > 1)
    with pytest.raises(InputError, match="one device"):
        calibrate(plan, subject.profile, [])


def test_a_short_log_is_refused() -> None:
    plan = best(PROBLEM, "rra")
    _, log = simulate(plan, PROBLEM.profile, plan.workload, 400, np.random.default_rng(0))
    with pytest.raises(InputError, match="replay more"):
        calibrate(plan, PROBLEM.profile, log[:60])


@pytest.mark.parametrize("subject", [PROBLEM, T5], ids=["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("kind", ["rra", "orca"])
def test_a_log_of_the_profile_itself_is_predicted_to_the_nanosecond(subject: Problem, kind: str) -> None:
    plan = best(subject, kind)
    _, log = simulate(plan, subject.profile, plan.workload, 200, np.random.default_rng(0))
    steps = steps_of(plan, subject.profile, log)
    np.testing.assert_allclose(steps.parts.sum(axis=1), steps.seconds, rtol=0, atol=1.1e-9)


def test_a_server_predicts_the_steps_of_an_encoder_decoder() -> None:
    plan = best(T5, "orca")
    planner = BackgroundPlanner(plan, T5.profile)
    cost = LaneCost(T5.model, T5.profile, whole(T5.model))
    (alone,) = cost.step(StepCounts([(0, 50, 1)], 2, 1 + 5 + 1 + 7, 3, 52, (50 + 30 + 40) / 3))
    assert planner.predict_s(plan, [(0, 50, 1)], [(30, 5), (40, 7)]) == pytest.approx(alone)
