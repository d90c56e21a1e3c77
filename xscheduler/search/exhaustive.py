"""Search by predicting every point of every space. The other methods are compared with this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from xscheduler.search.base import SearchResult
from xscheduler.space import Space

BOUND = "every point was predicted"


def search(spaces: Sequence[Space]) -> SearchResult:
    """Return the best allowed point of all spaces, proven by predicting every point."""
    best, highest = SearchResult(None, None, {}, 0, 0.0, BOUND), -np.inf
    for space in spaces:
        for columns, evaluation in space.sweep():
            score = np.where(evaluation.feasible, evaluation.score, -np.inf)
            index = int(score.argmax())
            if score[index] > highest:
                highest = float(score[index])
                best = SearchResult(space, space.settings(columns, index), evaluation.at(index), 0, 0.0, BOUND)
    return replace(best, method="exhaustive", evaluations=sum(space.evaluations for space in spaces))
