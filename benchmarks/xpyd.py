"""What `xgpt plan` finds where TTFT and TPOT bind, against prefill and decode groups divided by hand (xPyD).

    python -m benchmarks.xpyd [--only NUMBER ...] [--record]

Every division of the devices into x prefill groups of p devices and y decode groups of d devices has an upper bound:
full decode batches within TPOT, and busy prefill groups. In order of these bounds, divisions are simulated until none
can serve more: one queue before the prefill groups, whose steps take one prompt or up to 8192 tokens, whichever
serves more; then decode groups in turn. This simulation shares only step times with the planner's. K/V moves in no
time, so that xPyD is flattered. The plan has no headroom, as xPyD has none. --record stores the rows; those of other
problems stay.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from heapq import heapify, heappop, heappush, heapreplace
from itertools import product
from math import ceil
from typing import NamedTuple

import numpy as np

from benchmarks.lib.results import store, stored, table, write
from xgpt import plan
from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Plan, Precision
from xgpt.core.workload import sample
from xgpt.resolve import load_cluster, load_model, load_workload
from xprofiler import analytic
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.memory import LaneMemory
from xsimulator.stages import whole

QUANTILE, NUM_REQUESTS = 0.99, 3000
"""Share of requests that keep both bounds, and requests of a simulation."""
COLUMNS = ("model", "workload", "factors", "TTFT, TPOT, ms", "`xgpt plan`, requests/s", "at most", "xPyD by hand",
           "plan over xPyD")  # fmt: skip
BUDGETS = (1, 8192)
"""Most prompt tokens of a prefill step, unless it has a single prompt."""
MODELS = ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b", "gpt-oss-120b", "qwen3-30b-a3b")
CLUSTERS = dict.fromkeys(MODELS, "h100x8")
WORKLOADS = ("azure-conv", "azure-code")
BOUNDS = ((2.0, 1.5), (3.0, 3.0), (5.0, 1.5), (10.0, 2.0), (10.0, 4.0))
"""TTFT as a multiple of the longest common prompt's own prefill on all devices, and TPOT of a lone request's."""


class Split(NamedTuple):
    """x prefill groups of p devices, and y decode groups of d devices."""

    x: int
    p: int
    y: int
    d: int

    def __str__(self) -> str:
        return f"{self.x}x{self.p}+{self.y}x{self.d}"


class Case:
    """A model on a cluster with a workload: step times of groups of any size."""

    def __init__(self, model: str, workload: str) -> None:
        self.model, self.cluster = load_model(model)[0], load_cluster(CLUSTERS[model])
        self.workload = load_workload(workload, self.model)
        self.profile = analytic.profile(self.model, self.cluster, self.model.default_dtype)
        self.lane = cache(lambda tp: LaneCost(self.model, self.profile, whole(self.model, tp)))
        self.prefill_s, self.prefills_s, self.decode_s = map(cache, (self._prefill_s, self._prefills_s, self._decode_s))
        self.most_running = cache(self._most_running)
        rng = np.random.default_rng(0)
        self.inputs, self.outputs = sample(self.workload, NUM_REQUESTS, rng)
        self.gaps = rng.exponential(size=NUM_REQUESTS)
        self.context = float(self.inputs.mean() + (self.outputs**2).mean() / self.outputs.mean() / 2)

    def bounds_s(self, ttft: float, tpot: float) -> tuple[float, float]:
        """Return bounds on TTFT and TPOT in seconds, from multiples as in `BOUNDS`."""
        longest_s, token_s = float(np.quantile(self.prefill_s(8), QUANTILE)), float(self.decode_s(8)[1][0])
        return round(ttft * longest_s, 3), round(tpot * token_s, 4)

    def _prefill_s(self, tp: int) -> np.ndarray:
        """Return the seconds of each request's prefill alone, interpolated between lengths. # [requests]"""
        grid = np.unique(np.geomspace(1, self.inputs.max(), 60).astype(int))
        seconds = [max(self.lane(tp).step(StepCounts.of([(0, int(length), 1)], []))) for length in grid]
        return np.interp(self.inputs, grid, seconds)

    def _prefills_s(self, tp: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of steps with several prompts of mean length, and the steps' seconds."""
        mean = round(float(self.inputs.mean()))
        counts = np.arange(1, max(2, BUDGETS[-1] // mean) + 1)
        step = [max(self.lane(tp).step(StepCounts.of([(0, mean, 1)] * int(n), []))) for n in counts]
        return counts * mean, np.asarray(step)

    def _decode_s(self, tp: int) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers of decoding requests, and the seconds of a step of each."""
        sizes = np.unique(np.geomspace(1, self.profile.largest_batch, 60).astype(int))
        step = [max(self.lane(tp).step(StepCounts.of([], [round(self.context)] * int(n)))) for n in sizes]
        return sizes, np.maximum.accumulate(step)

    def _most_running(self, tp: int) -> int:
        precision = Precision.of(self.profile.dtype, "gpu")
        memory = LaneMemory(self.model, self.cluster, precision, whole(self.model, tp), 16)
        room = float(memory.blocks_beside(8192)[0]) * 16 / self.context
        return max(1, min(int(room), self.profile.largest_batch))

    def splits(self) -> Iterator[Split]:
        devices, degrees = self.cluster.num_devices, [tp for tp in (1, 2, 4, 8) if self._fits(tp)]
        for p, d in product(degrees, degrees):
            for x in range(1, devices // p + 1):
                if (y := (devices - x * p) // d) >= 1:
                    yield Split(x, p, y, d)

    def _fits(self, tp: int) -> bool:
        try:
            return self.most_running(tp) > 1
        except InfeasibleError:
            return False

    def first_s(self, split: Split, rate: float, budget: int) -> tuple[np.ndarray, np.ndarray]:
        """Return when each request arrives, and when its first token is computed, if a prefill step takes up to
        `budget` prompt tokens, or one prompt. # [requests] each"""
        alone, step = self.prefill_s(split.p), self.lane(split.p).step
        arrivals, lengths = np.cumsum(self.gaps) / rate, self.inputs.tolist()
        free, ends, i, waits = [0.0] * split.x, np.empty(NUM_REQUESTS), 0, arrivals.tolist()
        while i < NUM_REQUESTS:
            begin = max(waits[i], free[0])
            last, total = i + 1, lengths[i]
            while last < NUM_REQUESTS and waits[last] <= begin and total + lengths[last] <= budget:
                total, last = total + lengths[last], last + 1
            seconds = float(alone[i])
            if last > i + 1:
                seconds = step(StepCounts.of([(0, length, 1) for length in lengths[i:last]], []))[0]
            ends[i:last] = begin + seconds
            heapreplace(free, begin + seconds)
            i = last
        return arrivals, ends

    def tpot_s(self, split: Split, ready_s: np.ndarray) -> np.ndarray:
        """Return each request's seconds per token after the first, if decode groups get requests in turn at `ready_s`.
        # [requests]"""
        sizes, step_s = self.decode_s(split.d)
        found, order = np.zeros(NUM_REQUESTS), np.argsort(ready_s, kind="stable")
        for group in (order[g :: split.y].tolist() for g in range(split.y)):
            now, count, next_one, inside = 0.0, 0, 0, list[tuple[int, int]]()
            while inside or next_one < len(group):
                now = now if inside else max(now, float(ready_s[group[next_one]]))
                while next_one < len(group) and ready_s[group[next_one]] <= now:
                    one, next_one = group[next_one], next_one + 1
                    heappush(inside, (count + int(self.outputs[one]) - 1, one))
                each = float(np.interp(len(inside), sizes, step_s))
                steps = max(inside[0][0] - count, 0)
                if next_one < len(group):
                    steps = min(steps, ceil((float(ready_s[group[next_one]]) - now) / each))
                now, count = now + steps * each, count + steps
                while inside and inside[0][0] <= count:
                    _, one = heappop(inside)
                    found[one] = (now - ready_s[one]) / max(int(self.outputs[one]) - 1, 1)
        return found

    def bound(self, split: Split, ttft_s: float, tpot_s: float) -> float:
        """Return a rate above any that the division serves: all prefill groups busy, or full decode batches."""
        if np.quantile(self.prefill_s(split.p), QUANTILE) > ttft_s:
            return 0.0
        sizes, step_s = self.decode_s(split.d)
        kept = (step_s <= tpot_s) & (sizes <= self.most_running(split.d))
        decoding = float((sizes[kept] / step_s[kept]).max(initial=0.0)) / (float(self.outputs.mean()) - 1)
        tokens, together = self.prefills_s(split.p)
        each_s = min(float(self.prefill_s(split.p).mean()), float((together / tokens).min() * self.inputs.mean()))
        return min(split.x / each_s, split.y * decoding)

    def best(self, ttft_s: float, tpot_s: float) -> tuple[float, Split]:
        """Return the highest rate that keeps the bounds, and its division.

        The division with the highest bound is simulated next: without a bound on TPOT, then with it.
        """
        queue = [(-self.bound(split, ttft_s, tpot_s), 0, split) for split in self.splits()]
        heapify(queue)
        while True:
            most, known, split = queue[0]
            if known == 2:
                return -most, split
            bound_s = (np.inf, tpot_s)[known]
            heapreplace(queue, (-self.simulated(split, ttft_s, bound_s, -most), known + 1, split))

    def simulated(self, split: Split, ttft_s: float, tpot_s: float, most: float) -> float:
        """Return the highest rate up to `most` that keeps the bounds, within 0.5%."""

        def keeps(rate: float, budget: int) -> bool:
            arrivals, first = self.first_s(split, rate, budget)
            in_time = first - arrivals <= ttft_s
            if in_time.mean() < QUANTILE:
                return False
            if tpot_s == np.inf:
                return True
            return bool((in_time & (self.tpot_s(split, first) <= tpot_s)).mean() >= QUANTILE)

        best = 0.0
        for budget in BUDGETS:
            low, high = best, most
            while high - low > 0.005 * most:
                middle = (low + high) / 2
                low, high = (middle, high) if keeps(middle, budget) else (low, middle)
            best = max(best, low)
        return best


def solved(case: Case, name: str, workload: str, factors: tuple[float, float]) -> tuple[str, ...]:
    """Return the bounds in milliseconds, the plan's rate and the rate that it proves to be the highest, xPyD's rate by
    hand, and the ratio.
    """
    ttft_s, tpot_s = case.bounds_s(*factors)
    most, best = case.best(ttft_s, tpot_s)
    given = {"model": name, "cluster": CLUSTERS[name], "workload": workload}
    try:
        ours = plan(**given, latency_bound_s=None, ttft_s=ttft_s, tpot_s=tpot_s, headroom=0.0)
        rate, shape, ceiling = ours.figure, shape_of(ours), ours.ceiling.most
    except InfeasibleError:
        rate, shape, ceiling = 0.0, "none", 0.0
    return (
        f"{1e3 * ttft_s:.0f}, {1e3 * tpot_s:.1f}",
        f"{rate:.2f} {shape}",
        "not proven" if ceiling is None else f"{ceiling:.2f}",
        f"{most:.2f} {best}",
        f"{rate / most:.2f}" if most else "-",
    )


def shape_of(found: Plan) -> str:
    """Return the policy, and the degrees of the stages of each lane; replicas before them. Prefill groups are xP."""
    lanes: dict[str, list[str]] = {}
    for stage in found.stages:
        lanes.setdefault(stage.lane, []).append(str(stage.tp))
    if found.prefill_groups > 1:
        lanes["encode"] = [f"{found.prefill_groups}x{found.stages[0].tp}"]
    return f"{found.policy.kind} {found.replicas}({'+'.join(','.join(tps) for tps in lanes.values())})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of problems, from 0")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    problems = list(product(MODELS, WORKLOADS, BOUNDS))
    keys = [(name, workload, f"{ttft:g},{tpot:g}") for name, workload, (ttft, tpot) in problems]
    case = cache(Case)
    for number in range(len(problems)) if options.only is None else options.only:
        name, workload, factors = problems[number]
        row = [*keys[number], *solved(case(name, workload), name, workload, factors)]
        print(*row, sep=" | ", flush=True)
        if options.record:
            keep(row, keys)


def keep(row: list[str], keys: list[tuple[str, str, str]]) -> None:
    """Store a problem's row among those of the others, in the problems' order."""
    others = stored("xpyd")["splits"].rows if stored("xpyd") else []
    kept = {tuple(each[:3]): each for each in (*others, row) if len(each) == len(COLUMNS)}
    rows = [kept[key] for key in keys if key in kept]
    claim = (
        "`xgpt plan` chooses several prefill groups in {groups} of {plans} problems. Over all, it keeps the bounds at "
        "{median} times the rate of the best division by hand (median), at least {least} times."
    )
    ratios = np.asarray([float(each[-1]) for each in rows if each[-1] != "-"])
    figures = {
        "groups": sum("(" in each[4] and "x" in each[4].split("(")[1] for each in rows),
        "plans": len(rows),
        "median": f"{np.median(ratios) if len(ratios) else 0:.2f}",
        "least": f"{ratios.min(initial=np.inf):.2f}",
    }
    result = store("xpyd/splits", claim, table(COLUMNS, rows), **figures)
    print(result.claim.format(**result.figures), flush=True)
    write("xpyd")


if __name__ == "__main__":
    main()
