"""Compare DAS's share of the optimal offline utility with TCB's constant.

    python -m benchmarks.tcb.competitive [--draws 300] [--seed 0]

As in TCB's problem (9) to (13), time is divided into slots, each with one batch of B rows of L tokens. A request may be
scheduled in the slots from its arrival to its deadline. The optimum knows all requests in advance. Small cases are
solved by trying all schedules, larger ones as the paper's integer program (scipy's HiGHS). If the solver ends early,
its upper bound replaces the optimum, so that no ratio is too high. Theorem 5.1: the share is at least eta q /
(eta q + 1), q = 1 - eta.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from xgpt.core.policies.admission import Queue
from xgpt.core.policies.orders import DasOrder, Order, SortedOrder, utility
from xgpt.core.policies.request import Request

SECONDS = 1.0
"""Longest time of the solver for an instance."""


class Instance(NamedTuple):
    """Requests whose arrivals and deadlines are given as numbers of time slots."""

    requests: tuple[Request, ...]
    num_slots: int
    num_rows: int
    row_tokens: int


class Case(NamedTuple):
    """Instances of about one size: largest number of requests, slots, rows, tokens of a row, and the longest request as
    a share of a row."""

    name: str
    most: int
    num_slots: int
    num_rows: int
    row_tokens: int
    longest: float = 1.0


CASES = (
    Case("seven requests, one row of 8", 7, 3, 1, 8),
    Case("one row of 20", 14, 3, 1, 20),
    Case("one row of 60", 14, 3, 1, 60),
    Case("one row of 100, lengths as TCB's", 24, 3, 1, 100, longest=0.4),
)
ETAS = (0.2, 0.5, 0.8, None)
"""Values of DAS's eta. None means shortest first, which ignores deadlines."""


def constant(eta: float | None) -> float:
    """Return the share that Theorem 5.1 guarantees, which is 0 for orders other than DAS."""
    return 0.0 if eta is None else eta * (1 - eta) / (eta * (1 - eta) + 1)


def draw(case: Case, rng: np.random.Generator) -> Instance:
    """Draw about twice as many requests as fit, half of them due within two slots."""
    requests = []
    for id_ in range(int(rng.integers(case.most // 2, case.most + 1))):
        arrival = int(rng.integers(case.num_slots))
        due = arrival + int(rng.integers(2 if rng.random() < 0.5 else case.num_slots))
        length = int(rng.integers(1, max(2, round(case.longest * case.row_tokens) + 1)))
        requests.append(Request(id_, length, 1, arrival, due))
    return Instance(tuple(requests), case.num_slots, case.num_rows, case.row_tokens)


def order_of(eta: float | None, row_tokens: int) -> Order:
    return SortedOrder(lambda one: one.input_length) if eta is None else DasOrder(row_tokens, eta)


def online(instance: Instance, eta: float | None) -> float:
    """Return the utility that an order reaches. In each slot, it knows only the requests that have arrived."""
    queue, served = Queue(partial(order_of, eta, instance.row_tokens)), 0.0
    for slot in range(instance.num_slots):
        for one in instance.requests:
            if one.arrival_ns == slot:
                queue.push(one)
        queue.expire(slot)
        for _ in range(instance.num_rows):
            served += sum(utility(one) for one in queue.fill_row(instance.row_tokens))
    return served


def optimum_by_trying(instance: Instance) -> float:
    """Return the best schedule's utility by trying all schedules. Use this for at most ten requests."""
    reached = {frozenset[int]()}
    for slot in range(instance.num_slots):
        open_ = [one for one in instance.requests if _is_open(one, slot)]
        rows = [
            frozenset(one.id for one in chosen)
            for count in range(1, len(open_) + 1)
            for chosen in combinations(open_, count)
            if sum(one.input_length for one in chosen) <= instance.row_tokens
        ]
        for _ in range(instance.num_rows):
            reached |= {served | row for served in reached for row in rows if not served & row}
    worth = {one.id: utility(one) for one in instance.requests}
    return max(sum(worth[id_] for id_ in served) for served in reached)


def optimum(instance: Instance) -> tuple[float, bool]:
    """Return the best schedule's utility and True, or an upper bound and False if the solver ended early.

    Source: TCB (9) to (13), with a variable for each request and each slot and row in which it may be scheduled.
    """
    places = [
        (i, slot * instance.num_rows + row)
        for i, one in enumerate(instance.requests)
        for slot in range(instance.num_slots)
        for row in range(instance.num_rows)
        if _is_open(one, slot)
    ]
    if not places:
        return 0.0, True
    request, row = np.array(places).T
    lengths = np.array([one.input_length for one in instance.requests], float)
    column, num = np.arange(len(places)), len(instance.requests)
    entries = np.concatenate([np.ones(len(places)), lengths[request]])
    shape = (num + instance.num_slots * instance.num_rows, len(places))
    matrix = coo_array((entries, (np.concatenate([request, num + row]), np.concatenate([column, column]))), shape)
    most = np.concatenate([np.ones(num), np.full(instance.num_slots * instance.num_rows, instance.row_tokens)])
    solve = partial(
        milp, -1 / lengths[request], constraints=LinearConstraint(matrix.tocsr(), -np.inf, most), bounds=Bounds(0, 1)
    )
    whole = solve(integrality=np.ones(len(places)), options={"time_limit": SECONDS, "mip_rel_gap": 1e-6})
    if whole.status == 0:
        return -whole.fun, True
    bounds = [-solve(options={"time_limit": SECONDS}).fun]  # in fractions of requests
    if whole.mip_dual_bound is not None:
        bounds.append(-whole.mip_dual_bound)
    return min(bounds), False


def _is_open(one: Request, slot: int) -> bool:
    assert one.deadline_ns is not None
    return one.arrival_ns <= slot <= one.deadline_ns


class Found(NamedTuple):
    """Shares of the optimum over the drawn instances."""

    case: str
    eta: float | None
    constant: float
    least: float
    mean: float
    num_instances: int
    num_proven: int

    @property
    def order(self) -> str:
        return "sjf" if self.eta is None else f"das, eta {self.eta:g}"


def compare(case: Case, draws: int, seed: int = 0) -> list[Found]:
    rng = np.random.default_rng(seed)
    ratios: dict[float | None, list[float]] = {eta: [] for eta in ETAS}
    num_proven = 0
    for _ in range(draws):
        instance = draw(case, rng)
        small = len(instance.requests) <= 7
        best, proven = (optimum_by_trying(instance), True) if small else optimum(instance)
        num_proven += proven
        for eta, found in ratios.items():
            found.append(online(instance, eta) / best if best else 1.0)
    return [
        Found(case.name, eta, constant(eta), min(ratios_of), float(np.mean(ratios_of)), draws, num_proven)
        for eta, ratios_of in ratios.items()
    ]


def run(draws: int, seed: int = 0, cases: Sequence[Case] = CASES) -> list[Found]:
    return [found for case in cases for found in compare(case, draws, seed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for found in run(options.draws, options.seed):
        print(
            f"{found.case:32} {found.order:12}: least {found.least:.3f}, mean {found.mean:.3f}, "
            f"constant {found.constant:.3f}; {found.num_instances} instances, {found.num_proven} optima proven"
        )


if __name__ == "__main__":
    main()
