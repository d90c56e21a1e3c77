"""A running plan under other lengths: its figures against the simulated engine, and the decision to change it."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import xgpt
from tests.contract.scenarios import problem
from tests.planned import num_params
from tests.rings import few
from xgpt import api
from xgpt.core.policies import build
from xgpt.core.schema import (
    ChunkedSettings,
    Constraint,
    Histogram,
    Observation,
    ObservedReuse,
    Outcome,
    Pinned,
    Plan,
    Profile,
    TruncatedNormal,
    Workload,
)
from xgpt.core.schema.policy import PolicyChoice
from xgpt.core.workload import histogram, sample, within_context
from xgpt.observation.windows import observe_lengths
from xgpt.resolve import load_engine
from xscheduler.found import Found
from xscheduler.objectives.ladder import request_latency
from xscheduler.placement import Placement
from xscheduler.replanning.decide import (
    AT_ONCE,
    Change,
    Verdict,
    decide,
    judged,
    loading_s,
    start_s,
    weights_loading_s,
    within_pins,
)
from xscheduler.replanning.judge import SaturatedJudge, Terms
from xscheduler.replanning.replanner import in_numbers, propose
from xscheduler.replanning.situation import Situation, reestimate
from xscheduler.schedule import Scheduler
from xsimulator.forecast import CHOICES, FORECASTS
from xsimulator.run import simulate

Kind = Literal["rra", "chunked", "orca", "static"]


def scaled(workload: Workload, input_: float, output: float) -> Workload:
    """Summarisation's lengths with other means; the longest stay."""
    parts = {}
    for name, factor in (("input", input_), ("output", output)):
        old: Histogram = getattr(workload, name)
        mean = float(np.dot(old.lengths, old.probabilities))
        normal = TruncatedNormal(mean=factor * mean, sd=0.4 * mean, min=1, max=old.lengths[-1])
        parts[name] = histogram(normal)
    return Workload(name="scaled", **parts)


@functools.cache
def plan_of(kind: str, bound: float | None) -> Plan:
    return Scheduler(problem("opt-13b", "h200x1", "summarization", bound)).best((kind,))


PROFILE = problem("opt-13b", "h200x1", "summarization").profile


def observed(lengths: Workload, weight: float = 9999) -> Observation:
    return Observation(
        workload=lengths, num_requests=9999, num_finished=9999, weight=weight, input_distance=0, output_distance=0
    )


def judge(
    plan: Plan,
    profile: Profile,
    lengths: Workload,
    weight: float,
    terms: Terms | None = None,
    slowdown: float | None = None,
) -> Verdict:
    """Judge a plan by its saturated throughput."""
    terms = terms or Terms()
    return decide(SaturatedJudge(Situation.of(plan, profile, observed(lengths, weight), slowdown), terms))


@pytest.mark.parametrize("kind", ["rra", "chunked", "orca"])
@pytest.mark.parametrize(("input_", "output"), few([(0.8, 1.4), (1.3, 0.7)]))
def test_a_running_plan_under_other_lengths(kind: str, input_: float, output: float) -> None:
    plan = plan_of(kind, 6.0)
    lengths = scaled(plan.workload, input_, output)
    predicted = reestimate(plan, PROFILE, lengths, 0.99)
    measured, _ = simulate(plan, PROFILE, lengths, 2000, np.random.default_rng(0))
    assert predicted["throughput"] == pytest.approx(measured.throughput_rps, rel=0.06)
    assert predicted["latency"] == pytest.approx(measured.latency_s, rel=0.15)


def test_under_its_own_lengths_a_plan_does_what_it_promises() -> None:
    for kind in ("rra", "chunked", "orca", "static"):
        plan = plan_of(kind, 6.0)
        now = reestimate(plan, PROFILE, plan.workload, 0.99)
        assert now["throughput"] == pytest.approx(plan.estimate.throughput_rps, rel=0.02)
        verdict = judge(plan, PROFILE, plan.workload, 1_000_000)
        assert not verdict.breaks_bound


def test_longer_outputs_break_the_bound_and_a_swap_keeps_it() -> None:
    plan = plan_of("rra", 6.0)
    lengths = scaled(plan.workload, 1.0, 1.6)
    verdict = judge(plan, PROFILE, lengths, 400)
    assert verdict.breaks_bound and verdict.switch and verdict.change.is_swap
    assert verdict.plan is not None and verdict.plan.estimate.latency_s <= 6.0
    assert verdict.plan.stages == plan.stages
    assert verdict.change.pause_s == 0
    again = judge(verdict.plan, PROFILE, lengths, 400)
    assert not again.switch


def test_a_candidate_that_cannot_be_built_is_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of one division of memory ended the judgement."""
    plan = plan_of("rra", 4.0)
    reuse = ObservedReuse(share=0.5, sizes=(1000.0,), shares=(0.5,), most=0.5)
    found = observe_lengths([60] * 400, [20] * 400, plan.workload).but(reuse=reuse)
    made = Scheduler.found

    def fails_with_reuse(self: Scheduler, kinds: Sequence[str]) -> dict[str, Found]:
        if self.problem.reused is not None:
            Plan.model_validate(plan.model_dump() | {"replicas": -1})
        return made(self, kinds)

    monkeypatch.setattr(Scheduler, "found", fails_with_reuse)
    decision, _ = propose(plan, PROFILE, found)
    assert decision.num_unbuilt > 0 and decision.best is not None


def test_a_loss_within_the_terms_is_left_alone() -> None:
    plan = plan_of("rra", 6.0)
    lengths = scaled(plan.workload, 1.0, 0.5)
    gain = judge(plan, PROFILE, lengths, 1000).gain
    assert gain > 0.01
    assert judge(plan, PROFILE, lengths, 1000, Terms(least_gain=gain / 2)).switch
    assert not judge(plan, PROFILE, lengths, 1000, Terms(least_gain=2 * gain)).switch


def test_few_requests_do_not_prove_a_broken_bound() -> None:
    plan = plan_of("rra", 6.0)
    lengths = scaled(plan.workload, 1.0, 1.1)
    assert judge(plan, PROFILE, lengths, 100_000).breaks_bound
    assert not judge(plan, PROFILE, lengths, 20).breaks_bound


def test_where_nothing_keeps_the_bound_the_plan_comes_near_to_what_can_be_kept() -> None:
    plan = plan_of("rra", 6.0)
    verdict = judge(plan, PROFILE, plan.workload, 1000, slowdown=30.0)
    assert verdict.breaks_bound and verdict.switch and verdict.plan is not None and verdict.best is not None
    assert not verdict.best.keeps_bound and "no plan keeps" in verdict.reason
    assert verdict.best.latency_s < 0.8 * verdict.running.latency_s
    assert verdict.plan.constraint == plan.constraint  # which is aimed at again as soon as it can be kept
    again = judge(verdict.plan, PROFILE, plan.workload, 1000)
    assert again.breaks_bound and not again.switch
    assert (
        judge(verdict.plan, PROFILE, plan.workload, 1000, slowdown=1.0).best
        == judge(plan, PROFILE, plan.workload, 1000).best
    )


def test_where_another_bound_cannot_be_kept_either_the_plan_stays() -> None:
    plan = plan_of("rra", 6.0)
    plan = plan.model_copy(update={"constraint": plan.constraint.model_copy(update={"ttft_s": 0.2})})
    verdict = judge(plan, PROFILE, plan.workload, 1000, slowdown=100.0)
    assert verdict.breaks_bound and not verdict.switch and verdict.plan is None


def test_in_doubt_of_the_bound_a_swap_that_costs_next_to_nothing_is_made() -> None:
    plan = plan_of("chunked", 6.0)
    plan = plan.model_copy(
        update={
            "policy": ChunkedSettings(token_budget=4096, max_batch=256),
            "constraint": plan.constraint.model_copy(update={"headroom": 0.3}),
        }
    )
    lengths = scaled(plan.workload, 1.0, 0.2)
    few, many = judge(plan, PROFILE, lengths, 100), judge(plan, PROFILE, lengths, 100_000)
    assert not few.breaks_bound and few.switch and few.change.is_swap and "serves little less" in few.reason
    assert few.plan is not None and few.gain >= -0.05
    assert few.plan.estimate.latency_s < 0.7 * few.running.latency_s
    assert not many.switch
    assert not judge(few.plan, PROFILE, lengths, 100, Terms(caution=((2.0, 1e-6), (1.0, 1e-6)))).switch
    # Where caution costs more than the terms allow, half of it may do, or the plan stays.
    assert judge(plan, PROFILE, lengths, 100, Terms(caution=((2.0, -0.1), (1.0, 0.05)))).switch
    assert not judge(plan, PROFILE, lengths, 100, Terms(caution=((2.0, -0.1), (1.0, -0.1)))).switch


def test_a_placement_changes_only_where_that_repays_its_pause() -> None:
    plan = plan_of("static", 20.0)
    assert judge(plan, PROFILE, plan.workload, 1000, Terms(horizon_s=3600)).switch
    short = judge(plan, PROFILE, plan.workload, 1000, Terms(horizon_s=1))
    assert not (short.switch and not short.change.is_swap)


TWO = replace(problem("opt-13b", "a40x4", "summarization", 20.0), max_devices=2)


@functools.cache
def plan_on_two(kind: str, where: str) -> Plan:
    """A policy's best on one placement on two devices."""
    search = Scheduler(TWO)
    if where == "1+1":
        return search.best((kind,))
    degree, stages, replicas = {"TP 2": (2, 1, 1), "PP 2": (1, 2, 1), "two": (1, 1, 2)}[where]
    placement = search.candidates.uniform_placement(kind, degree, stages, replicas)
    return Scheduler(replace(TWO, placement=placement)).best((kind,))


ON_TWO = [("rra", "TP 2"), ("rra", "PP 2"), ("orca", "two"), ("chunked", "PP 2"), ("static", "PP 2"), ("waa", "1+1")]


@pytest.mark.parametrize(("kind", "where"), ON_TWO)
def test_a_running_plan_on_two_devices_under_other_lengths(kind: str, where: str) -> None:
    plan = plan_on_two(kind, where)
    figures = reestimate(plan, TWO.profile, plan.workload, 0.99)
    assert figures["throughput"] == pytest.approx(plan.estimate.throughput_rps, rel=0.02)
    lengths = scaled(plan.workload, 1.2, 0.8)
    predicted = reestimate(plan, TWO.profile, lengths, 0.99)
    measured, _ = simulate(plan, TWO.profile, lengths, 300, np.random.default_rng(0))
    assert predicted["throughput"] == pytest.approx(measured.throughput_rps, rel=0.1)
    assert predicted["latency"] == pytest.approx(measured.latency_s, rel=0.15)


@pytest.mark.parametrize(("kind", "where"), [("rra", "PP 2"), ("orca", "two"), ("waa", "1+1")])
def test_other_settings_on_the_same_two_devices(kind: str, where: str) -> None:
    placement = Placement.of(plan_on_two(kind, where))
    short, long = (scaled(TWO.workload, 1.0, factor) for factor in (0.6, 1.4))
    constraint = Constraint(latency_bound_s=4.0)
    plan = Scheduler(replace(TWO, placement=placement, workload=short, constraint=constraint)).best((kind,))
    verdict = judge(plan, TWO.profile, long, 1000, Terms(horizon_s=1))  # no pause is repaid in a second
    assert verdict.breaks_bound and verdict.switch and verdict.change.is_swap and verdict.change.pause_s == 0
    assert verdict.plan is not None and verdict.plan.estimate.latency_s <= 4.0
    assert build(plan).apply(build(verdict.plan))


def test_other_stages_on_the_same_two_devices() -> None:
    plan = plan_on_two("static", "PP 2")
    verdict = judge(plan, TWO.profile, plan.workload, 1000, Terms(horizon_s=3600))
    assert verdict.switch and not verdict.change.is_swap and verdict.change.pause_s > 0 and verdict.plan is not None
    assert verdict.plan.stages != plan.stages
    assert verdict.plan.num_devices == 2
    assert verdict.plan.replicas > 1 or not build(plan).apply(build(verdict.plan))


def test_the_number_of_replicas_changes_unless_it_is_held() -> None:
    plan = plan_on_two("static", "PP 2")
    short = scaled(plan.workload, 0.3, 0.3)
    held = plan.model_copy(update={"pinned": Pinned(policy="static", fixed={"replicas": 1})})
    free, kept = (judge(each, TWO.profile, short, 1000, Terms(horizon_s=3600)).plan for each in (plan, held))
    assert free is not None and kept is not None
    assert (free.replicas, free.devices_per_replica, kept.replicas) == (2, 1, 1)


def test_the_pause_is_what_the_devices_take_to_load() -> None:
    """Half of the weights each, at the profile's rate or, where it says none, at a CPU's or GPU's usual one."""
    plan = plan_on_two("static", "PP 2")
    weights = 2 * num_params(plan.model) / 2
    usual, slow = (loading_s(plan, TWO.profile.model_copy(update={"load_bytes_per_s": r}), plan) for r in (None, 1e9))
    assert slow == pytest.approx(weights / 1e9, rel=0.1) and usual == pytest.approx(slow / 4)
    alone = plan_of("static", None)
    assert loading_s(alone, PROFILE, alone) == 0  # the weights stay where they are


@pytest.mark.parametrize(("engine", "is_anew"), [("vllm", True), ("sglang", True), ("xgpt-vllm", False), (None, False)])
def test_an_engine_that_serve_does_not_run_starts_anew(engine: str | None, is_anew: bool) -> None:
    """A change was to pause requests for 18 s, and a fleet's start of the same replica took 65 s."""
    plan = plan_on_two("static", "PP 2").model_copy(update={"engine": None if engine is None else load_engine(engine)})
    running = Outcome(policy=plan.policy, throughput_rps=1.0, latency_s=13.0, keeps_bound=True)
    change, there = (Change.of(plan, TWO.profile, plan, running, in_place=within) for within in (False, True))
    loads_s = weights_loading_s(plan, TWO.profile)
    assert change.start_s == (60 + loads_s if is_anew else 0) and change.start_s in (0, start_s(plan, TWO.profile))
    assert change.pause_s == pytest.approx(13 + (change.start_s or loads_s))
    assert there == (change if is_anew else AT_ONCE), "not even settings change in an engine that runs"


@functools.cache
def plan_for_all(kind: str) -> Plan:
    """A plan whose latency is that of all requests, as under `--sla request`, and whose bound is next to it."""
    plan = plan_of(kind, 6.0)
    seen_s = request_latency(plan, PROFILE)
    constraint = plan.constraint.model_copy(update={"sla": "request", "latency_bound_s": 1.02 * seen_s})
    estimate = plan.estimate.model_copy(update={"latency_s": seen_s})
    return plan.model_copy(update={"constraint": constraint, "estimate": estimate})


@pytest.mark.parametrize(("kind", "input_", "output"), few([("rra", 0.8, 1.4), ("orca", 1.3, 0.7)]))
def test_where_the_bound_is_all_requests_the_running_plan_is_simulated(kind: str, input_: float, output: float) -> None:
    plan = plan_for_all(kind)
    lengths = scaled(plan.workload, input_, output)
    running = judged(plan, PROFILE, observed(lengths), None, None).running
    measured, _ = simulate(plan, PROFILE, lengths, 12000, np.random.default_rng(1))
    by_length = judge(plan, PROFILE, lengths, 9999).running
    assert running.latency_s == pytest.approx(measured.request_latency_s, rel=0.03)
    closed_form_off, off = (abs(each.latency_s - measured.request_latency_s) for each in (by_length, running))
    assert off < closed_form_off
    assert running.throughput_rps == by_length.throughput_rps


def test_what_takes_over_keeps_a_bound_on_all_requests_in_simulation() -> None:
    plan = plan_for_all("rra")
    bound_s = plan.constraint.latency_bound_s
    assert bound_s is not None
    lengths = scaled(plan.workload, 1.3, 1.1)
    by_length = judge(plan, PROFILE, lengths, 9999).plan
    assert by_length is not None and request_latency(by_length, PROFILE) > bound_s
    verdict = judged(plan, PROFILE, observed(lengths), None, None)
    assert verdict.breaks_bound and verdict.switch and verdict.plan is not None and verdict.best is not None
    assert verdict.plan.constraint == plan.constraint
    measured, _ = simulate(verdict.plan, PROFILE, verdict.plan.workload, 1500, np.random.default_rng(1))
    assert measured.request_latency_s <= 1.02 * bound_s
    assert verdict.plan.estimate.latency_s == verdict.best.latency_s <= bound_s


def test_what_cannot_be_kept_is_said() -> None:
    plan = plan_of("rra", 1.2)
    verdict = judge(plan, PROFILE, scaled(plan.workload, 1.0, 2.0), 1000)
    if verdict.plan is None:
        assert not verdict.switch and "nearest bound" in verdict.reason
    else:
        assert verdict.plan.estimate.latency_s <= 1.2


def test_a_decision_tells_what_was_compared() -> None:
    plan = plan_of("rra", 6.0)
    inputs, outputs = sample(scaled(plan.workload, 1.0, 1.6), 2000, np.random.default_rng(0))
    decision, then = propose(plan, PROFILE, observe_lengths(inputs, outputs, plan.workload))
    assert decision.action == "swap" and then is not None
    assert decision.running.keeps_bound is False
    assert decision.best is not None and decision.best.policy == then.policy
    assert decision.output_mean == pytest.approx(outputs.mean())


def test_the_cause_of_a_judgement_is_stated_in_numbers() -> None:
    plan = plan_of("rra", 6.0)
    inputs, outputs = np.full(100, 261), np.full(100, 106)
    seen = observe_lengths(inputs, outputs, plan.workload).model_copy(update={"slowdown": 1.96, "goodput": 0.958})
    texts = {
        cause: in_numbers(plan, seen.model_copy(update={"cause": cause}))
        for cause in ("lengths", "pace", "goodput", "asked")
    }
    inputs_to = f"mean lengths went from {plan.workload.input.mean:.0f} to 261 input tokens"
    assert texts == {
        "lengths": f"{inputs_to}, and from {plan.workload.output.mean:.0f} to 106 output tokens",
        "pace": "steps take 1.96 times as long as in the profile",
        "goodput": "95.8% of recent requests kept their bounds, but 99.0% should",
        "asked": "a user asked for a decision, after 100 requests",
    }


def test_long_inputs_are_cut_to_go_with_the_longest_output() -> None:
    workload = Workload(
        name="w",
        input=Histogram(lengths=(10, 90), probabilities=(0.25, 0.75)),
        output=Histogram(lengths=(5, 40), probabilities=(0.5, 0.5)),
    )
    cut = within_context(workload, 100)
    assert (cut.input.lengths, cut.input.probabilities) == ((10, 60), (0.25, 0.75))
    assert within_context(workload, 130) == workload


def test_outputs_that_were_allowed_but_did_not_come_do_not_cut_inputs() -> None:
    inputs = Histogram(lengths=(10, 60), probabilities=(0.25, 0.75))
    for allowed, reach in ((90, (5, 40)), (30, (5, 30)), (3000, (5, 40))):
        output = Histogram(lengths=(5, allowed), probabilities=(1.0, 0.0))
        cut = within_context(Workload(name="w", input=inputs, output=output), 100)
        assert cut.input == inputs
        assert cut.output.lengths == reach


def asked_plan(**changes: object) -> Plan:
    asked = {"model": "llama-3.1-8b", "cluster": "h200x1", "workload": "azure-conv", "latency_bound_s": 8.0}
    return xgpt.plan(**(asked | changes))  # type: ignore[arg-type]


@pytest.mark.long
def test_a_plan_keeps_what_its_user_pinned(tmp_path: Path) -> None:
    """Orca with six requests at a time became chunked with a thousand."""
    plan = asked_plan(policy="orca", fix={"max_batch": 6}, order="das", objective="saturated")
    trace = tmp_path / "longer.csv"
    trace.write_text("input,output\n" + "2000,400\n3000,500\n" * 500)
    then = xgpt.replan(plan, trace, least_gain=0.0).plan
    assert (then.policy.kind, then.policy.max_batch) == ("orca", 6)  # type: ignore[union-attr]
    assert then.admission.order == "das" and then.pinned == plan.pinned
    assert Plan.model_validate_json(then.model_dump_json()) == then
    free = xgpt.replan(plan, trace, least_gain=0.0, replan_policies="all")
    assert free.plan.policy != then.policy and free.decision.best is not None
    assert free.decision.best.throughput_rps > 1.5 * then.estimate.throughput_rps


@pytest.mark.parametrize(("choice", "kinds"), [("exegpt", {"rra", "waa"}), ("waa-m", {"waa"}), ("rra", {"rra"})])
def test_replacements_are_of_the_policies_that_were_asked_for(choice: PolicyChoice, kinds: set[str]) -> None:
    plan = plan_of("rra", None).model_copy(update={"pinned": Pinned(policy=choice)})
    found = within_pins(plan, tuple(FORECASTS))
    assert {CHOICES[kind].settings.model_fields["kind"].default for kind in found} == kinds
    pinned = plan.model_copy(update={"pinned": Pinned(fixed={"token_budget": 512})})
    assert within_pins(pinned, tuple(FORECASTS)) == ("chunked",)


@pytest.mark.parametrize(("engine", "kinds"), [("vllm", {"chunked"}), ("sglang", {"chunked"}), ("xgpt-vllm", None)])
def test_an_engines_own_scheduler_is_offered_only_what_it_runs(engine: str, kinds: set[str] | None) -> None:
    """A running vLLM was to change to rra, which its scheduler lacks."""
    plan = asked_plan(policy="chunked", cluster="h100x1", engine=engine, objective="saturated")
    found = within_pins(plan.deployed(pinned=Pinned()), tuple(FORECASTS))
    assert set(found) == (kinds or set(FORECASTS))


DRAFTED = {"engine": "vllm", "speculative": "eagle3", "acceptance": 0.6}


@pytest.mark.parametrize("asked", few([DRAFTED, {}, {"engine": "vllm"}, {"engine": "xgpt-vllm"}]))
def test_lengths_as_planned_keep_the_plan_of_every_engine(asked: dict[str, str | float]) -> None:
    """Other plans were sought for an engine without vLLM's loop and without a draft: a swap promised 36%."""
    many = {"model": "llama-3.1-8b", "cluster": "h100x1", "objective": "saturated", "latency_bound_s": 8}
    planned = api.solve(**many, **asked)
    plan = planned.best
    situation = Situation(plan, planned.problem.profile, plan.workload, 1.0)
    own = asked.get("engine") == "vllm"  # then a pipeline's K/V is promised as `xgpt plan` promises it
    assert situation.problem(in_place=False).kv == (None if own else plan.admission.kv)
    verdict = judge(plan, planned.problem.profile, plan.workload, 1_000_000)
    assert not verdict.switch and verdict.best is not None
    assert verdict.best.throughput_rps == pytest.approx(plan.estimate.throughput_rps, rel=0.02)
