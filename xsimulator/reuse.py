"""Apply a reuse curve to the lengths of closed forms."""

from __future__ import annotations

import numpy as np

from xgpt.core.reuse import ReuseCurve
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
    columns = [[float(values[group].mean()) for group in groups] for values in (curve.inputs, cached)]
    shares = np.asarray([len(group) / len(order) for group in groups])
    return Reused(
        np.asarray(columns[0]),
        np.asarray(columns[1]),
        shares,
        tokens if kept_tokens is None else kept_tokens,
        curve.most,
        holds_prompts,
    )
