"""Draw how many decode steps requests take with a draft, since the number of tokens per step varies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import Speculation

Ints = npt.NDArray[np.int_]


def decoded(outputs: npt.ArrayLike, speculation: Speculation | None, rng: np.random.Generator) -> Ints:
    """Return the output lengths with which the schedule simulates requests with a draft. # [requests]

    A step of the schedule stands for that fraction of an engine step in which a request gets one token on average. The
    first token comes with the prompt. Then engine steps emit 1, 2, ... tokens with the probabilities in
    `Speculation.shares` until the output is complete. So a request whose drafts are rarely accepted takes more steps.
    Without a draft, the lengths are unchanged.

    Args:
        outputs: output tokens. # [requests]
    """
    lengths = np.asarray(outputs)
    if speculation is None:
        return lengths
    left, steps = lengths - 1, np.zeros(len(lengths), int)
    ends = np.cumsum(speculation.shares)
    while (going := np.flatnonzero(left > 0)).size:
        left[going] -= 1 + np.minimum(np.searchsorted(ends, rng.random(going.size)), speculation.tokens)
        steps[going] += 1
    # The last step may emit more tokens than the output needs. All outputs are scaled to correct for this.
    whole = speculation.tokens_per_step * steps
    wanted, taken = float((lengths - 1).sum()), float(whole.sum())
    return 1 + np.round(whole * (wanted / taken if taken else 1.0)).astype(int)
