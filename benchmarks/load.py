"""Load a server with many streams at once, with more requests than it can serve, and with a SIGTERM during streams.

    python -m benchmarks.load [streams] [overload] [sigterm]

streams: 1,600 streams are opened at 50 a second, so long that 1,000 are open at once, with a model of three million
parameters. Every token is compared with that of the same prompt in a request by itself. overload: a plan under a
latency bound gets three times the requests that it can serve. sigterm: the server gets SIGTERM while streams run.
Client and server are separate processes. Prints tables and writes results/load.json. The exit code is 1 if a goal is
missed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

from benchmarks.drift import KINDS, SMALL, Lab
from benchmarks.lib import tiny_server
from benchmarks.lib.changing_lengths import shifted
from xgpt.benchmark import served
from xgpt.cli.render import show, table
from xgpt.client import ClientRequest, ClientResult, replay
from xgpt.core.io import write_atomic
from xgpt.core.workload import sample
from xgpt.resolve import load_workload
from xprofiler.others import gflops

RESULTS = Path("results/load.json")
NUM_OPEN = 1000
RATE_PER_S = 50.0
ENDING_PER_S = 12.0
"""Number of streams that end per second, so low that 1,000 are open after 1,600 have been opened. The pace is measured
on a server that has just started, and is a fifth too low."""
MOST_TOKENS = 480
MAX_OVERHEAD_S = 0.05
PROMPTS = 8
"""Number of different prompts. Each is also sent once by itself to get the right tokens."""
OVERLOAD = 3.0
PACE_S = 20.0
"""Time after which the server has measured its pace beside a client and changed to a plan for this pace. Later requests
are reported separately."""
DRAIN_S = 5.0


def streams(num_streams: int, num_tokens: int | None, max_batch: int, seed: int) -> dict[str, Any]:
    """Run many streams at once, and check each token.

    Args:
        num_tokens: tokens of each stream. None means so many, at the server's pace, that all streams are open at once.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, tiny_server.SPEC.vocab_size, 16).tolist() for _ in range(PROMPTS)]
    blocks = max_batch * -(-(16 + MOST_TOKENS) // tiny_server.BLOCK_SIZE)
    with tiny_server.running(max_batch, blocks) as server:
        url = f"http://127.0.0.1:{server.port}"
        if num_tokens is None:
            short = [ClientRequest(prompts[i % PROMPTS], 40, 40) for i in range(2 * max_batch)]
            results = asyncio.run(replay(url, short, concurrency=max_batch))
            pace = sum(r.num_tokens for r in results) / max(r.end_s for r in results)
            num_tokens = min(max(20, round(pace / ENDING_PER_S)), MOST_TOKENS)
        alone = [ClientRequest(prompt, num_tokens, num_tokens) for prompt in prompts]
        right = [result.token_ids for result in asyncio.run(replay(url, alone, concurrency=1))]
        requests = [
            ClientRequest(prompts[i % PROMPTS], num_tokens, num_tokens, i / RATE_PER_S) for i in range(num_streams)
        ]
        results = asyncio.run(replay(url, requests, concurrency=None))
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    wrong = sum(r.error is None and r.token_ids != right[i % PROMPTS] for i, r in enumerate(results))
    events = sorted([(r.send_s, 1) for r in results] + [(r.end_s, -1) for r in results])
    seconds = max(r.end_s for r in results)
    return {
        "streams": num_streams,
        "tokens_each": num_tokens,
        "decoding_at_once": max_batch,
        "open_at_once": max(accumulate(change for _, change in events)),
        "lost": sum(r.error is not None for r in results),
        "wrong": wrong,
        "tokens_per_s": sum(r.num_tokens for r in results) / seconds,
        **{
            f"{name}_p{round(100 * q)}_s": histogram_quantile(metrics, f"xgpt_{name}_seconds", q)
            for name in ("handover", "delivery")
            for q in (0.5, 0.99)
        },
        "machine_gflops": gflops(),
        "failures": sorted({r.error for r in results if r.error is not None})[:3],
    }


def histogram_quantile(metrics: str, name: str, q: float) -> float:
    """Return a quantile of a Prometheus histogram, linear within a bucket like Prometheus' function of this name."""
    found = re.findall(rf'^{name}_bucket{{le="([^"]+)"}} (\S+)', metrics, re.MULTILINE)
    edges = [(0.0, 0.0), *((float(edge), float(count)) for edge, count in found)]
    wanted = q * edges[-1][1]
    for (low, below), (high, count) in pairwise(edges):
        if count >= wanted:
            return high if high == float("inf") else low + (high - low) * (wanted - below) / max(count - below, 1e-9)
    return float("inf")


def overload(seconds: float, seed: int) -> dict[str, Any]:
    """Send three times the requests that a plan can serve. Admitted requests must keep its bound and the promised wait.

    A plan's bound counts from admission, and the same time again is promised for waiting.
    """
    lab = Lab()
    workload = shifted(load_workload("summarization", SMALL))
    plan = lab.plan(workload, lab.bound(workload, 2.0))
    assert plan.policy.kind in KINDS and plan.constraint.latency_bound_s is not None
    estimate = plan.estimate
    bound_s = plan.constraint.latency_bound_s
    promised_s = 2 * bound_s
    rate = OVERLOAD * estimate.throughput_rps
    rng = np.random.default_rng(seed)
    inputs, outputs = sample(workload, int(rate * seconds), rng)
    requests = [
        ClientRequest(rng.integers(3, SMALL.vocab_size, int(n)).tolist(), int(m), workload.output.lengths[-1], i / rate)
        for i, (n, m) in enumerate(zip(inputs, outputs, strict=True))
    ]
    with tempfile.TemporaryDirectory() as directory:
        options = ("--answer-within", str(promised_s))
        with served(plan, Path(directory), Path(directory) / "steps.jsonl", replan=True, options=options) as url:
            results = asyncio.run(replay(url, requests, concurrency=None, stream=False))
            history = httpx.get(f"{url}/plan/history", trust_env=False).json()
    accepted = [r for r in results if r.error is None]
    refused_s = [r.end_s - r.send_s for r in results if "HTTP 429" in (r.error or "")]
    sent_s = np.asarray([r.send_s for r in accepted])
    total_s = np.asarray([r.end_s - r.send_s for r in accepted])
    admitted_s = np.asarray([r.server.total_s - r.server.queued_s for r in accepted if r.server is not None])
    later = sent_s >= PACE_S
    return {
        "sent": len(results),
        "accepted": len(accepted),
        "refused_429": len(refused_s),
        "other_errors": sum(r.error is not None and "HTTP 429" not in r.error for r in results),
        "planned_rps": estimate.throughput_rps,
        "accepted_rps": len(accepted) / max(r.end_s for r in accepted),
        "later_accepted_rps": float(later.sum() / (seconds - PACE_S)),
        "bound_s": bound_s,
        "from_admission_p99_s": float(np.quantile(admitted_s, 0.99)),
        "share_within_bound": float(np.mean(admitted_s <= bound_s)),
        "later_share_within_bound": float(np.mean(admitted_s[later] <= bound_s)),
        "promised_s": promised_s,
        "end_to_end_p99_s": float(np.quantile(total_s, 0.99)),
        "share_within_promise": float(np.mean(total_s <= promised_s)),
        "later_share_within_promise": float(np.mean(total_s[later] <= promised_s)),
        "refusal_p99_s": float(np.quantile(refused_s, 0.99)) if refused_s else 0.0,
        "machine_gflops": gflops(),
        "replans": sum(decision["action"] != "keep" for decision in history),
    }


def sigterm(num_streams: int, seed: int) -> dict[str, Any]:
    """Send SIGTERM during a run. Half of the streams are longer than the server waits for them."""
    rng = np.random.default_rng(seed)
    lab = Lab()
    workload = shifted(load_workload("summarization", SMALL))
    plan = lab.plan(workload, None)
    prompts = rng.integers(3, SMALL.vocab_size, (num_streams, 32)).tolist()
    requests = [
        ClientRequest(prompt, 1800 if i % 2 else 40, 1800 if i % 2 else 40, 0.01 * i)
        for i, prompt in enumerate(prompts)
    ]

    async def run(url: str) -> tuple[list[ClientResult], float]:
        loop = asyncio.create_task(replay(url, requests, concurrency=None))
        await asyncio.sleep(0.01 * num_streams + 1)
        told_s = time.perf_counter()
        (pid,) = [int(p) for p in os.listdir("/proc") if p.isdecimal() and _serves(int(p), plan_path)]
        os.kill(pid, signal.SIGTERM)
        results = await loop
        while _serves(pid, plan_path) and time.perf_counter() < told_s + 60:
            await asyncio.sleep(0.05)
        return results, time.perf_counter() - told_s

    with tempfile.TemporaryDirectory() as directory:
        plan_path = str(Path(directory) / "plan.json")
        options = ("--drain-timeout", str(DRAIN_S))
        try:
            with served(plan, Path(directory), Path(directory) / "steps.jsonl", options=options) as url:
                results, ended_s = asyncio.run(run(url))
        except Exception as error:  # `served` reports that the server has ended, as expected
            if "died with exit code 0" not in str(error):
                raise
    errors = [r.error for r in results if r.error is not None]
    return {
        "streams": num_streams,
        "finished": len(results) - len(errors),
        "told": sum("the server is shutting down" in error for error in errors),
        "unclear": [error for error in errors if "the server is shutting down" not in error][:3],
        "ended_after_s": ended_s,
        "drain_limit_s": DRAIN_S,
    }


def _serves(pid: int, plan_path: str) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and "serve" in arguments and plan_path in arguments


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(("streams", "overload", "sigterm")))
@click.option("--num-streams", default=1600, show_default=True)
@click.option(
    "--num-tokens", type=click.IntRange(1, MOST_TOKENS), help="Tokens of each stream.  [default: chosen by the pace]"
)
@click.option("--max-batch", default=64, show_default=True, help="Streams in decode at once; the others wait.")
@click.option(
    "--seconds",
    type=click.FloatRange(PACE_S, min_open=True),
    default=60.0,
    show_default=True,
    help="Duration of the overload.",
)
@click.option("--seed", default=0, show_default=True)
def main(
    parts: tuple[str, ...], num_streams: int, num_tokens: int | None, max_batch: int, seconds: float, seed: int
) -> None:
    """Put load on a server."""
    found: dict[str, dict[str, Any]] = {}
    missed: list[str] = []

    def tell(name: str, figures: dict[str, Any], *, is_good: bool) -> None:
        found[name] = figures
        missed.extend([] if is_good else [name])
        cells = [[k, f"{v:.4g}" if isinstance(v, float) else str(v)] for k, v in figures.items()]
        show(table(name, ["figure", "value"], cells))
        write_atomic(RESULTS, json.dumps(found | {"missed": missed}, indent=1) + "\n")

    if not parts or "streams" in parts:
        it = streams(num_streams, num_tokens, max_batch, seed)
        overhead_s = max(it["handover_p99_s"], it["delivery_p99_s"])
        is_whole = not it["lost"] and not it["wrong"] and it["open_at_once"] >= NUM_OPEN
        tell("streams", it, is_good=is_whole and overhead_s <= MAX_OVERHEAD_S)
    if not parts or "overload" in parts:
        it = overload(seconds, seed)
        kept = min(it["share_within_bound"], it["share_within_promise"])
        tell("overload", it, is_good=kept >= 0.99 and not it["other_errors"] and bool(it["refused_429"]))
    if not parts or "sigterm" in parts:
        it = sigterm(40, seed)
        tell("sigterm", it, is_good=not it["unclear"] and it["ended_after_s"] <= DRAIN_S + 3)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
