"""A day's fleet under control: kept requests and device-hours of the controller, a constant fleet and an autoscaler by
utilisation, against the clairvoyant optimum.

    python -m benchmarks.fleet [--traces DIR] [--mooncake FILE] [--cases NAME,…] [--json FILE]

Every case has two days of one shape, drawn apart: the first is planned (`xgpt fleet`), the second is controlled on the
simulated clock, request by request. The clairvoyant optimum is the fleet planned for the second day itself, all changes
paid, at the least load factor that keeps the share. The autoscaler by utilisation is Kubernetes' rule: replicas times
utilisation over its target, within a tolerance of a tenth, with five minutes of stabilisation before it scales down.
The Azure traces of 2023 are those of AzurePublicDataset, Mooncake's is its conversation trace; a case whose trace is
not given is left out.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from xgpt.app.fleet.controller import Controller, Look, Orders
from xgpt.app.fleet.day import Day
from xgpt.app.fleet.planning import FleetModel, FleetRequest, plan_day, share_kept
from xgpt.app.fleet.simulated import ControlledDay, control_day
from xgpt.resolve import load_workload
from xgpt.schema.fleet import FleetPlan
from xgpt.workload import read_lengths, sample
from xsimulator.fleet import Requests

DAY_S = 86400.0
LOOK_S = 15.0
ATTAIN = 0.99
TARGET, TOLERANCE, STABLE_S = 0.7, 0.1, 300.0
"""Of the autoscaler by utilisation."""
MOST_TOKENS = 40_000
"""Longer requests are left out: they exceed the model's context."""
WINDOW = 0.02
"""Share of a trace that tells the rate and the lengths of a moment of the day."""


@dataclass(frozen=True)
class Case:
    """A load, and what serves it.

    Attributes:
        draw: makes a day of a seed.
        interval_s: of the plan.
    """

    name: str
    draw: Callable[[int], Day]
    model: str
    cluster: str
    latency_bound_s: float
    ttft_s: float
    interval_s: float


@dataclass(frozen=True)
class Row:
    """What came of one way to run a day.

    Attributes:
        over: device-hours relative to the clairvoyant optimum's.
    """

    case: str
    fleet: str
    kept: float
    within: float
    device_hours: float
    over: float
    seconds: float


def from_rates(name: str, rate_at: Callable[[np.ndarray], np.ndarray], seconds: float, workload: str, seed: int) -> Day:
    """A day of Poisson arrivals whose rate changes."""
    rng = np.random.default_rng(seed)
    times = np.arange(0, seconds, 10.0)
    counts = rng.poisson(rate_at(times) * 10.0)
    arrivals_s = np.sort(np.repeat(times, counts) + 10.0 * rng.random(counts.sum()))
    return Day(name, Requests(*sample(load_workload(workload), len(arrivals_s), rng), arrivals_s), seconds)


def sinusoid(seed: int) -> Day:
    """From 1 to 24 requests a second and back, in half an hour, for six hours."""
    return from_rates("sinusoid", lambda t: 12.5 - 11.5 * np.cos(2 * np.pi * t / 1800), 6 * 3600, "azure-conv", seed)


def flash_crowd(seed: int) -> Day:
    """A calm day from 3 to 9 requests a second; on the second one three times as many come at 14:00, for 20 minutes."""

    def rate_at(t: np.ndarray) -> np.ndarray:
        calm = 6 - 3 * np.cos(2 * np.pi * t / DAY_S)
        crowd = (t >= 14 * 3600) & (t < 14 * 3600 + 1200) & (seed > 0)
        return np.where(crowd, 3 * calm, calm)

    return from_rates("flash crowd", rate_at, DAY_S, "azure-conv", seed)


def stretched(path: Path, name: str, mean_rate: float) -> Callable[[int], Day]:
    """A trace stretched over a day, at another mean rate. Of its requests every second one makes the first day, the
    others the second: rates and lengths of a moment are those near to it in its half."""

    def draw(seed: int) -> Day:
        trace = read_lengths(path)
        assert trace.timestamp_s is not None
        half = slice(seed % 2, None, 2)
        fits = trace.input[half] + trace.output.max() <= MOST_TOKENS
        at = trace.timestamp_s[half][fits] / trace.timestamp_s[-1] * DAY_S
        inputs, outputs = trace.input[half][fits], trace.output[half][fits]
        rng = np.random.default_rng(seed)
        times = np.arange(0, DAY_S, 60.0)
        low, high = (np.searchsorted(at, times + sign * WINDOW * DAY_S / 2) for sign in (-1, 1))
        span = np.minimum(times + WINDOW * DAY_S / 2, DAY_S) - np.maximum(times - WINDOW * DAY_S / 2, 0)
        rates = (high - low) / span
        counts = rng.poisson(rates / rates.mean() * mean_rate * 60)
        arrivals_s = np.repeat(times, counts) + 60 * rng.random(counts.sum())
        chosen = (np.repeat(low, counts) + rng.random(counts.sum()) * np.repeat(high - low, counts)).astype(int)
        order = np.argsort(arrivals_s)
        return Day(name, Requests(inputs[chosen][order], outputs[chosen][order], arrivals_s[order]), DAY_S)

    return draw


class ByUtilisation:
    """Kubernetes' autoscaler on the share of slots in use."""

    def __init__(self, fleet: FleetPlan) -> None:
        self._fleet, self._recent = fleet, deque[tuple[float, int]]()
        self._rate: deque[float] = deque(maxlen=4)

    def __call__(self, look: Look) -> Orders:
        kind = max(range(len(self._fleet.kinds)), key=lambda k: sum(r.kind == k for r in look.replicas))
        rate = self._fleet.kinds[kind].rates_per_s[self._fleet.interval_at(look.now_s).lengths]
        ready = [replica for replica in look.replicas if replica.state == "ready"]
        self._rate.append(look.num_requests / look.seconds)
        load = np.mean(self._rate) + look.waiting / look.seconds
        use = min(1.0, load / max(rate * len(ready), 1e-9))
        ratio = use / TARGET
        wanted = len(look.replicas) if abs(ratio - 1) <= TOLERANCE else math.ceil(len(ready) * ratio)
        wanted = max(1, wanted)
        self._recent.append((look.now_s, wanted))
        while self._recent[0][0] < look.now_s - STABLE_S:
            self._recent.popleft()
        target = max(count for _, count in self._recent)
        more = max(0, max(wanted, 1) - len(look.replicas))
        newest = sorted(look.replicas, key=lambda replica: (replica.state == "ready", -replica.since_s))
        drain = tuple(replica.name for replica in newest[: max(0, len(look.replicas) - target)])
        start = tuple(more if number == kind else 0 for number in range(len(self._fleet.kinds)))
        return Orders(start, drain, float(load), "utilisation")


def run(case: Case) -> list[Row]:
    """All ways to run the second day of a case."""
    asked = {"model": case.model, "cluster": case.cluster, "latency_bound_s": case.latency_bound_s}
    asked |= {"ttft_s": case.ttft_s, "quantile": ATTAIN}
    request = FleetRequest(trace=Path(case.name), interval_s=case.interval_s)
    began = time.perf_counter()
    fleet, _ = plan_day(case.draw(0), request, asked)
    planned_s = time.perf_counter() - began
    day = case.draw(1)
    best, model = plan_day(day, request, asked)
    optimum = best.planned.device_hours
    rows = [
        Row(case.name, "clairvoyant", best.planned.share_kept, best.planned.share_within, optimum, 1.0, planned_s),
        Row(
            case.name,
            "constant",
            best.constant.figures.share_kept,
            best.constant.figures.share_within,
            best.constant.figures.device_hours,
            best.constant.figures.device_hours / optimum,
            0.0,
        ),
    ]
    for name, decide in (
        ("controller", Controller(fleet, look_s=LOOK_S).decide),
        ("utilisation", ByUtilisation(fleet)),
    ):
        began = time.perf_counter()
        done = control_day(fleet, day.requests, day.seconds, decide, LOOK_S, fleet.intervals[0].replicas)
        rows.append(_row(case.name, name, model, done, optimum, time.perf_counter() - began))
    return rows


def _row(case: str, name: str, model: FleetModel, done: ControlledDay, optimum: float, seconds: float) -> Row:
    times = model.simulate_replicas(done.replicas)
    shares = (share_kept(model, times, headroom=of) for of in (True, False))
    return Row(case, name, *shares, done.device_hours, done.device_hours / optimum, seconds)


def cases(traces: Path | None, mooncake: Path | None) -> list[Case]:
    """The cases whose traces are given."""
    of = ("qwen3-32b", "h100x8")
    found = [
        Case("sinusoid", sinusoid, *of, 25.0, 3.0, 60.0),
        Case("flash crowd", flash_crowd, *of, 25.0, 3.0, 300.0),
    ]
    if traces is not None:
        conv, code = traces / "azure_conv_2023_first_half.csv", traces / "azure_code_2023.csv"
        found.append(Case("azure-conv", stretched(conv, "azure-conv", 8.0), *of, 25.0, 3.0, 300.0))
        found.append(Case("azure-code", stretched(code, "azure-code", 8.0), *of, 12.0, 3.0, 300.0))
    if mooncake is not None:
        found.append(Case("mooncake", stretched(mooncake, "mooncake", 5.0), *of, 40.0, 10.0, 300.0))
    return found


@click.command()
@click.option("--traces", type=click.Path(path_type=Path), help="Folder of the Azure traces.")
@click.option("--mooncake", type=click.Path(path_type=Path), help="Mooncake's conversation trace.")
@click.option("--cases", "names", help="Only these.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(traces: Path | None, mooncake: Path | None, names: str | None, json_path: Path | None) -> None:
    rows: list[Row] = []
    print("| case | fleet | kept, headroom free | within the bounds | device-hours | over the optimum | s |")
    print("|---|---|---|---|---|---|---|")
    for case in cases(traces, mooncake):
        if names is not None and case.name not in names.split(","):
            continue
        for row in run(case):
            rows.append(row)
            print(
                f"| {row.case} | {row.fleet} | {100 * row.kept:.2f}% | {100 * row.within:.2f}% | "
                f"{row.device_hours:.1f} | {row.over:.3f} | {row.seconds:.0f} |",
                flush=True,
            )
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
