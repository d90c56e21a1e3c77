"""xgpt bench"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import Decimal, Whole, batching_option, engine_option, json_option


@click.command("bench")
@click.argument("target", metavar="PLAN.JSON|URL")
@click.option("--workload", help="Name, YAML file, CSV or JSON lines; the plan's own by default.")
@click.option(
    "--requests", "num_requests", type=Whole(1), default=300, show_default=True, help="Number of requests to send."
)
@click.option(
    "--arrival-rate",
    "arrival_rate_per_s",
    type=Decimal(0, min_open=True),
    metavar="R",
    help="Poisson arrivals a second. Default: requests are always waiting.",
)
@click.option(
    "--concurrency", type=Whole(1), default=32, show_default=True, help="Outstanding requests, where a URL is given."
)
@click.option("--stream", is_flag=True, help="Have answers streamed, as those of a URL always are.")
@click.option(
    "--calibrate", "calibrated_path", metavar="FILE", help="Fit the profile to the measured steps, and write it."
)
@click.option("--profile", metavar="FILE", help="The plan's profile. Default: the one kept on this machine.")
@click.option(
    "--ca-file", metavar="FILE", help="Certificate authorities for an https URL, in PEM. Default: the system's."
)
@engine_option
@batching_option
@click.option("--seed", type=Whole(0), default=0, show_default=True, help="Seed of lengths and arrivals.")
@json_option
def command(target: str, calibrated_path: str | None, as_json: bool, **asked: Any) -> None:
    """Replay a workload, and set what the plan predicts against what is measured.

    A URL that demands an API key has it from the environment variable XGPT_API_KEY.

    \b
    Examples:
      xgpt bench plan.json --requests 300
      xgpt bench plan.json --calibrate profile.json && xgpt plan --profile profile.json --latency-bound 9.8
      xgpt bench http://127.0.0.1:8000 --workload chat-short --concurrency 16
    """
    from pathlib import Path

    from xgpt import api
    from xgpt.cli import render
    from xgpt.io import dump_json, write_atomic
    from xgpt.schema import UrlReport

    found = api.bench(target, calibrate=calibrated_path is not None, **asked)
    report = found.report
    if calibrated_path is not None and found.profile is not None:
        write_atomic(Path(calibrated_path), dump_json(found.profile))
    if as_json:
        click.echo(dump_json(report), nl=False)
    elif isinstance(report, UrlReport):
        render.show(render.url_table(report))
    else:
        notes = render.bench_notes(report)
        if calibrated_path is not None and report.calibration is not None:
            notes += render.calibration_notes(report.calibration, calibrated_path)
        render.show(render.bench_table(report), *notes)
