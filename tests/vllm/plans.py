"""Plans for the tests: made for a device that is not here, then given settings small enough for one that is."""

from __future__ import annotations

from functools import cache

from xgpt.core.schema import Admission, Constraint, KvPromise, Plan, RraSettings, SingleLaneSettings, Stage, WaaSettings
from xgpt.resolve import load_cluster, load_model, load_workload
from xprofiler import analytic
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler


def plan_with(policy: SingleLaneSettings, *, kv_tokens: int = 12800, kv: KvPromise = "reserve") -> Plan:
    """A plan with these settings, whose steps encode 300 tokens on average with 24 requests in decode."""
    plan = _planned()
    stage = plan.stages[0].model_copy(update={"kv_blocks": kv_tokens // plan.block_size})
    estimate = plan.estimate.model_copy(update={"encode_tokens": 300.0, "decode_batch": 24.0})
    admission = Admission(kv=kv, max_running=40 if kv == "quantile" else None)
    return plan.model_copy(update={"policy": policy, "estimate": estimate, "stages": (stage,), "admission": admission})


@cache
def _planned() -> Plan:
    spec, _ = load_model("opt-125m")
    cluster = load_cluster("h200x1")
    problem = Problem(
        spec,
        None,
        cluster,
        load_workload("translation", spec),
        analytic.profile(spec, cluster, "float32"),
        Constraint(),
    )
    return Scheduler(problem).best(("rra",))


def waa_plan(groups: int = 1) -> Plan:
    """A lane of one or several prefill groups of a device, and a decode lane on one: batches of about four prompts, at
    most sixteen requests inside.
    """
    plan = plan_with(RraSettings(encode_batch=1, decode_iterations=1))
    layers = (0, plan.model.num_layers)
    own = (None, layers) if groups > 1 else (layers, (0, 0))
    stages = (
        *(
            Stage(lane="encode", devices=(device,), encode_layers=own[0], decode_layers=own[1], kv_blocks=200)
            for device in range(groups)
        ),
        Stage(lane="decode", devices=(groups,), decode_layers=layers, kv_blocks=800),
    )
    estimate = plan.estimate.model_copy(update={"encode_tokens": 250.0, "decode_batch": 10.0})
    policy = WaaSettings(encode_batch=4, max_decode_batch=16)
    update = {"cluster": load_cluster("h200x8"), "policy": policy, "stages": stages, "estimate": estimate}
    return plan.model_copy(update=update)


def here(plan: Plan) -> Plan:
    """The plan on this machine's CPU, whose flags are others than a GPU's; its cores are shared out among devices."""
    devices = plan.devices_per_replica
    return plan.model_copy(update={"cluster": load_cluster("local" if devices == 1 else f"local:{devices}")})


def exportable(plan: Plan, checkpoint: str) -> Plan:
    """The plan with weights to load, its estimate within its devices."""
    estimate = plan.estimate.model_copy(update={"memory_bytes": (2**30,)})
    return plan.model_copy(update={"checkpoint": checkpoint, "estimate": estimate})
