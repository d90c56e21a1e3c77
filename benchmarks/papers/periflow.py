"""Check the figure and the three statements of FriendliAI's article on PeriFlow (ORCA in production).

Source: "PeriFlow: How to Serve Large-scale Transformer Models", 2022-07-18.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.papers import orca
from benchmarks.papers.claims import Found, at_least, judged
from benchmarks.papers.settings import workload_of
from xgpt.core.workload import sample

RATE = 0.15
"""Requests a second that both systems sustain."""
BATCHES = 4000


def claims() -> Iterator[Found]:
    workload = workload_of("orca", orca.MODEL)
    at = orca.at_twice_one_request()
    yield at_least("PeriFlow", "throughput over FT at the same latency, 175B", 36.9, at.orca / at.ft, "x")
    _, outputs = sample(workload, 8 * BATCHES, np.random.default_rng(0))
    batches = outputs.reshape(BATCHES, 8)
    longest = batches.max(axis=1, keepdims=True)
    wasted = 1 - batches.sum() / (8 * longest.sum())
    yield judged(
        "PeriFlow",
        "share of a batch's computation for requests that have ended, batches of 8",
        "some; none with iteration-level scheduling",
        f"{100 * wasted:.0f}%; 0%",
        "above 0; 0 with iteration-level scheduling",
        wasted > 0,
    )
    late = float(((longest - batches) / batches).mean())
    yield judged(
        "PeriFlow",
        "time that a finished request waits for its batch, relative to its own length",
        "cannot return promptly; returns at once with iteration-level scheduling",
        f"{late:.1f} times its own tokens on average; 0",
        "above 0; 0 with iteration-level scheduling",
        late > 0,
    )
    demand = orca.draw(workload, RATE)
    ft = orca.FasterTransformer(orca.problem_of(orca.MODEL, workload))
    ends = ft.ends(demand, 8)
    begins = ends - np.array([ft.batch_s(demand.inputs[ends == end], demand.outputs[ends == end]) for end in ends])
    wait_ft = float(np.mean(np.maximum(begins - demand.arrivals_s, 0)))
    wait_orca = orca.seconds_a_token(orca.lane_cost(orca.problem_of(orca.MODEL, workload)))
    yield judged(
        "PeriFlow",
        f"time that a new request waits at {RATE:g} req/s: for the end of the running batch; for the next iteration",
        "for the whole batch; for an iteration",
        f"{wait_ft:.1f} s on average; {wait_orca:.3f} s",
        "the first above the second",
        wait_ft > wait_orca,
    )
