"""xgpt fleet"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import bound_options, json_option, policy_option, priced, replica_options
from xgpt.cli.outputs import output_file, output_option, write
from xgpt.cli.values import Decimal, Whole


@click.command("fleet")
@click.option(
    "--trace",
    required=True,
    metavar="FILE",
    help="A day's requests with their times (CSV, JSON lines), or its rates and workloads over hours (YAML).",
)
@bound_options
@click.option(
    "--attain",
    type=Decimal(0, 1, min_open=True, max_open=True),
    default=0.99,
    metavar="SHARE",
    help="Share of the day's requests that must keep the bounds.",
)
@replica_options
@policy_option
@click.option(
    "--among",
    metavar="CLUSTER=PRICE,…",
    help="Instead of --cluster: replicas on any of these clusters, mixed. PRICE is that of one device for an hour.",
)
@click.option(
    "--devices",
    metavar="N|CLUSTER=N,…",
    help="Use at most N devices of each cluster.  [default: as many as needed; with --cluster local, this machine's]",
)
@click.option(
    "--interval",
    "interval_s",
    type=Decimal(1),
    default=900,
    metavar="S",
    help="Length of an interval, within which the fleet does not change.",
)
@click.option(
    "--least-stay",
    "least_stay_s",
    type=Decimal(0),
    default=0,
    metavar="S",
    help="Least time for which a started replica stays.",
)
@click.option(
    "--startup",
    "startup_s",
    type=Decimal(0),
    default=60,
    metavar="S",
    help="Time from ordering a replica until it begins to load weights: for a machine, an image, an engine.",
)
@click.option(
    "--least-replicas",
    type=Whole(0),
    default=1,
    metavar="N",
    help="Least number of replicas at any time.",
)
@click.option("--seed", type=Whole(0), default=0, help="Seed of the requests drawn from rates over hours.")
@output_option("Where to write the fleet.", default="fleet.json")
@json_option
def command(among: str | None, devices: str | None, output: str, force: bool, as_json: bool, **asked: Any) -> None:
    """Find how many replicas hold each interval of a day's load at the least cost, and write fleet.json.

    Replicas may be of several kinds. The day is simulated request by request on the fleet that is found, and, for
    comparison, on the cheapest one that never changes.

    \b
    Examples:
      xgpt fleet --trace day.csv --latency-bound 15 --model llama-3.1-8b --cluster h100x8
      xgpt fleet --trace day.yaml --latency-bound 15 --ttft 2 --model llama-3.1-8b \\
        --among h100x8=2.9,a100x16=1.4,l40sx8=0.9 --devices 64
    """
    from xgpt import api
    from xgpt.cli import render
    from xgpt.cli.fleet_tables import summary
    from xgpt.core.io import dump_json

    file = output_file(output)
    clusters = priced(among, asked)
    with render.progress_bar() as progress:
        found = api.fleet(**asked, among=clusters, devices=_counts(devices), progress=progress)
    text = dump_json(found)
    write(file, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        render.show(*summary(found), f"next: xgpt report {output}")


def _counts(devices: str | None) -> int | dict[str, int] | None:
    """Return the devices in text like 64, or like h100x8=16,a100x16=32."""
    from xgpt.core.errors import InputError
    from xgpt.core.numbers import whole

    if devices is None:
        return None
    found: dict[str, int] = {}
    for part in devices.split(","):
        name, _, count = part.strip().rpartition("=")
        try:
            found[name] = whole(count)
        except ValueError:
            found[name] = 0
        if found[name] < 1 or (not name and "," in devices):
            raise InputError("devices", part, "write N, or CLUSTER=N,CLUSTER=N with whole numbers of at least 1")
    return found.get("", found)
