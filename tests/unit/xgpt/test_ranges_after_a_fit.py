"""Ranges of predictions that were fitted to measured loads."""

from __future__ import annotations

import pytest

from xgpt import api
from xgpt.core.schema import FittedLoads
from xgpt.deciding.ranges import ranges_of
from xprofiler.ranges import beyond
from xprofiler.store import profile_of


def test_ranges_are_those_of_the_fit_and_widen_away_from_its_loads() -> None:
    asked = {"model": "llama-3.1-8b", "cluster": "h100x1", "workload": "azure-conv", "engine": "vllm"}
    plan = api.plan(**asked, objective="saturated", latency_bound_s=20, policy="chunked")
    profile, running = profile_of(plan, None), plan.estimate.decode_batch
    unfitted = ranges_of(plan, profile)["ranges"]
    widths = {}
    for times in (1, 4, 256):
        loads = FittedLoads(running=(running / 2 / times, running / times), error=0.05)
        found = ranges_of(plan, profile.but(fitted=loads))
        low, high = found["ranges"]["throughput_rps"]
        assert low < plan.estimate.throughput_rps < high
        widths[times] = (high / low) ** 0.5
        said = found["ranges_from"]["throughput_rps"]
        assert ("measure a load like it" in said) == (times > 1) and "fitted to loads" in said
        assert found["ranges"]["ttft_s"][1] / plan.estimate.ttft_s >= widths[times] * 0.999
    assert widths[1] == pytest.approx(1.05) and widths[4] == pytest.approx(1.05 * beyond("throughput", 4))
    assert widths[1] < (unfitted["throughput_rps"][1] / unfitted["throughput_rps"][0]) ** 0.5 < widths[256]


def test_errors_grow_with_the_distance_from_the_fit() -> None:
    grown = [beyond("throughput", times) for times in (0.5, 1, 1.5, 2, 8, 32, 100)]
    assert grown[:2] == [1, 1] and grown == sorted(grown) and len(set(grown[1:])) == 6
