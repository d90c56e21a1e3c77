"""A user's own objective: what an expression is worth, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xgpt
from benchmarks.lib.served_plans import one_lane, plan
from tests.rings import examples
from xscheduler.expression import names_in, objective_value, value_of

NUMBERS = st.sampled_from(["throughput", "latency", "2", "0.5", "ttft"])


def expressions() -> st.SearchStrategy[str]:
    """Arithmetic that means the same in Python."""
    return st.recursive(
        NUMBERS,
        lambda part: st.one_of(
            st.tuples(part, st.sampled_from("+-*"), part).map(lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"),
            st.tuples(part, st.sampled_from(["<", ">="]), part, part).map(
                lambda parts: f"({parts[3]} if {parts[0]} {parts[1]} {parts[2]} else {parts[0]})"
            ),
            st.tuples(part, part).map(lambda parts: f"max({parts[0]}, {parts[1]})"),
        ),
        max_leaves=8,
    )


@given(expressions(), st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
@settings(max_examples=examples(200, 20))
def test_an_expression_is_worth_what_python_makes_of_it(text: str, values: list[float]) -> None:
    figures = dict(zip(("throughput", "latency", "ttft"), values, strict=True))
    assert names_in(text) <= figures.keys()
    assert value_of(text, figures) == pytest.approx(eval(text, {"max": max}, figures))


def test_an_expression_is_computed_for_all_candidates_at_once() -> None:
    value = value_of("throughput / latency if latency < 3 else -1", {"throughput": 6.0, "latency": np.arange(1.0, 5)})
    assert list(value) == [6, 3, -1, -1]
    assert value_of("throughput / latency", {"throughput": 0.0, "latency": 0.0}) == -np.inf


def test_devices_of_all_replicas_are_counted_once() -> None:
    """They were counted once for each replica, so plans of several replicas lost to dearer ones."""
    two = plan(one_lane([2]), replicas=2)
    cluster = two.cluster.model_copy(update={"price_per_device_hour": 0.5})
    for text, value in {"devices": 4.0, "cost": 2.0, "replicas": 2.0}.items():
        constraint = two.constraint.model_copy(update={"maximise": text})
        assert objective_value(two.model_copy(update={"cluster": cluster, "constraint": constraint})) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "throughput.__class__",
        "(lambda: 1)()",
        "[throughput]",
        "'text'",
        "True",
        "throughput[0]",
        "throughput if",
        "log(1, 2)",
        "max()",
        "min(throughput, key=abs)",
        "speed",
        "1 < throughput < 2",
        "(" * 300 + ")" * 300,
        "1 + " * 200 + "1",
    ],
)
def test_what_is_not_arithmetic_over_figures_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"give|known|takes"):
        names_in(text)


@pytest.mark.long
def test_the_plan_is_better_by_the_objective_than_the_one_of_most_throughput() -> None:
    """Requests a second for each second of latency, on any number of devices."""
    asked = {"model": "opt-13b", "cluster": "a40x4", "policy": "orca", "latency_bound_s": 12.0}
    maximised = xgpt.plan(**asked, maximise="throughput / latency / devices")
    usual = xgpt.plan(**asked, objective="saturated")
    assert maximised.search.method == "optuna"
    assert maximised.estimate.latency_s * 1.12 <= 12
    constraint = maximised.constraint
    assert objective_value(maximised) > objective_value(usual.model_copy(update={"constraint": constraint}))
