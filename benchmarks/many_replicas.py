"""Route 20,000 requests a second to a thousand replicas for an hour, and compare the queues and the cost of routings.

    python -m benchmarks.many_replicas [--seconds 3600] [--replicas 1000] [--rate 20000] [--only cache-0.5]

Every request is routed, in slots of 40 ms with numpy. A replica is modelled by the time of a step: `STEP_S`, plus a
time for each request in decode and for each prompt token. A step takes at most `BUDGET` prompt tokens. Output lengths
are drawn at random. A request's time to first token is the time of the prompt tokens before it. A gateway knows loads
from `stale_s` ago, plus its own requests since then. A replica's cache drops a prefix once `KEPT` other prefixes have
been added since its last use, a rule between FIFO and LRU. Half of each prompt is one of `PREFIXES` shared prefixes,
drawn by Zipf's law.

A replica has the rounded figures of Llama 3.1 8B on an H100: reading the weights takes 7.5 ms, a decode 55 us, a prompt
token 33 us.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgpt.core.policies.routing import ReplicaRouter

SLOT_S = 0.04
STEP_S, DECODE_S, TOKEN_S, BUDGET, MOST = 7.5e-3, 55e-6, 33e-6, 512, 256
PROMPT, SHARED, OUTPUT, LONGEST = 1000, 500, 160, 1024
PREFIXES, KEPT = 2000, 300
BOUND_S = 0.5
AWAY = 1e6
"""Load that gateways see for a replica that accepts no requests."""
EDGES = np.geomspace(1e-3, 100.0, 2001)
"""Edges of the histogram of times to first token, in seconds: 0.6% apart."""
CACHE = "cache-"
"""Routing by cached prefixes. The number after it is the share of the mean load by which a replica may exceed the least
load."""

Numbers = NDArray[np.int64]
Seconds = NDArray[np.float64]


@dataclass
class Row:
    """The results of a routing.

    Attributes:
        kept: share of requests whose first token came within `BOUND_S`.
        hits: share of requests whose shared prefix was cached.
        busiest: number of requests in the fullest replica, as a multiple of the mean number, averaged over time.
        wave: share of the replicas that change plans at the same time. Before the change, gateways avoid them until
            they are empty.
        replanned_s: time until all replicas have changed plans, or None if not all have.
        seconds: processor time of the simulation.
    """

    routing: str
    gateways: int
    stale_s: float
    wave: float
    requests: int
    median_s: float
    p99_s: float
    kept: float
    hits: float
    busiest: float
    replanned_s: float | None
    seconds: float

    def __str__(self) -> str:
        changed = "never" if self.replanned_s is None else f"in {self.replanned_s:.0f} s"
        waves = f"all re-planned {changed} by waves of {100 * self.wave:g}%; " if self.wave else ""
        return (
            f"{self.routing:>12} {self.gateways:3} gateways, {1000 * self.stale_s:5.0f} ms old: TTFT median "
            f"{1000 * self.median_s:7.1f} ms, p99 {1000 * self.p99_s:8.1f} ms, {100 * self.kept:6.2f}% within "
            f"{BOUND_S} s, {100 * self.hits:5.1f}% cached, fullest {self.busiest:5.2f} x mean; "
            f"{waves}{self.requests / 1e6:.1f} M requests in {self.seconds:.1f} s"
        )


class Fleet:
    def __init__(self, count: int, rng: np.random.Generator) -> None:
        self.count = count
        self.running = np.zeros(count, np.int64)
        self.waiting = np.zeros(count, np.int64)
        self._prompt_tokens = np.zeros(count)
        self._steps = np.zeros(count)
        """Number of steps that each replica has run. A request ends as many steps after it enters as its output has
        tokens."""
        self._ends = np.zeros((count, 4 * LONGEST), np.int64)
        """Number of requests that end in each step, modulo the array's length."""
        self._came_in = np.zeros(count, np.int64)
        self._used = np.full((count, PREFIXES), -KEPT, np.int64)
        """Value of `_came_in` when a prefix was last used."""
        self._rng = rng
        self._all = np.arange(count)
        self.is_emptying = np.zeros(count, np.bool_)

    @property
    def load(self) -> Numbers:
        return self.running + self.waiting

    def take(self, replicas: Numbers, prefixes: Numbers) -> tuple[Seconds, int]:
        """Queue requests at replicas. Return their times to first token, and how many prefixes were cached."""
        cached = self._came_in[replicas] - self._used[replicas, prefixes] < KEPT
        self._came_in += np.bincount(replicas[~cached], minlength=self.count)
        self._used[replicas, prefixes] = self._came_in[replicas]
        tokens = np.where(cached, PROMPT - SHARED, PROMPT)
        before = self._prompt_tokens[replicas] + tokens
        self._prompt_tokens += np.bincount(replicas, tokens, self.count)
        self.waiting += np.bincount(replicas, minlength=self.count)
        step_s = STEP_S + DECODE_S * self.running[replicas] + TOKEN_S * np.minimum(before, BUDGET)
        queued = np.maximum(0, self.load[replicas] - MOST) * OUTPUT / MOST  # steps until an earlier request has ended
        return step_s * (np.ceil(before / BUDGET) + queued), int(cached.sum())

    def step(self) -> None:
        chunk = np.minimum(self._prompt_tokens, BUDGET)
        step_s = STEP_S + DECODE_S * self.running + TOKEN_S * chunk
        steps = SLOT_S / step_s
        then = self._steps + steps
        first, last = self._steps.astype(np.int64) + 1, then.astype(np.int64)
        for step in range(int(np.max(last - first)) + 1):
            at = (first + step) % self._ends.shape[1]
            ended = self._ends[self._all, at] * (first + step <= last)
            self.running -= ended
            self._ends[self._all, at] -= ended
        self._steps = then
        self._prompt_tokens -= np.minimum(self._prompt_tokens, chunk * steps)
        enter = np.minimum(self.waiting, MOST - self.running) * ~self.is_emptying
        self.waiting -= enter
        self.running += enter
        replicas = np.repeat(self._all, enter)
        outputs = np.minimum(self._rng.geometric(1 / OUTPUT, len(replicas)), LONGEST)
        encoded = np.minimum(np.ceil(self._prompt_tokens[replicas] / BUDGET), 2 * LONGEST)
        ends = last[replicas] + outputs + encoded.astype(np.int64)
        np.add.at(self._ends, (replicas, ends % self._ends.shape[1]), 1)


class Gateway:
    """One of several gateways that send requests to all replicas. It knows past loads, and its own requests since
    then."""

    def __init__(self, routing: str, fleet: Fleet, rng: np.random.Generator) -> None:
        self._routing = routing
        self._fleet = fleet
        self._rng = rng
        self._turn = int(rng.integers(fleet.count))
        self._home = np.full(PREFIXES, -1)
        self._slack = 0.0
        if routing.startswith(CACHE):
            self._slack = float(routing.removeprefix(CACHE))
        self.seen = fleet.load.astype(np.float64)

    def route(self, prefixes: Numbers) -> Numbers:
        count = len(prefixes)
        match self._routing:
            case "turns":
                chosen = (self._turn + np.arange(count)) % self._fleet.count
                self._turn += count
            case "two":
                pairs = self._rng.integers(self._fleet.count, size=(2, count))
                chosen = np.where(self.seen[pairs[0]] <= self.seen[pairs[1]], *pairs)
            case "least" | "latency":
                chosen = self._least(count)
            case _:
                chosen = self._cached(prefixes)
        self.seen += np.bincount(chosen, minlength=self._fleet.count)
        return chosen

    def _least(self, count: int) -> Numbers:
        """Return the replicas with the fewest requests, in random order among equals."""
        rank = self.seen + self._rng.random(self._fleet.count)
        whole, rest = divmod(count, self._fleet.count)
        chosen = np.argpartition(rank, rest)[:rest] if rest else np.empty(0, np.int64)
        return np.concatenate([np.tile(np.arange(self._fleet.count), whole), chosen])

    def _cached(self, prefixes: Numbers) -> Numbers:
        """Return the replicas that have the prefixes, unless they are much busier, as in
        `xgpt.core.policies.routing`."""
        home = self._home[prefixes]
        order = np.argsort(home, kind="stable")
        ordered = home[order]
        before = np.empty(len(home), np.int64)  # requests of the same slot go to the same replica
        before[order] = np.arange(len(home)) - np.searchsorted(ordered, ordered)
        excess = self.seen[home] + before - self.seen.min()
        is_full = (home < 0) | (excess > self._slack * self.seen.mean(where=self.seen < AWAY))
        home[is_full] = self._least(int(is_full.sum()))
        self._home[prefixes] = home
        return home


def simulate(
    routing: str,
    gateways: int,
    stale_s: float,
    wave: float = 0.0,
    *,
    replicas: int,
    rate: float,
    seconds: float,
    seed: int = 0,
) -> Row:
    started = time.process_time()
    rng = np.random.default_rng(seed)
    fleet = Fleet(replicas, rng)
    fronts = [Gateway(routing, fleet, rng) for _ in range(gateways)]
    shares = 1.0 / np.arange(1, PREFIXES + 1)
    steps = np.cumsum(shares / shares.sum())
    counts, hits, busiest, total = np.zeros(len(EDGES) + 1, np.int64), 0, 0.0, 0
    slots, refresh = round(seconds / SLOT_S), max(1, round(stale_s / SLOT_S))
    latency = np.zeros(replicas)
    warm_up = min(slots // 5, round(60 / SLOT_S))
    at_once, next_one, replanned_s = max(1, round(wave * replicas)), 0, None
    for slot in range(slots):
        if wave and slot >= warm_up and replanned_s is None:
            fleet.is_emptying &= fleet.running > 0
            if not fleet.is_emptying.any():
                fleet.is_emptying[next_one : next_one + at_once] = True
                replanned_s = (slot - warm_up) * SLOT_S if next_one >= replicas else None
                next_one += at_once
        if not slot % refresh:
            for front in fronts:
                front.seen = latency.copy() if routing == "latency" else fleet.load.astype(np.float64)
                front.seen[fleet.is_emptying] = AWAY
        for front in fronts:
            prefixes = np.searchsorted(steps, rng.random(rng.poisson(rate * SLOT_S / gateways)))
            chosen = front.route(prefixes)
            first_s, cached = fleet.take(chosen, prefixes)
            if routing == "latency":  # load in milliseconds, of which each further request counts as one
                latency[chosen] += 0.2 * (1000 * first_s - latency[chosen])
            if slot >= warm_up:
                counts += np.bincount(np.searchsorted(EDGES, first_s), minlength=len(counts))
                hits, total = hits + cached, total + len(chosen)
        fleet.step()
        if not slot % 50:
            busiest += float(fleet.load.max() / max(1.0, fleet.load.mean()))
    share = np.cumsum(counts) / total
    at: Callable[[float], float] = lambda level: float(EDGES[min(len(EDGES) - 1, np.searchsorted(share, level))])  # noqa: E731
    kept = float(share[np.searchsorted(EDGES, BOUND_S)])
    took_s = time.process_time() - started
    fullest = busiest / len(range(0, slots, 50))
    figures = at(0.5), at(0.99), kept, hits / total, fullest
    return Row(routing, gateways, stale_s, wave, total, *figures, replanned_s, took_s)


CASES: tuple[tuple[str, int, float, float], ...] = (
    ("turns", 1, 0.0, 0.0),
    ("two", 1, 0.0, 0.0),
    ("least", 1, 0.0, 0.0),
    ("latency", 1, 1.0, 0.0),
    *((f"{CACHE}{slack}", 1, 0.0, 0.0) for slack in (0.0625, 0.125, 0.25, 0.5, 1.0)),
    *(
        (routing, gateways, stale_s, 0.0)
        for routing in ("two", "least", f"{CACHE}0.125")
        for gateways, stale_s in ((1, 1.0), (4, 0.08), (4, 1.0), (16, 1.0))
    ),
    *((f"{CACHE}0.125", 1, 0.0, wave) for wave in (0.001, 0.02, 0.05, 0.1, 0.25)),
)


def routing_cost(replicas: int, count: int = 20_000) -> float:
    """Return the seconds that `xgpt.core.policies.routing` takes for a request, with its prompt's ten keys."""
    router = ReplicaRouter(replicas, 16.0)
    chains = [tuple(f"{n % 500}.{key}".encode() for key in range(10)) for n in range(count)]
    inside: deque[int] = deque()
    started = time.process_time()
    for chain in chains:
        if len(inside) > 20 * replicas:
            router.leave(inside.popleft())
        inside.append(router.route(chain))
    return (time.process_time() - started) / count


def main() -> None:
    accepted = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accepted.add_argument("--seconds", type=float, default=3600)
    accepted.add_argument("--replicas", type=int, default=1000)
    accepted.add_argument("--rate", type=float, default=20_000)
    accepted.add_argument("--only", action="append", help="a routing, with one gateway and present loads; repeatable")
    accepted.add_argument("--json", type=Path)
    given = accepted.parse_args()
    run = partial(simulate, replicas=given.replicas, rate=given.rate, seconds=given.seconds)
    cases = [case for case in CASES if given.only is None or (case[0] in given.only and case[1:] == (1, 0.0, 0.0))]
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    with ProcessPoolExecutor(2) as pool:
        for row in pool.map(run, *zip(*cases, strict=True)):
            print(row, flush=True)
            rows.append(asdict(row))
    for replicas in (10, 100, 1000, 10_000):
        print(f"one request's routing among {replicas} replicas: {1e6 * routing_cost(replicas):.1f} us of a core")
    print(f"{len(cases)} simulations in {time.perf_counter() - started:.1f} s on two processes")
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
