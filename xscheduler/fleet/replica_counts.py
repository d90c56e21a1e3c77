"""Find the numbers of replicas of each kind that serve every interval of a day's load at the lowest cost.

Minimise, over whole numbers n[t, k] of replicas and starts u[t, k],

    sum_t sum_k  price[k] hours[t] n[t, k] + start_cost[k] u[t, k]
    subject to   sum_k rate[t, k] n[t, k] >= need[t]              the load is served
                 u[t, k] >= n[t, k] - n[t-1, k]                   additional replicas start
                 sum_{t-stay < s <= t} u[s, k] <= n[t, k]         started replicas stay
                 sum_k devices[k] n[t, k] <= limit                for each group of kinds that share devices

Starts in the first interval cost nothing unless `before` states the previous fleet. If replicas need not stay and few
fleets are possible, the cheapest day is found as a shortest path over intervals and fleets. Otherwise HiGHS finds it by
branch and bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import scipy as sp  # scipy loads its parts at first use; optimize would slow the start of every command

from xgpt.core.errors import InfeasibleError, XgptError

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

EXACT, NEAR = 1e-7, 5e-3
"""The search stops at a relative gap of `EXACT` for up to `FEW` variables, or of `NEAR` for more. With many variables,
closing the last half percent would take minutes, and a day's load is not known that precisely.
"""
FEW = 200
TIME_S = 30.0
"""After this many seconds, a search stops with its best fleet. Only large problems on slow machines take so long."""
MOST_STATES, MOST_CONSTANT = 1000, 20_000
SLACK = 1e-9
INFEASIBLE = 2


@dataclass(frozen=True)
class DeviceLimit:
    """A limit on the devices of kinds of replicas. Replicas that start occupy theirs beside those that then end."""

    kinds: tuple[int, ...]
    devices: tuple[int, ...]
    most: int


@dataclass(frozen=True)
class FleetProblem:
    """A day's load and the kinds of replicas that may serve this load.

    Attributes:
        needs: requests a second that the fleet must be able to serve. # [intervals]
        rates: requests a second that a replica of each kind serves with the interval's lengths. # [intervals, kinds]
        start_costs: cost of the time in which a replica starts and ends, and serves nothing. # [kinds]
        least_stay: smallest number of intervals for which a started replica runs.
        least: smallest number of replicas at any time.
        before: number of replicas of each kind before the first interval. None means the same as in the first interval.
            # [kinds]
    """

    needs: Array
    rates: Array
    prices: Array
    start_costs: Array
    hours: Array
    least_stay: int = 1
    least: int = 0
    limits: tuple[DeviceLimit, ...] = ()
    before: Ints | None = None


@dataclass(frozen=True)
class FleetSolution:
    """The number of replicas of each kind in each interval.

    Attributes:
        replicas: # [intervals, kinds]
        gap: largest share by which the cost may exceed the optimum.
    """

    replicas: Ints
    cost: float
    gap: float


def starts_of(replicas: Ints, before: Ints | None = None) -> Ints:
    """Return the number of replicas of each kind that start in each interval. # [intervals, kinds]"""
    first = replicas[:1] if before is None else before[None, :]
    return np.maximum(np.diff(replicas, axis=0, prepend=first), 0)


def cost_of(problem: FleetProblem, replicas: Ints) -> float:
    running = problem.hours @ replicas @ problem.prices
    return float(running + (starts_of(replicas, problem.before) @ problem.start_costs).sum())


def solve_fleet(problem: FleetProblem) -> FleetSolution:
    """Return the fleet with the lowest cost.

    Raises:
        InfeasibleError: there are too few devices for the load.
    """
    _check(problem)
    states = _states(problem, MOST_STATES) if problem.least_stay == 1 else None
    return _by_branching(problem) if states is None else _by_shortest_path(problem, states)


def _by_shortest_path(problem: FleetProblem, states: Ints) -> FleetSolution:
    running = np.outer(problem.hours, states @ problem.prices)
    holding = _held(problem, states)
    more = np.maximum(states[None] - states[:, None], 0)
    changing = more @ problem.start_costs
    for limit in problem.limits:
        kinds = list(limit.kinds)
        at_once = (states[:, None, kinds] + more[:, :, kinds]) @ np.asarray(limit.devices)
        changing[at_once > limit.most] = np.inf
    present = np.zeros(len(states))
    if problem.before is not None:
        present = np.maximum(states - problem.before, 0) @ problem.start_costs
    reached = np.where(holding[0], present + running[0], np.inf)
    came_from = []
    for state, of_interval in zip(holding[1:], running[1:], strict=True):
        ways = reached[:, None] + changing
        came_from.append(ways.argmin(axis=0))
        reached = np.where(state, ways.min(axis=0) + of_interval, np.inf)
    if not np.isfinite(reached.min(initial=np.inf)):
        raise _not_held(problem)
    path = [int(reached.argmin())]
    for step in reversed(came_from):
        path.append(int(step[path[-1]]))
    replicas = states[path[::-1]]
    return FleetSolution(replicas, cost_of(problem, replicas), 0.0)


def _by_branching(problem: FleetProblem) -> FleetSolution:
    count, kinds = problem.rates.shape
    size = count * kinds
    whole = sp.sparse.eye_array(size)
    earlier = sp.sparse.eye_array(count, k=-1) + (
        _first(count) if problem.before is None else sp.sparse.csr_array((count, count))
    )
    present = np.zeros(size)
    present[:kinds] = 0 if problem.before is None else problem.before
    before = sp.sparse.kron(earlier, sp.sparse.eye_array(kinds))
    window = sum(
        (sp.sparse.eye_array(count, k=-age) for age in range(min(problem.least_stay, count))),
        start=sp.sparse.csr_array((count, count)),
    )
    shares, needed = _shares(problem)
    load = _by_interval(shares)
    constraints = [
        sp.optimize.LinearConstraint(sp.sparse.hstack([load, sp.sparse.csr_array((count, size))]), needed, np.inf),
        sp.optimize.LinearConstraint(sp.sparse.hstack([whole - before, -whole]), -np.inf, present),
        sp.optimize.LinearConstraint(
            sp.sparse.hstack([whole, -sp.sparse.kron(window, sp.sparse.eye_array(kinds))]), 0, np.inf
        ),
        sp.optimize.LinearConstraint(
            sp.sparse.hstack([_by_interval(np.ones((count, kinds))), sp.sparse.csr_array((count, size))]), problem.least
        ),
    ]
    if size > FEW:  # each interval costs at least its lowest cost by itself; this closes most of the gap
        prices, least = _by_interval(np.tile(problem.prices, (count, 1))), least_costs(problem) / problem.hours
        constraints.append(
            sp.optimize.LinearConstraint(
                sp.sparse.hstack([prices, sp.sparse.csr_array((count, size))]), (1 - SLACK) * least, np.inf
            )
        )
    for limit in problem.limits:
        devices = np.zeros((count, kinds))
        devices[:, limit.kinds] = limit.devices
        each = _by_interval(devices)
        at_once = sp.sparse.hstack([each @ before, each])
        constraints.append(sp.optimize.LinearConstraint(at_once, -np.inf, limit.most - each @ present))
    cost = np.concatenate([np.outer(problem.hours, problem.prices).ravel(), np.tile(problem.start_costs, count)])
    found = sp.optimize.milp(
        cost,
        constraints=constraints,
        integrality=np.concatenate([np.ones(size), np.zeros(size)]),
        bounds=sp.optimize.Bounds(0, np.tile(_most(problem), 2 * count)),
        options={"mip_rel_gap": EXACT if size <= FEW else NEAR, "time_limit": TIME_S},
    )
    if found.status == INFEASIBLE:
        raise _not_held(problem)
    if found.x is None:
        raise XgptError(
            f"no fleet was found within {TIME_S:g} s: {found.message}; give longer intervals (`interval_s`) or fewer "
            "clusters"
        )
    replicas = np.round(found.x[:size]).astype(int).reshape(count, kinds)
    return FleetSolution(replicas, cost_of(problem, replicas), float(found.mip_gap or 0.0))


def solve_constant(problem: FleetProblem) -> FleetSolution:
    """Return the fleet with the lowest cost among those that are the same in all intervals."""
    return next(constant_fleets(problem))


def constant_fleets(problem: FleetProblem) -> Iterator[FleetSolution]:
    """Yield the fleets that are the same in all intervals: the cheapest and, if they can be counted, all others by
    their cost.
    """
    _check(problem)
    count, kinds = problem.rates.shape
    if (states := _states(problem, MOST_CONSTANT)) is not None:
        states = states[_held(problem, states).all(axis=0)]
        if not len(states):
            raise _not_held(problem)
        for each in states[(states @ problem.prices).argsort(kind="stable")]:
            replicas = np.tile(each, (count, 1))
            yield FleetSolution(replicas, cost_of(problem, replicas), 0.0)
        return
    constraints = [
        sp.optimize.LinearConstraint(*_shares(problem), np.inf),
        sp.optimize.LinearConstraint(np.ones((1, kinds)), problem.least),
    ]
    for limit in problem.limits:
        devices = np.zeros((1, kinds))
        devices[0, limit.kinds] = limit.devices
        constraints.append(sp.optimize.LinearConstraint(devices, -np.inf, limit.most))
    found = sp.optimize.milp(
        problem.prices,
        constraints=constraints,
        integrality=np.ones(kinds),
        bounds=sp.optimize.Bounds(0, _most(problem)),
    )
    if found.x is None:
        raise _not_held(problem)
    replicas = np.tile(np.round(found.x).astype(int), (count, 1))
    yield FleetSolution(replicas, cost_of(problem, replicas), float(found.mip_gap or 0.0))


def least_costs(problem: FleetProblem) -> Array:
    """Return the lowest cost of each interval by itself, without start costs. # [intervals]"""
    columns = np.column_stack([problem.needs, problem.rates])
    each, index = np.unique(columns, axis=0, return_inverse=True)
    hour = replace(problem, hours=np.ones(1))
    costs = [solve_constant(replace(hour, needs=row[:1], rates=row[None, 1:])).cost for row in each]
    return problem.hours * np.asarray(costs)[index.ravel()]


def _check(problem: FleetProblem) -> None:
    unheld = (problem.needs > 0) & (problem.rates.max(axis=1) <= 0)
    if unheld.any():
        raise InfeasibleError(
            f"trace: with the lengths of interval {int(np.argmax(unheld))}, no kind of replica keeps the bounds at any "
            "rate; loosen the bounds or give other devices",
            binding="latency_bound_s",
        )


def _not_held(problem: FleetProblem) -> InfeasibleError:
    limits = " and ".join(str(limit.most) for limit in problem.limits)
    return InfeasibleError(
        f"devices: {limits} devices cannot serve {problem.needs.max():.4g} requests/s, the day's peak with what keeps "
        "its requests in time: allow more",
        binding="devices",
    )


def _most(problem: FleetProblem) -> Ints:
    """These bounds reduce HiGHS's time to a seventh if there are few variables."""
    needs = problem.needs[:, None]
    alone = np.ceil(np.divide(needs, problem.rates, out=np.zeros_like(problem.rates), where=problem.rates > 0))
    before = 0 if problem.before is None else problem.before
    fewest = max(problem.least, int(problem.needs.max() > 0))  # a load of 5e-324 would round to 0 replicas
    most = np.maximum(np.maximum(alone.max(axis=0), fewest), before).astype(int)
    for limit in problem.limits:
        kinds = list(limit.kinds)
        most[kinds] = np.minimum(most[kinds], limit.most // np.asarray(limit.devices))
    return most


def _states(problem: FleetProblem, at_most: int) -> Ints | None:
    most = _most(problem)
    if np.prod(most + 1.0) > at_most:
        return None
    states = np.indices(tuple(most + 1)).reshape(len(most), -1).T
    allowed = states.sum(axis=1) >= problem.least
    for limit in problem.limits:
        allowed &= states[:, list(limit.kinds)] @ np.asarray(limit.devices) <= limit.most
    return states[allowed]


def _held(problem: FleetProblem, states: Ints) -> npt.NDArray[np.bool_]:
    return problem.rates @ states.T >= (1 - SLACK) * problem.needs[:, None]


def _shares(problem: FleetProblem) -> tuple[Array, Array]:
    """Unlike needs, shares are never so small that a solver treats them as zero. The limit of 1 changes no integer
    solution. # [intervals, kinds], [intervals]
    """
    needs = problem.needs[:, None]
    shares = np.divide(np.minimum(problem.rates, needs), needs, out=np.zeros_like(problem.rates), where=needs > 0)
    return shares, np.where(problem.needs > 0, 1 - SLACK, 0.0)


def _by_interval(values: Array) -> sp.sparse.csr_array:
    count, kinds = values.shape
    rows = np.repeat(np.arange(count), kinds)
    return sp.sparse.coo_array((values.ravel(), (rows, np.arange(count * kinds))), shape=(count, count * kinds)).tocsr()


def _first(count: int) -> sp.sparse.csr_array:
    """Return the matrix that makes the first interval its own predecessor. No replica then starts in this interval."""
    return sp.sparse.coo_array(([1.0], ([0], [0])), shape=(count, count)).tocsr()
