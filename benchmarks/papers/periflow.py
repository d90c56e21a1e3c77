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
        "share of a batch of 8 computed for ended requests; in ORCA",
        "some; none",
        f"{100 * wasted:.0f}%; 0%",
        "above 0; 0",
        wasted > 0,
    )
    late = float(((longest - batches) / batches).mean())
    yield judged(
        "PeriFlow",
        "wait of an ended request for its batch, over its own length; in ORCA",
        "some; none",
        f"{late:.1f}x; 0",
        "above 0; 0",
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
        f"wait of a new request at {RATE:g} req/s; in ORCA",
        "a batch; an iteration",
        f"{wait_ft:.1f} s; {wait_orca:.3f} s",
        "first above second",
        wait_ft > wait_orca,
    )
