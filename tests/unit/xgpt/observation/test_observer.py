"""A pace that is another than planned: when it is known, what it changes, and that it is counted once."""

import functools
from collections import deque

import numpy as np
import pytest

from tests.changing_lengths import Phase, simulated
from tests.contract.scenarios import problem
from tests.fakes import fake_plan
from xgpt.core.io import sha256
from xgpt.core.schema import Constraint, Observation, Plan, ProfileRef, Workload
from xgpt.core.workload import histogram_of
from xgpt.observation.observer import (
    ENOUGH_STEPS,
    PACE_MEMORY_S,
    MeasuredPace,
    Observer,
    differs,
    slowdown_to_plan_with,
)
from xgpt.observation.windows import Seen
from xscheduler.replanning.decide import judged
from xscheduler.replanning.replanner import BackgroundPlanner, propose
from xscheduler.replanning.situation import reestimate
from xscheduler.schedule import Scheduler

OF = problem("opt-13b", "h200x1", "summarization", 4.0)


@functools.cache
def tight() -> Plan:
    """A plan that has no headroom."""
    return Scheduler(OF).best(("rra", "chunked", "orca"))


def step(pace: MeasuredPace, seconds: float, slowdown: float, start_s: float = 0.0, step_s: float = 0.05) -> float:
    """Steps one after the other, each that many times as long as predicted; when the last has ended."""
    end_s = start_s
    while end_s < start_s + seconds:
        end_s += slowdown * step_s
        if pace.wants_step(slowdown * step_s):
            pace.note(end_s, slowdown * step_s, step_s)
    return end_s


def finish(observer: Observer, count: int) -> None:
    """Requests as planned, that have ended."""
    for i in range(count):
        seen = observer.window.arrive(float(i), (3, 8)[i % 2], 8)
        seen.generated, seen.has_ended = (3, 8)[i // 2 % 2], True


def look(observer: Observer) -> Observation | None:
    """As a server does, all at once."""
    now = observer.snapshot()
    assert now is not None
    return observer.look(now)


@pytest.mark.parametrize("cycle", range(2, 30))
def test_the_steps_that_are_compared_are_in_step_with_no_cycle(cycle: int) -> None:
    pace, taken = MeasuredPace(), np.zeros(cycle)
    for i in range(400 * cycle):
        taken[i % cycle] += pace.wants_step(0.001)
    assert taken.sum() == pytest.approx(50 * cycle, rel=0.02)
    assert taken.min() > 35 and taken.max() < 65


def test_long_steps_are_all_compared() -> None:
    for step_s, share in ((0.2, 1.0), (0.01, 0.2), (0.001, 0.125)):
        pace = MeasuredPace()
        assert sum(pace.wants_step(step_s) for _ in range(1000)) == pytest.approx(1000 * share, rel=0.02)


def test_a_pace_is_known_after_some_time_and_some_steps() -> None:
    pace = MeasuredPace()
    assert pace.ratio is None
    pace.note(0.1, 0.2, 0.1)
    pace.note(10 * PACE_MEMORY_S, 0.2, 0.1)
    assert pace.ratio == pytest.approx(2) and not pace.is_known  # long, but two steps
    pace = MeasuredPace()
    for i in range(4 * ENOUGH_STEPS):
        pace.note(0.5 * PACE_MEMORY_S * i / (4 * ENOUGH_STEPS), 0.2, 0.1)
    assert not pace.is_known  # many steps, in one moment of the machine
    pace = MeasuredPace()
    end_s = step(pace, 40, 2.0)
    assert pace.is_known and pace.ratio == pytest.approx(2)
    step(pace, 80, 1.0, end_s)
    assert pace.ratio == pytest.approx(1, abs=0.02)


def test_a_clock_that_flips_every_second_is_one_pace() -> None:
    pace, end_s, ratios = MeasuredPace(), 0.0, []
    for second in range(120):
        end_s = step(pace, 1.0, (0.7, 1.0, 1.4)[second % 3], end_s, 0.01)
        if pace.is_known:
            ratios.append(pace.ratio or 0.0)
    assert max(ratios) / min(ratios) < 1.1


def test_a_slower_machine_is_noticed_within_seconds_and_a_faster_one_is_made_sure_of() -> None:
    for slowdown, seconds in ((1.2, 3.0), (0.7, 1.2 * PACE_MEMORY_S)):
        observer = Observer(fake_plan())
        finish(observer, 1)
        end_s = step(observer.pace, seconds / 2, slowdown, step_s=0.01)
        assert observer.slowdown is None and not observer.is_due(end_s)
        end_s = step(observer.pace, seconds / 2, slowdown, end_s, 0.01)
        assert observer.slowdown == pytest.approx(slowdown, rel=0.01)
        # Looks at lengths count endings; a machine that uses up the headroom is reason enough.
        assert observer.is_due(end_s) == (slowdown > 1) and not observer.is_due(end_s + 0.1)


def test_a_pace_that_goes_up_and_down_is_not_taken_for_a_slower_one() -> None:
    observer, end_s = Observer(fake_plan()), 0.0
    for stretch in range(12):
        end_s = step(observer.pace, 0.5, (0.8, 1.3)[stretch % 2], end_s, 0.01)
        assert observer.slowdown is None
    assert 0.8 < observer.pace.least_ratio < 1.05


def test_a_ratio_within_the_spread_is_one() -> None:
    reference = ProfileRef(source="measured", sha256="0", spread=0.3, slowdown=2.0)
    assert slowdown_to_plan_with(reference, None) == 2
    assert slowdown_to_plan_with(reference, 2.5) == 2
    assert slowdown_to_plan_with(reference, 2.7) == 2.7
    assert differs(1.06, 1.0, 0.0) and not differs(1.04, 1.0, 0.0) and not differs(1.0, 1.09, 0.0)


def test_a_pace_is_judged_once_and_counted_once() -> None:
    observer = Observer(fake_plan())
    finish(observer, 20)  # too few to tell anything of lengths; a server that turns most away has no more
    assert look(observer) is None
    end_s = step(observer.pace, 30, 2.0)
    found = look(observer)
    assert found is not None and found.slowdown == pytest.approx(2) and found.step_ratio == pytest.approx(2)
    assert found.workload == fake_plan().workload  # lengths are those that were planned for
    assert (found.cause, found.lengths) == ("pace", "planned")
    assert (found.recent_input_mean, found.recent_output_mean) == pytest.approx((5.5, 5.5), rel=0.02)
    assert look(observer) is None  # whatever came of it
    slower = fake_plan(profile=fake_plan().profile.model_copy(update={"slowdown": 2.0}))
    observer.go_over_to(slower)
    assert observer.pace.ratio == pytest.approx(1) and observer.slowdown == pytest.approx(2)
    end_s = step(observer.pace, 60, 1.04, end_s, step_s=0.1)
    assert look(observer) is None
    step(observer.pace, 60, 0.5, end_s, step_s=0.1)
    found = look(observer)
    assert found is not None and found.slowdown == pytest.approx(1, rel=0.02)


def test_profiles_are_slowed_in_every_part() -> None:
    slow = OF.profile.slowed(2)
    assert slow.overhead.seconds == pytest.approx([2 * s for s in OF.profile.overhead.seconds])
    before, after = OF.profile.layers[0], slow.layers[0]
    assert after.decode_attention.seconds[-1] == pytest.approx([2 * s for s in before.decode_attention.seconds[-1]])
    assert OF.profile.slowed(1) is OF.profile


def test_a_plan_says_what_pace_its_predictions_rest_on() -> None:
    plan = tight()
    one = reestimate(plan, OF.profile, plan.workload, 0.99)
    many = Observation(
        workload=plan.workload, num_requests=999, num_finished=999, weight=1e6, input_distance=0, output_distance=0
    )
    verdict = judged(plan, OF.profile, many, slowdown=1.5)
    assert verdict.breaks_bound and verdict.switch and verdict.plan is not None
    assert verdict.running.latency_s == pytest.approx(1.5 * one["latency"], rel=1e-6)
    new = verdict.plan
    assert new.profile.sha256 == plan.profile.sha256 == sha256(OF.profile) and new.profile.slowdown == 1.5
    again = reestimate(new, OF.profile, new.workload, 0.99)
    assert again["latency"] == pytest.approx(new.estimate.latency_s, rel=0.02)
    assert new.estimate.latency_s <= 4
    planner = BackgroundPlanner(plan, OF.profile)
    slow, fast = (planner.predict_s(p, [], [(60, 40)] * 8) for p in (new, plan))
    assert slow is not None and fast is not None and slow == pytest.approx(1.5 * fast)
    assert not judged(new, OF.profile, many).switch


def test_a_machine_that_is_steadily_slower_is_planned_for_once() -> None:
    plan = tight()
    phases = [Phase(plan.workload, 2000)]
    run = simulated(plan, OF.profile, phases, np.random.default_rng(0), slowdown=1.5)
    replans = [decision for _, decision in run.changes if decision.action != "keep"]
    assert len(run.changes) <= 2 and len(replans) == 1 and run.num_lost == 0
    assert replans[0].slowdown == pytest.approx(1.5)
    without = simulated(plan, OF.profile, phases, np.random.default_rng(0), slowdown=1.5, replan=False)
    bound_s = plan.constraint.latency_bound_s
    assert bound_s is not None
    # A plan without headroom lies at the bound, and 400 requests say where that is within a few percent.
    assert run.tail(plan, plan.workload, 1000, 400).latency_s <= 1.03 * bound_s
    assert without.tail(plan, plan.workload, 1000, 400).latency_s > 1.3 * bound_s


def test_an_offline_decision_takes_the_pace_that_a_server_tells() -> None:
    """`xgpt replan --lengths URL`: the server's own plan may rest on that pace by now, the file's does not."""
    observer = Observer(tight())
    for n, m in zip((100, 200) * 100, (20, 60) * 100, strict=True):
        seen = observer.window.arrive(0.0, n, 100)
        seen.generated, seen.has_ended = m, True
    step(observer.pace, 30, 3.0)
    now = observer.snapshot()
    assert now is not None
    found = now.observation()
    assert found is not None
    decision, then = propose(tight(), OF.profile, found)
    assert decision.slowdown == pytest.approx(3)
    assert then is None or then.profile.slowdown == pytest.approx(3)


def test_a_goodput_below_the_plans_is_judged_once_until_it_recovers() -> None:
    observer = Observer(fake_plan())
    finish(observer, 200)
    assert look(observer) is None
    for i in range(200):
        observer.goodput.note(is_kept=i % 50 > 0)  # 98%: could be chance
    assert look(observer) is None
    for i in range(400):
        observer.goodput.note(is_kept=i % 10 > 0)
    found = look(observer)
    assert found is not None and found.goodput == pytest.approx(1 - 44 / 600) and found.cause == "goodput"
    assert look(observer) is None
    for _ in range(2048):
        observer.goodput.note(is_kept=True)
    assert look(observer) is None
    for i in range(2048):
        observer.goodput.note(is_kept=i % 10 > 0)
    assert look(observer) is not None


def test_a_rising_arrival_rate_is_judged_once() -> None:
    constraint = Constraint(latency_bound_s=4.0, objective="arrivals")
    observer = Observer(fake_plan(constraint=constraint).with_estimate(throughput_rps=2.0))

    def arrive(count: int, rate: float, start_s: float) -> float:
        for i in range(count):
            seen = observer.window.arrive(start_s + i / rate, (3, 8)[i % 2], 8)
            seen.generated, seen.has_ended = (3, 8)[i // 2 % 2], True
        return start_s + count / rate

    end_s = arrive(200, 1.0, 0.0)
    assert look(observer) is None
    end_s = arrive(80, 6.0, end_s)
    found = look(observer)
    assert found is not None and found.cause == "arrivals" and found.arrival_rate_per_s == pytest.approx(6)
    arrive(80, 6.0, end_s)
    assert look(observer) is None


def test_longer_requests_are_seen_while_most_of_them_time_out() -> None:
    """One request ends in each second, first come, first served; four arrive, and wait for at most 15 seconds."""
    rng = np.random.default_rng(0)
    planned, longer = (
        (np.maximum(1, rng.gamma(4, mean / 4, (400, 2))) * (1, 0.4)).astype(int) + 1 for mean in (68, 261)
    )
    lengths = Workload(name="w", input=histogram_of(planned[:, 0]), output=histogram_of(planned[:, 1]))
    observer, queue, arrived, ended = Observer(fake_plan(workload=lengths)), deque[tuple[float, int, Seen]](), 0, 0
    for second in range(90):
        for input_, output in longer[arrived : arrived + 4]:
            queue.append((float(second), int(output), observer.window.arrive(float(second), int(input_), 500)))
        arrived += 4
        while queue and queue[0][0] < second - 15:
            queue.popleft()  # cancelled: never finishes
        _, output, seen = queue.popleft()
        seen.generated = output
        observer.end(seen)
        ended += 1
        if observer.is_due(float(second)) and (found := look(observer)) is not None:
            break
    assert found is not None and found.cause == "lengths" and ended <= 40
    assert found.workload.input.mean == pytest.approx(longer[:arrived, 0].mean(), rel=0.1)
