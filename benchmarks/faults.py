"""Kill or stop workers under load during streams, and check whether requests are lost or tokens change.

    python -m benchmarks.faults [--requests 500] [--json faults.json]

`xgpt serve` runs a small model on two cores as two devices, with three plans: one stage on both devices, a stage on
each, and WAA with one device that encodes and one that decodes. While clients stream answers, each worker in turn gets
SIGKILL, then SIGSTOP. The same hundred requests are sent repeatedly until all signals and all requests have been sent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.lib.served_plans import SPEC, Served, left_over, listening, one_lane, parser, plan, report, served
from xgpt.client import ClientRequest, ClientResult, replay
from xgpt.core.schema import Plan
from xgpt.serving.engine_process import build_engine
from xrunner.cluster.workers import PERIOD_S, RESTARTS
from xrunner.generation import Generation

NUM_WORKERS = 2
CONCURRENCY = 16
ROUND = 100
BETWEEN_S = 3.0
"""Seconds from the time when workers are ready again to the next signal."""


@dataclass
class Row:
    """The result of one plan.

    Attributes:
        back_s: seconds from each signal until workers were ready again.
        changed: requests whose tokens differ from those of one undisturbed process.
        left_over: processes and sockets of the server that remain after its end.
        seconds: total time, including the server's start.
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
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.plan}: {self.blows} blows, {self.lost} of {self.requests} requests lost, {self.changed} changed, "
            f"back after {self.back_s} s, longest gap between tokens {self.longest_gap_s} s, "
            f"exit code {self.exit_code}, left over: {self.left_over}; {self.seconds} s"
        )


def requests(count: int) -> list[ClientRequest]:
    rng = np.random.default_rng(7)
    lengths, outputs = rng.integers(8, 64, count).tolist(), rng.integers(16, 96, count).tolist()
    prompts = [rng.integers(3, SPEC.vocab_size, length).tolist() for length in lengths]
    return [ClientRequest(prompt, None, output) for prompt, output in zip(prompts, outputs, strict=True)]


async def strike(server: Served, blows: list[tuple[int, int]]) -> list[float]:
    back: list[float] = []
    dealt: list[float] = []
    for worker, number in blows:
        # A fourth restart within the period would end the server.
        forgiven_s = dealt[-RESTARTS] + PERIOD_S + 1 - time.monotonic() if len(dealt) >= RESTARTS else 0.0
        await asyncio.sleep(max(BETWEEN_S, forgiven_s))
        count = len(server.starts)
        os.kill(server.pids[worker], number)
        dealt.append(time.monotonic())
        while len(server.starts) == count:
            if server.process.poll() is not None:
                raise RuntimeError("the server has ended: " + " / ".join(server.lines[-3:]))
            await asyncio.sleep(0.02)
        back.append(round(time.monotonic() - dealt[-1], 2))
    return back


async def under_load(
    server: Served, count: int, blows: list[tuple[int, int]]
) -> tuple[list[list[ClientResult]], list[float]]:
    striking = asyncio.create_task(strike(server, blows))
    rounds: list[list[ClientResult]] = []
    while len(rounds) * ROUND < count or not striking.done():
        rounds.append(await replay(server.url, requests(ROUND), concurrency=CONCURRENCY))
    return rounds, await striking


def undisturbed(count: int = ROUND) -> list[list[int]]:
    engine = build_engine(plan(one_lane([1])))
    tokens: list[list[int]] = [[] for _ in range(count)]
    for id_, request in enumerate(requests(count)):
        engine.submit(Generation(id_, tuple(request.prompt_ids), request.max_tokens))
    while (step := engine.step()) is not None:
        for token in step:
            tokens[token.id].append(token.token)
    engine.close()
    return tokens


def measure(name: str, what: Plan, count: int, expected: list[list[int]]) -> Row:
    began = time.monotonic()
    blows = [(worker, number) for number in (signal.SIGKILL, signal.SIGSTOP) for worker in range(NUM_WORKERS)]
    with tempfile.TemporaryDirectory() as directory, served(what, Path(directory)) as server:
        rounds, back = asyncio.run(under_load(server, count, blows))
        sockets = listening(server.process.pid)
    disturbed = [result for results in rounds for result in results]
    gaps = [b - a for result in disturbed for a, b in pairwise(result.token_s)]
    return Row(
        name,
        len(disturbed),
        len(blows),
        sum(result.error is not None for result in disturbed),
        sum(result.token_ids != tokens for result, tokens in zip(disturbed, expected * len(rounds), strict=True)),
        back,
        round(max(gaps), 2),
        server.process.returncode,
        left_over(server.process.pid, sockets),
        round(time.monotonic() - began, 1),
    )


def main() -> None:
    options = parser(__doc__ or "", 500).parse_args()
    count, expected = options.requests, undisturbed()
    report(lambda name, what: measure(name, what, count, expected), options.plan, options.json)


if __name__ == "__main__":
    main()
