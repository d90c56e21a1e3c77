"""xgpt bench"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from xgpt.cli.options import Decimal, Whole, engine_option, json_option

if TYPE_CHECKING:
    from xgpt.schema import EngineKind
    from xgpt.schema.step_log import StepRecord


@click.command("bench")
@click.argument("target", metavar="PLAN.JSON|URL")
@click.option("--workload", help="Name, YAML file, CSV or JSON lines; the plan's own by default.")
@click.option(
    "--requests", "num_requests", type=Whole(1), default=300, show_default=True, help="Number of requests to send."
)
@click.option(
    "--arrival-rate",
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
@click.option(
    "--profile", "profile_path", metavar="FILE", help="The plan's profile. Default: the one kept on this machine."
)
@click.option(
    "--ca-file", metavar="FILE", help="Certificate authorities for an https URL, in PEM. Default: the system's."
)
@engine_option
@click.option("--seed", type=Whole(0), default=0, show_default=True, help="Seed of lengths and arrivals.")
@json_option
def command(
    target: str,
    workload: str | None,
    num_requests: int,
    arrival_rate: float | None,
    concurrency: int,
    stream: bool,
    calibrated_path: str | None,
    profile_path: str | None,
    ca_file: str | None,
    engine: EngineKind,
    seed: int,
    as_json: bool,
) -> None:
    """Replay a workload, and set what the plan predicts against what is measured.

    A URL that demands an API key has it from the environment variable XGPT_API_KEY.

    \b
    Examples:
      xgpt bench plan.json --requests 300
      xgpt bench plan.json --calibrate profile.json && xgpt plan --profile profile.json --latency-bound 9.8
      xgpt bench http://127.0.0.1:8000 --workload chat-short --concurrency 16
    """
    from pathlib import Path

    import numpy as np

    from xgpt.app.bench import bench_plan, bench_url
    from xgpt.app.profiles import profile_of
    from xgpt.cli import render
    from xgpt.errors import InputError
    from xgpt.io import dump_json, load_json, write_atomic
    from xgpt.resolve import load_workload
    from xgpt.schema import Plan
    from xsimulator.calibrate import calibrate

    rng = np.random.default_rng(seed)
    if profile_path is not None and calibrated_path is None:
        raise InputError("--profile", profile_path, "it goes with --calibrate")
    if target.startswith(("http://", "https://")):
        if calibrated_path is not None:
            raise InputError("--calibrate", calibrated_path, "a URL tells no steps; give a plan")
        if arrival_rate is not None:
            raise InputError("--arrival-rate", arrival_rate, "a URL is measured in a closed loop; give --concurrency")
        lengths = load_workload(workload or "summarization")
        trusted = None if ca_file is None else Path(ca_file)
        url_report = bench_url(target, lengths, num_requests, concurrency, rng, trusted)
        if as_json:
            click.echo(dump_json(url_report), nl=False)
        else:
            render.show(render.url_table(url_report))
        return
    if ca_file is not None:
        raise InputError("--ca-file", ca_file, "it goes with an https URL")
    plan = load_json(Path(target), Plan, "plan")
    lengths = plan.workload if workload is None else load_workload(workload, plan.model)
    log: list[StepRecord] = []
    profile = None if calibrated_path is None else profile_of(plan, profile_path)
    report = bench_plan(plan, lengths, num_requests, rng, arrival_rate, stream=stream, engine=engine, on_log=log.extend)
    notes = render.bench_notes(report)
    if calibrated_path is not None and profile is not None:
        corrected, calibration = calibrate(plan, profile, log)
        write_atomic(Path(calibrated_path), dump_json(corrected))
        report = report.model_copy(update={"calibration": calibration})
        notes += render.calibration_notes(calibration, calibrated_path)
    if as_json:
        click.echo(dump_json(report), nl=False)
    else:
        render.show(render.bench_table(report), *notes)
