"""Measure how much latency the gateway adds and how much throughput it costs, compared with xgpt's endpoint.

    python -m benchmarks.fronts [--rounds 5] [--seconds 5]

`xgpt serve` runs a small model behind each front. The fronts are measured in turns, and the other server is idle
meanwhile. A round sends chats of one token one after the other. Then 16 clients send chats of 32 tokens. Processor time
includes all processes of the server. Prints a table, and writes results/fronts.json. This takes a minute and a half.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import click
import httpx

from benchmarks.lib.served_plans import SPEC, Served, one_lane, plan, served
from tests.attack.target import children_of, save_checkpoint
from xgpt.checkpoints.files import read_spec
from xgpt.cli.render import show, table
from xgpt.core.io import write_atomic

RESULTS = Path("results/fronts.json")
FRONTS = ("endpoint", "smg")
CHATS, CLIENTS, TOKENS = 40, 16, 32
FIGURES = ("ms a chat of one token", "chats/s", "processor ms a chat")


def processor_s(server: Served) -> float:
    """Return the processor seconds of a server's processes."""
    ticks = 0
    for pid in (server.process.pid, *children_of(server.process.pid)):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def measured(server: Served, model: str, seconds: float) -> tuple[float, float, float]:
    """Return the `FIGURES` of one round."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as client:

        async def ask(num_tokens: int) -> float:
            begin_s = time.perf_counter()
            answer = await client.post("/v1/chat/completions", json=body | {"max_tokens": num_tokens})
            answer.raise_for_status()
            return time.perf_counter() - begin_s

        alone_s = [await ask(1) for _ in range(CHATS)]
        begin_s, used_s, ended = time.perf_counter(), processor_s(server), 0

        async def keep_asking() -> None:
            nonlocal ended
            while time.perf_counter() < begin_s + seconds:
                await ask(TOKENS)
                ended += 1

        await asyncio.gather(*(keep_asking() for _ in range(CLIENTS)))
        took_s = time.perf_counter() - begin_s
        return 1e3 * median(alone_s), ended / took_s, 1e3 * (processor_s(server) - used_s) / ended


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="Duration of the load in each round.")
def main(rounds: int, seconds: float) -> None:
    """Measure both fronts in turns."""
    with ExitStack() as at_end:
        directory = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = save_checkpoint(directory / "model")
        what = plan(one_lane([1], layers=SPEC.num_layers), model=read_spec(checkpoint))
        what = what.model_copy(update={"checkpoint": str(checkpoint)})
        servers: dict[str, Served] = {}
        for front in FRONTS:
            (directory / front).mkdir()
            servers[front] = at_end.enter_context(served(what, directory / front, "--front", front))
            asyncio.run(measured(servers[front], what.model.name, 1.0))  # compiles, and fills caches
        found: dict[str, list[tuple[float, float, float]]] = {front: [] for front in FRONTS}
        for _ in range(rounds):
            for front, server in servers.items():
                found[front].append(asyncio.run(measured(server, what.model.name, seconds)))
    medians = {front: [median(column) for column in zip(*found[front], strict=True)] for front in FRONTS}
    rows = [(name, *(f"{medians[front][i]:.2f}" for front in FRONTS)) for i, name in enumerate(FIGURES)]
    show(table("medians of rounds", ["", *FRONTS], rows))
    added = medians["smg"][0] - medians["endpoint"][0]
    lost = 1 - medians["smg"][1] / medians["endpoint"][1]
    click.echo(f"The gateway adds {added:.1f} ms to a chat, and {100 * lost:.1f}% of the throughput is lost.")
    write_atomic(RESULTS, json.dumps({"figures": FIGURES, "medians": medians, "rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
