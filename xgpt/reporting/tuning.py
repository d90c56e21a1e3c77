"""Describe what a search by measurements found, as text and as a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xgpt.core.schema.recommendation import Ranged, Recommendation
from xgpt.core.schema.tuning import CheckOutput, TuneOutput, TuneRun
from xgpt.pages import render

if TYPE_CHECKING:
    from xgpt.pages.charts import Chart

COLUMNS = ("", "tokens a step", "requests", "within the bounds", "start s", "all s")


def advice_text(found: Recommendation) -> Iterator[str]:
    """Yield what to run, its gain over what runs now, and its command."""
    words = {"run": "run", "change": "change to", "keep": "keep"}
    unit = "requests/s within the bounds" if found.gain is None else found.gain.unit
    rate = f"{ranged_text(found.best.rate_per_s)} {unit}"
    yield f"{words[found.action]}: {found.best.settings}, {rate}; {found.why}"
    other = found.rejected if found.action == "keep" else found.best
    if found.gain is not None and found.gain.factor is not None and other is not None:
        yield f"{other.settings}: {ranged_text(found.gain.factor)} times the rate of what runs now"
    yield from (f"command: {process.command}" for process in found.best.processes if found.action != "keep")


def unexplained(found: CheckOutput) -> Iterator[str]:
    """Yield a line for each load that broke the bounds at a rate at which they should be kept."""
    what = "sessions" if any(load.num_sessions for load in found.loads) else "requests"
    for load in found.loads:
        if not load.kept and load.rate_per_s < found.rate_after.value:
            share = f" ({100 * load.share_kept:.3g}% kept them)" if load.share_kept else ""
            yield (
                f"measured, {load.rate_per_s:.3g} {what}/s broke the bounds{share}, which the fit does not explain: "
                "something else slowed the server, or the rate is wrong; check again before you rely on it"
            )


def ranged_text(value: Ranged) -> str:
    if value.low is None or value.high is None:
        return f"{value.value:.3g}"
    return f"{value.value:.3g} ({value.low:.3g} to {value.high:.3g})"


def run_text(run: TuneRun) -> str:
    """Return what a run measured, or why it measured nothing."""
    if run.start != "started":
        return f"{run.start}: {run.reason}"
    return f"{run.rate_per_s:.3g} requests/s ±{100 * run.error:.0f}%" if run.rate_per_s else "at no tried rate"


def rows_of(found: TuneOutput) -> list[list[str]]:
    """Return the cells of each run, under `COLUMNS`."""
    return [
        [
            str(number),
            str(run.token_budget),
            str(run.max_batch) + (f", {shlex.join(run.further)}" if run.further else ""),
            run_text(run),
            f"{run.start_s:.0f}",
            f"{run.seconds:.0f}",
        ]
        for number, run in enumerate(found.runs, 1)
    ]


def ended_text(found: TuneOutput) -> str:
    most = f"no setting keeps the bounds at more than {found.most_per_s:.3g} requests/s (with a probability of 95%)"
    return f"ended: {found.ended}; {most}"


def tune_report(found: TuneOutput) -> str:
    """Return a page about a search as HTML that loads no other files."""
    told = found.recommendation
    return render(
        "tune.html",
        heading=f"{told.model}: settings by measurement",
        subject=f"{told.devices}; {told.workload}",
        advice=list(advice_text(told)),
        chart=_rounds(found),
        columns=COLUMNS,
        rows=rows_of(found),
        ended=ended_text(found),
    )


def _rounds(found: TuneOutput) -> Chart:
    from xgpt.pages import charts

    rates = [run.rate_per_s for run in found.runs]
    best = max(rates, default=0.0)
    return charts.rounds(
        rates,
        [run.error * run.rate_per_s for run in found.runs],
        found.most_per_s,
        alt=f"rates of {len(rates)} measured settings, the best {best:.3g} requests/s",
        caption="Requests a second within the bounds, in the order of measurement. What did not start is at 0.",
    )
