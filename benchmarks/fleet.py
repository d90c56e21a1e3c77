"""Compare a fleet that follows its exported rule with a constant fleet and with autoscaling, by kept requests and
device-hours.

    python -m benchmarks.fleet [--traces DIR] [--mooncake FILE] STATE

Every case has two independently drawn days of the same shape. The first day is planned (`xgpt fleet`), and the second
is simulated request by request. Results are stored in the directory STATE and not computed again. A case whose trace is
not given is left out.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.lib.results import record, table
from xgpt.core.io import dump_json, load_json, write_atomic
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.traces import read_lengths
from xgpt.core.workload import sample
from xgpt.requests import FleetRequest
from xgpt.resolve import load_workload
from xgpt.solving import plan_fleet_of
from xprofiler.store import profile_of
from xscheduler.fleet.day_load import Day, cut
from xscheduler.fleet.following import LOOK_S, FollowedDay, LoadSample, Recommend, WantedReplicas, simulate_day
from xscheduler.fleet.planning import FleetModel, share_kept
from xscheduler.fleet.replica_kinds import Candidate
from xscheduler.fleet.scaling import Follower
from xsimulator.fleet import Requests

DAY_S = 86400.0
ATTAIN = 0.99
TARGETS, TOLERANCE, STABLE_S = (0.5, 0.6, 0.7, 0.8, 0.9), 0.1, 300.0
"""Settings of the autoscaler by utilisation."""
HEADER = (
    "load", "fleet (target)", "requests within the bounds", "within the bounds reduced by the headroom", "device-hours",
    "device-hours / clairvoyant", "starts",
)  # fmt: skip
MOST_TOKENS = 40_000
"""Longer requests are left out: they exceed the model's context."""
WINDOW = 0.02
"""Share of a trace from which the rate and the lengths at a time of day are computed."""


@dataclass(frozen=True)
class Case:
    """A load, and the cluster that serves it.

    Attributes:
        draw: returns a day, given a seed.
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
    """The result of one way to run a day.

    Attributes:
        kept, within: share of requests within the bounds, with and without headroom.
    """

    fleet: str
    kept: float
    within: float
    device_hours: float
    starts: int


def from_rates(name: str, rate_at: Callable[[np.ndarray], np.ndarray], seconds: float, workload: str, seed: int) -> Day:
    rng = np.random.default_rng(seed)
    times = np.arange(0, seconds, 10.0)
    counts = rng.poisson(rate_at(times) * 10.0)
    arrivals_s = np.sort(np.repeat(times, counts) + 10.0 * rng.random(counts.sum()))
    return Day(name, Requests(*sample(load_workload(workload), len(arrivals_s), rng), arrivals_s), seconds)


def sinusoid(seed: int) -> Day:
    """Return six hours in which the rate goes from 1 to 24 requests a second and back every half hour."""
    return from_rates("sinusoid", lambda t: 12.5 - 11.5 * np.cos(2 * np.pi * t / 1800), 6 * 3600, "azure-conv", seed)


def flash_crowd(seed: int) -> Day:
    """Return a calm day of 3 to 9 requests a second. On the second day, the rate is three times as high for 20 minutes
    from 14:00."""

    def rate_at(t: np.ndarray) -> np.ndarray:
        calm = 6 - 3 * np.cos(2 * np.pi * t / DAY_S)
        crowd = (t >= 14 * 3600) & (t < 14 * 3600 + 1200) & (seed > 0)
        return np.where(crowd, 3 * calm, calm)

    return from_rates("flash crowd", rate_at, DAY_S, "azure-conv", seed)


def stretched(path: Path, name: str, mean_rate: float) -> Callable[[int], Day]:
    """Return a function that draws a day from a trace stretched over a day, at another mean rate. Every second request
    of the trace belongs to the first day, the others to the second. Rates and lengths at a time are those of nearby
    requests of the same half."""

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
    """Kubernetes' autoscaler, which scales by the used share of the replicas' rate."""

    def __init__(self, fleet: FleetPlan, target: float) -> None:
        self._fleet, self._target, self._recent = fleet, target, deque[tuple[float, int]]()
        self._rate: deque[float] = deque(maxlen=4)
        self._present = 0

    def __call__(self, sample: LoadSample) -> WantedReplicas:
        fleet, ready = self._fleet, sample.ready
        kind = max(range(len(fleet.kinds)), key=lambda k: ready[k])
        rate = fleet.kinds[kind].rates_per_s[fleet.interval_at(sample.now_s).lengths]
        self._rate.append(sample.num_requests / sample.seconds)
        load = float(np.mean(self._rate) + sample.waiting / sample.seconds)
        use = min(1.0, load / max(rate * ready[kind], 1e-9))
        ratio = use / self._target
        present = self._present or sum(ready)
        wanted = max(1, present if abs(ratio - 1) <= TOLERANCE else math.ceil(ready[kind] * ratio))
        self._recent.append((sample.now_s, wanted))
        while self._recent[0][0] < sample.now_s - STABLE_S:
            self._recent.popleft()
        self._present = max(wanted, min(present, max(count for _, count in self._recent)))
        replicas = tuple(self._present if number == kind else 0 for number in range(len(fleet.kinds)))
        return WantedReplicas(replicas, load)


def run(case: Case, state: Path) -> dict[str, Row]:
    for seed in (0, 1):
        path = state / f"{case.name}.{seed}.json"
        if not path.is_file():
            asked: dict[str, Any] = {
                "model": case.model,
                "cluster": case.cluster,
                "latency_bound_s": case.latency_bound_s,
            }
            asked |= {"ttft_s": case.ttft_s, "attain": ATTAIN, "slo_window": "day"}
            request = FleetRequest(trace=Path(case.name), interval_s=case.interval_s, **asked)
            write_atomic(path, dump_json(plan_fleet_of(case.draw(seed), request)))
    fleet, best = (load_json(state / f"{case.name}.{seed}.json", FleetPlan, "fleet") for seed in (0, 1))
    rows_path = state / f"{case.name}.rows.json"
    rows = {name: Row(**row) for name, row in json.loads(rows_path.read_text()).items()} if rows_path.is_file() else {}
    missing = {name: recommend for name, recommend in _ways(fleet) if name not in rows}
    if missing:
        day = case.draw(1)
        found = tuple(Candidate(kind, profile_of(kind.plan, None)) for kind in best.kinds)
        model = FleetModel(day, cut(day, case.interval_s, found[0].kind.plan.model), found)
    for name, recommend in missing.items():
        first = fleet.intervals[0].replicas
        done = simulate_day(fleet, day.requests, day.seconds, recommend, LOOK_S, first)
        rows[name] = _row(name, model, done, sum(first))
        write_atomic(rows_path, json.dumps({name: asdict(row) for name, row in rows.items()}, indent=1) + "\n")
    for name, figures in (("clairvoyant", best.planned), ("constant", best.constant.figures)):
        rows[name] = Row(name, figures.share_kept, figures.share_within, figures.device_hours, figures.starts)
    return rows


def _ways(fleet: FleetPlan) -> Iterator[tuple[str, Recommend]]:
    yield "exported", Follower(fleet)
    for target in TARGETS:
        yield f"utilisation, {target:g}", ByUtilisation(fleet, target)


def _row(name: str, model: FleetModel, done: FollowedDay, first: int) -> Row:
    times = model.simulate_replicas(done.replicas)
    kept, within = (share_kept(model, times, headroom=headroom) for headroom in (True, False))
    return Row(name, kept, within, done.device_hours, len(done.replicas) - first)


def shown(rows: dict[str, Row]) -> list[Row]:
    by_use = [row for name, row in rows.items() if name.startswith("utilisation")]
    good = [row for row in by_use if row.within >= ATTAIN]
    best = min(good, key=lambda row: row.device_hours) if good else max(by_use, key=lambda row: row.within)
    return [rows["clairvoyant"], rows["exported"], best, rows["constant"]]


def cases(traces: Path | None, mooncake: Path | None) -> list[Case]:
    place = ("qwen3-32b", "h100x8")
    found = [
        Case("sinusoid", sinusoid, *place, 25.0, 3.0, 60.0),
        Case("flash crowd", flash_crowd, *place, 25.0, 3.0, 300.0),
    ]
    if traces is not None:
        conv, code = traces / "azure_conv_2023_first_half.csv", traces / "azure_code_2023.csv"
        found.append(Case("azure-conv", stretched(conv, "azure-conv", 8.0), *place, 25.0, 3.0, 300.0))
        found.append(Case("azure-code", stretched(code, "azure-code", 8.0), *place, 12.0, 3.0, 300.0))
    if mooncake is not None:
        found.append(Case("mooncake", stretched(mooncake, "mooncake", 5.0), *place, 40.0, 10.0, 300.0))
    return found


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.argument("state", type=click.Path(path_type=Path))
@click.option("--traces", type=click.Path(path_type=Path), help="Folder of the Azure traces.")
@click.option("--mooncake", type=click.Path(path_type=Path), help="Mooncake's conversation trace.")
def main(state: Path, traces: Path | None, mooncake: Path | None) -> None:
    state.mkdir(parents=True, exist_ok=True)
    lines, shares = list[tuple[object, ...]](), []
    for case in cases(traces, mooncake):
        rows = run(case, state)
        optimum = rows["clairvoyant"].device_hours
        shares.append(rows["exported"].device_hours / optimum)
        lines += [
            (case.name, row.fleet, f"{row.within:.2%}", f"{row.kept:.2%}", f"{row.device_hours:.1f}",
             f"{row.device_hours / optimum:.3f}", row.starts)
            for row in shown(rows)
        ]  # fmt: skip
    claim = "A fleet that follows its exported rule takes {least} to {most} times the clairvoyant device-hours."
    record("fleet/days", claim, table(HEADER, lines), least=f"{min(shares):.2f}", most=f"{max(shares):.2f}")


if __name__ == "__main__":
    main()
