"""Divide a plan for several machines in vLLM among the machines."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING

from xgpt.core.errors import InputError
from xgpt.core.processes import stops_on_signal
from xgpt.core.schema import Plan
from xrunner.vllm.command import launch
from xrunner.vllm.machines import Machines, follow

if TYPE_CHECKING:
    from xgpt.serving.serve import ServeRequest

MASTER_PORT = 29500


def share_of(plan: Plan, request: ServeRequest) -> tuple[Plan, Machines | None]:
    """Return the part of a plan that this machine serves, and the machines that share this part. None means only this
    machine.

    A machine serves the replicas for which it has devices, or a part of one replica. Each replica has a separate
    endpoint on its first machine, so that replicas are independent. A gateway in front of them distributes the
    requests.

    Raises:
        InputError: the plan's devices do not divide evenly among the machines, or an argument is missing.
    """
    count, rank, each = request.nnodes, request.node_rank, plan.devices_per_replica
    if rank >= count:
        raise InputError("node_rank", rank, f"machines are numbered from 0 to {count - 1}")
    here, rest = divmod(plan.num_devices, count)
    if rest or (here % each and each % here):
        accepted = f"{plan.replicas} replicas of {each} devices do not divide evenly among the machines"
        raise InputError("nnodes", count, accepted)
    if here >= each:
        return plan.model_copy(update={"replicas": here // each}), None
    if len(plan.policy.lanes) > 1:
        accepted = "for its lanes on several machines use `xgpt export --to llm-d` or `--to dynamo`"
        raise InputError("plan.policy", plan.policy.kind, accepted)
    host, _, port = (request.master_addr or "").partition(":")
    if not host or not (port or "0").isdecimal():
        raise InputError("master_addr", request.master_addr, "give the address of the replica's first machine")
    span = each // here
    return plan.model_copy(update={"replicas": 1}), Machines(span, rank % span, host, int(port or MASTER_PORT))


def follow_first(plan: Plan, machines: Machines) -> None:
    """Run this machine's part of a replica for the engine on the first machine, until that engine stops or SIGTERM
    arrives.

    Raises:
        MachineError: the first machine cannot be reached, or refuses this one.
    """
    ended = Event()
    with stops_on_signal(ended):
        follow(plan, machines, machines.spread(launch(plan, plan_path="plan.json")), ended.is_set)
