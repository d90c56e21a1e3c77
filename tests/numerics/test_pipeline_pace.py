"""The pace of a served pipeline: what its workers say they have computed, over what was predicted of them."""

import numpy as np
import pytest

from tests.planned import problem_of, scored
from xgpt.benchmark import Load, bench_plan
from xsimulator.costs.step_cost import lanes_of
from xsimulator.executed import executed


@pytest.mark.long
@pytest.mark.parametrize("name", ["opt-tied", "t5-gated-untied"])
def test_workers_of_a_served_pipeline_tell_what_they_computed_and_not_what_they_waited(checkpoint, name):
    """With one micro-batch one worker waits while the other computes, so that both together compute for as long as
    steps are under way at most."""
    problem = problem_of(checkpoint(name)[0], 2)
    plan = scored(problem, "orca", [[1, 1]], 1, max_batch=16)
    report, log = bench_plan(plan, Load(30), np.random.default_rng(0), profile=problem.profile)
    assert report.num_failed == 0 and set(report.paces) == {"worker 0", "worker 1"}
    lane = lanes_of(plan, problem.profile)["both"]
    predicted_s = np.sum([lane.step(counts) for _, counts, _ in executed(plan, log)], axis=0)
    busy_s = predicted_s * [report.paces["worker 0"], report.paces["worker 1"]]
    assert report.pace == pytest.approx(busy_s.sum() / predicted_s.sum())
    under_way_s = sum(record.end_ns - record.start_ns for record in log) / 1e9
    assert min(busy_s) > 0 and busy_s.sum() <= under_way_s
    assert all(figure.at_pace is not None for figure in report.figures)
