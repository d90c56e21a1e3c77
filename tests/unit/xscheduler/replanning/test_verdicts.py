"""Re-planning by arrival rates: what a plan maximises is what it is judged by."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.contract.scenarios import problem
from tests.rings import few
from xgpt import api
from xgpt.core import policies
from xgpt.core.errors import InfeasibleError
from xgpt.core.load import Growth, LogLoad
from xgpt.core.schema import Constraint, Observation, OrcaSettings, Outcome, Pinned, Plan
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.recommendation import AtLoad, Gain, Offer, Ranged
from xgpt.core.traces import read_lengths
from xgpt.core.workload import sample
from xgpt.deciding.load import at_load, carried
from xgpt.deciding.recommend import _decide
from xgpt.observation.observer import Observer
from xgpt.observation.windows import observe_lengths
from xscheduler.found import Found
from xscheduler.objectives.best_plans import plan_each
from xscheduler.objectives.sizing import Judged
from xscheduler.replanning import decide as decisions
from xscheduler.replanning.decide import Verdict, decide, with_known_rate
from xscheduler.replanning.judge import ArrivalsJudge, Terms
from xscheduler.replanning.replanner import propose
from xscheduler.replanning.situation import Situation
from xsimulator.events import replay
from xsimulator.run import simulate

OF = problem("llama-3.1-8b", "h200x1", "azure-conv")


def free(plan: Plan) -> Plan:
    """The plan as if no policy had been asked for: re-planning may go over to any."""
    return plan.model_copy(update={"pinned": Pinned()})


@functools.cache
def running() -> Plan:
    subject = OF
    constraint = Constraint(latency_bound_s=8.0, objective="arrivals")
    return free(next(iter(plan_each(subject.under(constraint), "orca").values())))


def found_in(plan: Plan) -> Found:
    return Found(plan, plan.ceiling)


def observed(input_factor: float, output_factor: float, rate: float | None = None) -> Observation:
    inputs, outputs = sample(OF.workload, 2000, np.random.default_rng(0))
    lengths = [
        np.maximum(1, (factor * values).astype(int))
        for factor, values in ((input_factor, inputs), (output_factor, outputs))
    ]
    found = observe_lengths(lengths[0], lengths[1], OF.workload)
    return found.model_copy(update={"arrival_rate_per_s": rate})


def test_the_plan_that_keeps_a_higher_arrival_rate_takes_over() -> None:
    decision, plan = propose(running(), OF.profile, observed(1.0, 0.5))
    assert decision.best is not None and plan is not None
    now, then = decision.running.arrival_rate_per_s, decision.best.arrival_rate_per_s
    assert now is not None and then is not None
    assert then >= 1.05 * now
    assert decision.gain == pytest.approx(then / now - 1)
    assert rate_of(plan) == then
    assert plan.constraint == running().constraint
    assert decision.best.latency_s * (1 + plan.constraint.headroom) <= 8.0


def test_who_asks_is_told_to_keep_a_plan_that_holds_the_load_and_a_server_swaps_for_headroom() -> None:
    """`xgpt compare` judges so, too: a change needs a reason."""
    quiet = observed(1.0, 0.5, 0.2 * rate_of(running()))
    decision, plan = propose(running(), OF.profile, quiet)
    assert decision.running.keeps_bound and decision.best is not None and decision.gain >= 0.05
    assert plan is None and decision.action == "keep" and "it keeps the bounds at your load" in decision.reason
    assert propose(running(), OF.profile, quiet.model_copy(update={"cause": "lengths"}))[1] is not None


def test_a_log_is_judged_by_its_replay_not_by_the_rate_of_its_busiest_window(tmp_path: Path) -> None:
    """`xgpt compare` kept a deployment that `xgpt replan` replaced: more arrive in a short window than can for long."""
    plan, rng = running(), np.random.default_rng(0)
    rate = rate_of(plan)
    gaps = [rng.exponential(1 / (factor * rate), number) for factor, number in ((0.3, 600), (1.1, 560), (0.3, 600))]
    inputs, outputs = sample(OF.workload, 1760, rng)
    rows = zip(np.cumsum(np.concatenate(gaps)), inputs, outputs, strict=True)
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["timestamp_s,input,output", *(f"{at:.3f},{i},{o}" for at, i, o in rows)]) + "\n")
    (tmp_path / "profile.json").write_text(OF.profile.model_dump_json())
    found = api.replan(plan, str(path), profile=str(tmp_path / "profile.json"))
    load = carried(LogLoad.of("log", read_lengths(path)), None)
    assert load is not None and load.log is not None and rate < load.rate_per_s
    assert at_load(plan, OF.profile, load).holds
    assert found.decision.running.keeps_bound
    assert found.decision.reason.startswith("both hold your load, this plan more surely (yours in ")
    told = found.decision.recommendation
    assert told is not None and told.now is not None and told.now.at_load is not None
    assert told.now.at_load.num_requests == 1760 and told.now.at_load.share_kept is not None
    factor = load.too_much(found.plan, OF.profile)
    sure = load.sure_up_to(found.plan, OF.profile, 0.9)
    assert factor is not None and sure is not None and sure < factor
    assert re.fullmatch(
        r"growth to 1\.\d+ times this load: then it is held less surely than wanted", told.would_change[0]
    ), "not a rate of even arrivals, and not the growth at which it breaks: the answer changes before"
    more = carried(LogLoad.of("log", read_lengths(path), Growth(rate=factor)), None)
    assert more is not None and not at_load(found.plan, OF.profile, more).holds


def test_under_too_much_load_what_keeps_more_requests_runs() -> None:
    """A deployment that kept 70% of a log was to change to a plan that kept 48%, since its rate was higher; another one
    that kept 61% was to stay where a plan kept 98%, since its rate might be lower in bursts.
    """
    kept, fewer = (
        AtLoad(rate_per_s=17.7, num_requests=640_932, holds=False, share_kept=share) for share in (0.7, 0.48)
    )
    now, then = (
        Offer(
            name="chunked",
            policy="chunked",
            settings="",
            engine="",
            needs_xgpt=False,
            num_devices=8,
            rate_per_s=Ranged(value=rate),
            at_load=at_load,
        )
        for rate, at_load in ((6.8, kept), (10.0, fewer))
    )
    gain = Gain(unit="requests/s", now=6.8, then=10.0, factor=Ranged(value=1.47, low=1.17, high=1.57))
    said = "neither holds your load, and the best other plan, chunked, keeps the bounds only for 48%"
    assert _decide(then, now, gain) == ("keep", f"{said} of 640,932 requests")
    assert _decide(now, then, gain.but(factor=Ranged(value=0.7, low=0.5, high=0.9)))[0] == "change"
    sure, unsure = (kept.but(holds=True, confidence=share) for share in (0.95, 0.86))
    for confidence, cases in ((0.86, "8 of 10 cases"), (0.0, "hardly any case")):
        said = f"both hold your load, this plan more surely (yours in {cases})"
        mine = now.but(at_load=unsure.but(confidence=confidence))
        assert _decide(then.but(at_load=sure), mine, gain) == ("change", said)
    mine, other = now.but(at_load=unsure), then.but(at_load=unsure)
    assert _decide(other, mine, gain) == ("keep", "it holds your load"), "no fewer devices were searched"
    for confidence, less in ((0.7, "do so less surely"), (0.0, "do not")):
        tried = {4: Judged(0.0), 6: Judged(confidence), 8: Judged(0.86)}
        assert _decide(other, mine, gain, tried=tried)[1] == f"it holds your load, and fewer devices {less}"
    for at, likely, action in ((sure, 0.95, "change"), (sure, 0.86, "keep"), (unsure, 0.81, "change")):
        fewer = then.but(num_devices=3, at_load=unsure.but(confidence=likely))
        assert _decide(fewer, now.but(at_load=at), gain)[0] == action, "three devices held it less surely than wanted"
    unknown = then.but(at_load=AtLoad(rate_per_s=17.7, num_requests=640_932, holds=False))
    assert _decide(unknown, now, gain)[0] == "change", "a replay that is not known decides nothing"


def test_a_plan_with_k_v_by_quantile_is_compared_with_a_static_batch() -> None:
    """The candidate got the running plan's promise of K/V memory, with which no static batch is built."""
    draft = running().but(admission=running().admission.but(kv="quantile", max_running=64))
    plan = draft.proven(running().ceiling)
    situation = Situation.of(plan, OF.profile, observed(1.0, 1.0))
    found = ArrivalsJudge(situation, Terms()).best(("static",), in_place=False)
    assert (found.draft.policy.kind, found.draft.admission.kv) == ("static", "reserve")


def test_an_encoder_decoder_goes_over_to_a_plan_for_other_lengths() -> None:
    subject = problem("t5-11b", "h200x1", "translation")
    constraint = Constraint(latency_bound_s=6.0)
    plan = free(next(iter(plan_each(subject.under(constraint), "orca").values())))
    inputs, outputs = sample(subject.workload, 2000, np.random.default_rng(0))
    shorter = observe_lengths(inputs // 2 + 1, outputs // 3 + 1, subject.workload)
    decision, other = propose(plan, subject.profile, shorter)
    assert other is not None and decision.gain > 0.05
    measured, log = simulate(other, subject.profile, shorter.workload, 300, np.random.default_rng(1))
    assert measured.latency_s <= 6.0
    schedule = policies.build(plan)
    assert schedule.apply(policies.build(other)) == (decision.action == "swap")
    assert replay(policies.build(other), log) == log


def test_what_gains_little_stays() -> None:
    decision, plan = propose(running(), OF.profile, observed(1.0, 1.0))
    assert decision.best is not None
    assert (plan is None) == (decision.gain < 0.05)


@pytest.mark.parametrize(("share", "keeps"), [(0.8, True), (1.2, False)])
def test_the_bound_is_broken_where_more_arrive_than_it_is_kept_for(share: float, keeps: bool) -> None:
    decision, _ = propose(running(), OF.profile, observed(1.0, 1.0, share * rate_of(running())))
    assert decision.running.keeps_bound is keeps


@pytest.mark.long
def test_on_one_device_a_static_batch_may_give_way_to_another_policy() -> None:
    plan = free(plan_each(OF.under(Constraint(latency_bound_s=8.0, objective="arrivals")), "static")["static"])
    decision, then = propose(plan, OF.profile, observed(1.0, 1.0))
    assert decision.action == "redeploy" and then is not None and then.policy.kind != "static"
    assert decision.gain > 0.05 and decision.pause_s > 0


def test_where_requests_break_their_bounds_the_decision_says_so_and_takes_a_smaller_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the best plan of a slightly tighter bound as the running one: it gains some, and less than 5%."""
    monkeypatch.setattr("xsimulator.capacity.LASTING_REQUESTS", 2000)  # with others' requests, it gains less
    subject, kept = OF, observed(1.0, 1.01)
    tighter = subject.under(Constraint(latency_bound_s=6.8, objective="arrivals"))
    plan = next(iter(plan_each(tighter, "chunked").values()))
    plan = plan.model_copy(update={"constraint": running().constraint})
    before, _ = propose(plan, subject.profile, kept)
    after, _ = propose(plan, subject.profile, kept.model_copy(update={"goodput": 0.9}))
    assert before.running.keeps_bound and 0.02 < before.gain < 0.05 and before.action == "keep"
    assert after.running.keeps_bound is False and after.action == "swap"
    assert after.reason.startswith("90.0% of recent requests kept their bounds, but 99.0% should")


@pytest.mark.parametrize(("rate", "least_s", "most_s"), few([(3.0, 15, 60), (None, 8, 20)]))
def test_if_no_plan_keeps_the_bound_one_near_it_takes_over(rate: float | None, least_s: float, most_s: float) -> None:
    """Outputs four times as long take longer than the bound under any plan. The plan that is nearest to it must also
    hold the rate at which requests arrive."""
    decision, plan = propose(running(), OF.profile, observed(1.0, 4.0, rate))
    assert decision.running.keeps_bound is False and decision.best is not None and decision.best.keeps_bound is False
    rates = f"{decision.best.arrival_rate_per_s:.3g} requests/s, the running one up to "
    assert decision.planned_under_s is not None and decision.planned_under_s > 8
    under = re.escape(f"under {decision.planned_under_s:.3g} s")
    assert re.match(rf"no plan keeps the bound of 8 s; {under}, the best other .* {rates}", decision.reason)
    assert least_s < decision.best.latency_s < most_s
    if rate is None:
        assert decision.action == "swap" and plan is not None and decision.gain > 0
        assert plan.policy != running().policy and plan.constraint == running().constraint
    else:
        assert (decision.best.arrival_rate_per_s or 0.0) >= rate


class Missing(ArrivalsJudge):
    """Finds no plan that keeps the bound of 8 s, as closed forms of waa may miss one that simulation finds."""

    def best(self, kinds: Sequence[str], *, in_place: bool) -> Found:
        if self.plan.constraint.latency_bound_s == 8.0:
            raise InfeasibleError("no schedule keeps it", nearest_bound_s=11.0, binding="latency_bound_s")
        return super().best(kinds, in_place=in_place)


def test_a_plan_that_keeps_its_bound_is_not_exchanged_for_one_that_breaks_it() -> None:
    """A waa plan that kept 12 s up to 3.1 requests/s gave way to one that took 16.6 s at every rate."""
    more = 2 * rate_of(running())
    situation = Situation.of(running(), OF.profile, observed(1.0, 1.0, more))
    verdict = decide(Missing(situation, Terms()))
    assert not verdict.switch and verdict.breaks_bound and verdict.found is None
    assert verdict.running.arrival_rate_per_s == pytest.approx(rate_of(running()), rel=0.1)
    assert "no other plan keeps the bound of 8 s; the running plan keeps it up to" in verdict.reason


class TwoPlans(ArrivalsJudge):
    """Knows two plans: small batches keep the bound of 8 s up to 3.5 requests/s, and serve 4.5 at saturation; large
    ones keep it up to 3, and serve 13.5; under bounds above 12 s large ones keep up to 9, and small ones up to 4."""

    def plan_of(self, *, is_large: bool) -> Plan:
        is_wide = (self.plan.constraint.latency_bound_s or 0.0) > 12
        rate = (9.0 if is_large else 4.0) if is_wide else (3.0 if is_large else 3.5)
        capacity = running().estimate.capacity
        assert capacity is not None
        found = self.plan.but(policy=OrcaSettings(max_batch=128 if is_large else 2))
        capacity = capacity.model_copy(update={"rate_per_s": rate})
        return found.with_estimate(throughput_rps=13.5 if is_large else 4.5, capacity=capacity).proven(
            running().ceiling
        )

    @property
    def running(self) -> Outcome:
        return self.outcome(self.plan_of(is_large=self.plan.policy == OrcaSettings(max_batch=128)))

    def best(self, kinds: Sequence[str], *, in_place: bool) -> Found:
        return found_in(max((self.plan_of(is_large=is_large) for is_large in (False, True)), key=rate_of))


def test_a_plan_for_few_arrivals_gives_way_when_more_arrive() -> None:
    """A cut from 128 to 2 running requests at 2 requests/s was never undone at 6/s, since the plan of large batches
    keeps the bound only at a lower rate."""

    def judged_at(rate: float, plan: Plan) -> Verdict:
        return decide(TwoPlans(Situation.of(plan, OF.profile, observed(1.0, 1.0, rate)), Terms()))

    large = running().model_copy(update={"policy": OrcaSettings(max_batch=128)})
    small = judged_at(2.0, large).found
    assert small is not None and small.draft.policy == OrcaSettings(max_batch=2)
    risen = judged_at(6.0, small.plan)
    assert risen.switch and risen.found is not None and risen.found.draft.policy == OrcaSettings(max_batch=128)
    assert risen.found.draft.constraint == running().constraint
    assert risen.reason.startswith(
        "6 requests/s arrive, and no plan keeps the bound of 8 s at this rate; under 13.2 s, "
    )
    assert risen.planned_under_s == pytest.approx(13.2)
    assert not judged_at(6.0, large).switch


def test_a_plan_that_serves_less_never_takes_over_while_more_requests_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """More arrive than any plan serves; the plan for a wider bound serves more than the one for the bound, but less
    than the running one."""

    def outcome(throughput_rps: float, rate: float) -> Outcome:
        return Outcome(
            policy=running().policy,
            throughput_rps=throughput_rps,
            latency_s=1.6,
            keeps_bound=False,
            arrival_rate_per_s=rate,
        )

    judge = ArrivalsJudge(Situation.of(running(), OF.profile, observed(1.0, 1.0, 9.65)), Terms())
    now = judge.__dict__["running"] = outcome(5.62, 1.9)
    found = iter([4.2, 4.43, 4.43, 4.43])
    monkeypatch.setattr(decisions, "_wider", lambda judge, *_: [judge] * 3)
    monkeypatch.setattr(
        decisions,
        "_decide_feasible",
        lambda _: Verdict(now, True, "it gains", outcome(next(found), 3.3), found_in(running()), gain=0.7, switch=True),
    )
    verdict = decide(judge)
    assert not verdict.switch and verdict.reason.endswith("the running plan serves more")


def test_few_requests_do_not_cut_what_a_plan_serves() -> None:
    outcome = Outcome(
        policy=running().policy, throughput_rps=13.5, latency_s=3.3, keeps_bound=True, arrival_rate_per_s=3.0
    )
    less = outcome.model_copy(update={"throughput_rps": 4.5, "arrival_rate_per_s": 3.5})
    verdict = Verdict(outcome, False, "it gains", less, found_in(running()), gain=0.17, switch=True)
    kept = with_known_rate(verdict, 9)
    assert not kept.switch and "9 requests are too few to know the arrival rate" in kept.reason
    assert with_known_rate(verdict, 100) == verdict


def test_a_drift_of_the_arrival_rate_cuts_capacity_only_while_few_arrive() -> None:
    """Steps become slower while 9 requests have come, then 2 requests arrive a second, then 6."""
    large = TwoPlans(Situation.of(running(), OF.profile, observed(1.0, 1.0)), Terms()).plan_of(is_large=True)
    observer, end_s, step_s = Observer(large), 0.0, 0.0
    inputs, outputs = sample(OF.workload, 2000, np.random.default_rng(0))

    def batch_after(num_arrivals: int, rate: float, slowdown: float) -> tuple[str | None, int]:
        """Return why the plan is judged, if it is, and the batch size that runs afterwards."""
        nonlocal end_s, step_s
        for _ in range(num_arrivals):
            end_s += 1 / rate
            i = observer.window.num_arrived
            seen = observer.window.arrive(end_s, int(inputs[i]), int(outputs[i]))
            seen.generated = int(outputs[i])
            observer.end(seen)
        for _ in range(400):
            step_s += 0.1
            observer.pace.note(step_s, 0.1 * slowdown, 0.1)
        now = observer.snapshot()
        found = None if now is None else observer.look(now)
        if found is not None:
            situation = Situation.of(observer.plan, OF.profile, found)
            verdict = with_known_rate(decide(TwoPlans(situation, Terms())), found.num_requests)
            if verdict.switch and verdict.found is not None:
                observer.go_over_to(verdict.found.plan)
        assert isinstance(observer.plan.policy, OrcaSettings)
        return None if found is None else found.cause, observer.plan.policy.max_batch

    assert batch_after(9, 2.0, 1.96) == ("pace", 128)
    assert batch_after(200, 2.0, 1.96) == (None, 128)
    assert batch_after(10, 2.0, 2.6) == ("pace", 2)
    assert batch_after(100, 6.0, 2.6) == ("arrivals", 128)
