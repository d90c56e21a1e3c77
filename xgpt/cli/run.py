"""Run those commands of `commands.py` that print tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from xgpt import api
from xgpt.checkpoints import hub
from xgpt.cli import options, render
from xgpt.cli.options import output_file, refuse_idle, write
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.io import dump_json, load_json, sha256
from xgpt.core.schema import Plan, UrlReport
from xgpt.core.schema.documents import SessionsOutput, SimulateOutput
from xgpt.deciding import phrases, words
from xgpt.deciding.load import of_log
from xgpt.deciding.recommend import name_of, offer_of
from xgpt.reporting import plan_text
from xgpt.reporting.plan_text import settings_text
from xgpt.sessions import SimulatedSessions
from xprofiler.others import differences

if TYPE_CHECKING:
    from xgpt.core.load import LogLoad
    from xgpt.solving import Planned


def plan(output: str, force: bool, as_json: bool, explain: bool, **_: Any) -> None:
    file = output_file(output)
    with render.progress_bar() as progress:
        asked = {"latency_bound_s": None, **options.given(), "progress": progress, "path": output}
        planned, refusal = answered(lambda: api.solve(**asked))
    text = dump_json(planned.best)
    if refusal is None:
        write(file, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        page = f"A page: xgpt report {output}." if refusal is None else ""
        click.echo("\n".join(words.told(planned.recommendation, explain, page)))
        if explain:
            render.show("", *summary(planned))
    if refusal is not None:
        raise refusal


Answer = TypeVar("Answer")


def answered(find: Callable[[], Answer]) -> tuple[Answer, InfeasibleError | None]:
    """Return what is found or, with the refusal, what is told all the same."""
    try:
        return find(), None
    except InfeasibleError as error:
        if error.answer is None:
            raise
        return error.answer, error


def summary(planned: Planned) -> Iterator[object]:
    problem, best = planned.problem, planned.best
    bound = plan_text.bounds_in_words(best.constraint) or "no bounds"
    yield (
        f"{problem.model.name} on {problem.cluster.name} ({problem.cluster.device.name}), workload "
        f"{problem.workload.name}, {bound}"
    )
    yield f"maximised: {plan_text.objective_in_words(best)}; planned in {planned.planning_s:.1f} s"
    yield from plan_text.own_objective_in_words(planned.plans)
    for words_of in (plan_text.classes_in_words, plan_text.headroom_in_words, plan_text.engine_in_words):
        yield from words_of(best)
    yield from plan_text.ranges_in_words(best)
    shown = dict(planned.plans)
    for plan in planned.others:
        name = name_of(plan)
        shown[f"{name}, another" if name in shown else name] = plan
    yield render.plans_table(shown)
    yield from plan_text.missing_in_words(planned.request.policy, problem, planned.plans)
    yield f"chosen: {best.policy.kind}: {plan_text.schedule_in_words(best)}"
    if planned.fewest is not None and (why := planned.fewest.why_not_fewer):
        yield why
    if problem.cluster.num_devices > 1:
        yield f"placement: {plan_text.placement_in_words(best)}"
    yield from _memory(planned)
    yield f"proof: {plan_text.proof_in_words(best)}"
    yield from plan_text.arrivals_in_words(best)
    yield from plan_text.order_in_words(best)
    yield from plan_text.speculation_in_words(best, planned.ahead)
    for words_of in (plan_text.reuse_in_words, plan_text.mixing_in_words, plan_text.joint_in_words):
        yield from words_of(best)
    yield plan_text.profile_in_words(best)
    if best.cluster.is_local and (line := differences(problem.profile)) is not None:
        yield line
    yield from (f"warning: {warning}" for warning in best.estimate.warnings)
    if best.seeded_weights and best.cluster.is_local:
        yield f"warning: {best.seeded_weights}; to serve real weights, plan with --model DIRECTORY"
    elif best.seeded_weights:
        name = hub.id_of_shipped(best.model.name) or "DIRECTORY or --model ORGANISATION/NAME"
        yield f"weights: the plan names no checkpoint; to export it, plan with --model {name}"


def _memory(planned: Planned) -> list[str]:
    """Return what vLLM logs of K/V memory when the command of the best plan starts it."""
    from xgpt.comparing.launched import read_current
    from xgpt.comparing.scoring import memory_note

    told, problem, engine = planned.recommendation, planned.problem, planned.best.engine
    offer, on_gpu = told.rejected or told.best, planned.best.cluster.device.type == "gpu"
    if engine is None or engine.framework != "vllm" or offer.needs_xgpt or not on_gpu:
        return []
    return memory_note(problem, read_current(offer.processes[0].command, problem.cluster))


SHORT_S = 120
"""For a shorter interval, a note on the unit is printed, since such a number usually means minutes."""


def fleet(output: str, force: bool, as_json: bool, interval_s: float, **_: Any) -> None:
    if interval_s < SHORT_S:
        click.echo(
            f"note: --interval {interval_s:g} means {interval_s:g} seconds; for minutes give {60 * interval_s:g}",
            err=True,
        )
    file = output_file(output)
    with render.progress_bar() as progress:
        found = api.fleet(**{"latency_bound_s": None, **options.given()}, progress=progress)
    text = dump_json(found)
    write(file, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        render.show(*render.fleet_summary(found), f"next: xgpt report {output}")


def profile(output: str | None, force: bool, as_json: bool, engine: str, import_from: str | None, **_: Any) -> None:
    if engine == "vllm" and import_from is None and output is None and not as_json:
        raise InputError("output", None, "give -o FILE, then plan for vLLM with `xgpt plan --profile FILE`")
    file = None if output is None else output_file(output)
    with render.progress_bar() as progress:
        profile = api.profile(**options.given(), progress=progress)
    if file is not None:
        write(file, dump_json(profile))
    if as_json:
        click.echo(dump_json(profile), nl=False)
        return
    layer, num_layers = profile.layers[0], profile.model.num_layers
    rows = [
        [str(n), f"{1000 * num_layers * s:.2f}", f"{n / (num_layers * s):.0f}" if s else "-"]
        for n, s in zip(layer.rest.points, layer.rest.seconds, strict=True)
    ]
    notes = [
        f"{profile.source} on {profile.device}, {profile.num_threads or '-'} threads, spread "
        f"{100 * profile.spread:.1f}%, sha256 {sha256(profile)[:12]}"
    ]
    if profile.is_restless and profile.source == "measured":
        notes.append(f"warning: {profile.unrest}; measure again when the machine is idle")
    notes += [f"{part}: {source}" for part, source in profile.provenance.items()]
    render.show(render.table("all layers except attention", ["tokens", "ms", "tokens/s"], rows), *notes)


def simulate(
    plan_path: str, timeline: str | None, output: str | None, force: bool, as_json: bool, **asked: Any
) -> None:
    file = None if timeline is None else output_file(timeline, "timeline")
    requests = None if output is None else output_file(output)
    if not asked["own_times"]:
        refuse_idle(["output"], "it needs --own-times: only a replay of a trace has requests of its own")
    with render.at_work("simulating"):
        run = api.simulate(plan_path, keep_steps=file is not None, **options.given())
    if isinstance(run, SimulatedSessions):
        if file is not None:
            raise InputError("--timeline", timeline, "sessions are simulated by counts, without steps: leave it out")
        if requests is not None:
            raise InputError("--output", output, "sessions are simulated by turns: leave it out")
        click.echo(dump_json(run.output), nl=False) if as_json else render.show(*render.sessions_tables(run.output))
        return
    if file is not None:
        write(file, run.chrome_trace())
    if requests is not None:
        write(requests, run.requests_csv())
    if run.load is not None:
        _tell_share(run.load, asked["since_s"])
    kept = None
    if run.load is not None and run.windows is not None and run.windows.worst is not None:
        kept = of_log(run.load, run.windows, run.plan.constraint.quantile)
    if as_json:
        found = SimulateOutput.model_validate({**run.figures, "goodput_by_class": run.kept or None, "at_load": kept})
        click.echo(found.model_dump_json(indent=1, exclude_none=True))
    else:
        if kept is not None:
            text = f"Your load{'' if kept.holds else ', too much for this plan'}: {phrases.load_in_words(kept)}."
            text += f" {late}." if (late := phrases.late_in_words(kept, None)) else ""
            click.echo("\n".join([*phrases.wrapped(text), ""]))
        render.show(*render.simulated_tables(run))
        if not run.steps:
            click.echo(
                "note: with so many requests, single steps are not simulated, so gaps between tokens and idle shares "
                "are not known; --timeline simulates every step",
                err=True,
            )


def _tell_share(part: LogLoad, since_s: float) -> None:
    whole, number = (part.whole or part).part(since_s), len(part.requests.input)
    if (count := len(whole.requests.input)) > number:
        after = f" after --since {since_s:g}" if since_s else ""
        text = f"only the first {number:,} of {count:,} requests{after}; --requests all replays all of these"
        click.echo(f"note: the figures cover {text}", err=True)


def autoscale(fleet_path: str, simulated_trace: str, as_json: bool) -> None:
    with render.at_work("simulating"):
        followed = api.simulate_autoscale(fleet_path, simulated_trace)
    if as_json:
        click.echo(json.dumps(followed.figures, indent=1))
        return
    fleet, within = followed.fleet, followed.within
    kept = f"{phrases.percent(within.share)} of {followed.num_requests:,} requests"
    if within.worst is not None and within.worst_share is not None and within.worst_share < 1:
        kept += f", {phrases.percent(within.worst_share)} in the worst interval ({within.worst.name})"
    in_each = " in each, but for chance" if fleet.slo_window == "interval" else ""
    schedule = f"schedule of {Path(fleet_path).name} and the rule keep"
    followers = schedule if followed.has_schedule else "rule alone keeps"
    said = [f"The {followers} the bounds for {kept}; {100 * fleet.constraint.quantile:g}% must{in_each}."]
    if not followed.has_schedule:
        said.append("The fleet has no schedule, since its load is not a day long.")
    if not followed.holds:
        then = (
            "; if these differ, plan a fleet for this day" if followed.has_schedule else ", once replicas have started"
        )
        said.append(f"Too few: the rule follows the number of requests, not their lengths{then}.")
    click.echo("\n".join(line for text in said for line in phrases.wrapped(text)))
    rows = [
        ["share within the bounds less the headroom", phrases.percent(followed.share_kept)],
        ["device-hours", f"{followed.day.device_hours:.4g}"],
        *([["cost", f"{followed.day.cost:.4g}"]] if fleet.is_priced else []),
        ["starts of replicas, initial ones included", f"{len(followed.day.replicas)}"],
    ]
    render.show(render.table("the day on the simulated clock", ["figure", "value"], rows))


def bench(target: str, calibrate: str | None, force: bool, as_json: bool, **_: Any) -> None:
    if target.startswith(("http://", "https://")):
        refuse_idle(["engine"], "it applies only to a plan file: a server at a URL already runs an engine")
        refuse_idle(["saturated"], "it applies only to a plan file: for a URL give --arrival-rate or --concurrency")
    else:
        refuse_idle(
            ["concurrency"],
            "it applies only to a URL: for a plan file, as many requests as the plan can run are always outstanding",
        )
    file = None if calibrate is None else output_file(calibrate, "calibrate")
    with render.progress_bar() as progress:
        found = api.bench(target, progress=progress, calibrate=calibrate is not None, **options.given())
    report = found.report
    if file is not None and found.profile is not None:
        write(file, dump_json(found.profile))
    if as_json:
        click.echo(dump_json(report), nl=False)
    elif isinstance(report, SessionsOutput):
        render.show(*render.sessions_tables(report, "sessions, measured"))
    elif isinstance(report, UrlReport):
        render.show(*render.url_report(report))
    else:
        render.show(*render.bench_report(report))


def calibrate(
    plan_path: str,
    measured: tuple[str, ...],
    output: str | None,
    engine_output: str | None,
    force: bool,
    as_json: bool,
    **_: Any,
) -> None:
    file = None if output is None else output_file(output)
    engine_file = None if engine_output is None else output_file(engine_output, "engine_output")
    with render.at_work("simulating the measured loads"):
        found = api.calibrate(plan_path, measured, **options.given())
    if file is not None:
        write(file, dump_json(found.profile))
    if engine_file is not None:
        write(engine_file, dump_json(found.engine))
    if as_json:
        click.echo(dump_json(found.output), nl=False)
    else:
        render.show(*render.calibrated_tables(found.output))


def replan(plan_path: str, output: str | None, force: bool, as_json: bool, explain: bool, **_: Any) -> None:
    file = None if output is None else output_file(output)
    given = load_json(Path(plan_path), Plan, "plan")
    with render.at_work("searching for better plans"):
        found = api.replan(plan_path, path=output or "plan.json", **options.given())
    if file is not None:
        write(file, dump_json(found.plan))
    if as_json:
        click.echo(dump_json(found.decision), nl=False)
    else:
        decision, seen = found.decision, found.observation
        if (told := decision.recommendation) is not None:
            click.echo("\n".join(words.told(told, explain, words.change_in_words(decision))))
        else:
            then = None if decision.action == "keep" else offer_of(found.plan, path=output or "plan.json")
            click.echo("\n".join(words.decision_lines(decision, then)))
        distances = f"{seen.input_distance:.1f} (inputs) and {seen.output_distance:.1f} tokens (outputs)"
        notes = [f"Wasserstein distances from the plan's lengths: {distances}"] if explain else []
        if found.judged.deployed(pinned=given.pinned) != given:
            says = f"{given.policy.kind}: {settings_text(given)}"
            notes.insert(0, f"judged: the plan that the server runs now, which differs from {plan_path} ({says})")
        render.show(*([render.decision_table(decision)] if explain else []), *notes)
        if not explain and told is None:
            click.echo("Figures of both plans, distances of lengths: --explain.")


def report(plan_path: str, output: str, force: bool, **_: Any) -> None:
    file = output_file(output)
    with render.at_work("simulating, and drawing"):
        page = api.report(plan_path, **options.given())
    write(file, page)
