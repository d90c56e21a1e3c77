"""Compute from a reuse curve which part of prompts is cached, for the closed forms."""

from __future__ import annotations

import numpy as np

from xgpt.core.reuse_distances import ReuseCurve
from xsimulator.lengths import Reused

KINDS = 200
"""Largest number of kinds of requests that closed forms distinguish."""


def reused_at(
    curve: ReuseCurve, tokens: float, kept_tokens: float | None = None, *, holds_prompts: bool = True
) -> Reused:
    """Return the part of prompts that requests find in a cache of `tokens` tokens.

    Requests are grouped by the number of tokens that remain to be encoded.

    Args:
        kept_tokens: memory, in tokens, that is reserved for the cache. None means `tokens`.
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
