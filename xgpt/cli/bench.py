"""xgpt bench"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli import options
from xgpt.cli.options import json_option, refuse_idle
from xgpt.cli.outputs import force_option, output_file, write


@options.command("bench")
@click.argument("target", metavar="PLAN.JSON|URL")
@click.option("--calibrate", metavar="FILE", help="Fit the plan's profile to the measured steps, and write it to FILE.")
@force_option
@json_option
def command(target: str, calibrate: str | None, force: bool, as_json: bool, **_: Any) -> None:
    """Replay a workload against a plan or an endpoint, and compare measured figures with the plan's predictions.

    A plan that was made for arrivals is measured at the arrival rate that it promises.

    The API key for a URL is read from the environment variable XGPT_API_KEY.

    \b
    Examples:
      xgpt bench plan.json --requests 300
      xgpt bench plan.json --calibrate profile.json && xgpt plan --profile profile.json --latency-bound 9.8
      xgpt bench plan.json --saturated
      xgpt bench http://127.0.0.1:8000 --workload chat-short --concurrency 16
      xgpt bench http://127.0.0.1:8000 --workload log.csv --arrival-rate 5
    """
    from xgpt import api
    from xgpt.cli import render
    from xgpt.core.io import dump_json
    from xgpt.core.schema import UrlReport

    if target.startswith(("http://", "https://")):
        refuse_idle(["engine"], "it goes with a plan; a URL has its own")
        refuse_idle(["saturated"], "it goes with a plan; a URL gets --arrival-rate or --concurrency")
    else:
        refuse_idle(["concurrency"], "it goes with a URL; a plan is measured with as many requests as it runs, or more")
    file = None if calibrate is None else output_file(calibrate, "calibrate")
    with render.at_work("serving requests"):
        found = api.bench(target, calibrate=calibrate is not None, **options.given())
    report = found.report
    if file is not None and found.profile is not None:
        write(file, dump_json(found.profile))
    if as_json:
        click.echo(dump_json(report), nl=False)
    elif isinstance(report, UrlReport):
        render.show(render.url_table(report))
    else:
        render.show(*render.bench_report(report))
