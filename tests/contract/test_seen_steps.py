"""What a run by counts logs of its steps says of latencies what the log of the engine says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings

from tests.contract.test_counts import Arrivals, drawn
from tests.rings import examples
from xgpt.core.workload import TraceLengths
from xscheduler.space import POLICIES
from xsimulator.costs.step_cost import lanes_of
from xsimulator.counts.arrivals import Stream
from xsimulator.counts.counted_run import counted_run
from xsimulator.lengths import Lengths
from xsimulator.request_law import SeenSteps, request_law
from xsimulator.run import run_requests


@settings(max_examples=examples(60, 15))
@given(drawn(POLICIES, 4, sla="request", loads=(1.0,), together=(1,), room=(0,)))
def test_both_logs_say_the_same(arrivals: Arrivals) -> None:
    plan = arrivals.plan()
    assume(plan is not None)
    assert plan is not None
    profile, requests = arrivals.case.subject.profile, arrivals.stream(plan)
    at_once = Stream(requests.inputs, requests.outputs, requests.max_output, [0] * len(requests.inputs))
    run = counted_run(plan, lanes_of(plan, profile), at_once, is_logged=True)
    assert run.run()
    lengths = TraceLengths(np.asarray(requests.inputs), np.asarray(requests.outputs), None)
    log = run_requests(plan, profile, lengths, int(np.max(requests.max_output)))
    by_counts, one_by_one = (
        request_law(seen, Lengths(plan.workload), 10, 50) for seen in (SeenSteps.of_run(run), SeenSteps.of_log(log))
    )
    assert by_counts.seconds == pytest.approx(one_by_one.seconds, rel=1e-9)
