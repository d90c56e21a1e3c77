"""Write a self-contained HTML page about a plan, with its schedule, predicted figures and charts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.schema import Constraint, Histogram, Plan, Profile, Recommendation
from xgpt.core.schema.plan import rate_of
from xgpt.core.version import __version__
from xgpt.core.workload import ArrivalProcess
from xgpt.deciding import phrases, words
from xgpt.deciding.recommend import BOUNDED, recommend, times_at
from xgpt.pages import charts, render
from xgpt.reporting import figures
from xgpt.reporting.plan_text import (
    objective_in_words,
    placement_in_words,
    proof_in_words,
    schedule_in_words,
    settings_text,
)
from xscheduler.objectives.capacities import rated
from xscheduler.placement import Placement
from xscheduler.problem import Problem
from xscheduler.schedule import scheduler
from xscheduler.space import POLICIES, run_by, runnable
from xsimulator.capacity import Trial
from xsimulator.clock import Span as StageSpan
from xsimulator.measures import Measured, quantile_of
from xsimulator.run import run_simulation, simulate
from xsimulator.session_rate import SessionTrial
from xsimulator.sessions import places_in_sessions

if TYPE_CHECKING:
    from xgpt.pages.charts import Chart

NUM_REQUESTS = 400
"""Number of requests in the simulated run whose figures are shown next to the prediction."""
LOAD_WITHOUT_BOUNDS = 0.8
"""If a plan has no bounds, the arrival rate in its report is this share of the throughput at saturation."""
HISTOGRAM_BINS = 40


def report(plan: Plan, profile: Profile, rng: np.random.Generator, path: str = "plan.json") -> str:
    """Return the page as HTML that loads no other files.

    Args:
        path: the plan's file, for commands on the page.

    Raises:
        InputError: requests of the plan's workload do not fit into the plan's memory.
    """
    full = plan if plan.estimate.capacity else rated(plan, profile).proven(plan.ceiling, plan.search.rival)
    spans: list[StageSpan] = []
    measured, _ = simulate(plan, profile, plan.workload, NUM_REQUESTS, rng, on_span=spans.append)
    constraint = plan.constraint
    told = plan.recommendation or recommend({plan.policy.kind: full}, profile, path=path)
    said = words.lines(told, phrases.PAGE)
    if plan.recommendation is None:  # such as what runs now, which nobody advises to run
        said[0] = said[0].removeprefix("Run ")
    slowdown = plan.profile.slowdown
    slowed = "" if slowdown == 1 else f", with all times multiplied by {slowdown:.3g}"
    return render(
        "report.html",
        heading=f"{plan.model.name} on {plan.cluster.name}: {plan.policy.kind}",
        subject=(
            f"{plan.dtype}, {plan.num_devices} x {plan.cluster.device.name}, workload {plan.workload.name}, "
            f"{phrases.bounds_in_words(told.bounds, told.best.sessions) if told.bounds else 'no bounds'}"
        ),
        schedule=f"{plan.policy.kind}: {schedule_in_words(plan)}.",
        recommendation=said,
        cards=words.cards(told),
        warnings=plan.estimate.warnings,
        figures=_figures(full, measured),
        simulation=(
            f"Simulated: {measured.num_requests} requests of the plan's workload at saturation, with the engine's own "
            "scheduling rule and step times from the profile. Latency counts from admission. Headroom of the bounds: "
            f"{100 * constraint.headroom:.1f}%. Maximised: {objective_in_words(plan)}."
        ),
        arriving=_arriving(full, profile),
        classes=_classes(full, profile),
        charts=_charts(full, profile, spans, told),
        of_arrivals=constraint.maximises_arrivals,
        frontier="Your bounds at each load" if constraint.maximises_arrivals else "Throughput against latency",
        stages=[
            (
                number,
                stage.lane,
                ", ".join(map(str, stage.devices)),
                _layers(stage.decode_layers),
                "-" if stage.encode_layers is None else _layers(stage.encode_layers),
                f"{stage.tp}, experts in {stage.ep} parts" if stage.ep > 1 else stage.tp,
                f"{stage.kv_blocks:,}",
            )
            for number, stage in enumerate(plan.stages, 1)
        ],
        placement=f"{placement_in_words(plan)}; K/V blocks of {plan.block_size} tokens.",
        proof=f"Found by {plan.search.method}: {proof_in_words(plan)}.",
        provenance=[
            {"name": "settings", "value": settings_text(plan)},
            {"name": "profile", "value": f"{plan.profile.source}, sha256 {plan.profile.sha256}{slowed}"},
            {"name": "plan", "value": f"sha256 {plan.digest}"},
            {"name": "written by", "value": f"xgpt {__version__}"},
        ],
    )


def _figures(plan: Plan, measured: Measured) -> list[dict[str, str]]:
    e, c = plan.estimate, plan.constraint
    # Bounds on arriving requests do not apply at saturation.
    bounds = Constraint() if c.maximises_arrivals else c
    latency_s = measured.request_latency_s if c.sla == "request" else measured.latency_s

    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:,.{0 if value >= 1000 else 3}f}"

    def row(
        name: str, predicted: float | None, simulated: float | None, bound: float | None = None, field: str = ""
    ) -> dict[str, str]:
        least, most = e.ranges.get(field, (None, None))
        range_ = "-" if least is None or most is None else phrases.range_in_words(least, most)
        found = {"predicted": text(predicted), "simulated": text(simulated), "bound": text(bound)}
        return {"name": name, "range": range_} | found

    return [
        row("requests/s", e.throughput_rps, measured.throughput_rps, field="throughput_rps"),
        row("output tokens/s", e.output_tokens_per_s, measured.output_tokens_per_s),
        row(f"latency at {_ordinal(c.quantile)}, s", e.latency_s, latency_s, bounds.latency_bound_s, "latency_s"),
        row("time to first token, s", e.ttft_s, measured.ttft_s, bounds.ttft_s),
        row("time per output token, s", e.tpot_s, None, bounds.tpot_s),
        row("inter-token latency p99, s", e.itl_p99_s, measured.itl_p99_s, field="itl_p99_s"),
    ]


def _arriving(plan: Plan, profile: Profile) -> dict[str, object] | None:
    if plan.workload.sessions is not None:
        return _in_sessions(plan, profile)
    bounded = plan.constraint.bounds_latency
    rate = rate_of(plan) if bounded else LOAD_WITHOUT_BOUNDS * plan.estimate.throughput_rps
    times = Trial.of_rate(plan, profile).at(rate) if rate else None
    if times is None:
        return None
    seen = times.figures
    names = {"ttft": "time to first token, s", "tpot": "time per output token, s", "whole": "whole time, s"}
    rows = [
        (label, *(f"{seen.get(f'{name}_{end}_s', 0.0):,.3f}" for end in ("mean", "p50", "p90", "p99")))
        for name, label in names.items()
    ]
    goodput = f"; goodput: {100 * times.goodput(plan.constraint):.1f}% of them keep every bound" if bounded else ""
    return {"rows": rows, "text": f"Simulated: {rate:.4g} requests/s (Poisson); times count from arrival{goodput}."}


def _in_sessions(plan: Plan, profile: Profile) -> dict[str, object] | None:
    found = plan.estimate.sessions
    if found is None:
        return None
    run, _, counts = SessionTrial(plan, profile).at(found.rate_per_s)
    place = places_in_sessions(run.trace)
    rows = []
    for i, share in enumerate(found.reused_by_turn):
        waits = run.ttft_s[counts & (place == i)]
        if len(waits):
            ends = waits.mean(), *np.percentile(waits, (50, 90, 99))
            name = f"turn {i + 1}, {100 * share:.0f}% found: time to first token, s"
            rows.append((name, *(f"{value:,.3f}" for value in ends)))
    text = f"Simulated: {found.rate_per_s:.4g} sessions/s, about {found.at_once:.3g} at once. "
    return {
        "rows": rows,
        "text": text + " ".join(line for _, line in words.session_lines(found, plan.constraint.quantile)),
    }


def _classes(plan: Plan, profile: Profile) -> dict[str, object] | None:
    if not plan.constraint.classes or not (rate := rate_of(plan)):
        return None
    kept = run_simulation(plan, profile, None, NUM_REQUESTS, ArrivalProcess.at(rate)).kept

    def bound(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds:g}"

    rows = [
        (
            each.name,
            f"{100 * each.share:.0f}%",
            each.priority,
            *map(bound, (each.ttft_s, each.tpot_s, each.latency_bound_s)),
            f"{100 * kept[each.name]:.1f}%",
        )
        for each in plan.constraint.classes
    ]
    drawn = f"Simulated: {NUM_REQUESTS} requests, {rate:.4g} a second."
    return {"rows": rows, "text": f"{drawn} The plan is for the tightest bounds of all classes."}


def _charts(plan: Plan, profile: Profile, spans: list[StageSpan], told: Recommendation) -> dict[str, Chart]:
    of_arrivals = plan.constraint.maximises_arrivals
    return {
        "timeline": _timeline(plan, spans),
        "frontier": bounded_chart(plan, profile, told) if of_arrivals else _frontier(plan, profile),
        "memory": _memory(plan),
        "input": _histogram(plan.workload.input, "input tokens", beside=plan),
        "output": _histogram(plan.workload.output, "output tokens"),
    }


def _timeline(plan: Plan, spans: list[StageSpan]) -> Chart:
    shown = figures.timeline(plan, spans)
    times, sizes = zip(*shown.decoding, strict=True) if shown.decoding else ((), ())
    return charts.timeline(
        shown.bars,
        shown.rows,
        charts.Series("in decode", times, [float(size) for size in sizes]),
        alt=f"timeline of {len(plan.stages)} stages",
        caption=(
            "The steps of each stage of a replica, from the middle of the simulated run; below: the number of requests "
            "in decode."
        ),
    )


RATES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.05, 1.1, 1.2)
"""Arrival rates of the chart of bounded times, as shares of the plan's highest rate or, if it is 0, of saturation."""


def bounded_chart(plan: Plan, profile: Profile, told: Recommendation) -> Chart:
    most = rate_of(plan)
    end = most or plan.estimate.throughput_rps
    points: dict[str, list[tuple[float, float]]] = {bound.name: [] for bound in told.bounds}
    for share in RATES:
        seen = dict(zip(BOUNDED, times_at(plan, profile, share * end), strict=True))
        for bound in told.bounds:
            if (times := seen[bound.name]) is None or not len(times):
                continue
            points[bound.name].append((share * end, quantile_of(times, bound.quantile) / bound.bound_s))
    lines = [
        charts.Series(
            f"{bound.name} {_ordinal(bound.quantile)}, of {phrases.seconds(bound.bound_s)}",
            *zip(*points[bound.name], strict=True),
        )
        for bound in told.bounds
        if points[bound.name]
    ]
    load = told.best.at_load
    return charts.bounded(
        lines,
        None if load is None else load.rate_per_s,
        most,
        alt="bounded times of the plan at each arrival rate",
        caption=(
            "Your bounded times at each arrival rate, simulated from the predicted step times, each as a share of its "
            f"bound. The plan leaves a headroom of {100 * plan.constraint.headroom:.0f}%."
        ),
    )


def _frontier(plan: Plan, profile: Profile) -> Chart:
    relaxed = plan.constraint.but(latency_bound_s=None)
    search = scheduler(Problem.of(plan, profile).under(relaxed))
    lines = []
    for kind in run_by(plan.engine, plan.speculation, runnable(POLICIES, plan.model), plan.policy.kind):
        if points := figures.frontier(search.candidates.spaces(kind)):
            lines.append(charts.Series(kind, [p.latency_s for p in points], [p.throughput_rps for p in points]))
    if not lines:
        says = "it does not fit the plan's devices, since the plan was edited after planning: plan again"
        raise InputError("model", plan.model.name, says)
    end = max(line.x[-1] for line in lines)
    lines = [charts.Series(line.name, [*line.x, end], [*line.y, line.y[-1]]) for line in lines]
    here = search.score(plan.policy, Placement.of(plan)).estimate
    return charts.frontier(
        lines,
        (here.latency_s, here.throughput_rps),
        None if plan.constraint.maximises_arrivals else plan.constraint.latency_bound_s,
        alt="highest throughput of each policy against its latency",
        caption=(
            "The highest throughput of each policy at saturation, in closed form, by latency from admission; settings "
            "are on a grid, so a finer search may find slightly more."
        ),
    )


def _memory(plan: Plan) -> Chart:
    memory = figures.memory(plan)
    return charts.memory(
        [f"device {device}" for device in range(len(memory.kv))],
        {"weights, activations, workspace": memory.rest, "keys and values": memory.kv},
        memory.usable,
        alt="memory of each device",
        caption=f"Memory of each device of one replica; the plan may use {memory.usable:.1f} GiB.",
    )


def _histogram(lengths: Histogram, label: str, beside: Plan | None = None) -> Chart:
    """`beside`: the plan, if the longest length may be one that `within_context` has shortened beside its outputs."""
    values, weights = np.asarray(lengths.lengths, float), np.asarray(lengths.probabilities)
    longest = lengths.lengths[-1]
    edges = np.linspace(0.5, longest + 0.5, min(HISTOGRAM_BINS, longest) + 1)
    shares, _ = np.histogram(values, bins=edges, weights=weights)
    mean = float(weights @ values)
    said = f"the longest request has {longest}"
    if beside is not None and longest + beside.workload.output.lengths[-1] == beside.model.max_context:
        said = f"the longest counts as {longest}, so that it fits with the longest output"
    return charts.histogram(
        edges,
        shares,
        mean,
        label,
        alt=f"histogram of {label}, mean {mean:.0f}",
        caption=f"Planned share of requests by {label}; {said}.",
    )


def _layers(layers: tuple[int, int]) -> str:
    first, last = layers
    return "none" if first == last else f"{first} to {last - 1}"


def _ordinal(quantile: float) -> str:
    return f"p{100 * quantile:g}"
