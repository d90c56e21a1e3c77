"""Apply a reuse curve to the lengths of closed forms, and check it against an exact replay."""

from __future__ import annotations

import numpy as np

from xgpt.policies import Blocks
from xgpt.reuse import ReuseCurve
from xgpt.workload import TraceLengths
from xsimulator.lengths import Reused

KINDS = 200
"""Kinds of requests that closed forms tell apart."""


def reused_at(
    curve: ReuseCurve, tokens: float, kept_tokens: float | None = None, *, holds_prompts: bool = True
) -> Reused:
    """Return what requests find in a cache of that many tokens, as closed forms take it.

    Requests are put together by what they have left to encode: the fewest and the most of them are kept apart.

    Args:
        kept_tokens: memory that is left for it; None: as much.
    """
    cached = curve.cached(tokens)
    order = np.argsort(curve.inputs - cached, kind="stable")
    groups = np.array_split(order, min(len(order), KINDS))
    columns = [[float(of[group].mean()) for group in groups] for of in (curve.inputs, cached)]
    shares = np.asarray([len(group) / len(order) for group in groups])
    return Reused(
        np.asarray(columns[0]),
        np.asarray(columns[1]),
        shares,
        tokens if kept_tokens is None else kept_tokens,
        curve.most,
        holds_prompts,
    )


def exact_share(trace: TraceLengths, capacity: int, block_size: int) -> float:
    """Return the share of prompt tokens found where the requests pass the engine's own blocks one after the other.

    Args:
        capacity: K/V blocks; the longest request must fit.
    """
    prefixes = trace.prefixes
    assert prefixes is not None
    blocks, found = Blocks(capacity), 0
    for number, (length, output) in enumerate(zip(trace.input.tolist(), trace.output.tolist(), strict=True)):
        chain = prefixes.chain(number, length, block_size)
        table = blocks.share(blocks.find(chain, (length - 1) // block_size).blocks)
        found += table.found * block_size
        for _ in range(-(-(length + output - 1) // block_size) - table.found):
            blocks.grow(table)
        chain += prefixes.output_chain(number, length, output, block_size)
        blocks.name(table, chain, len(chain))
        blocks.release(table)
    return float(found / trace.input.sum())
