"""A compressed day on this machine: real replicas behind a front, kept to by `xgpt autoscale`.

    python -m benchmarks.live_day [--seconds 180] [--bound 4] STATE

A replica is OPT-125M of random weights on one core. The day has 0.4 times the arrival rate that one replica keeps, then
1.25 times, then 0.4 times again. Two days are drawn apart: the first is planned, the second is sent as it comes, and
simulated with the same controller. Its figures are written to STATE/live.json; benchmarks.fleet shows them.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

import xgpt
from benchmarks.lib import made
from xgpt.client import ClientRequest, ClientResult, replay
from xgpt.core.io import dump_json, write_atomic
from xgpt.operating.operating import simulate

MODEL, VOCABULARY = "opt-125m", 50_000
LOOK_S, STARTUP_S = 3.0, 8.0
PARTS = ((0.4, 0.25), (1.25, 0.5), (0.4, 0.25))
"""Multiples of a replica's rate, and shares of the day."""
LIVE = "live.json"
LEAD_S = 40.0
"""Before the day begins: the first replica starts."""


@dataclass(frozen=True)
class Live:
    """What came of a day.

    Attributes:
        lost: requests without a whole answer.
        predicted, measured: shares within the bound, of the simulated day and of the real one.
        replicas: most that took requests at a time.
        load: of the whole machine at the end, the mean of a minute.
        commit: at which it began.
    """

    seconds: float
    bound_s: float
    requests: int
    lost: int
    predicted: float
    measured: float
    median_s: float
    tail_s: float
    starts: int
    replicas: int
    left_over: int
    load: float = 0.0
    commit: str = ""


def draw(rate: float, seconds: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrivals, inputs and outputs of a day."""
    rng = np.random.default_rng(seed)
    start_s, arrivals = 0.0, []
    for factor, share in PARTS:
        count = rng.poisson(factor * rate * share * seconds)
        arrivals.append(start_s + share * seconds * np.sort(rng.random(count)))
        start_s += share * seconds
    at = np.concatenate(arrivals)
    return at, rng.integers(20, 60, len(at)), rng.integers(8, 32, len(at))


def write_trace(path: Path, rate: float, seconds: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same as a trace."""
    day = draw(rate, seconds, seed)
    rows = (f"{at:.3f},{given},{made}" for at, given, made in zip(*day, strict=True))
    path.write_text("timestamp,input,output\n" + "\n".join(rows) + "\n")
    return day


def one_core_profile(path: Path) -> Path:
    """Measure steps on one core, so that replicas may have one each."""
    if not path.is_file():
        command = [sys.executable, "-m", "xgpt", "profile", "--model", MODEL, "-o", str(path)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return path


def run(state: Path, seconds: float, bound_s: float) -> Live:
    """Plan a day, and live another."""
    profile = one_core_profile(state / "profile.json")
    asked: dict[str, Any] = {"model": MODEL, "cluster": "local", "profile": profile, "latency_bound_s": bound_s}
    write_trace(state / "one.csv", 1.0, 600, 2)
    alone = xgpt.plan(**asked, workload=str(state / "one.csv"), quantile=0.99, objective="arrivals")
    assert alone.estimate.capacity is not None
    rate = alone.estimate.capacity.rate_per_s
    write_trace(state / "planned.csv", rate, seconds, 0)
    at, inputs, outputs = write_trace(state / "lived.csv", rate, seconds, 1)
    fleet = xgpt.fleet(state / "planned.csv", **asked, interval_s=seconds / 8, startup_s=STARTUP_S, devices=2)
    write_atomic(state / "fleet.json", dump_json(fleet))
    predicted = simulate(fleet, state / "lived.csv", LOOK_S)
    click.echo(f"a replica keeps {rate:.2f}/s; planned {[of.replicas for of in fleet.intervals]}; {predicted.figures}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begins_s = 60 * np.ceil((time.time() + LEAD_S) / 60)
    begins = time.strftime("%H:%M", time.gmtime(begins_s))
    stop, notes = threading.Event(), list[str]()

    def note(line: str) -> None:
        notes.append(line)
        click.echo(f"{time.time() - begins_s:7.1f} {line}", err=True)

    options: dict[str, Any] = {"look_s": LOOK_S, "port": port, "state": state / "fleet", "day_begins": begins}
    options |= {"on_note": note, "stop": stop}
    keeper = threading.Thread(target=xgpt.autoscale, args=(fleet,), kwargs=options)
    keeper.start()
    try:
        rng = np.random.default_rng(3)
        requests = [
            ClientRequest(rng.integers(5, VOCABULARY, given).tolist(), int(made), 31, float(when))
            for when, given, made in zip(at, inputs, outputs, strict=True)
        ]
        time.sleep(max(0.0, begins_s - time.time()))
        httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).raise_for_status()
        results = asyncio.run(replay(f"http://127.0.0.1:{port}", requests, concurrency=None))
    finally:
        stop.set()
        keeper.join()
    return _live(seconds, bound_s, predicted.share_within, requests, results, notes, state)


def _live(
    seconds: float,
    bound_s: float,
    predicted: float,
    requests: list[ClientRequest],
    results: list[ClientResult],
    notes: list[str],
    state: Path,
) -> Live:
    pairs = list(zip(results, requests, strict=True))
    lost = [of for of, asked in pairs if of.error is not None or of.num_tokens != asked.output_length]
    whole_s = np.asarray([of.end_s - (asked.send_at_s or 0.0) for of, asked in pairs])
    marked = [path for path in Path("/proc").glob("[0-9]*/environ") if _has_mark(path, str(state / "fleet"))]
    return Live(
        seconds,
        bound_s,
        len(results),
        len(lost),
        predicted,
        float(np.mean(whole_s <= bound_s)),
        float(np.median(whole_s)),
        float(np.quantile(whole_s, 0.99)),
        starts=sum(line.startswith("start ") for line in notes),
        replicas=max((int(line.split(" ready")[0].rsplit(" ", 1)[1]) for line in notes if " ready" in line), default=0),
        left_over=len(marked),
    )


def _has_mark(path: Path, directory: str) -> bool:
    try:
        return f"XGPT_FLEET_REPLICA={directory} ".encode() in path.read_bytes()
    except OSError:
        return False


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.argument("state", type=click.Path(path_type=Path))
@click.option("--seconds", type=float, default=180, show_default=True)
@click.option("--bound", "bound_s", type=float, default=4, show_default=True, help="On the whole request, s.")
def main(state: Path, seconds: float, bound_s: float) -> None:
    state.mkdir(parents=True, exist_ok=True)
    commit = made.commit()
    live = replace(run(state.resolve(), seconds, bound_s), load=os.getloadavg()[0], commit=commit)
    text = json.dumps(asdict(live), indent=1)
    write_atomic(state / LIVE, text + "\n")
    click.echo(text)
    sys.exit(bool(live.lost or live.left_over))


if __name__ == "__main__":
    main()
