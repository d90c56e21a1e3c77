"""T5 on devices of this machine, from a checkpoint to a served plan that is re-planned.

    python -m benchmarks.encoder_decoder [--cluster local:2] [--seconds 12] [--markdown FILE]

A checkpoint of T5's shape with random weights is profiled, planned for under every policy without a bound and under
one, and each plan is served and measured while requests always wait. Then the plan of `auto` under the bound is served
while outputs become three times as long, and re-planned. Ends with 1 where a request is lost, or none of the decisions
changes the plan.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np

import xgpt
from benchmarks.lib.changing_lengths import Phase, real
from xgpt.app.plan_text import placement_in_words, settings_text
from xgpt.app.profiles import profile_of
from xgpt.app.simulating import requests_to_send
from xgpt.errors import InfeasibleError
from xgpt.io import write_atomic
from xgpt.schema import Histogram, Plan, Workload

SIZES = {"d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 1024, "num_layers": 4, "vocab_size": 2048}
POLICIES = ("rra", "waa", "orca", "static")
BOUND_FACTOR = 2.0
"""The bound over the tightest that every policy keeps."""
LEAST, MOST = 60, 1500
"""Requests of a measurement."""
BEFORE, AFTER = 200, 1000
"""Requests before and after outputs become longer."""


def workload(mean_output: int) -> Workload:
    """Prompts of 100 tokens in the mean, and outputs up to three times the mean, longer ones ever rarer."""
    rng = np.random.default_rng(0)
    inputs = np.clip(rng.lognormal(np.log(85), 0.6, 5000), 4, 400)
    outputs = np.clip(rng.lognormal(np.log(0.85 * mean_output), 0.6, 5000), 1, 3 * mean_output)
    return Workload(name=f"{mean_output} tokens out", input=_histogram(inputs), output=_histogram(outputs))


def _histogram(lengths: np.ndarray[Any, Any]) -> Histogram:
    values, counts = np.unique(lengths.astype(int), return_counts=True)
    return Histogram(lengths=tuple(values.tolist()), probabilities=tuple((counts / counts.sum()).tolist()))


def write_checkpoint(directory: Path) -> None:
    """Save T5 with random weights, as `transformers` does."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(
        transformers.T5Config(decoder_start_token_id=0, **SIZES)  # type: ignore[arg-type]
    ).save_pretrained(directory)


class Lab:
    """Plans of the checkpoint on this machine."""

    def __init__(self, directory: Path, cluster: str, seconds: float) -> None:
        self._of: dict[str, Any] = {"model": directory, "cluster": cluster, "objective": "saturated"}
        self._seconds = seconds

    def plan(self, lengths: Workload, policy: Any, bound_s: float | None) -> Plan:
        return xgpt.plan(**self._of, workload=lengths, policy=policy, latency_bound_s=bound_s)

    def bound(self, lengths: Workload) -> float:
        nearest = []
        for policy in POLICIES:
            try:
                self.plan(lengths, policy, 1e-6)
            except InfeasibleError as error:
                assert error.nearest_bound_s is not None
                nearest.append(error.nearest_bound_s)
        return round(BOUND_FACTOR * max(nearest), 2)

    def row(self, plan: Plan) -> list[str]:
        """One plan, served: predicted and measured, and the error at the pace of the measured steps."""
        wanted = round(self._seconds * plan.estimate.throughput_rps) - requests_to_send(plan, 0, saturated=True)
        report = xgpt.bench(plan, num_requests=int(np.clip(wanted, LEAST, MOST))).report
        bound = plan.constraint.latency_bound_s
        cells = ["none" if bound is None else f"{bound:g}", plan.policy.kind, settings_text(plan)]
        cells += [placement_in_words(plan), f"{report.num_requests}, {report.num_failed} failed"]
        cells.append("-" if report.pace is None else f"{report.pace:.3f}")
        for metric in ("throughput_rps", "latency_s"):
            figure = report.figure(metric)
            at_pace = "-" if figure.error_at_pace is None else f"{figure.error_at_pace:+.1%}"
            cells += [f"{figure.predicted:.2f}", f"{figure.measured:.2f}", f"{figure.error:+.1%}", at_pace]
        return cells

    def rows(self, lengths: Workload, bound_s: float) -> Iterator[list[str]]:
        for bound in (None, bound_s):
            for policy in POLICIES:
                yield self.row(self.plan(lengths, policy, bound))


def replanned(lab: Lab, bound_s: float) -> tuple[list[str], bool]:
    """Lines on a plan that is served while outputs become longer, and whether all went well."""
    before, after = workload(30), workload(90)
    plan = lab.plan(before, "auto", bound_s)
    phases = [Phase(before, BEFORE), Phase(after, AFTER)]
    run = real(plan, phases, np.random.default_rng(0))
    changes = [decision for _, decision in run.changes if decision.action != "keep"]
    tail = run.tail(plan, after, BEFORE + AFTER // 2, AFTER // 4)
    lines = [
        f"{plan.policy.kind}, {settings_text(plan)}, {placement_in_words(plan)}, bound {bound_s:g} s, served; after "
        f"{BEFORE} of {BEFORE + AFTER} requests outputs become three times as long. Lost: {run.num_lost}. Decisions:",
        "",
        *(f"- {decision.action}: {decision.reason}" for _, decision in run.changes),
        "",
        f"The third quarter of the longer ones: {tail.throughput_rps:.2f} requests/s, {tail.latency_s:.2f} s.",
    ]
    return lines, bool(changes) and not run.num_lost


COLUMNS = (
    *("bound s", "policy", "settings", "placement", "requests", "pace"),
    *("req/s", "measured", "error", "at that pace", "latency s", "measured", "error", "at that pace"),
)


@click.command()
@click.option("--cluster", default="local:2", show_default=True)
@click.option("--seconds", default=12.0, show_default=True, help="That each plan is measured, about.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write what was found here, too.")
def main(cluster: str, seconds: float, markdown: Path | None) -> None:
    with TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name  # of a model that is gone afterwards
        write_checkpoint(directory := Path(name) / "t5")
        started = time.perf_counter()
        lab, lengths = Lab(directory, cluster, seconds), workload(30)
        profile = profile_of(lab.plan(lengths, "orca", None), None)
        lines = [
            f"`python -m benchmarks.encoder_decoder --cluster {cluster}`, 4 + 4 layers, 256 wide, {date.today()}, "
            f"{profile.device}, {profile.num_threads} threads; profiled in {time.perf_counter() - started:.0f} s, "
            f"spread {profile.spread or 0.0:.1%}.",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + "---|" * len(COLUMNS),
        ]
        click.echo("\n".join(lines))
        bound_s = lab.bound(lengths)
        for row in lab.rows(lengths, bound_s):
            lines.append("| " + " | ".join(row) + " |")
            click.echo(lines[-1])
        about, is_good = replanned(lab, bound_s)
        click.echo("\n".join(about))
        if markdown is not None:
            write_atomic(markdown, "\n".join([*lines, "", *about, ""]))
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
