"""What no rule of steps exceeds: no more requests are counted late than the best choice of them makes so."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from benchmarks.lib.ceiling import _fewest_late
from tests.rings import few

TTFT_S = 1.0


def keeps(arrivals_s: list[float], seconds: list[float], chosen: tuple[int, ...]) -> bool:
    free_s = 0.0
    for i in chosen:
        free_s = max(free_s, arrivals_s[i]) + seconds[i]
        if free_s > arrivals_s[i] + TTFT_S:
            return False
    return True


@pytest.mark.parametrize("seed", few(range(60), 12))
def test_no_choice_has_fewer_late(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 9))
    arrivals_s = np.cumsum(rng.exponential(0.4, count))
    seconds = rng.uniform(0.05, 1.2, count).tolist()
    least = min(
        count - size
        for size in range(count + 1)
        for chosen in combinations(range(count), size)
        if keeps(arrivals_s.tolist(), seconds, chosen)
    )
    counted = _fewest_late(arrivals_s, seconds, seconds, TTFT_S)
    assert counted <= least
    assert counted >= least - 1  # it takes no idle time where a request is given up, and is little lower for it
