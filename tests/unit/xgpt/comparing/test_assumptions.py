"""Gains as ranges: what changes under each assumption, and which plan is chosen for it."""

from __future__ import annotations

import numpy as np
import pytest

from xgpt.comparing import assumptions as varied
from xgpt.comparing.assumptions import assumptions, changes, ranges
from xgpt.comparing.compare import compare
from xgpt.core.schema import Plan, Profile
from xgpt.core.schema.plan import rate_of
from xgpt.core.workload import TraceLengths
from xgpt.deciding import words
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xgpt.resolve import load_workload
from xscheduler.objectives.best_plans import found_each
from xscheduler.objectives.capacities import with_capacities

ASKED = {"model": "llama-3.1-8b", "cluster": "h100x1", "workload": "chat-short", "latency_bound_s": 30.0}


@pytest.fixture(scope="module")
def planned() -> tuple[dict[str, Plan], Profile]:
    problem = resolve(plan_request(**ASKED, engine="vllm", objective="saturated", policy="chunked"))
    found = with_capacities(found_each(problem, "chunked"), problem.profile)
    return {kind: one.plan for kind, one in found.items()}, problem.profile


def test_each_assumption_changes_what_it_says(planned: tuple[dict[str, Plan], Profile]) -> None:
    plans, profile = planned
    among = assumptions(load_workload("chat-short"), None)
    cheap, dear, fast, slow, short, long, bursts = changes(plans["chunked"], profile, among)
    assert dear < 0.99 < 1 < cheap and slow < 0.95 and fast > 1.05
    assert slow == pytest.approx(1 / 1.15, rel=0.05) and fast == pytest.approx(1 / 0.9, rel=0.05)
    assert long < 0.95 and short > 1.05 and bursts <= 1.001


def test_a_trace_is_varied_by_its_halves() -> None:
    inputs, outputs = np.asarray([100] * 5 + [300] * 5), np.asarray([50] * 5 + [20] * 5)
    found = assumptions(load_workload("chat-short"), TraceLengths(inputs, outputs, None))
    lengths = [each.workload for each in found if each.workload is not None]
    assert [each.input.lengths for each in lengths] == [(100,), (300,)]
    assert [each.output.lengths for each in lengths] == [(50,), (20,)]


def test_a_plan_gains_nothing_over_itself(planned: tuple[dict[str, Plan], Profile]) -> None:
    plans, profile = planned
    found = ranges(plans, profile, plans["chunked"], profile, None)["chunked"]
    assert (found.least, found.most) == (pytest.approx(1), pytest.approx(1))


def test_a_deployment_that_keeps_no_bound_under_an_assumption_has_no_largest_gain(
    planned: tuple[dict[str, Plan], Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, profile = planned
    rows = iter([[1.0] * 6 + [0.0], [1.0] * 7])
    monkeypatch.setattr(varied, "changes", lambda *_: next(rows))
    found = ranges(plans, profile, plans["chunked"], profile, None)["chunked"]
    assert (found.least, found.most) == (pytest.approx(1), None)


def test_what_keeps_the_bounds_at_no_rate_has_no_range_of_gains(
    planned: tuple[dict[str, Plan], Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`xgpt compare` ended with an internal error where both kept them at no rate under an assumption."""
    plans, profile = planned
    plan = plans["chunked"]
    never = plan.but(estimate=plan.estimate.but(capacity=plan.estimate.capacity.but(rate_per_s=0.0)))
    rows = iter([[1.0] * 6 + [0.0], [1.0] * 6 + [0.0]])
    monkeypatch.setattr(varied, "changes", lambda *_: next(rows))
    found = ranges({"chunked": plan, "never": never}, profile, plan, profile, None)
    assert list(found) == ["chunked"] and found["chunked"].most == pytest.approx(1)


def test_verdict_gain_and_command_are_about_the_same_plan() -> None:
    request = plan_request(**ASKED)
    found = compare(request, "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-num-seqs 64")
    told = found.recommendation
    assert found.best.recommendation == told and found.current is not None
    chosen = told.rejected if told.action == "keep" else told.best
    assert chosen is not None and chosen.policy == found.best.policy.kind
    assert chosen.processes[0].command.startswith("vllm serve ")
    assert told.gain is not None and told.gain.factor is not None
    assert told.gain.then == pytest.approx(rate_of(found.best)) and told.gain.now == pytest.approx(
        rate_of(found.current)
    )
    assert found.ranges[chosen.policy].least == told.gain.factor.low
    said = words.lines(told)
    assert sum("max-num-seqs" in line for line in said) == (told.action != "keep") and max(map(len, said)) <= 80
