"""Replays of more than a plan can serve."""

from __future__ import annotations

import time

import numpy as np

import xgpt
from xgpt.core.load import LogLoad
from xgpt.core.schema.plan import rate_of
from xgpt.core.workload import TraceLengths
from xprofiler.store import profile_of
from xsimulator.replay import replay


def test_overdue_requests_do_not_slow_a_replay_down() -> None:
    """Each step walked through all of them: a day of twice the load did not end within minutes."""
    asked = {"model": "llama-3.1-8b", "cluster": "h200x1", "workload": "orca", "order": "in-time"}
    plan = xgpt.plan(**asked, policy="chunked", latency_bound_s=None, ttft_s=0.5, quantile=0.9)
    profile, rng = profile_of(plan, None), np.random.default_rng(0)

    def seconds(number: int) -> float:
        inputs, outputs = rng.integers(32, 512, number), rng.integers(1, 128, number)
        times = np.cumsum(rng.exponential(1 / (4 * rate_of(plan)), number))
        begun_s = time.process_time()
        assert replay(plan, profile, LogLoad.of("log", TraceLengths(inputs, outputs, times))) is not None
        return time.process_time() - begun_s

    seconds(1000)
    assert seconds(64_000) < 10 * seconds(16_000)
