"""Run `xgpt check`, `xgpt tune` and `xgpt watch`, and print their tables."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from xgpt import api
from xgpt.cli import options, render
from xgpt.cli.options import output_file, write
from xgpt.core.errors import printable
from xgpt.core.io import dump_json
from xgpt.core.processes import stops_on_signal
from xgpt.core.schema.tuning import CheckOutput, TuneRun, WatchAlarm
from xgpt.reporting import tuning as tuned
from xgpt.tuning.tune import Told
from xsimulator.fitted import Fit

if TYPE_CHECKING:
    from xgpt.tuning.check import LoadToSend
    from xscheduler.tuning.belief import Standing

LABELS = {
    "share_kept": "share within the bounds",
    "ttft_mean_s": "TTFT, mean, s",
    "ttft_quantile_s": "TTFT, quantile, s",
    "tpot_mean_s": "TPOT, mean, s",
    "tpot_quantile_s": "TPOT, quantile, s",
    "whole_quantile_s": "whole time, quantile, s",
    "session_wait_quantile_s": "a session's waiting, quantile, s",
    "session_time_quantile_s": "a session's time, quantile, s",
    "reused_share": "share of prompt tokens found",
}


def check(target: str, as_json: bool, yes: bool, **_: Any) -> None:
    def may_send(sending: LoadToSend) -> bool:
        click.echo(printable(sending.text), err=True)
        if yes or not (sending.serving or 0):
            return True
        says = f"the server has {sending.serving:.0f} requests of others now, which this load slows; send it"
        return click.confirm(says, err=True)

    found = api.check(target, may_send=may_send, **options.given())
    if as_json:
        click.echo(dump_json(found), nl=False)
    else:
        render.show(*_checked(found))


def _checked(found: CheckOutput) -> Iterator[object]:
    yield from tuned.advice_text(found.recommendation)
    yield from tuned.unexplained(found)
    rows = []
    for load, predicted in zip(found.loads, found.predicted, strict=True):
        what = "requests" if load.num_sessions is None else "sessions"
        for name, label in LABELS.items():
            value, bound = getattr(load, name), found.bounds.get(name)
            if value is None:
                continue
            off = f"{round(100 * (value / predicted[name] - 1)):+d}%" if predicted[name] else "-"
            first = f"{load.rate_per_s:.3g} {what}/s" if name == "share_kept" else ""
            shown = "-" if bound is None else f"{bound:g}"
            rows.append([first, label, f"{value:.4g}", f"{predicted[name]:.4g}", off, shown])
    columns = ["load", "", "measured", "predicted", "difference", "bound"]
    yield render.table("measured by this client, beside the prediction for the same load", columns, rows)
    failed = sum(load.num_failed for load in found.loads)
    if failed:
        yield f"failed {what}: {failed}"
    yield f"fit: {Fit(**found.fit).text}"
    after, before = tuned.ranged_text(found.rate_after), tuned.ranged_text(found.rate_before)
    yield f"within the bounds: {after} {what}/s; before: {before}"


def tune(output: str | None, force: bool, as_json: bool, **_: Any) -> None:
    file = None if output is None else output_file(output)
    count = 0

    def start(command: str, rate_per_s: float) -> None:
        nonlocal count
        count += 1
        click.echo(printable(f"{count}. about {rate_per_s:.3g} requests/s expected: {command}"), err=True)

    def end(run: TuneRun, standing: Standing) -> None:
        sure = "" if standing.best is None else f"; best {standing.value:.3g}, {100 * standing.sure:.0f}% sure"
        click.echo(printable(f"   {tuned.run_text(run)}, {run.seconds:.0f} s{sure}"), err=True)

    def ask(command: str) -> str:
        click.echo(printable(command), err=True)
        return str(
            click.prompt("URL once it runs (empty: it does not start)", default="", show_default=False, err=True)
        )

    try:
        found = api.tune(told=Told(start, end), ask=ask, **options.given())
    except KeyboardInterrupt:
        journal = click.get_current_context().params["journal"]
        click.echo(f"the finished measurements are in {journal}: go on with --resume", err=True)
        raise
    if file is not None:
        write(file, dump_json(found))
    if as_json:
        click.echo(dump_json(found), nl=False)
        return
    measured = render.table("measurements", tuned.COLUMNS, tuned.rows_of(found))
    render.show(*tuned.advice_text(found.recommendation), measured, tuned.ended_text(found))


def watch(plan_path: str, **_: Any) -> None:
    def tell(alarm: WatchAlarm) -> None:
        more = "" if alarm.gain is None else f" ({100 * alarm.gain:+.0f}% requests/s)"
        act = f"; {alarm.action}{more}" if alarm.action else ""
        click.echo(printable(f"{datetime.now():%H:%M:%S} {alarm.text}{act}"))
        if alarm.command:
            click.echo(printable(f"command: {alarm.command}"))

    given = options.given()
    click.echo(printable(f"watching {' and '.join(given['engine'])} ..."), err=True)
    stop = Event()
    with stops_on_signal(stop):
        api.watch(plan_path, on_alarm=tell, stop=stop, **given)
