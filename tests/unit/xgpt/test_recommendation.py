"""What a plan is said to rest on: measurements, or none."""

import pytest

import xgpt
from xgpt.deciding.verified import unverified
from xgpt.deciding.words import lines


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "llama-3.1-8b", "cluster": "h100x1"}, ()),
        ({"model": "llama-3.1-8b", "cluster": "mi300x-x8", "devices": 1}, ("mi300x", "h100-80gb-hbm3")),
        ({"model": "opt-13b", "cluster": "a40x4", "fix": {"pp": 2}, "policy": "orca"}, ("pipelines",)),
        ({"model": "opt-13b", "cluster": "a40x4", "policy": "waa"}, ("prefill and decode on separate devices",)),
    ],
)
def test_what_no_measurement_checks_is_said(asked: dict[str, object], words: tuple[str, ...]) -> None:
    plan = xgpt.plan(**{"latency_bound_s": 20, "objective": "saturated"} | asked)  # type: ignore[arg-type]
    text = "; ".join(unverified(plan))
    assert bool(text) == bool(words)
    assert all(word in text for word in words)


def test_a_recommendation_prints_it() -> None:
    found = xgpt.solve(
        model="opt-13b", cluster="a40x4", latency_bound_s=20, objective="saturated", policy="waa"
    ).recommendation
    assert "Not verified by measurements: prefill and decode on separate devices." in " ".join(lines(found, 1000))


def test_a_replay_that_breaks_the_bounds_is_no_load_that_holds() -> None:
    found = xgpt.solve(model="llama-3.1-8b", cluster="h100x1", latency_bound_s=20, arrival_rate_per_s=2).recommendation
    load = found.best.at_load
    assert load is not None
    for share, start in ((0.995, "Your load: 2/s"), (0.98, "Too little for your load: 2/s")):
        at_load = load.but(share_kept=share, worst_share_kept=0.9, worst_window="12 h to 12.2 h")
        text = lines(found.but(best=found.best.but(at_load=at_load)), 1000)
        assert any(line.startswith(start) for line in text), text
