"""Show tables and progress on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from xgpt.core.errors import printable
from xgpt.core.schema.plan import rate_of
from xgpt.deciding.phrases import percent, range_in_words
from xgpt.deciding.recommend import name_of
from xgpt.deciding.verified import unverified
from xgpt.reporting.fleet import costs_rows, how_sure, kinds_rows, planned_for, unverified_kinds
from xgpt.reporting.plan_text import OF_WINDOW, bounds_in_words, settings_text
from xscheduler.expression import maximised
from xsimulator.fitted import Fit

if TYPE_CHECKING:
    from xgpt.core.schema import BenchReport, Calibration, Comparison, Decision, Plan, UrlReport
    from xgpt.core.schema.documents import CalibrateOutput, RangeOutput, SessionsOutput
    from xgpt.core.schema.fleet import FleetPlan
    from xsimulator.run import Simulated


def show(*parts: object) -> None:
    """Print tables and text on standard output. If the output is not a terminal, the width is 120 characters."""
    # Brackets and colons in the names of models and workloads are text, not markup.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=120)
    for part in parts:
        console.print(printable(part) if isinstance(part, str) else part)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    result = Table(title=printable(title), box=box.SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(columns):
        result.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        result.add_row(*map(printable, row))
    return result


class Fitting:
    """A table with lines of text below it. On a narrow terminal, it leaves out its least important columns until it
    fits.

    Args:
        least: names of the columns that may be left out, in this order.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        least: Sequence[str] = (),
        below: Sequence[str] = (),
    ) -> None:
        self.title, self.columns, self.rows = title, list(columns), rows
        self._least, self._below = least, below

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[object]:
        kept = list(range(len(self.columns)))
        for name in ("", *self._least):
            kept = [i for i in kept if self.columns[i] != name]
            fitting = table(self.title, [self.columns[i] for i in kept], [[row[i] for i in kept] for row in self.rows])
            if console.measure(fitting, options=options.update(width=1000)).maximum <= options.max_width:
                break
        yield fitting
        if len(kept) < len(self.columns):
            gone = [name for i, name in enumerate(self.columns) if i not in kept]
            yield f"  (not shown at this width: {', '.join(gone)})"
        yield from (f"  {line}" for line in self._below)


QUIET_S = 2.0
"""A command that ends within this number of seconds prints no progress."""


class ProgressBar:
    """Shows progress on standard error: a bar on a terminal, or else a line for each stage of long work."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("profiling")
        self._begin_s, self._shown = time.perf_counter(), ""

    def __call__(self, done: int, total: int, what: str) -> None:
        stage = what.partition(":")[0]
        if self._console.is_terminal:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=total, description=what)
        elif stage != self._shown and time.perf_counter() - self._begin_s > QUIET_S:
            click.echo(f"{stage} ...", err=True)
            self._shown = stage

    def pause(self) -> None:
        """Stop the bar until there is new progress, so that other text can be printed."""
        # A bar that never started would still print an empty line.
        if self._bar.live.is_started:
            self._bar.stop()


@contextmanager
def progress_bar() -> Iterator[ProgressBar]:
    bar = ProgressBar()
    try:
        yield bar
    finally:
        bar.pause()


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """Show an activity and its duration on standard error, if standard error is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with Bar(SpinnerColumn(), TextColumn(what), TimeElapsedColumn(), console=console, transient=True) as bar:
        bar.add_task(what, total=None)
        yield


LEAST = ("tok/s", "itl p99 ms", "whole s", "ttft s", "cost/Mtok", "gap", "tpot ms")
"""Columns of plans that are left out on a narrow terminal, in this order."""


def plans_table(plans: dict[str, Plan], title: str = "each plan") -> Fitting:
    """Return a table of each plan's figures, including the arrival rate and the throughput at saturation."""
    rows = []
    for kind, plan in plans.items():
        e = plan.estimate
        rows.append(
            [
                kind,
                f"{rate_of(plan):.3f}" if e.capacity or not plan.constraint.bounds_latency else "-",
                f"{e.capacity.whole_s:.2f}" if e.capacity and e.capacity.rate_per_s else "-",
                f"{e.throughput_rps:.3f}",
                f"{e.latency_s:.2f}",
                f"{e.output_tokens_per_s:.1f}",
                f"{e.ttft_s:.2f}",
                "-" if plan.constraint.tpot_s is None else f"{1000 * e.tpot_s:.0f}",
                f"{1000 * e.itl_p99_s:.0f}",
                "-" if plan.search.gap is None else f"{100 * plan.search.gap:.1f}%",
                "-" if e.cost_per_million_tokens is None else f"{e.cost_per_million_tokens:.3g}",
            ]
        )
    columns = [
        "policy",
        "arrivals/s",
        "whole s",
        "req/s",
        "latency s",
        "tok/s",
        "ttft s",
        "tpot ms",
        "itl p99 ms",
        "gap",
        "cost/Mtok",
    ]
    known = [
        i
        for i, name in enumerate(columns)
        if name not in ("whole s", "tpot ms", "cost/Mtok") or any(row[i] != "-" for row in rows)
    ]
    first = next(iter(plans.values()))
    arrives = first.constraint.maximises_arrivals
    what = "arrival rate" if arrives else "saturated throughput"
    what += "" if first.workload.sessions is None else " of turns"
    title = f"{title}'s highest {what} within the bounds"
    title += "; from req/s on: while requests are always waiting" if arrives else ""
    below = [f"{kind}: {settings_text(plan)}" for kind, plan in plans.items()]
    return Fitting(title, [columns[i] for i in known], [[row[i] for i in known] for row in rows], LEAST, below)


def relaxed_table(best: Plan, relaxed: dict[float | None, Plan]) -> Fitting:
    """Return a table of the highest rates under looser bounds, beside that of `best` under the given ones."""
    plans = {1.0: best, **relaxed}
    rows = [
        [
            "none" if factor is None else f"x{factor:g}: {bounds_in_words(best.constraint.looser(factor))}",
            f"{maximised(plan):.3f}",
            f"{100 * (maximised(plan) / maximised(best) - 1):+.1f}%",
        ]
        for factor, plan in plans.items()
    ]
    rate = "arrivals/s" if best.constraint.maximises_arrivals else "req/s"
    below = []
    for row, plan in zip(rows, plans.values(), strict=True):
        sure = f" (not verified: {', '.join(unsure)})" if (unsure := unverified(plan)) else ""
        below.append(f"{row[0].partition(':')[0]}: {name_of(plan)}: {settings_text(plan)}{sure}")
    title = f"gains of the highest rate under looser bounds, on {best.num_devices} devices"
    return Fitting(title, ["bounds", rate, "gain"], rows, below=below)


def assumptions_table(ranges: Mapping[str, RangeOutput]) -> Fitting:
    """Return a table of each plan's gain per device over the current deployment under each assumption."""
    short = {name: name if len(name) <= MOST_NAME else f"({i})" for i, name in enumerate(ranges, 1)}
    rows = [
        [name, *("-" if (gain := one.each.get(name)) is None else f"{gain:.2f}" for one in ranges.values())]
        for name in next(iter(ranges.values())).each
    ]
    below = [f"{said}: {name}" for name, said in short.items() if said != name]
    if any("-" in row for row in rows):
        below.append("-: what runs now, or the plan, keeps the bounds at no rate")
    return Fitting("gain per device", ["if", *short.values()], rows, below=below)


MOST_NAME = 8
"""Longest name of a plan that heads a column. Longer ones stand below the table."""
ENDS = ("_mean_s", "_p50_s", "_p90_s", "_p99_s")
TIMES = {"ttft": "time to first token, s", "tpot": "time per output token, s", "whole": "whole time, s"}
"""Labels of times that count from arrival, by the first part of a figure's name."""


SESSIONS = {
    "sessions_per_s": "sessions that begin in a second",
    "num_sessions": "sessions",
    "num_turns": "turns",
    "at_once": "sessions at once, mean",
    "reused_share": "share of prompt tokens found in the cache",
    "goodput": "share of turns within all bounds",
    "goodput_of_sessions": "share of sessions within all bounds",
}
"""Labels of figures of sessions, without times."""


def sessions_tables(found: SessionsOutput, title: str = "sessions, simulated") -> list[Table]:
    """Return tables of the figures of sessions."""
    shown = found.model_dump(exclude_none=True)
    times = {"ttft_s": "time to first token, s", "tpot_s": "time per output token, s"}
    times |= {"wait_s": "a session's waiting, s", "time_s": "a session's time without pauses, s"}
    rows = [
        [label, f"{shown[name]:,}" if isinstance(shown[name], int) else f"{shown[name]:.4g}"]
        for name, label in SESSIONS.items()
        if name in shown
    ]
    if found.reused_by_turn:
        rows.append(["share found in the cache, by turn", ", ".join(f"{share:.2f}" for share in found.reused_by_turn)])
    ends = ("mean", "p50", "p90", "p99")
    of_times = [[label, *(f"{shown[name].get(end, 0.0):.4g}" for end in ends)] for name, label in times.items()]
    return [table(title, ["figure", "value"], rows), table("times", ["", *ends], of_times)]


SIMULATED = {
    "num_requests": "requests",
    "window_s": "measured, s",
    "throughput_rps": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "latency_s": "from admission to the last token, at the length of the bound, s",
    "request_latency_s": "from admission to the last token, at the bound's quantile of requests, s",
    "ttft_s": "from admission to the first token, mean, s",
    "itl_p99_s": "gap between tokens, p99, s",
    "preemptions": "preemptions",
    "encode_batch": "prompts in a step with prompts",
    "decode_batch": "requests in a step that decodes",
    "idle_share": "share of the time in which a stage idles",
    "reused_share": "share of prompt tokens found in the cache",
    "goodput": "share of requests within all bounds",
}
"""Labels of a simulated run's figures, without the times that count from arrival."""


def simulated_tables(run: Simulated) -> list[Table]:
    """Return tables of a simulated run's figures beside the plan's bounds. If requests arrive at a rate, their times
    are in a separate table.
    """
    figures, constraint = run.figures, run.plan.constraint
    bounded = "request_latency_s" if constraint.sla == "request" else "latency_s"
    whole = _bound(constraint.latency_bound_s, constraint.quantile)
    shares = {"goodput": percent(constraint.quantile)} if constraint.bounds_latency else {}
    bounds = {bounded: _bound(constraint.latency_bound_s)} | shares
    rows = [
        [
            label,
            f"{figures[name]:,}" if isinstance(figures[name], int) else f"{figures[name]:.4g}",
            bounds.get(name, ""),
        ]
        for name, label in SIMULATED.items()
        if name in figures and name != "goodput"
    ]
    if "goodput" in figures:
        rows.append([SIMULATED["goodput"], percent(figures["goodput"]), shares.get("goodput", "")])
    rows += [[f"share of {name} within its bounds", percent(share), ""] for name, share in run.kept.items()]
    found = [table(f"{run.plan.policy.kind}, simulated", ["", "", "bound"], rows)]
    if run.times is not None:
        at = {
            "ttft": _bound(constraint.ttft_s, constraint.ttft_quantile),
            "tpot": _bound(constraint.tpot_s, constraint.tpot_quantile),
            "whole": whole,
        }
        rows = [
            [label, *(f"{figures[name + end]:.4g}" if name + end in figures else "-" for end in ENDS), at[name]]
            for name, label in TIMES.items()
        ]
        found.append(table("from arrival, waiting included", ["", "mean", "p50", "p90", "p99", "bound"], rows))
    return found


def _bound(bound: float | None, quantile: float | None = None) -> str:
    """Return a bound, and the quantile for which it holds, in words."""
    if bound is None:
        return ""
    return f"{bound:g}" + (f" (p{100 * quantile:g})" if quantile else "")


METRICS = {
    "throughput_rps": "throughput, req/s",
    "latency_s": "latency at the quantile's length, s",
    "ttft_s": "time to first token, s",
    "itl_p99_s": "inter-token latency p99, s",
} | {f"{name}{end}": label.replace(", s", f" {end.split('_')[1]}, s") for name, label in TIMES.items() for end in ENDS}


OF_URL = {
    **{name: METRICS[name] for name in ("throughput_rps", "ttft_p50_s", "ttft_p99_s", "itl_p99_s")},
    "output_tokens_per_s": "output tokens/s",
    "end_to_end_p50_s": METRICS["whole_p50_s"],
    "end_to_end_p99_s": METRICS["whole_p99_s"],
}
"""Labels of an endpoint's figures."""
SHOWN = ("throughput_rps", "latency_s", "ttft_s", "ttft_p50_s", "ttft_p99_s", "itl_p99_s", "whole_p50_s", "whole_p99_s")
"""Figures in the table of a measured plan. --json has all figures."""


def bench_table(report: BenchReport) -> Table:
    """Return a table of predicted and measured figures with their errors.

    If requests arrive at a rate, their times count from arrival. The latency from admission is then left out.
    """
    arrives = report.arrival_rate_per_s is not None
    rows = [
        [METRICS[f.metric], f"{f.predicted:.3f}", _range(f), f"{f.measured:.3f}", f"{100 * f.error:+.1f}%"]
        for f in report.figures
        if f.metric in SHOWN and not (arrives and f.metric == "latency_s")
    ]
    load = f"at {report.arrival_rate_per_s:.4g} requests/s" if arrives else "always waiting"
    title = f"{report.policy} on {report.workload}"
    found = table(title, ["", "predicted", "usual range", "measured", "error"], rows)
    found.caption, found.caption_justify = f"{report.num_requests} requests {load}, {report.window_s:.0f} s", "left"
    return found


def _range(figure: Comparison) -> str:
    return "-" if figure.low is None or figure.high is None else range_in_words(figure.low, figure.high)


def bench_report(report: BenchReport) -> list[object]:
    notes = bench_notes(report)
    if report.calibration is not None:
        notes += calibration_notes(report.calibration)
    return [bench_table(report), *notes]


def bench_notes(report: BenchReport) -> list[str]:
    """Return lines on the bounds, on failed requests, and, if steps took longer than the plan allows, on likely
    disturbances.
    """
    notes = [] if report.differences is None else [report.differences]
    if report.bound_kept is not None and report.share_within_bound is not None:
        kept = "kept" if report.bound_kept else "BROKEN"
        share = f"{100 * report.share_within_bound:.1f}% of all requests"
        if report.counts_waiting:
            notes.append(f"bounds: {kept}; {share} kept all bounds, counted from arrival")
        else:
            bound = f"latency bound {report.latency_bound_s:g} s"
            notes.append(f"{bound}: {kept}, counted from admission as in the plan; {share} kept it")
    if report.arrival_rate_per_s is None:
        throughput = report.figure("throughput_rps")
        if report.pace is not None and throughput.at_pace is not None:
            drawn = report.pace * throughput.at_pace / throughput.predicted - 1
            notes.append(
                "the measured requests were drawn at random, and their lengths alone change throughput by "
                f"{100 * drawn:+.1f}%"
            )
        notes.append(f"p99 from sending a request to its last token, waiting included: {report.end_to_end_p99_s:.2f} s")
    if report.pace is not None and (report.is_disturbed or report.is_outside):
        notes.append(_diagnosis(report))
    notes.append(f"plan {report.plan_sha256[:12]}; failed requests: {report.num_failed}")
    notes += [f"failure: {failure}" for failure in report.failures]
    return notes


def _diagnosis(report: BenchReport) -> str:
    assert report.pace is not None
    allowed = f"the plan allows {report.headroom:.0%} longer"
    line = f"diagnosis: steps took {_longer(report.pace)} than in the profile ({allowed})"
    if (waits := report.core_waits) is not None and waits.share_of_steps > 0:
        share = f"{waits.share_of_steps:.1%} of the steps ({waits.seconds:.1f} s in all)"
        line += (
            f"; {share} waited for cores that other threads used, and without these waits steps would have taken "
            f"{_longer(waits.pace)} than in the profile"
        )
    rates = report.calibration_gflops
    if len(rates) == 2:
        line += f"; the machine computed {rates[0]:.0f} GFLOP/s before the run and {rates[1]:.0f} after it"
    left = report.figure("throughput_rps").error_at_pace
    return line if left is None else f"{line}; predicted with these step times, throughput has an error of {left:+.1%}"


def _longer(pace: float) -> str:
    return f"{100 * abs(pace - 1):.0f}% {'longer' if pace >= 1 else 'shorter'}"


URL_NOTES = {
    "token_ids": [],
    "usage": [
        "the server sends no token ids: times to first token and between tokens are times of chunks of text, and the "
        "server counts the tokens"
    ],
    "chunks": ["the server sends neither token ids nor usage: each chunk of text counts as one token"],
}


def url_report(report: UrlReport) -> list[object]:
    """Return the table of a measured endpoint, and a note on how its tokens were counted."""
    rows = [[label, f"{getattr(report, name):.3f}"] for name, label in OF_URL.items()]
    found = table(f"{report.url}, {report.workload}, as measured by the client", ["", "measured"], rows)
    found.caption, found.caption_justify = f"{report.num_requests} requests", "left"
    return [found, *URL_NOTES[report.tokens_from], f"failed requests: {report.num_failed}"]


def calibrated_tables(found: CalibrateOutput) -> tuple[Fitting, ...]:
    names = {"throughput_rps": "requests/s", "ttft_s": "first token, s", "tpot_s": "between tokens, s"}
    rows = [
        [
            load.source if name == "throughput_rps" else "",
            label,
            f"{load.measured[name]:.4g}",
            f"{100 * load.before[name]:+.1f}%",
            f"{100 * load.after[name]:+.1f}%",
            "yes" if load.used else "no",
        ]
        for load in found.loads
        for name, label in names.items()
    ]
    fit = Fit(found.decode, found.prefill, found.step_s, found.path_s)
    below = ["nothing was changed: the prediction is good" if fit == Fit() else f"fitted: {fit.text}"]
    below += [f"hardly known is {text}" for text in found.unknown]
    if all(load.used for load in found.loads):
        below.append("give several loads: with only one, the error on other loads is not known")
    return (
        Fitting(
            "error of the prediction, before and after the fit",
            ["load", "figure", "measured", "before", "after", "used"],
            rows,
            below=below,
        ),
    )


def decision_table(decision: Decision) -> Fitting:
    rows, below = [], []
    other = "best other" if decision.action == "keep" else "best"
    for name, outcome in (("running", decision.running), (other, decision.best)):
        if outcome is not None:
            policy = outcome.policy
            settings = ", ".join(f"{variable.name} {getattr(policy, variable.name)}" for variable in policy.variables)
            holds = {None: "-", True: "yes", False: "NO"}[outcome.keeps_bound]
            rate = "-" if outcome.arrival_rate_per_s is None else f"{outcome.arrival_rate_per_s:.3f}"
            figures = (rate, f"{outcome.throughput_rps:.3f}", f"{outcome.latency_s:.2f}", holds)
            rows.append([f"{name}: {policy.kind}", *figures])
            below.append(f"{name}: {settings}")
    title = f"plans under {decision.num_requests} observed requests"
    time = "latency s" if decision.running.arrival_rate_per_s is None else "whole s"
    return Fitting(title, ["plan", "arrivals/s", "req/s", time, "holds this load"], rows, below=below)


def calibration_notes(calibration: Calibration) -> list[str]:
    factors = ", ".join(f"{part} x{factor:.3f}" for part, factor in calibration.factors.items())
    return [
        f"calibrated on {calibration.num_steps_used} steps: {factors}",
        f"{calibration.num_steps_unused} other steps check the fit: the error of a step's time went from "
        f"{100 * calibration.error_before:.1f}% to {100 * calibration.error_after:.1f}%, and the error of their total "
        f"time from {100 * calibration.bias_before:+.1f}% to {100 * calibration.bias_after:+.1f}%",
    ]


def fleet_summary(fleet: FleetPlan) -> Iterator[object]:
    constraint, plan = fleet.constraint, fleet.kinds[0].plan
    share = f"{100 * constraint.quantile:g}%"
    kept = f"{share} of {OF_WINDOW[fleet.slo_window]} keep {bounds_in_words(constraint)}"
    yield f"{plan.model.name}, {fleet.name}: {kept}"
    what = "kinds of replicas, with the arrivals/s that each sustains under each of the day's lengths"
    columns, rows = kinds_rows(fleet)
    settings = [f"{name}: {text}" for name, text, *_ in rows]
    figures = [[name, *others] for name, _, *others in rows]
    yield Fitting(what, [columns[0], *columns[2:]], figures, ["start s", "cost/1000"], settings)
    yield day_table(fleet)
    yield table("the day's cost", *costs_rows(fleet))
    over, gap = fleet.constant.figures.cost / max(fleet.planned.cost, 1e-12) - 1, 100 * fleet.gap
    words = planned_for(fleet)
    yield f"{words[0].lower()}{words[1:]}, at the predicted step times"
    yield from filter(None, (how_sure(fleet), unverified_kinds(fleet)))
    yield (
        f"proof: no fleet of these replicas whose arrivals/s come to {fleet.load_factor:.2f} times the load in each "
        f"interval costs over {gap:.2f}% less; if starting and stopping them took no time and cost nothing, it would "
        f"still cost {fleet.least_cost:.4g}" + ("" if fleet.is_priced else " device-hours")
    )
    yield f"the cheapest constant fleet of them costs {100 * over:.0f}% more"
    yield (
        f"planned in {fleet.planning_s:.1f} s; {fleet.num_requests} requests simulated several times in "
        f"{fleet.verifying_s:.1f} s"
    )


def day_table(fleet: FleetPlan) -> Table:
    """Return a table of the day. Consecutive intervals with the same replicas and lengths share a row."""
    rows = []
    numbered = enumerate(fleet.intervals)
    for _, part in groupby(numbered, key=lambda item: (item[1].replicas, item[1].lengths)):
        stretch = list(part)
        first, intervals = stretch[0][0], [interval for _, interval in stretch]
        kept = [interval.within for interval in intervals if interval.within is not None]
        rows.append(
            [
                f"{_clock(fleet.edges_s[first])} - {_clock(fleet.edges_s[first + len(intervals)])}",
                f"{min(one.rate_per_s for one in intervals):.2f} - {max(one.rate_per_s for one in intervals):.2f}",
                str(intervals[0].lengths),
                fleet.in_words(intervals[0].replicas) or "none",
                f"{100 * min(kept):.1f}%" if kept else "-",
            ]
        )
    return table("the day, from its start", ["time", "requests/s", "lengths", "replicas", "kept at least"], rows)


def _clock(seconds: float) -> str:
    """Return seconds since midnight as a time of day, as in 2:30 for 9000."""
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d}" if seconds % 60 == 0 or seconds > 3600 else f"{seconds:g} s"
