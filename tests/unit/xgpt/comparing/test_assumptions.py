"""Gains as ranges: what changes under each assumption, and which plan is chosen for it."""

from __future__ import annotations

import numpy as np
import pytest

import xgpt
from xgpt.comparing import compare as comparing
from xgpt.comparing.assumptions import assumptions, changes, ranges
from xgpt.comparing.compare import compare, gain_in_words
from xgpt.core.schema import Plan, Profile
from xgpt.core.schema.documents import RangeOutput
from xgpt.core.workload import TraceLengths
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xgpt.resolve import load_workload
from xscheduler.found import Found
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


def test_what_holds_up_in_the_worst_case_is_chosen(
    planned: tuple[dict[str, Plan], Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunked = planned[0]["chunked"]
    rra = xgpt.plan(**ASKED, engine="vllm", objective="saturated", policy="rra")
    found = {plan.policy.kind: Found(plan, plan.ceiling) for plan in (chunked, rra)}
    monkeypatch.setattr(comparing, "found_each", lambda *_: found)
    monkeypatch.setattr(comparing, "with_capacities", lambda plans, _: plans)
    monkeypatch.setattr(comparing, "relax", lambda *_: {})
    given = {
        "chunked": RangeOutput(least=0.95, most=1.4, worst="mixed steps slow decodes by 20 points more"),
        "rra": RangeOutput(least=1.1, most=1.2, worst="bursts"),
    }
    monkeypatch.setattr(comparing, "ranges", lambda *_: given)
    request = plan_request(**ASKED, objective="saturated")
    found = compare(request, "vllm serve m --max-num-seqs 64")
    assert list(found.plans) == ["rra", "chunked"] and found.ranges == given
    assert (
        "but only 0.95 to 1.40 times as many" in found.notes[-1]
        and "in its worst case rra gains more" in found.notes[-1]
    )
    assert found.current is not None
    said = gain_in_words(found.best, found.current, found.ranges["rra"])
    assert said.endswith("if assumptions vary, per device 1.10 to 1.20 times as many (worst case: bursts)")
    monkeypatch.setattr(
        comparing, "ranges", lambda *_: given | {"rra": RangeOutput(least=0.9, most=1.2, worst="bursts")}
    )
    assert "keep the current deployment" in compare(request, "vllm serve m --max-num-seqs 64").notes[-1]
