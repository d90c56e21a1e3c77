"""Calibration: a profile that is wrong by factors is put right from a log of steps."""

import numpy as np
import pytest

from tests.contract.scenarios import problem
from xgpt.app.simulating import simulate
from xgpt.errors import InputError
from xgpt.schema import Calibration
from xscheduler.schedule import Scheduler
from xsimulator.calibrate import PARTS, calibrate, corrected

PROBLEM = problem("opt-13b", "h200x1", "summarization", 6.0)


def factors(**given: float) -> Calibration:
    every = dict.fromkeys(PARTS, 1.0) | given
    rest = dict.fromkeys(("error_before", "error_after", "bias_before", "bias_after"), 0.0)
    return Calibration(factors=every, num_steps_used=1, num_steps_unused=1, **rest)


@pytest.mark.parametrize("kind", ["rra", "chunked"])
def test_a_slower_machine_is_found(kind: str) -> None:
    plan = Scheduler(PROBLEM).best((kind,))
    truth = corrected(PROBLEM.profile, factors(tokens=1.2, decode_attention=1.5))
    _, log = simulate(plan, truth, plan.workload, 400, np.random.default_rng(0))
    profile, found = calibrate(plan, PROBLEM.profile, log)
    assert found.error_before > 0.1 and found.bias_before < -0.1
    assert found.error_after < 0.03 and abs(found.bias_after) < 0.02
    assert found.factors["tokens"] == pytest.approx(1.2, rel=0.05)
    assert "calibration" in profile.provenance
    again = calibrate(plan, profile, log)[1]
    assert again.error_before < 0.03


def test_steps_that_tell_of_the_machine_are_left_out() -> None:
    plan = Scheduler(PROBLEM).best(("rra",))
    _, log = simulate(plan, PROBLEM.profile, plan.workload, 400, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    stalled = [r._replace(end_ns=r.end_ns + 10**9) if rng.random() < 0.03 else r for r in log]
    _, found = calibrate(plan, PROBLEM.profile, stalled)
    assert all(factor == pytest.approx(1, abs=0.02) for factor in found.factors.values())


def test_a_short_log_is_refused() -> None:
    plan = Scheduler(PROBLEM).best(("rra",))
    _, log = simulate(plan, PROBLEM.profile, plan.workload, 400, np.random.default_rng(0))
    with pytest.raises(InputError, match="replay more"):
        calibrate(plan, PROBLEM.profile, log[:60])
