"""Kill each process of a server many times, with and without requests, and state the distribution of what follows.

    python -m benchmarks.kills [--times 20] [--only engine] [--load idle] [--json kills.json]

`xgpt serve` runs a small model with tensor parallelism on two cores. SIGKILL ends its engine, a worker or the launcher;
with --ray, on two Ray nodes of this machine, the head's GCS, the other node's raylet or an actor. Nodes of Ray are
started again at once, as a supervisor would.
A server ends after four losses, so each one gets three. With requests, eight streams run during the kill. Every stream
must have the tokens of an undisturbed engine. A killed front must leave nothing behind, and the time is that until the
next server answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.lib.results import record, table
from benchmarks.lib.served_plans import PLANS, SPEC, Served, left_over, one_lane, plan, served
from xgpt.client import ClientRequest, replay
from xgpt.core.processes import children_of, end_with_parent, free_port
from xgpt.serving.engine_process import build_engine
from xrunner.generation import Generation

STREAMS, PER_SERVER, WITHIN_S = 8, 3, 120.0
VICTIMS = ("engine", "worker", "launcher", "front")
OF_RAY = ("actor", "raylet", "head")
START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--disable-usage-stats", "--block"]


@dataclass
class KillRow:
    """What followed the kills of one kind of process.

    Attributes:
        back_s: seconds from each kill until a request was answered.
        lost, changed: requests that got an error or other tokens. The streams of a killed front are not counted.
        ended: servers that ended although another process was killed.
        left_over: processes and sockets that a killed front left behind.
    """

    victim: str
    is_loaded: bool
    back_s: list[float] = field(default_factory=list)
    requests: int = 0
    lost: int = 0
    changed: int = 0
    ended: int = 0
    left_over: int = 0

    def __str__(self) -> str:
        times = sorted(self.back_s) or [0.0]
        spread = f"back after {times[0]:.1f}, {median(times):.1f}, {times[-1]:.1f} s (least, median, most)"
        return (
            f"{self.victim}, {'with' if self.is_loaded else 'without'} requests: {len(self.back_s)} kills, {spread}; "
            f"{self.lost} of {self.requests} requests lost, {self.changed} changed, {self.ended} servers ended, "
            f"{self.left_over} left over"
        )


def requests(count: int) -> list[ClientRequest]:
    rng = np.random.default_rng(7)
    lengths, outputs = rng.integers(8, 64, count).tolist(), rng.integers(16, 96, count).tolist()
    prompts = [rng.integers(3, SPEC.vocab_size, length).tolist() for length in lengths]
    return [ClientRequest(prompt, None, output) for prompt, output in zip(prompts, outputs, strict=True)]


def undisturbed(count: int) -> list[list[int]]:
    engine = build_engine(plan(one_lane([1])))
    tokens: list[list[int]] = [[] for _ in range(count)]
    for id_, request in enumerate(requests(count)):
        engine.submit(Generation(id_, tuple(request.prompt_ids), request.max_tokens))
    while (step := engine.step()) is not None:
        for token in step:
            tokens[token.id].append(token.token)
    engine.close()
    return tokens


def victim_of(server: Served, name: str) -> int:
    engine = server.engine
    assert engine is not None
    (launcher,) = (
        pid for pid in children_of(engine) if b"cluster.launcher" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return {"engine": engine, "launcher": launcher, "worker": server.pids[-1], "front": server.process.pid}[name]


def start_ray(*words: str) -> subprocess.Popen[str]:
    """Start a node, again and again until it runs, as a supervisor does."""
    end_s = time.monotonic() + WITHIN_S
    while True:
        node = subprocess.Popen([*START, *words], stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent)
        assert node.stdout is not None
        if any("Ray runtime started" in line for line in node.stdout):
            return node
        if time.monotonic() > end_s:
            raise RuntimeError(f"ray start {' '.join(words)} does not start a node")
        time.sleep(1)


class RayNodes:
    """Two Ray nodes on this machine."""

    def __init__(self, directory: str) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._directory = directory
        self._head = self._start_head()
        self._second = self._start_second()

    def _start_head(self) -> subprocess.Popen[str]:
        port = self.address.rpartition(":")[2]
        return start_ray("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._directory}")

    def _start_second(self) -> subprocess.Popen[str]:
        return start_ray(f"--address={self.address}")

    def kill(self, victim: str) -> None:
        """Kill a process of Ray, and start its node again."""
        node, program = (self._head, "gcs_server") if victim == "head" else (self._second, "raylet")
        end_s = time.monotonic() + 60
        while program not in (children := {program_of(pid): pid for pid in children_of(node.pid)}):
            if time.monotonic() > end_s:  # a node that was started again takes some seconds
                raise RuntimeError(f"the Ray node {node.pid} (exit code {node.poll()}) has no {program}")
            time.sleep(0.2)
        if victim == "actor":
            actors = [pid for pid in children_of(children["raylet"]) if b"Machine" in title_of(pid)]
            os.kill(actors[0], signal.SIGKILL)
            return
        os.kill(children[program], signal.SIGKILL)
        end(node, children)
        if victim == "head":
            end(self._second, {program_of(pid): pid for pid in children_of(self._second.pid)})
            self._head = self._start_head()
        self._second = self._start_second()

    def close(self) -> None:
        for node in (self._second, self._head):
            node.terminate()
            with suppress(subprocess.TimeoutExpired):
                node.wait(30)


def end(node: subprocess.Popen[str], children: dict[str, int]) -> None:
    """Wait until a node that lost a process has ended, with all of its processes."""
    node.terminate()
    with suppress(subprocess.TimeoutExpired):
        node.wait(10)
    for pid in (node.pid, *children.values()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait(WITHIN_S)


def title_of(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def program_of(pid: int) -> str:
    return os.path.basename(title_of(pid).split(b"\0")[0]).decode()


async def one_kill(server: Served, row: KillRow, expected: list[list[int]], nodes: RayNodes | None = None) -> None:
    streams = asyncio.create_task(replay(server.url, requests(STREAMS), concurrency=STREAMS)) if row.is_loaded else None
    await asyncio.sleep(0.3)
    began_s = time.monotonic()
    killing = None
    if nodes is None:
        os.kill(victim_of(server, row.victim), signal.SIGKILL)
    else:
        killing = asyncio.create_task(asyncio.to_thread(nodes.kill, row.victim))
        await asyncio.sleep(0.5)
    results = await replay(server.url, requests(STREAMS)[:1], concurrency=1)
    if killing is not None:
        await killing
    row.back_s.append(round(time.monotonic() - began_s, 2))
    results += [] if streams is None else await streams
    wanted = expected[:1] + expected[: len(results) - 1]
    row.requests += len(results)
    row.lost += sum(result.error is not None for result in results)
    row.changed += sum(
        one.error is None and one.token_ids != tokens for one, tokens in zip(results, wanted, strict=True)
    )


def kill_front(row: KillRow) -> None:
    with fresh() as (server, _):
        began_s = time.monotonic()
        os.kill(server.process.pid, signal.SIGKILL)
        while (found := left_over(server.process.pid, ())) and time.monotonic() < began_s + 30:
            time.sleep(0.05)
            server.process.poll()
        row.left_over += len(found)
    with fresh() as (server, _):
        asyncio.run(replay(server.url, requests(STREAMS)[:1], concurrency=1))
        row.back_s.append(round(time.monotonic() - began_s, 2))


@contextmanager
def fresh(*, on_ray: bool = False) -> Iterator[tuple[Served, RayNodes | None]]:
    plan, nodes = PLANS["TP 2"](), None
    options: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        if on_ray:
            cluster = plan.cluster.model_copy(update={"num_nodes": 2, "devices_per_node": 1})
            plan, nodes = plan.model_copy(update={"cluster": cluster}), RayNodes(directory)
            stack.callback(nodes.close)
            options = ("--ray", nodes.address)
        yield stack.enter_context(served(plan, Path(directory), *options)), nodes


def measure(row: KillRow, times: int, expected: list[list[int]]) -> Iterator[KillRow]:
    """Yield the row after each kill, until it has so many."""
    while len(row.back_s) < times:
        if row.victim == "front":
            kill_front(row)
            yield row
            continue
        with fresh(on_ray=row.victim in OF_RAY) as (server, nodes):
            for _ in range(min(PER_SERVER, times - len(row.back_s))):
                asyncio.run(asyncio.wait_for(one_kill(server, row, expected, nodes), 3 * WITHIN_S))
                row.ended += server.process.poll() is not None
                yield row
                if server.process.poll() is not None:
                    break


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--times", type=int, default=20)
    options.add_argument("--ray", action="store_true", help="kill processes of Ray")
    options.add_argument("--only", choices=(*VICTIMS, *OF_RAY))
    options.add_argument("--load", choices=("idle", "loaded"), help="only without, or only with requests")
    options.add_argument("--json", type=Path, help="add to the kills in this file until there are enough")
    options.add_argument("--record", action="store_true", help="store the rows as a result")
    given = options.parse_args()
    stored = json.loads(given.json.read_text()) if given.json and given.json.exists() else []
    rows = {(row["victim"], row["is_loaded"]): KillRow(**row) for row in stored}
    expected = undisturbed(STREAMS)
    for victim in [given.only] if given.only else OF_RAY if given.ray else VICTIMS:
        for is_loaded in (False,) if victim == "front" else (False, True):
            if given.load in (None, "loaded" if is_loaded else "idle"):
                row = rows.setdefault((victim, is_loaded), KillRow(victim, is_loaded))
                for _ in measure(row, given.times, expected):
                    if given.json:
                        given.json.write_text(json.dumps([*map(asdict, rows.values())], indent=1) + "\n")
                print(row, flush=True)
    if given.record:
        keep_rows(list(rows.values()))


def keep_rows(rows: list[KillRow]) -> None:
    cells = [
        (
            row.victim,
            "eight streams" if row.is_loaded else "none",
            len(row.back_s),
            ", ".join(f"{seconds:.1f}" for seconds in (min(row.back_s), median(row.back_s), max(row.back_s))),
            f"{row.lost} of {row.requests}",
            row.changed,
            row.ended,
        )
        for row in rows
    ]
    columns = ("killed", "requests", "kills", "answers again after: least, median, most s", "lost", "changed", "ended")
    fields = ("requests", "lost", "changed", "ended", "left_over")
    counts = {name: sum(getattr(row, name) for row in rows) for name in fields}
    record(
        "devices/kills",
        "{kills} kills: {lost} of {requests} requests were lost, {changed} got other tokens, {ended} servers ended, "
        "and {left_over} processes and sockets were left.",
        table(columns, cells),
        kills=sum(len(row.back_s) for row in rows),
        **counts,
    )


if __name__ == "__main__":
    main()
