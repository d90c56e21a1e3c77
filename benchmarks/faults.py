"""Workers that are killed or stopped in mid-stream, under load: what is lost, and whether a token changes.

    python -m benchmarks.faults [--requests 500] [--json faults.json]

`xgpt serve` runs a small model on three devices in two ways: a stage of two devices and one of one, and WAA with one
device that encodes and two that decode. Clients stream answers; meanwhile each worker in turn gets SIGKILL, then
SIGSTOP. Requests are sent again and again until all blows have been dealt; whoever is under way then is counted, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.placed import SPEC, Served, left_over, one_lane, plan, served, two_lanes
from xgpt.client import ClientRequest, ClientResult, replay
from xgpt.schema import Plan

PLANS = {
    "stages of 2 and 1": lambda: plan(one_lane([2, 1])),
    "WAA 1 + 2": lambda: plan(two_lanes([1], [2])),
}
CONCURRENCY = 16
BETWEEN_S = 21.0
"""Between two blows: three in a minute are forgiven."""


@dataclass
class Row:
    """What came of one plan.

    Attributes:
        back_s: from each blow until workers were ready again.
        changed: requests whose tokens differ from the undisturbed run's.
        left_over: processes of the server's after its end.
    """

    plan: str
    requests: int
    blows: int
    lost: int
    changed: int
    back_s: list[float]
    longest_gap_s: float
    exit_code: int | None
    left_over: list[str]


def requests(count: int) -> list[ClientRequest]:
    rng = np.random.default_rng(7)
    lengths, outputs = rng.integers(8, 64, count).tolist(), rng.integers(16, 96, count).tolist()
    prompts = [rng.integers(3, SPEC.vocab_size, length).tolist() for length in lengths]
    return [ClientRequest(prompt, None, output) for prompt, output in zip(prompts, outputs, strict=True)]


async def strike(server: Served, blows: list[tuple[int, int]]) -> list[float]:
    """One blow after another while requests run; returns seconds until workers were ready again."""
    back: list[float] = []
    for worker, number in blows:
        await asyncio.sleep(BETWEEN_S if back else 1.0)
        count = len(server.starts)
        os.kill(server.pids[worker], number)
        began = time.monotonic()
        while len(server.starts) == count:
            await asyncio.sleep(0.05)
        back.append(round(time.monotonic() - began, 2))
    return back


async def under_load(
    server: Served, count: int, blows: list[tuple[int, int]]
) -> tuple[list[list[ClientResult]], list[float]]:
    """The same requests, round after round, until the last blow has been dealt."""
    striking = asyncio.create_task(strike(server, blows))
    rounds = []
    while not rounds or not striking.done():
        rounds.append(await replay(server.url, requests(count), concurrency=CONCURRENCY))
    return rounds, await striking


def measure(name: str, what: Plan, count: int, numbers: list[int]) -> Row:
    blows = [(worker, number) for number in numbers for worker in range(3)]
    with tempfile.TemporaryDirectory() as directory:
        with served(what, Path(directory)) as server:
            (undisturbed,), _ = asyncio.run(under_load(server, count, []))
        with served(what, Path(directory)) as server:
            rounds, back = asyncio.run(under_load(server, count, blows))
    disturbed = [result for results in rounds for result in results]
    gaps = [b - a for result in disturbed for a, b in zip(result.token_s, result.token_s[1:], strict=False)]
    return Row(
        name,
        len(disturbed),
        len(blows),
        sum(result.error is not None for result in disturbed),
        sum(a.token_ids != b.token_ids for a, b in zip(undisturbed * len(rounds), disturbed, strict=True)),
        back,
        round(max(gaps), 2),
        server.process.returncode,
        left_over(server.process.pid),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--plan", choices=PLANS, help="only this one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in [options.plan] if options.plan else PLANS:
        row = measure(name, PLANS[name](), options.requests, [signal.SIGKILL, signal.SIGSTOP])
        rows.append(row)
        print(
            f"{row.plan}: {row.blows} blows, {row.lost} of {row.requests} requests lost, {row.changed} changed, back "
            f"after {min(row.back_s)} to {max(row.back_s)} s, exit code {row.exit_code}, left over: {row.left_over}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
