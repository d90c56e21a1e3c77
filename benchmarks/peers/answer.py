"""Connect an engine in a separate environment with the benchmark, which sends a line for each run over pipes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict


class Request(TypedDict):
    prompt: list[int]
    num_output: int


def answer(load: Callable[[str, str, int], Callable[[list[Request]], int]], package: str) -> None:
    """Load the model, run two requests as warm-up, then the requests of each file that standard input names.

    Args:
        load: takes a checkpoint's directory, a precision ("float32", "bfloat16", "int8") and the largest number of
            tokens in a step. Returns a function that runs requests and returns the number of output tokens.
        package: the package whose version is reported.
    """
    checkpoint, precision, budget = sys.argv[1:]
    print("NOTE", package, version(package), flush=True)
    run = load(checkpoint, precision, int(budget))
    run([{"prompt": list(range(10, 42)), "num_output": 4}] * 2)
    print("READY", flush=True)
    for line in sys.stdin:
        requests: list[Request] = json.loads(Path(line.strip()).read_text())
        start = time.perf_counter()
        num_tokens = run(requests)
        seconds = time.perf_counter() - start
        expected = sum(request["num_output"] for request in requests)
        assert num_tokens == expected, f"{num_tokens} tokens came out instead of {expected}"
        print(f"SECONDS {seconds}", flush=True)
