"""Read a day's load (a trace with times, or rates and workloads over hours), and cut it into groups of intervals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveFloat

from xgpt.core.errors import InputError
from xgpt.core.io import load_yaml, parse
from xgpt.core.load import NO_GROWTH, Growth, LogLoad
from xgpt.core.schema import Frozen, Histogram, ModelSpec, Workload
from xgpt.core.traces import read_lengths
from xgpt.core.workload import binned, fits, fitting, gamma_arrivals, sample
from xgpt.resolve import load_workload
from xsimulator.fleet import Requests

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PARTS = 3
"""Number of parts of an interval. The busiest part determines the interval's load."""
ALIKE = 0.2
"""Intervals are in one group if their mean lengths differ by at most this share, plus what chance allows."""
MOST_GROUPS = 6
MOST_INTERVALS = 2000


class DayStage(Frozen):
    """A part of a day with one arrival rate and one workload."""

    hours: PositiveFloat
    rate_per_s: float = Field(ge=0)
    workload: str


class DaySpec(Frozen):
    name: str
    stages: tuple[DayStage, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Day:
    """A day's requests.

    Attributes:
        begin_s: when it begins, in seconds since 1970, or None if not known.
    """

    name: str
    requests: Requests
    seconds: float
    begin_s: float | None = None

    def within(self, model: ModelSpec) -> Day:
        """Return the day with those requests that fit into a model's context, as `fits` tells."""
        if model.is_encoder_decoder:
            return self
        inputs, outputs, arrivals_s = self.requests.inputs, self.requests.outputs, self.requests.arrivals_s
        fit = fits(inputs, outputs, self.name, model.max_context, "trace")
        return replace(self, requests=Requests(inputs[fit], outputs[fit], arrivals_s[fit]))


@dataclass(frozen=True)
class Intervals:
    """A day's load in intervals. # each [intervals]

    Attributes:
        of_requests: the interval in which each request arrives. # [requests]
    """

    seconds: Array
    rates: Array
    peaks: Array
    of_requests: Ints
    groups: Ints
    lengths: tuple[Workload, ...]
    everything: Workload


def read_day(path: Path, seed: int = 0, growth: Growth = NO_GROWTH) -> Day:
    """Read a day's requests from a trace (CSV, JSON lines) with times, or from YAML with rates and workloads over
    hours.
    """
    if path.suffix in (".yaml", ".yml"):
        return _drawn(parse(load_yaml(path, "trace"), DaySpec, "trace"), growth, np.random.default_rng(seed))
    trace = LogLoad.of(path.stem, read_lengths(path, "trace"), growth).requests
    if trace.timestamp_s is None:
        raise InputError("trace", str(path), "a day's requests need their times: add a column or field `timestamp`")
    requests = Requests(trace.input, trace.output, trace.timestamp_s)
    return Day(path.stem, requests, max(float(trace.timestamp_s[-1]), 1.0), trace.begin_s)


def _drawn(spec: DaySpec, growth: Growth, rng: np.random.Generator) -> Day:
    start_s, parts = 0.0, []
    for stage in spec.stages:
        seconds = 3600 * stage.hours
        workload = growth.workload(load_workload(stage.workload))
        if workload.sessions is not None:
            raise InputError("workload", stage.workload, "a fleet serves independent requests: give request lengths")
        count = int(rng.poisson(growth.rate * stage.rate_per_s * seconds))
        if count:
            times = gamma_arrivals(1.0, count + 1, 1.0, rng)
            arrivals_s = start_s + seconds * times[:-1] / times[-1]  # arrivals are uniform, given their number
            parts.append(Requests(*sample(workload, count, rng), arrivals_s))
        start_s += seconds
    if not parts:
        raise InputError("trace.stages", 0, "no request arrives at these rates: give higher rates or more hours")
    columns = [np.concatenate([getattr(part, name) for part in parts]) for name in ("inputs", "outputs", "arrivals_s")]
    return Day(spec.name, Requests(*columns), start_s)


def cut(day: Day, interval_s: float, model: ModelSpec) -> Intervals:
    """Cut a day into intervals.

    Raises:
        InputError: there are too many intervals.
    """
    count = max(1, ceil(day.seconds / interval_s - 1 / PARTS))
    if count > MOST_INTERVALS:
        least = day.seconds / MOST_INTERVALS
        raise InputError("interval_s", interval_s, f"the day would have {count} intervals; give at least {least:.4g} s")
    requests = day.requests
    index = np.minimum((requests.arrivals_s // interval_s).astype(int), count - 1)
    seconds = np.full(count, interval_s)
    seconds[-1] = day.seconds - (count - 1) * interval_s
    into_s = requests.arrivals_s - index * interval_s
    parts = PARTS * index + np.minimum((into_s * PARTS // seconds[index]).astype(int), PARTS - 1)
    arrived = np.bincount(index, minlength=count)
    busiest = np.bincount(parts, minlength=PARTS * count).reshape(count, PARTS).max(axis=1)
    groups = _alike(requests, index, count)
    of_request = groups[index]
    longest = int(requests.outputs.max())
    members = [of_request == group for group in range(groups.max() + 1)]
    lengths = tuple(
        _workload(f"{day.name} {group}", requests.inputs[inside], requests.outputs[inside], longest, model)
        for group, inside in enumerate(members)
    )
    everything = _workload(day.name, requests.inputs, requests.outputs, longest, model)
    return Intervals(seconds, arrived / seconds, busiest * PARTS / seconds, index, groups, lengths, everything)


def _alike(requests: Requests, index: Ints, count: int) -> Ints:
    arrived = np.maximum(np.bincount(index, minlength=count), 1)
    means, doubts = [], []
    for lengths in (requests.inputs, requests.outputs):
        sums = np.bincount(index, lengths, count)
        means.append(np.log(np.where(sums > 0, sums / arrived, lengths.mean())))
        doubts.append(2 * lengths.std() / lengths.mean() / np.sqrt(arrived))
    logs, doubt = np.column_stack(means), np.column_stack(doubts)
    alike = ALIKE
    while True:
        groups = _led(logs, alike + doubt, np.argsort(-arrived, kind="stable"))
        if groups.max() < MOST_GROUPS:
            return groups
        alike *= 1.5


def _led(points: Array, reach: Array, order: Ints) -> Ints:
    """A point joins the first leader within `reach`. If there is none, it becomes a leader."""
    leaders: list[int] = []
    groups = np.zeros(len(points), int)
    for i in order.tolist():
        near = [number for number, leader in enumerate(leaders) if (abs(points[i] - points[leader]) <= reach[i]).all()]
        if not near:
            leaders.append(i)
        groups[i] = near[0] if near else len(leaders) - 1
    return groups


def _workload(name: str, inputs: Ints, outputs: Ints, longest: int, model: ModelSpec) -> Workload:
    output = binned(outputs)
    if output.lengths[-1] < longest:
        output = Histogram(lengths=(*output.lengths, longest), probabilities=(*output.probabilities, 0.0))
    return fitting(Workload(name=name, input=binned(inputs), output=output), model)
