"""Short requests by the ten thousand: memory stays flat and every K/V block comes back.

    python -m benchmarks.soak [--requests 20000]

The server is one of three million parameters in a process of its own. Requests differ in all that a request may
ask for; one in fifty leaves in the middle. Prints a line a tenth, writes results/soak.json, and ends with 1 where
memory grew by more than 2% after the warm-up, a block is missing or a request failed.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click

from benchmarks.fuzz import Case, exchange, http
from benchmarks.lib.tiny_server import SPEC, Running, running
from xgpt.core.io import write_atomic

RESULTS = Path("results/soak.json")
CONCURRENCY = 32
NUM_PARTS = 10
NUM_WARM_PARTS = 3
MAX_RSS_GROWTH = 0.02


def cases(num_requests: int, seed: int) -> Iterator[Case]:
    """Good requests of many kinds."""
    rng = random.Random(seed)
    for _ in range(num_requests):
        body: dict[str, Any] = {
            "model": SPEC.name,
            "prompt": [rng.randrange(3, SPEC.vocab_size) for _ in range(rng.randint(1, 24))],
            "max_tokens": rng.randint(1, 12),
            "temperature": rng.choice((0, 0, 1)),
            "stream": rng.random() < 0.5,
        }
        body |= rng.choice(({}, {}, {"top_p": 0.9}, {"n": 2}, {"stop": "e"}, {"logprobs": 3}, {"presence_penalty": 1}))
        leaves = "close" if rng.random() < 0.02 else None
        yield Case(http("/v1/completions", json.dumps(body).encode()), leaves=leaves, must_succeed=leaves is None)


async def soak(server: Running, num_requests: int, seed: int) -> tuple[Counter[str], list[int]]:
    """Returns how often each status came, and the server's memory in bytes after each part."""
    statuses: Counter[str] = Counter()
    rss_bytes: list[int] = []
    everything = cases(num_requests, seed)
    for part in range(NUM_PARTS):
        start_s = time.perf_counter()
        queue = islice(everything, num_requests // NUM_PARTS)

        async def work(queue: Iterator[Case] = queue) -> None:
            for case in queue:
                statuses[await exchange(server.port, case)] += 1

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        rss_bytes.append(server.rss_bytes())
        rate = num_requests // NUM_PARTS / (time.perf_counter() - start_s)
        click.echo(f"{part + 1:2} of {NUM_PARTS}: {rss_bytes[-1] / 2**20:.1f} MiB, {rate:.0f} requests/s")
    return statuses, rss_bytes


@click.command()
@click.option("--requests", "num_requests", default=20_000, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(num_requests: int, seed: int) -> None:
    """Serve many short requests; compare memory and blocks before and after."""
    with running() as server:
        statuses, rss_bytes = asyncio.run(soak(server, num_requests, seed))
    growth = rss_bytes[-1] / rss_bytes[NUM_WARM_PARTS - 1] - 1
    click.echo(f"answers: {dict(statuses)}; memory after warm-up: {100 * growth:+.2f}%")
    click.echo(f"blocks free again: {server.last_words['free_blocks']} of {server.last_words['num_blocks']}")
    result = {"num_requests": num_requests, "seed": seed, "answers": statuses, "rss_bytes": rss_bytes}
    write_atomic(RESULTS, json.dumps(result | {"rss_growth": growth} | server.last_words, indent=1) + "\n")
    leaks = server.last_words["free_blocks"] < server.last_words["num_blocks"]
    raise SystemExit(growth > MAX_RSS_GROWTH or leaks or set(statuses) - {"200", "left"} != set())


if __name__ == "__main__":
    main()
