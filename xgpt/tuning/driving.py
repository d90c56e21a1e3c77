"""Send a workload at a rate until it is clear whether a server keeps the bounds, and find the highest such rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from math import log, sqrt
from typing import NamedTuple

import numpy as np

from xgpt.client import ClientRequest, ClientResult, replay
from xgpt.connection import own_api_key
from xgpt.core.errors import MachineError
from xgpt.core.schema import Constraint, Workload
from xgpt.core.schema.tuning import DrivenLoad
from xgpt.core.workload import ArrivalProcess, sample

RARE, OFTEN = 0.5, 5.0
"""The test decides between two shares of late requests, as multiples of the allowed share."""
CERTAIN = log(19.0)
"""The test ends when one of the two is 19 times as likely as the other. Source: Wald, Sequential Analysis, 1947."""
MOST_ALLOWED = 4.0
"""After this number of requests, divided by the allowed share of late ones, the share that was seen decides."""
LEAST_REQUESTS, MOST_REQUESTS = 30, 400
LEAST_S = 10.0
STEP = 1.35
"""Factor between the first two rates. It is squared until one rate keeps the bounds and another breaks them."""
MOST_STEP = 4.0
PRECISION = 1.12
MOST_LOADS = 7
LEAST_SHARE = 0.08
"""If the bounds are broken at this share of the expected rate, they count as broken at any rate."""
LOST = 8


class Goals(NamedTuple):
    constraint: Constraint

    @property
    def allowed(self) -> float:
        return 1 - self.constraint.quantile

    def is_kept(self, result: ClientResult) -> bool:
        if result.error is not None or not result.token_s:
            return False
        times = self.constraint.latency_bound_s, self.constraint.ttft_s, self.constraint.tpot_s
        seen = result.token_s[-1] - result.send_s, result.token_s[0] - result.send_s, _gap_s(result)
        return all(bound is None or value <= bound for bound, value in zip(times, seen, strict=True))


class SequentialTest:
    def __init__(self, allowed: float) -> None:
        rare, often = RARE * allowed, min(OFTEN * allowed, (1 + allowed) / 2)
        self._late, self._kept = log(often / rare), log((1 - often) / (1 - rare))
        self._allowed = allowed
        self.most = round(min(MOST_REQUESTS, max(LEAST_REQUESTS, MOST_ALLOWED / allowed)))
        self.score = 0.0
        self.num_kept = self.num_late = 0

    def note(self, *, is_kept: bool) -> None:
        self.num_kept, self.num_late = self.num_kept + is_kept, self.num_late + (not is_kept)
        self.score += self._kept if is_kept else self._late

    @property
    def verdict(self) -> bool | None:
        count = self.num_kept + self.num_late
        if self.score >= CERTAIN and self.num_late > 1:
            return False
        if count < LEAST_REQUESTS:
            return None
        if self.score <= -CERTAIN:
            return True
        return self.num_late <= self._allowed * count if count >= self.most else None


def drive(
    url: str,
    workload: Workload,
    constraint: Constraint,
    rate_per_s: float,
    *,
    vocabulary: int,
    seed: int = 0,
    most: int | None = None,
    until_s: float = float("inf"),
) -> DrivenLoad:
    """Send Poisson arrivals at a rate until it is clear whether the bounds are kept.

    Args:
        vocabulary: prompts are random tokens below this number.
        most: number of requests to send, without a test. None means as many as the test needs.
        until_s: time on the monotonic clock at which the load ends in any case.

    Raises:
        MachineError: the server does not answer, or is lost meanwhile.
    """
    rng = np.random.default_rng(seed)
    goals = Goals(constraint)
    test = SequentialTest(goals.allowed)
    count = most or test.most + round(LEAST_S * rate_per_s)
    inputs, outputs = sample(workload, count, rng)
    times = ArrivalProcess.at(rate_per_s, constraint.burstiness).times(count, rng)
    tokens = np.random.default_rng()  # a server keeps the K/V of earlier runs
    requests = [
        ClientRequest(tokens.integers(3, vocabulary, int(n)).tolist(), int(out), int(out), float(at))
        for n, out, at in zip(inputs, outputs, times, strict=True)
    ]
    began_s, in_a_row, first = time.monotonic(), 0, ""

    def is_clear(result: ClientResult) -> bool:
        nonlocal in_a_row, first
        in_a_row = 0 if result.error is None else in_a_row + 1
        first = first or result.error or ""
        test.note(is_kept=goals.is_kept(result))
        now_s = time.monotonic()
        if in_a_row >= LOST or now_s >= until_s:
            return True
        verdict = None if most is not None else test.verdict
        # After an error, further answers show whether the server is lost.
        return (verdict is False and not in_a_row) or (verdict is True and now_s - began_s >= LEAST_S)

    results = asyncio.run(replay(url, requests, concurrency=None, api_key=own_api_key(), until=is_clear))
    done = [result for result in results if result.error is None and result.token_s]
    if in_a_row >= LOST or not done:
        raise MachineError(f"{url} answers no more: {first or 'no request was answered in time'}")
    verdict = test.verdict
    kept = verdict if verdict is not None else test.num_late <= goals.allowed * (test.num_kept + test.num_late)
    return _measured(done, len(results) - len(done), constraint, rate_per_s, test, kept=kept)


def _measured(
    done: Sequence[ClientResult],
    num_failed: int,
    constraint: Constraint,
    rate_per_s: float,
    test: SequentialTest,
    *,
    kept: bool,
) -> DrivenLoad:
    ttft, whole = ([end - r.send_s for r in done for end in (r.token_s[at],)] for at in (0, -1))
    gaps = [_gap_s(result) for result in done if len(result.token_s) > 1] or [0.0]
    quantile = constraint.quantile
    return DrivenLoad(
        rate_per_s=rate_per_s,
        num_requests=len(done),
        num_failed=num_failed,
        share_kept=test.num_kept / max(test.num_kept + test.num_late, 1),
        kept=kept,
        ttft_mean_s=float(np.mean(ttft)),
        ttft_quantile_s=float(np.quantile(ttft, quantile)),
        tpot_mean_s=float(np.mean(gaps)),
        tpot_quantile_s=float(np.quantile(gaps, quantile)),
        whole_quantile_s=float(np.quantile(whole, quantile)),
        seconds=max(result.end_s for result in done),
    )


def _gap_s(result: ClientResult) -> float:
    tokens = max(result.num_tokens, len(result.token_s)) - 1
    return (result.token_s[-1] - result.token_s[0]) / tokens if tokens > 0 else 0.0


class Highest(NamedTuple):
    rate_per_s: float
    error: float
    loads: tuple[DrivenLoad, ...]


def highest_rate(send: Callable[[float], DrivenLoad], expected_per_s: float, until_s: float = float("inf")) -> Highest:
    """Find the highest rate at which the bounds are kept, beginning at the expected one.

    Args:
        until_s: time on the monotonic clock after which no further load begins.
    """
    low, high, loads = 0.0, float("inf"), list[DrivenLoad]()
    rate, step = expected_per_s, STEP
    while len(loads) < MOST_LOADS and (not loads or time.monotonic() < until_s):
        load = send(rate)
        loads.append(load)
        low, high = (max(low, rate), high) if load.kept else (low, min(high, rate))
        if high <= PRECISION * low or (not low and high <= LEAST_SHARE * expected_per_s):
            break
        if high == float("inf"):
            rate, step = low * step, min(step**2, MOST_STEP)
        elif not low:
            rate, step = high / step, min(step**2, MOST_STEP)
        else:
            rate = sqrt(low * high)
    if not low:
        return Highest(0.0, 0.0, tuple(loads))
    top = min(high, low * STEP**2)
    return Highest(sqrt(low * top), max(log(top / low) / sqrt(12), 0.02), tuple(loads))
