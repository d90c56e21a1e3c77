"""What a plan for several machines may contain, by the engine that is to run it."""

from __future__ import annotations

import pytest

from xgpt.core.errors import InputError
from xgpt.problems import resolve
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


def test_a_plan_for_several_machines_stays_one_that_vllm_runs() -> None:
    planned = solve(PlanRequest.model_validate(TINY | {"cluster": MACHINES, "policy": "orca", "fix": {"replicas": 1}}))
    assert Placement.of(planned.best).is_even
    assert Problem.of(planned.best, planned.problem.profile).even
