"""Draw how long requests decode whose steps emit varying numbers of tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import Speculation

Ints = npt.NDArray[np.int_]


def decoded(outputs: npt.ArrayLike, speculation: Speculation | None, rng: np.random.Generator) -> Ints:
    """Return the schedule's decode steps of requests, as output lengths: the same without a draft. # [requests]

    A step of the schedule stands for the part of a whole step in which a request gets one token on average. A request
    whose drafts are accepted less often than the mean takes more of them: its whole steps emit 1, 2, ... tokens with
    the probabilities of `Speculation.shares`, until it has its output; the first token comes with its prompt.

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
    # The last step may emit more than is wanted, of all outputs alike.
    whole = speculation.tokens_per_step * steps
    wanted, taken = float((lengths - 1).sum()), float(whole.sum())
    return 1 + np.round(whole * (wanted / taken if taken else 1.0)).astype(int)
