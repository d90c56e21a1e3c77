"""Draw the numbers of decode steps of requests with a draft, whose steps emit varying numbers of tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import Speculation

Ints = npt.NDArray[np.int_]


def decoded(outputs: npt.ArrayLike, speculation: Speculation | None, rng: np.random.Generator) -> Ints:
    """Return the decode steps of requests in the schedule, as output lengths; unchanged without a draft. # [requests]

    A step of the schedule stands for the part of a real step in which a request gets one token on average. A request
    whose drafts are accepted less often than average takes more such steps: its real steps emit 1, 2, ... tokens with
    the probabilities in `Speculation.shares` until it has its output. The first token comes with its prompt.

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
    # The last step may emit more tokens than the output has; all outputs are scaled to correct for this.
    whole = speculation.tokens_per_step * steps
    wanted, taken = float((lengths - 1).sum()), float(whole.sum())
    return 1 + np.round(whole * (wanted / taken if taken else 1.0)).astype(int)
