"""Fleets for a day's load: the least cost, against all fleets that there are and against a shortest path."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rings import examples
from xgpt.core.errors import InfeasibleError
from xscheduler.fleet import replica_counts as fleet
from xscheduler.fleet.replica_counts import (
    DeviceLimit,
    FleetProblem,
    cost_of,
    least_costs,
    solve_constant,
    solve_fleet,
    starts_of,
)


def least_by_brute_force(problem: FleetProblem, most: int) -> float | None:
    """The least cost over every fleet of at most `most` replicas of each kind in each interval; None: none holds."""
    count, kinds = problem.rates.shape
    states = [np.asarray(state) for state in product(range(most + 1), repeat=kinds)]
    by_interval = [[state for state in states if _holds(problem, t, state)] for t in range(count)]
    best = None
    for chosen in product(*by_interval):
        replicas = np.asarray(chosen)
        if _stays(problem, replicas) and _fits(problem, replicas):
            cost = cost_of(problem, replicas)
            best = cost if best is None else min(best, cost)
    return best


def _holds(problem: FleetProblem, t: int, state: np.ndarray) -> bool:
    for limit in problem.limits:
        if sum(state[k] * devices for k, devices in zip(limit.kinds, limit.devices, strict=True)) > limit.most:
            return False
    return bool(problem.rates[t] @ state >= problem.needs[t] * (1 - 1e-9) and state.sum() >= problem.least)


def _fits(problem: FleetProblem, replicas: np.ndarray) -> bool:
    """Whether devices suffice while a replica ends and another one starts."""
    at_once = replicas.copy()
    at_once[1:] = np.maximum(replicas[1:], replicas[:-1])
    return all((at_once[:, limit.kinds] @ np.asarray(limit.devices)).max() <= limit.most for limit in problem.limits)


def _stays(problem: FleetProblem, replicas: np.ndarray) -> bool:
    """Whether there are enough stops among replicas that have stayed long enough, the oldest leaving first."""
    starts = starts_of(replicas)
    for t in range(len(replicas)):
        first = max(0, t - problem.least_stay + 1)
        if (starts[first : t + 1].sum(axis=0) > replicas[t]).any():
            return False
    return True


def least_by_shortest_path(problem: FleetProblem, most: int) -> float:
    """The least cost of one kind, by dynamic programming over the number of replicas."""
    count = len(problem.needs)
    costs = dict.fromkeys(range(most + 1), 0.0)
    for t in range(count):
        reached = {}
        for n in range(most + 1):
            if not _holds(problem, t, np.asarray([n])):
                continue
            starts = {m: max(0, n - m) * problem.start_costs[0] if t else 0.0 for m in costs}
            reached[n] = problem.hours[t] * problem.prices[0] * n + min(cost + starts[m] for m, cost in costs.items())
        costs = reached
    return min(costs.values())


@st.composite
def problems(draw: st.DrawFn, kinds: int, count: int, least_stay: int) -> FleetProblem:
    amounts = st.floats(0.75, 4)
    needs = draw(st.lists(st.floats(0, 5), min_size=count, max_size=count))
    rates = draw(st.lists(amounts, min_size=count * kinds, max_size=count * kinds))
    prices, starts = (draw(st.lists(amounts, min_size=kinds, max_size=kinds)) for _ in range(2))
    limit = DeviceLimit(tuple(range(kinds)), tuple(range(1, kinds + 1)), draw(st.integers(2, 4)))
    return FleetProblem(
        np.asarray(needs),
        np.asarray(rates).reshape(count, kinds),
        np.asarray(prices),
        np.asarray(starts),
        np.asarray(draw(st.lists(st.floats(0.1, 0.5), min_size=count, max_size=count))),
        draw(st.integers(1, least_stay)),
        draw(st.integers(0, 1)),
        (limit,),
    )


BOTH = pytest.mark.parametrize("most_states", [fleet.MOST_STATES, 0], ids=["path", "branching"])
"""Each problem is solved as a shortest path where it is one, and by branching."""


@BOTH
@settings(max_examples=examples(60, 20))
@given(problem=problems(kinds=2, count=3, least_stay=3))
def test_mixed_kinds_cost_what_the_best_of_all_fleets_costs(problem: FleetProblem, most_states: int) -> None:
    with patch.multiple(fleet, MOST_STATES=most_states, MOST_CONSTANT=most_states):
        _check_mixed(problem)


def _check_mixed(problem: FleetProblem) -> None:
    expected = least_by_brute_force(problem, most=4)
    if expected is None:
        with pytest.raises(InfeasibleError):
            solve_fleet(problem)
        return
    found = solve_fleet(problem)
    assert found.cost == pytest.approx(expected, rel=1e-6)
    assert all(_holds(problem, t, state) for t, state in enumerate(found.replicas))
    assert _stays(problem, found.replicas) and _fits(problem, found.replicas)
    assert least_costs(problem).sum() <= found.cost + 1e-9


@BOTH
@settings(max_examples=examples(40, 10))
@given(problem=problems(kinds=1, count=8, least_stay=1))
def test_one_kind_costs_what_the_shortest_path_costs(problem: FleetProblem, most_states: int) -> None:
    with patch.object(fleet, "MOST_STATES", most_states):
        _check_one_kind(problem)


def _check_one_kind(problem: FleetProblem) -> None:
    most = problem.limits[0].most
    if not all(any(_holds(problem, t, np.asarray([n])) for n in range(most + 1)) for t in range(8)):
        with pytest.raises(InfeasibleError):
            solve_fleet(problem)
        return
    assert solve_fleet(problem).cost == pytest.approx(least_by_shortest_path(problem, most), rel=1e-6)


@BOTH
@settings(max_examples=examples(40, 10))
@given(problem=problems(kinds=2, count=3, least_stay=1))
def test_the_constant_fleet_is_the_cheapest_that_never_changes(problem: FleetProblem, most_states: int) -> None:
    with patch.object(fleet, "MOST_CONSTANT", most_states):
        _check_constant(problem)


def _check_constant(problem: FleetProblem) -> None:
    states = [np.asarray(state) for state in product(range(7), repeat=2)]
    kept = [state for state in states if all(_holds(problem, t, state) for t in range(3))]
    if not kept:
        with pytest.raises(InfeasibleError):
            solve_constant(problem)
        return
    least = min(problem.hours.sum() * float(state @ problem.prices) for state in kept)
    assert solve_constant(problem).cost == pytest.approx(least, rel=1e-6)


def test_a_start_that_costs_more_than_staying_is_not_made() -> None:
    day = FleetProblem(
        needs=np.asarray([2.0, 1.0, 2.0]),
        rates=np.ones((3, 1)),
        prices=np.asarray([1.0]),
        start_costs=np.asarray([0.5]),
        hours=np.ones(3),
    )
    assert solve_fleet(day).replicas[:, 0].tolist() == [2, 1, 2]
    dear = FleetProblem(day.needs, day.rates, day.prices, np.asarray([1.5]), day.hours)
    assert solve_fleet(dear).replicas[:, 0].tolist() == [2, 2, 2]
    assert least_costs(dear).sum() == 5.0


def test_a_load_of_hardly_anything_needs_a_replica() -> None:
    """The solver itself takes 1e-7 for zero."""
    day = FleetProblem(np.asarray([1e-7, 0.0]), np.ones((2, 1)), np.ones(1), np.ones(1), np.ones(2))
    assert solve_fleet(day).replicas[:, 0].tolist() == [1, 0] and solve_constant(day).cost == 2.0


def test_a_load_that_the_devices_cannot_hold_is_refused() -> None:
    limit = DeviceLimit((0,), (2,), 3)
    day = FleetProblem(np.asarray([2.0]), np.ones((1, 1)), np.ones(1), np.ones(1), np.ones(1), limits=(limit,))
    with pytest.raises(InfeasibleError, match="3 devices cannot serve 2 requests/s, the day"):
        solve_fleet(day)


@BOTH
def test_replicas_start_beside_those_that_they_replace(most_states: int) -> None:
    """On three devices, a replica of two cannot follow another one of two: one of three runs all day."""
    rates, prices = np.asarray([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]), np.asarray([2.0, 2.0, 3.0])
    limit = DeviceLimit((0, 1, 2), (2, 2, 3), 4)
    day = FleetProblem(np.ones(2), rates, prices, np.zeros(3), np.ones(2), limits=(limit,))
    with patch.object(fleet, "MOST_STATES", most_states):
        assert solve_fleet(day).replicas.tolist() == [[1, 0, 0], [0, 1, 0]]
        tight = replace(day, limits=(replace(limit, most=3),))
        assert solve_fleet(tight).replicas.tolist() == [[0, 0, 1], [0, 0, 1]]
