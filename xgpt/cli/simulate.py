"""xgpt simulate"""

from __future__ import annotations

import click

from xgpt.cli.options import Decimal, Whole, json_option


@click.command("simulate")
@click.argument("plan_path", metavar="PLAN.JSON")
@click.option("--workload", help="Name, YAML file, CSV or JSON lines; the plan's own by default.")
@click.option(
    "--requests", "num_requests", type=Whole(1), default=2000, show_default=True, help="Number of requests to simulate."
)
@click.option(
    "--arrival-rate",
    type=Decimal(0, min_open=True),
    metavar="R",
    help="Poisson arrivals a second. Default: requests are always waiting.",
)
@click.option(
    "--burstiness",
    type=Decimal(0, min_open=True),
    metavar="CV",
    help="Coefficient of variation of the gaps between arrivals: 1 for Poisson, above 1 for bursts.",
)
@click.option(
    "--own-times", is_flag=True, help="Replay a trace as recorded: its pairs of lengths and its arrival times."
)
@click.option("--profile", "profile_path", metavar="FILE", help="The profile that the plan was made from.")
@click.option("--trace", metavar="FILE", help="Write the steps as a Chrome trace, which Perfetto opens.")
@click.option("--seed", type=Whole(0), default=0, show_default=True, help="Seed of lengths and arrivals.")
@json_option
def command(
    plan_path: str,
    workload: str | None,
    num_requests: int,
    arrival_rate: float | None,
    burstiness: float | None,
    own_times: bool,
    profile_path: str | None,
    trace: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Run a plan request by request on the simulated engine.

    \b
    Example:
      xgpt simulate plan.json --requests 5000 --arrival-rate 1.5 --trace timeline.json
    """
    import json
    from dataclasses import asdict
    from pathlib import Path

    import numpy as np

    from xgpt.app.profiles import profile_of
    from xgpt.app.simulating import replay_trace, simulate
    from xgpt.cli import render
    from xgpt.errors import InputError
    from xgpt.io import load_json, write_atomic
    from xgpt.resolve import load_workload
    from xgpt.schema import Plan
    from xgpt.workload import read_lengths
    from xsimulator.clock import Span
    from xsimulator.queueing import whole_times
    from xsimulator.timeline import Timeline, chrome_trace, idle_shares

    plan = load_json(Path(plan_path), Plan, "plan")
    lengths = plan.workload if workload is None else load_workload(workload, plan.model)
    profile = profile_of(plan, profile_path)
    if burstiness is not None and arrival_rate is None:
        raise InputError("burstiness", burstiness, "it goes with --arrival-rate")
    spans: list[Span] = []
    if own_times:
        if workload is None or not Path(workload).is_file() or arrival_rate is not None:
            raise InputError("own-times", workload, "it goes with a trace as --workload, and without --arrival-rate")
        joint = read_lengths(Path(workload))
        result, log = replay_trace(plan, profile, lengths, joint, num_requests, spans.append)
    else:
        rng = np.random.default_rng(seed)
        result, log = simulate(plan, profile, lengths, num_requests, rng, arrival_rate, burstiness or 1.0, spans.append)
    if trace is not None:
        write_atomic(Path(trace), chrome_trace(Timeline(f"{plan.policy.kind}, simulated", log, spans)))
    figures = {name: value for name, value in asdict(result).items() if name != "latencies_s"}
    idle = idle_shares(spans)
    figures["idle_share"] = sum(idle.values()) / len(idle)
    if own_times or arrival_rate is not None:
        whole_s, bound_s = whole_times(log), plan.constraint.latency_bound_s
        figures["whole_time_s"] = float(np.quantile(whole_s, plan.constraint.quantile))
        if bound_s is not None:
            figures["share_within_bound"] = float(np.mean(whole_s <= bound_s))
    if as_json:
        click.echo(json.dumps(figures, indent=1))
    else:
        rows = [[name, f"{value:.4g}"] for name, value in figures.items()]
        render.show(render.table(f"{plan.policy.kind}, simulated", ["figure", "value"], rows))
