"""Serve for a long time while processes are killed, prompts repeat and lengths shift: nothing may be lost or wrong.

    python -m benchmarks.soak [--seconds 1200] [--clients 4] [--json soak.json]

A model with seeded weights runs with tensor parallelism on two cores, from a plan of its measured profile, with
re-planning. Clients repeat twelve prompts. Halfway, prompts and outputs become longer. Each process is killed once: the
engine, a worker, the launcher, the planning process, and the front, which a supervisor would start again, as this
program does. A client whose connection breaks with the front asks again. Each answer must be the one that the
undisturbed server gave.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import numpy as np

from benchmarks.kills import victim_of
from benchmarks.lib.results import record, table
from benchmarks.lib.served_plans import Served, started
from tests.attack.target import save_checkpoint
from xgpt.core.processes import children_of, free_port

KILLS = ("engine", "worker", "launcher", "planner", "front")
PAUSE_S = 0.05
"""Mean pause of a client between two requests."""
WORKLOAD = """name: short
source: soak
input: {kind: uniform, min: 8, max: 40}
output: {kind: uniform, min: 4, max: 12}
"""
SETTINGS = {"model": "soak", "ignore_eos": True, "temperature": 0}


@dataclass
class SoakRow:
    """What a soak found.

    Attributes:
        lost: requests that were never answered. wrong: answers that differ from the undisturbed ones.
        repeated: requests that were asked again, since the front was killed.
        longest_s: the longest time until an answer.
        decisions: judgements of re-planning, by what they decided; "failed" among them.
    """

    seconds: float = 0.0
    answered: int = 0
    lost: int = 0
    wrong: int = 0
    repeated: int = 0
    longest_s: float = 0.0
    kills: dict[str, float] = field(default_factory=dict)
    decisions: dict[str, int] = field(default_factory=dict)


def prompts(rng: np.random.Generator, longer: int) -> list[dict[str, object]]:
    lengths, outputs = rng.integers(8, 40, 12) * longer, rng.integers(4, 12, 12) * longer
    return [
        SETTINGS | {"prompt": rng.integers(3, 250, length).tolist(), "max_tokens": output}
        for length, output in zip(lengths.tolist(), outputs.tolist(), strict=True)
    ]


class Soak:
    def __init__(self, words: tuple[str, ...], url: str, seconds: float, clients: int) -> None:
        self._words, self._url, self._seconds, self._clients = words, url, seconds, clients
        self._phases = [prompts(np.random.default_rng(0), 1), prompts(np.random.default_rng(1), 4)]
        self._expected: dict[tuple[int, int], str] = {}
        self._is_front_gone = False
        self.row = SoakRow()

    async def run(self) -> SoakRow:
        stack = contextlib.ExitStack()
        server = stack.enter_context(started(*self._words))
        async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
            for phase, asked in enumerate(self._phases):
                for number, body in enumerate(asked):
                    self._expected[phase, number] = await self._ask(client, body)
            end_s = time.monotonic() + self._seconds
            asking = [asyncio.create_task(self._repeat(client, number, end_s)) for number in range(self._clients)]
            for number, victim in enumerate(KILLS):
                await asyncio.sleep(self._seconds / (len(KILLS) + 1))
                began_s = time.monotonic()
                if victim == "front":
                    await self._count_decisions(client)
                    self._is_front_gone = True
                os.kill(self._pid(server, victim), signal.SIGKILL)
                if victim == "front":
                    self._note_failures(server)
                    await asyncio.to_thread(stack.close)
                    server = await asyncio.to_thread(stack.enter_context, started(*self._words))
                    self._is_front_gone = False
                await self._ask(client, self._phases[0][number])
                self.row.kills[victim] = round(time.monotonic() - began_s, 1)
                print(f"{victim} killed; answered after {self.row.kills[victim]} s; {self.row}", flush=True)
            await asyncio.gather(*asking)
            await self._count_decisions(client)
        self._note_failures(server)
        stack.close()
        self.row.seconds = self._seconds
        return self.row

    def _note_failures(self, server: Served) -> None:
        for line in server.lines:
            if "re-planning failed" in line:
                print(line, flush=True)

    def _pid(self, server: Served, victim: str) -> int:
        if victim != "planner":
            return victim_of(server, victim)
        (found,) = (
            pid
            for pid in children_of(server.process.pid)
            if b"replanning.replanner" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        return found

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, object]) -> str:
        answer = await client.post(f"{self._url}/v1/completions", json=body)
        if answer.is_error:
            raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
        return str(answer.json()["choices"][0]["text"])

    async def _repeat(self, client: httpx.AsyncClient, number: int, end_s: float) -> None:
        rng = np.random.default_rng(number)
        while (now_s := time.monotonic()) < end_s:
            phase, which = int(end_s - now_s < self._seconds / 2), int(rng.integers(12))
            while True:
                try:
                    text = await self._ask(client, self._phases[phase][which])
                    self.row.answered += 1
                    self.row.wrong += text != self._expected[phase, which]
                    break
                except httpx.TransportError:
                    if not self._is_front_gone:
                        self.row.lost += 1
                        break
                    self.row.repeated += 1
                    await asyncio.sleep(0.5)
                except RuntimeError as error:
                    print(error, flush=True)
                    self.row.lost += 1
                    break
            self.row.longest_s = max(self.row.longest_s, round(time.monotonic() - now_s, 1))
            await asyncio.sleep(float(rng.exponential(PAUSE_S)))

    async def _count_decisions(self, client: httpx.AsyncClient) -> None:
        page = (await client.get(f"{self._url}/metrics")).text
        for action, count in re.findall(r'^xgpt_plan_decisions_total\{action="(\w+)".*\} ([\d.]+)', page, re.M):
            self.row.decisions[action] = self.row.decisions.get(action, 0) + int(float(count))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=1200.0)
    options.add_argument("--clients", type=int, default=4)
    options.add_argument("--json", type=Path)
    options.add_argument("--record", action="store_true", help="store the row as a result")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        save_checkpoint(at)
        (at / "workload.yaml").write_text(WORKLOAD)
        plan = ["plan", "--model", directory, "--cluster", "local:2", "--fix", "tp=2", "--latency-bound", "30"]
        plan += ["--workload", str(at / "workload.yaml"), "-o", str(at / "plan.json")]
        subprocess.run([sys.executable, "-m", "xgpt", *plan], check=True)
        port = free_port()
        words = ("serve", str(at / "plan.json"), "--port", str(port), "--served-model-name", "soak")
        row = asyncio.run(Soak(words, f"http://127.0.0.1:{port}", given.seconds, given.clients).run())
    print(row)
    if given.json:
        given.json.write_text(json.dumps(asdict(row), indent=1) + "\n")
    if given.record:
        keep_row(row)


def keep_row(row: SoakRow) -> None:
    record(
        "devices/soak",
        "In {minutes} minutes with repeated prompts and a shift of lengths, each process was killed once: of "
        "{answered} requests {lost} were lost and {wrong} answered wrongly; {failed} of {judgements} judgements "
        "failed.",
        table(("killed", "answers again after, s"), [(name, f"{after:.1f}") for name, after in row.kills.items()]),
        minutes=round(row.seconds / 60),
        failed=row.decisions.get("failed", 0),
        judgements=sum(row.decisions.values()),
        **{name: getattr(row, name) for name in ("answered", "lost", "wrong")},
    )


if __name__ == "__main__":
    main()
