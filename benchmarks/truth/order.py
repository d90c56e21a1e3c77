"""Count how often predictions order settings as measurements do, and what the predicted best one loses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from benchmarks.truth.sources import Row
from xgpt.core.io import config_names, configs_dir, load_yaml

APART = 0.15
"""Least share by which two measured values differ, for their order to count."""
GOOD, OVER = 0.05, 0.1
"""A decision is good if it loses at most the first share, and exceeds the bound by at most the second one."""
BOUNDS_S = (0.01, 0.02, 0.03, 0.05)
LEAST = 10
"""Smallest number of decisions in a line."""
FAMILIES = ("dense", "experts", "hybrid")
CLASSES = ("tensor-parallel degree", "device", "vendor", "engine")


class Point(NamedTuple):
    """One setting: what was served, output tokens a second for each device, measured and predicted, and TPOT so."""

    load: tuple[str, str, str, str]
    tp: int
    ep: int
    device: str
    engine: str
    measured: float
    predicted: float
    family: str
    tpot: tuple[float, float] | None

    @property
    def plain(self) -> float:
        return bandwidth(self.device) / self.tp

    @property
    def vendor(self) -> str:
        return "AMD" if self.device.startswith("mi") else "NVIDIA"


@cache
def bandwidth(device: str) -> float:
    """Return a device's memory bandwidth, bytes a second, as its datasheet states it."""
    return next(
        float(each["memory_bandwidth_bytes_per_s"])
        for each in (
            load_yaml(configs_dir() / "devices" / f"{name}.yaml", "devices") for name in config_names("devices")
        )
        if each["name"] == device
    )


def points_of(rows: list[Row]) -> list[Point]:
    """Return rows of clients in a closed loop as points. By Little's law, clients = rate x time of a request."""
    found = []
    for row in rows:
        if row.cell is None or (of := row.setting) is None:
            continue
        values = [_rate(figures, of.clients, of.output) for figures in (row.measured, row.predicted)]
        if None not in values:
            load = of.model, of.form, f"{of.prompt:.2g}x{of.output:.2g}", str(of.clients)
            of_device = [float(value or 0) * of.output / of.tp for value in values]
            tpot = tuple(each["TPOT"] for each in (row.measured, row.predicted) if "TPOT" in each)
            known = (tpot[0], tpot[1]) if len(tpot) == 2 else None
            found.append(
                Point(load, of.tp, of.ep, row.cell.device, row.cell.engine, *of_device, row.cell.family, known)
            )
    return found


def _rate(figures: dict[str, float], clients: int, output: int) -> float | None:
    if "throughput" in figures:
        return figures["throughput"]
    if {"TTFT", "TPOT"} <= figures.keys():
        return clients / (figures["TTFT"] + (output - 1) * figures["TPOT"])
    return None


def ranks(rows: list[Row]) -> str:
    """Return a table of pairs that differ in one property only, beside the order of a rule that predicts nothing.

    The rule: fewer devices give more tokens each, and a device with more memory bandwidth is faster.
    """
    points = points_of(rows)
    lines = [
        "| differ in | family | sets | pairs over 15% apart | right | without predictions |",
        "|---|---|---|---|---|---|",
    ]
    for name in CLASSES:
        for family in FAMILIES:
            sets = list(_sets([each for each in points if each.family == family], name))
            pairs = [
                (higher.predicted > lower.predicted, higher.plain > lower.plain)
                for each in sets
                for lower, higher in combinations(sorted(each, key=lambda point: point.measured), 2)
                if higher.measured > (1 + APART) * lower.measured
            ]
            if pairs:
                right, plain = map(sum, zip(*pairs, strict=True))
                known = str(plain) if name != "engine" else ""
                lines.append(f"| {name} | {family} | {len(sets)} | {len(pairs)} | {right} | {known} |")
    return "\n".join(lines)


def choices(rows: list[Row]) -> str:
    """Return a table of decisions: the degree and number of clients, of one published sweep, with most output tokens a
    second and device within a bound on TPOT, as predicted and as measured.
    """
    sweeps: dict[tuple[object, ...], list[Point]] = {}
    for point in points_of(rows):
        if point.tpot is not None:
            sweeps.setdefault((*point.load[:3], point.device, point.engine, point.family), []).append(point)
    lines = [
        "| family | bound on TPOT | decisions | good | loses: median | 90% | over the bound by a tenth |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        for bound_s in BOUNDS_S:
            found = [
                _choice(points, bound_s)
                for (*_, of_family), points in sweeps.items()
                if of_family == family and len({point.tp for point in points}) > 1 and _decides(points, bound_s)
            ]
            if len(found) >= LEAST:
                lost, over = (np.asarray(each) for each in zip(*found, strict=True))
                good = np.mean((lost <= GOOD) & (over <= OVER))
                cells = [f"{1e3 * bound_s:.0f} ms", str(len(found))]
                cells += [
                    f"{100 * x:.0f}%" for x in (good, np.median(lost), np.quantile(lost, 0.9), np.mean(over > OVER))
                ]
                lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _decides(points: list[Point], bound_s: float) -> bool:
    return 0 < sum(point.tpot[0] <= bound_s for point in points if point.tpot) < len(points)


def _choice(points: list[Point], bound_s: float) -> tuple[float, float]:
    """Return what share of the best measured rate the predicted choice loses, and by how much it exceeds the bound."""
    best = max(point.measured for point in points if point.tpot and point.tpot[0] <= bound_s)
    kept = [point for point in points if point.tpot and point.tpot[1] <= bound_s]
    if not kept:
        return 1.0, 0.0
    chosen = max(kept, key=lambda point: point.predicted)
    assert chosen.tpot is not None
    return max(0.0, 1 - chosen.measured / best), chosen.tpot[0] / bound_s - 1


def _sets(points: list[Point], name: str) -> Iterator[list[Point]]:
    """Yield points that have all in common but one property. Of several with the same settings, the median counts."""
    by_key: dict[tuple[object, ...], dict[object, list[Point]]] = {}
    for point in points:
        common = {
            "tensor-parallel degree": (point.device, point.engine),
            "device": (point.tp, point.engine, point.vendor),
            "vendor": (),
            "engine": (point.tp, point.device),
        }[name]
        value = {"tensor-parallel degree": point.tp, "engine": point.engine}.get(name, point.device)
        by_key.setdefault((point.load, *common), {}).setdefault(value, []).append(point)
    for found in by_key.values():
        chosen = [sorted(each, key=lambda p: p.measured)[len(each) // 2] for each in found.values()]
        if len(chosen) > 1 and (name != "vendor" or len({each.vendor for each in chosen}) > 1):
            yield chosen


def beyond(rows: list[Row]) -> str:
    """Return the JSON of configs/beyond.json: within what factor nine of ten figures lie that are predicted after a fit
    to another load of the same sweep, by quantity and by the ratio of the loads, a power of two.
    """
    sweeps: dict[tuple[object, ...], dict[int, list[float]]] = {}
    for row in rows:
        if (of := row.setting) is not None and row.source.startswith("silicon"):
            logs = [float(np.log(row.measured[q] / row.predicted[q])) for q in ("throughput", "TTFT", "TPOT")]
            sweeps.setdefault((row.group, of._replace(clients=0)), {})[of.clients] = logs
    found: dict[int, list[list[float]]] = {}
    for loads in sweeps.values():
        for low, high in combinations(sorted(loads), 2):
            apart = np.abs(np.subtract(loads[high], loads[low])).tolist()
            found.setdefault(round(np.log2(high / low)), []).append(apart)
    largest, lines = [0.0, 0.0, 0.0], []
    for power in sorted(power for power, each in found.items() if power >= 1 and len(each) >= 100):
        largest = np.maximum(largest, np.quantile(found[power], 0.9, axis=0)).tolist()
        named = zip(("throughput", "TTFT", "TPOT"), largest, strict=True)
        lines.append(json.dumps([2**power, {name: round(float(np.exp(value)), 2) for name, value in named}]))
    return "[\n" + ",\n".join(lines) + "\n]\n"
