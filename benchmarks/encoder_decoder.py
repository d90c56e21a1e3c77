"""Take T5 from a checkpoint to a served plan that is re-planned, on this machine's devices.

    python -m benchmarks.encoder_decoder [--cluster local:2] [--part saturated] [--seconds 12] [--work DIR]

A checkpoint of T5's shape with random weights is profiled, and planned under every policy with and without a bound.
Part saturated serves and measures each plan at saturation. Part rates serves the plan of `auto` under the bound at
three rates. Part change serves it with re-planning while outputs become three times as long. Errors are compared with
the aims of `benchmarks.prediction`. Without --part, all parts run. The checkpoint, its profile and the results are
stored in --work, so that several calls give one page. Writes results/encoder_decoder.md. The exit code is 1 if a
request is lost, or if no decision changes the plan.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click
import numpy as np

import xgpt
from benchmarks.lib.aims import AIMS, Checked, checked, summary
from benchmarks.lib.changing_lengths import Phase, real
from xgpt.core.errors import InfeasibleError
from xgpt.core.io import write_atomic
from xgpt.core.schema import BenchReport, Histogram, Plan, Workload
from xgpt.reporting.plan_text import placement_in_words, settings_text
from xgpt.resolve import load_cluster
from xprofiler.store import profile_of
from xsimulator.run import outstanding_requests, requests_to_send

SIZES = {"d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 1024, "num_layers": 4, "vocab_size": 2048}
POLICIES = ("rra", "waa", "orca", "static")
RESULTS = Path("results/encoder_decoder.md")
SHARES = (0.3, 0.6, 0.85)
"""Arrival rates, as shares of the plan's saturated throughput."""
BOUND_FACTOR = 2.0
"""The bound, as a multiple of the tightest bound that every policy keeps."""
LEAST, MOST = 60, 1500
"""Smallest and largest number of requests of a measurement."""
NUM_BATCHES = 4
"""Smallest number of batches in a measurement, since the result of one batch is mostly chance."""
BEFORE, AFTER = 200, 1000
"""Number of requests before and after outputs become longer."""


def workload(mean_output: int) -> Workload:
    rng = np.random.default_rng(0)
    inputs = np.clip(rng.lognormal(np.log(85), 0.6, 5000), 4, 400)
    outputs = np.clip(rng.lognormal(np.log(0.85 * mean_output), 0.6, 5000), 1, 3 * mean_output)
    return Workload(name=f"{mean_output} tokens out", input=_histogram(inputs), output=_histogram(outputs))


def _histogram(lengths: np.ndarray[Any, Any]) -> Histogram:
    values, counts = np.unique(lengths.astype(int), return_counts=True)
    return Histogram(lengths=tuple(values.tolist()), probabilities=tuple((counts / counts.sum()).tolist()))


def write_checkpoint(directory: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(
        transformers.T5Config(decoder_start_token_id=0, **SIZES)  # type: ignore[arg-type]
    ).save_pretrained(directory)


class Lab:
    def __init__(self, directory: Path, cluster: str, seconds: float) -> None:
        self._of: dict[str, Any] = {"model": directory, "cluster": cluster, "objective": "saturated"}
        self._seconds = seconds
        is_alone = load_cluster(cluster).num_devices == 1  # WAA takes two
        self._policies = tuple(policy for policy in POLICIES if policy != "waa" or not is_alone)

    def plan(self, lengths: Workload, policy: Any, bound_s: float | None) -> Plan:
        return xgpt.plan(**self._of, workload=lengths, policy=policy, latency_bound_s=bound_s)

    def bound(self, lengths: Workload) -> float:
        nearest = []
        for policy in self._policies:
            try:
                self.plan(lengths, policy, 1e-6)
            except InfeasibleError as error:
                assert error.nearest_bound_s is not None
                nearest.append(error.nearest_bound_s)
        return round(BOUND_FACTOR * max(nearest), 2)

    def rows(self, lengths: Workload, bound_s: float) -> Iterator[Row]:
        for bound in (None, bound_s):
            for policy in self._policies:
                plan = self.plan(lengths, policy, bound)
                wanted = self._seconds * plan.estimate.throughput_rps - requests_to_send(plan, 0, saturated=True)
                yield _row(plan, "saturated", _bench(plan, wanted, None))

    def rates(self, plan: Plan) -> Iterator[Row]:
        for share in SHARES:
            rate = share * plan.estimate.throughput_rps
            report = _bench(plan, self._seconds * rate - outstanding_requests(plan), rate)
            yield _row(plan, f"{share:g} of saturation", report)


def _bench(plan: Plan, wanted: float, rate_per_s: float | None) -> BenchReport:
    batches = NUM_BATCHES * plan.estimate.encode_batch if rate_per_s is None else 0
    count = int(np.clip(round(wanted), max(LEAST, batches), MOST))
    report = xgpt.bench(plan, num_requests=count, arrival_rate_per_s=rate_per_s, saturated=rate_per_s is None).report
    assert isinstance(report, BenchReport)
    return report


class Row(NamedTuple):
    """A load of a plan, with cells in the order of `COLUMNS` but without the figures."""

    cells: list[str]
    pace: float | None
    figures: dict[str, Checked]

    @property
    def text(self) -> str:
        cells = [*self.cells, "-" if self.pace is None else f"{self.pace:.3f}"]
        for name in AIMS:
            measured, error, of_model = self.figures[name][:3] if name in self.figures else (None, None, None)
            cells.append("-" if measured is None else f"{measured:.3f}")
            cells += ["-" if one is None else f"{one:+.1%}" for one in (error, of_model)]
        return "| " + " | ".join(cells) + " |"


def _row(plan: Plan, load: str, report: BenchReport) -> Row:
    bound = plan.constraint.latency_bound_s
    cells = ["none" if bound is None else f"{bound:g}", load, plan.policy.kind, settings_text(plan)]
    cells += [placement_in_words(plan), f"{report.num_requests}, {report.num_failed} failed"]
    row = Row(cells, report.pace, checked(report))
    click.echo(row.text)
    return row


def replanned(plan: Plan) -> tuple[list[str], bool]:
    before, after = workload(30), workload(90)
    phases = [Phase(before, BEFORE), Phase(after, AFTER)]
    run = real(plan, phases, np.random.default_rng(0))
    changes = [decision for _, decision in run.changes if decision.action != "keep"]
    tail = run.tail(plan, after, BEFORE + AFTER // 2, AFTER // 4)
    lines = [
        f"{plan.policy.kind}, {settings_text(plan)}, {placement_in_words(plan)}, bound "
        f"{plan.constraint.latency_bound_s:g} s, served; after "
        f"{BEFORE} of {BEFORE + AFTER} requests outputs become three times as long. Lost: {run.num_lost}. Decisions:",
        "",
        *(f"- {decision.action}: {decision.reason}" for _, decision in run.changes),
        "",
        f"The third quarter of the longer ones: {tail.throughput_rps:.2f} requests/s, {tail.latency_s:.2f} s.",
    ]
    return lines, bool(changes) and not run.num_lost


COLUMNS = ("bound s", "load", "policy", "settings", "placement", "requests", "pace")
PARTS = ("saturated", "rates", "change")


class Kept:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def add(self, part: str, found: Sequence[Row] | Sequence[str]) -> None:
        self._parts[part] = found
        write_atomic(self._path, json.dumps(self._parts, indent=1) + "\n")
        self._parts = json.loads(self._path.read_text())

    def lines(self) -> Iterator[str]:
        rows = [Row(*cells) for part in PARTS[:2] for cells in self._parts.get(part, ())]
        rows = [row._replace(figures={name: Checked(*figure) for name, figure in row.figures.items()}) for row in rows]
        yield from summary([row.figures for row in rows])
        figures = [text for name in AIMS for text in (name, "raw", "at the pace")]
        yield from ("", "| " + " | ".join((*COLUMNS, *figures)) + " |", "|" + "---|" * (len(COLUMNS) + len(figures)))
        yield from (row.text for row in rows)
        yield from ("", *self._parts.get("change", ()), "")


@click.command()
@click.option("--cluster", default="local:2", show_default=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Run only this part; may be repeated.")
@click.option("--seconds", default=12.0, show_default=True, help="Approximate time for which each plan is measured.")
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder that keeps the checkpoint, its profile and the results."
)
def main(cluster: str, parts: tuple[str, ...], seconds: float, work: Path | None) -> None:
    with TemporaryDirectory() as name:
        directory = (work or Path(name)) / cluster.replace(":", "-")
        checkpoint = directory / "t5"
        os.environ["XDG_CACHE_HOME"] = str(directory.resolve())  # the profile of a model that is deleted afterwards
        if not checkpoint.is_dir():
            write_checkpoint(checkpoint)
        started = time.perf_counter()
        lab, lengths, kept = Lab(checkpoint, cluster, seconds), workload(30), Kept(directory / "found.json")
        profile = profile_of(lab.plan(lengths, "orca", None), None)
        click.echo(f"profiled in {time.perf_counter() - started:.0f} s, or as kept, spread {profile.spread or 0.0:.1%}")
        bound_s, is_good = lab.bound(lengths), True
        best = lab.plan(lengths, "auto", bound_s)
        if "saturated" in (parts or PARTS):
            kept.add("saturated", list(lab.rows(lengths, bound_s)))
        if "rates" in (parts or PARTS):
            kept.add("rates", list(lab.rates(best)))
        if "change" in (parts or PARTS):
            about, is_good = replanned(best)
            kept.add("change", about)
        head = (
            f"`python -m benchmarks.encoder_decoder --cluster {cluster}`, 4 + 4 layers, 256 wide, {date.today()}, "
            f"{profile.device}, {profile.num_threads} threads; one profile, spread {profile.spread or 0.0:.1%}."
        )
        text = "\n".join([head, "", *kept.lines()])
        write_atomic(RESULTS, text)
        click.echo(text)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
