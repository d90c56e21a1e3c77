"""Settings next to others: one step up and one down each variable, however small its value is."""

from __future__ import annotations

from tests.contract.scenarios import problem
from xgpt.core.schema import Constraint
from xscheduler.arrival_rate import far_from, one_step_from
from xscheduler.schedule import Scheduler


def test_small_values_have_a_neighbour_below() -> None:
    search = Scheduler(problem("llama-3.1-8b", "h200x1", "azure-code").under(Constraint(latency_bound_s=4.0)))
    space = next(space for space in search.candidates.spaces("rra") if space.num_points)
    some = search.found(("rra",))["rra"].draft.policy
    for value, others in ((1, {2}), (2, {1, 3}), (3, {2, 5})):
        near = one_step_from(space, some.model_copy(update={"decode_iterations": value}))
        assert {other.decode_iterations for other in near} - {value} == others


def test_settings_afar_reach_both_ends_of_what_is_worth_a_try() -> None:
    """Replicas of one parallel degree were served 5% less than the same search found on their devices alone."""
    search = Scheduler(problem("llama-3.1-8b", "h200x1", "azure-code").under(Constraint(latency_bound_s=4.0)))
    space = next(space for space in search.candidates.spaces("chunked") if space.num_points)
    some = search.found(("chunked",))["chunked"].draft.policy
    far = far_from(space, some)
    assert some not in far and len({(each.token_budget, each.max_batch) for each in far}) == len(far)
    for axis in space.axes:
        values = [getattr(each, axis.variable.name) for each in (*far, some)]
        assert max(values) == axis.values[-1] and max(values) / min(values) >= 16
