"""ORCA's Figure 10: GPT-3 175B on two machines of eight A100 40 GB."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.papers.claims import Claim, judged
from benchmarks.papers.settings import problem, workload_of
from xscheduler.schedule import Scheduler
from xsimulator.queueing import Queue

BOUND_S = 0.19
"""Median latency a token."""


def _max_rate(kind: str) -> float:
    """The highest Poisson rate at which the median request's whole time, a token, keeps the bound."""
    of = problem("gpt3-175b", "a100-40g-x16", workload_of("orca", "gpt3-175b"))
    scheduler = Scheduler(of)
    space = scheduler.space(kind, scheduler.uniform_placement(kind, 8, 2, 1))
    name = {"orca": "max_batch", "static": "batch"}[kind]
    most = int(space.capacity)
    batches = np.unique(np.geomspace(1, most, 24).astype(int))

    def evaluate(kind: str, **columns: np.ndarray) -> object:
        return space.evaluate(columns).performance

    queue = Queue(evaluate, space.lengths, kind, **{name: batches})  # type: ignore[arg-type]
    outputs = space.lengths.outputs
    low, high = np.zeros(len(batches)), queue.saturation.copy()
    for _ in range(25):
        rate = (low + high) / 2
        loaded = queue.at(rate, 0.5)
        whole = loaded.ttft[:, None] + loaded.tpot[:, None] * (outputs - 1)
        if kind == "static":  # nobody of a batch is answered before its longest member
            whole = np.repeat(whole[:, -1:], len(outputs), axis=1)
        order = np.argsort(whole / outputs, axis=1)
        share = np.cumsum(space.lengths.output_probabilities[order], axis=1)
        middle = (share < 0.5).sum(axis=1)
        index = np.arange(len(batches))
        normalised = (whole / outputs)[index, order[index, middle]]
        keeps = normalised <= BOUND_S
        low, high = np.where(keeps, rate, low), np.where(keeps, high, rate)
    return float(low.max())


def figure_10() -> Iterator[Claim]:
    orca, ft = _max_rate("orca"), _max_rate("static")
    ratio = orca / ft if ft else np.inf
    yield judged(
        "ORCA Fig. 10",
        "requests a second at 190 ms median normalised latency",
        "ORCA 6.81, FT 0.185: 36.9x",
        f"ORCA {orca:.2f}, static {ft:.3f}: {ratio:.1f}x",
        ratio > 10,
    )
