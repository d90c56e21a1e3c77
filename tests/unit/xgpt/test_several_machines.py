"""What a plan for several machines may contain, by the engine that is to run it."""

from __future__ import annotations

import pytest

from xgpt.core.errors import InputError
from xgpt.problems import resolve
from xgpt.reporting.plan_text import uneven_in_words
from xgpt.requests import PlanRequest
from xgpt.resolve import load_cluster
from xgpt.solving import solve
from xscheduler.placement import Placement
from xscheduler.problem import Problem

MACHINES = load_cluster("a40x16").model_copy(update={"name": "2 x 2", "num_nodes": 2, "devices_per_node": 2})
TINY = {"model": "opt-125m", "workload": "translation", "objective": "saturated"}


@pytest.mark.parametrize(
    ("fields", "is_even"),
    [
        ({"cluster": MACHINES}, True),
        ({"cluster": MACHINES, "engine": "xgpt"}, False),
        ({"cluster": MACHINES, "fix": {"tp_devices": 2}}, False),
        ({"cluster": MACHINES, "model": "t5-11b"}, False),
        ({"cluster": "a40x4"}, False),
        ({"cluster": "a40x4", "engine": "vllm"}, True),
    ],
)
def test_by_default_plans_for_several_machines_are_what_vllm_runs(fields: dict[str, object], is_even: bool) -> None:
    assert resolve(PlanRequest.model_validate(TINY | fields)).even is is_even


def test_an_encoder_decoder_is_not_planned_for_vllm() -> None:
    with pytest.raises(InputError, match="use `engine=xgpt`"):
        resolve(PlanRequest.model_validate(TINY | {"model": "t5-11b", "cluster": "a40x4", "engine": "vllm"}))


def test_what_other_stages_would_gain_is_said() -> None:
    planned = solve(PlanRequest.model_validate(TINY | {"cluster": MACHINES, "policy": "orca", "fix": {"replicas": 1}}))
    assert Placement.of(planned.best).is_even
    assert Problem.of(planned.best, planned.problem.profile).even
    uneven = planned.best_uneven()
    assert uneven is not None and "equal tensor-parallel degrees" in uneven_in_words(planned.best, uneven)
    wide = uneven.model_copy(
        update={"estimate": uneven.estimate.model_copy(update={"throughput_rps": 2 * uneven.estimate.throughput_rps})}
    )
    assert "xgpt's own engine (--engine xgpt) would serve 100.0% more" in uneven_in_words(uneven, wide)
