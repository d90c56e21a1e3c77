"""Check whether this machine can serve a plan, and list what it lacks."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path

from xgpt.checkpoints import hub
from xgpt.checkpoints.files import read_spec, weight_files
from xgpt.core.errors import InputError, MachineError
from xgpt.core.machine import detect, num_cores
from xgpt.core.network import reach
from xgpt.core.schema import EngineKind, Plan, Profile
from xprofiler.store import check_engine, dtype_of, profile_of
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.command import runs_by_itself
from xrunner.vllm.engine import limits_of
from xrunner.vllm.process import package_path, python, version_of
from xscheduler.placement import Placement
from xsimulator.memory import LaneMemory

logger = logging.getLogger(__name__)


def check_devices(plan: Plan, num_nodes: int = 1) -> None:
    """Check that this machine has enough devices of the plan's type (CPU or GPU) for its part of the plan.

    Raises:
        MachineError: devices are missing. The message states which devices, and how to plan for this machine's devices.
    """
    planned, wanted = plan.cluster, plan.num_devices // num_nodes
    here = detect()
    offered = num_cores() if here.device.type == "cpu" else here.num_devices
    if planned.device.type == here.device.type and wanted <= offered:
        return
    missing = f"{wanted} x {planned.device.name}{' on each machine' if num_nodes > 1 else ''}"
    kind = "cores" if here.device.type == "cpu" else f"x {here.device.name}"
    several = f", or `--cluster local:{offered}` for all of them" if offered > 1 else ""
    raise MachineError(
        f"the plan needs {missing}; this machine has {offered} {kind}. Plan for this machine with "
        f"`xgpt plan --cluster local`{several}"
    )


def located(plan: Plan, checkpoint: str | None = None) -> Plan:
    """Return the plan with the local path of its checkpoint."""
    if checkpoint is not None:
        if not Path(checkpoint).is_dir():
            raise InputError("checkpoint", checkpoint, "there is no such directory; check the path")
        return plan.deployed(checkpoint=os.path.abspath(checkpoint))
    if (model_id := hub.id_of(plan.checkpoint)) is not None:
        cached = hub.cached(model_id)
        if cached is None or not weight_files(cached):
            accepted = (
                f"its weights are not on this machine: run `hf download {model_id}`, or give their directory as "
                "`checkpoint`"
            )
            raise InputError("plan.checkpoint", model_id, accepted)
        return plan.deployed(checkpoint=str(cached))
    if plan.checkpoint is not None and not Path(plan.checkpoint).is_dir():
        accepted = "there is no such directory on this machine: give the weights' directory as `checkpoint`"
        raise InputError("plan.checkpoint", plan.checkpoint, accepted)
    return plan


def missing(plan: Plan, given: str | Profile | None = None, *, replan: bool = True) -> list[str]:
    """Return a line of text for each thing that this machine lacks for a server with all functions.

    Args:
        given: the plan's profile, or its path. None means the copy on this machine.
        replan: whether the server re-plans. This needs the plan's profile.
    """
    lines = [] if plan.seeded_weights is None else [plan.seeded_weights]
    if (device := _device_here(plan)) != plan.cluster.device.name:
        lines.append(
            f"the plan's figures are for {plan.cluster.device.name}, but this machine has {device}: plan again for "
            "this machine"
        )
    if plan.checkpoint is not None and not (Path(plan.checkpoint) / "tokenizer.json").is_file():
        lines.append(f"{plan.checkpoint} has no tokenizer.json: prompts and answers can only be token ids")
    if replan:
        try:
            profile_of(plan, given)
        except InputError as error:
            if given is not None:
                raise
            lines.append(f"re-planning is off: {error}")
    return lines


def _device_here(plan: Plan) -> str:
    here = detect()
    if here.device.type == "cpu":
        here = detect(min(plan.cluster.devices_per_node, num_cores()))
    return here.device.name


def check_plan(plan: Plan, ray: str | None = None, *, waits: bool = False) -> None:
    """Check that xgpt's own engine can serve a plan here: check the plan's engine, devices, dtype, memory and the shape
    of its checkpoint's model. `check_weights` checks the weights.

    Args:
        ray: address of the Ray cluster whose machines run the plan. None means that this machine runs it.
        waits: whether machines may still join the cluster.

    Raises:
        MachineError: devices or memory are missing.
        InputError: the plan is for another engine, or the checkpoint is missing or of another model.
    """
    check_xgpt_runs(plan, ray)
    if ray is not None:
        from xrunner.cluster import on_ray  # Ray is an optional package

        nodes, gpus = nodes_of(plan, plan.devices_per_replica), plan.cluster.device.type == "gpu"
        devices = plan.devices_per_replica // nodes
        count, checkpoint = nodes * plan.replicas, plan.checkpoint
        on_ray.examine(ray, count, devices, gpus=gpus, checkpoint=checkpoint, waits=waits)
    if plan.checkpoint is not None:
        try:
            found = read_spec(Path(plan.checkpoint)).but(name=plan.model.name)
        except InputError as error:
            if error.field != "model":  # the error is about a file in the directory, not about the plan
                raise
            raise InputError("plan.checkpoint", error.value, error.accepted) from None
        if found != plan.model:
            differs = next(name for name, value in found if value != getattr(plan.model, name))
            accepted = (
                f"its {differs} is {getattr(found, differs)!r}, but the plan's is {getattr(plan.model, differs)!r}"
            )
            raise InputError("plan.checkpoint", plan.checkpoint, f"{accepted}: plan again for this checkpoint")


def check_weights(plan: Plan) -> None:
    """Refuse a plan's checkpoint if a weight is missing or has another shape, before memory is allocated.

    This loads torch, which a server's front never needs: its engine calls this.
    """
    if plan.checkpoint is not None:
        from xrunner import weights

        weights.check_weights(plan.model, plan.dtype, weights.Checkpoint(Path(plan.checkpoint)))


def check_planned(plan: Plan) -> None:
    """Check that a newly made plan's engine can run it on this machine. The weights are not checked."""
    if runs_by_itself(plan):
        check_devices(plan)
    elif plan.profile.engine == "vllm":
        check_vllm_runs(plan)
    else:
        check_runs(plan)


def check_runs(plan: Plan, num_nodes: int = 1, engine: EngineKind = "xgpt") -> None:
    """Check that an engine can run a plan on this machine. The weights are not checked."""
    dtype_of(plan.model, plan.cluster, plan.dtype, plan.profile.engine)
    check_own_schedule(plan, engine)
    check_engine(plan, engine)
    check_devices(plan, num_nodes)
    offered = detect(plan.num_devices // num_nodes).device.memory_bytes
    needed = max((*plan.estimate.memory_bytes, *_allocated_bytes(plan)))
    if needed > offered:
        raise MachineError(
            f"the plan needs {needed / 2**30:.1f} GiB a device, but this machine has {offered / 2**30:.1f}: "
            "plan again for this machine"
        )


def _allocated_bytes(plan: Plan) -> list[int]:
    """Return the bytes of weights and K/V memory on each device, from the plan's blocks. An edited plan can exceed its
    estimate. Return nothing for vLLM.
    """
    found = list[int]()
    if plan.profile.engine == "vllm":  # vLLM checks its own memory
        return found
    lanes = dict.fromkeys(stage.lane for stage in plan.stages)
    for name, layout in zip(lanes, Placement.of(plan).layouts, strict=True):
        blocks = max(stage.kv_blocks for stage in plan.stages if stage.lane == name)
        memory = LaneMemory(
            plan.model, plan.cluster, plan.precision, layout.lane, plan.block_size, plan.engine, must_fit=False
        )
        found += memory.device_bytes(blocks, 0)
    return found


def check_xgpt_runs(plan: Plan, ray: str | None) -> None:
    """Check that xgpt's own engine can run a plan on this machine, or on the machines of a Ray cluster."""
    if ray is None:
        check_runs(plan)
    else:
        check_runs_on_ray(plan, ray)


def check_runs_on_ray(plan: Plan, address: str) -> None:
    """Check that xgpt's own engine can run a plan on the machines of a Ray cluster."""
    if find_spec("ray") is None:
        raise InputError("ray", address, "install Ray on every machine: pip install 'xgpt-serve[ray]'")
    check_own_schedule(plan, "xgpt")
    check_engine(plan, "xgpt")
    nodes_of(plan, plan.devices_per_replica)
    try:
        if address != "auto":
            reach(address)
    except (OSError, ValueError):
        accepted = "no Ray cluster answers there: give HOST:PORT of its head, or `auto` on one of its machines"
        raise InputError("ray", address, accepted) from None


def nodes_of(plan: Plan, devices: int) -> int:
    """Return the number of machines among which `devices` devices of a replica are divided."""
    per_node = plan.cluster.devices_per_node
    nodes = -(-devices // per_node)
    if devices % nodes:
        says = f"a replica spans {nodes} nodes of {per_node} devices, and must use equally many devices on each"
        raise InputError("plan.stages", devices, says)
    return nodes


def check_own_schedule(plan: Plan, engine: EngineKind) -> None:
    """Check that xgpt's scheduler can run a plan in an engine: that it has neither drafts nor experts that replicas
    share, and several prefill groups only in vLLM.
    """
    if plan.prefill_groups > 1 and engine != "vllm":
        accepted = "only vLLM runs several prefill groups: serve the plan with `--engine vllm`"
        raise InputError("plan.stages", f"{plan.prefill_groups} prefill groups", accepted)
    if plan.sharing_replicas > 1:
        accepted = (
            "xgpt's scheduler cannot share experts among replicas: run the engine's command that `xgpt plan` prints, "
            f"or fix ep to at most {plan.stages[0].tp}, the value of tp"
        )
        raise InputError("plan.stages.ep", plan.stages[0].ep, accepted)
    if plan.speculation is not None:
        accepted = "xgpt's scheduler has no speculative decoding: run the engine's command that `xgpt plan` prints"
        raise InputError("plan.speculation", plan.speculation.method, accepted)


def check_plan_for_vllm(plan: Plan, num_nodes: int = 1) -> str:
    """Check that vLLM can serve a plan on this machine.

    Args:
        num_nodes: number of machines that run a replica together.

    Returns:
        vLLM's version.

    Raises:
        InputError: the plan is for another engine, vLLM cannot run its policy, or there are no weights.
        MachineError: vLLM, devices or memory are missing.
    """
    check_runs(plan, num_nodes, engine="vllm")
    check_vllm_runs(plan)
    with package_path() as packages:
        found = version_of(python(), packages)
    if found != TESTED_VERSION:
        logger.warning("xgpt is tested with vLLM %s, and this is vLLM %s", TESTED_VERSION, found)
    if plan.profile.engine_version not in (None, found):
        logger.warning("the plan's profile is of vLLM %s, and this is vLLM %s", plan.profile.engine_version, found)
    return found


def check_vllm_runs(plan: Plan) -> None:
    """Check that vLLM with xgpt's scheduler can run a plan. This machine is not checked."""
    check_own_schedule(plan, "vllm")
    if any(block.recurrent is not None for block in plan.model.kinds):
        accepted = "only vLLM's own scheduler can manage the states of its recurrent layers: run it with that scheduler"
        raise InputError("plan.model", plan.model.name, accepted)
    limits_of(plan)
