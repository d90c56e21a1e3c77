"""Run a plan: in this process, or behind the endpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xgpt.errors import InputError, MachineError
from xgpt.schema import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgpt.app.replanning import BackgroundPlanner
    from xgpt.policies import Schedule
    from xgpt.schema.step_log import StepRecord
    from xrunner.cluster.executor import RemoteExecutor
    from xrunner.engine import Deploy, Engine, Executor
    from xrunner.server import ApiKeys
    from xrunner.worker import Worker


def build_engine(plan: Plan, on_step: Callable[[StepRecord], None] | None = None, replica: int = 0) -> Engine:
    """The engine of one replica of a plan with its weights loaded, warmed up.

    One device is run in this process, several by a process each. `Engine.close` ends them.

    Raises:
        MachineError: the plan is for devices that are not here.
    """
    from xgpt import policies
    from xrunner.engine import Engine

    check_devices(plan)
    schedule = policies.build(plan)
    if plan.devices_per_replica * plan.replicas > 1:
        return Engine(schedule, _workers(plan, replica), on_step=on_step)
    worker = _one_worker(plan, schedule)
    return Engine(schedule, worker, on_step=on_step, deploy=_redeployer(worker))


def _one_worker(plan: Plan, schedule: Schedule) -> Worker:
    """All of a model in this process."""
    from xrunner.worker import build_worker, warm_up

    worker = build_worker(
        plan.model,
        plan.dtype,
        checkpoint=None if plan.checkpoint is None else Path(plan.checkpoint),
        seed=plan.seed,
        num_blocks=schedule.pool.kv_blocks,
        block_size=plan.block_size,
        device="cuda" if plan.cluster.device.type == "gpu" else "cpu",
        threads=plan.profile.num_threads,
    )
    warm_up(worker)
    return worker


def _redeployer(worker: Worker) -> Deploy:
    """Sets another plan's K/V memory up beside the weights, which stay where they are."""
    from xrunner.kv_cache import KvCache
    from xrunner.worker import Worker, warm_up

    # Not the worker itself: its memory must be free before the next one's is taken.
    model, backend = worker.model, worker.backend
    layer = worker.cache.layers[0]
    dtype, device = layer.dtype, layer.device

    def deploy(schedule: Schedule) -> Executor:
        pool = schedule.pool
        worker = Worker(model, KvCache(model.spec, pool.kv_blocks, pool.block_size, dtype, device), backend)
        warm_up(worker)
        return worker

    return deploy


def _workers(plan: Plan, replica: int) -> RemoteExecutor:
    """A process for each device of a replica."""
    from xrunner.cluster.deployment import Deployment
    from xrunner.cluster.executor import RemoteExecutor
    from xrunner.cluster.fleet import Fleet

    deployment = Deployment.of(plan)
    fleet = Fleet(deployment.num_workers, first_device=replica * deployment.num_workers)
    executor = RemoteExecutor(fleet, deployment)
    try:
        executor.deploy()
    except BaseException:
        executor.close()
        raise
    return executor


def check_devices(plan: Plan) -> None:
    """Refuse a plan for other devices than those at hand.

    Raises:
        MachineError: says what is missing, and how to plan for what is here.
    """
    from xgpt.machine import detect

    planned = plan.cluster
    here = detect(None if planned.num_devices == 1 else planned.num_devices)
    if planned.device.type != here.device.type or planned.num_devices > here.num_devices:
        raise MachineError(
            f"the plan wants {planned.num_devices} x {planned.device.name}, here is {here.num_devices} x "
            f"{here.device.name}; plan for this machine with `xgpt plan --cluster local`"
        )


def check_plan(plan: Plan) -> None:
    """Refuse a plan that cannot be served here: devices, memory, checkpoint.

    Raises:
        MachineError: devices or memory are missing.
        InputError: the checkpoint is not there, is broken, or does not have the plan's shape.
    """
    from xgpt.machine import detect

    check_devices(plan)
    offered = detect(plan.cluster.num_devices).device.memory_bytes
    needed = max(plan.estimate.memory_bytes)
    if needed > offered:
        raise MachineError(f"the plan needs {needed / 2**30:.1f} GiB a device, here are {offered / 2**30:.1f} GiB")
    if plan.checkpoint is not None:
        from xgpt.checkpoint import read_spec
        from xrunner.weights import Checkpoint, check_weights

        found = read_spec(Path(plan.checkpoint))
        if found.model_copy(update={"name": plan.model.name}) != plan.model:
            raise InputError("plan.checkpoint", plan.checkpoint, "its config.json no longer has the plan's shape")
        check_weights(plan.model, plan.dtype, Checkpoint(Path(plan.checkpoint)))


@dataclass(frozen=True)
class Exposure:
    """Where a server listens, and who may ask it."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()

    def check(self) -> ApiKeys | None:
        """The keys, if any.

        Raises:
            InputError: the file holds none, or there must be some.
        """
        from xrunner.server.access import ApiKeys, check_exposure

        keys = None if self.api_key_file is None else ApiKeys.read(self.api_key_file)
        check_exposure(self.host, keys)
        return keys


def serve_plan(
    plan: Plan,
    exposure: Exposure,
    *,
    max_waiting: int | None = None,
    drain_s: float | None = None,
    log_level: str = "info",
    step_log: Path | None = None,
    replan: bool = True,
    profile_path: str | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        replan: go over to other plans when lengths change.
        profile_path: the profile that the plan was made from; None: the cached one.
    """
    from xgpt.io import StepLogWriter
    from xrunner import server

    keys = exposure.check()
    server.log_json(log_level)
    planner = find_planner(plan, profile_path) if replan else None
    log = None if step_log is None else StepLogWriter(step_log)
    thread = server.single_thread()
    engine = thread.submit(build_engine, plan, on_step=log).result()
    limits = server.Limits()
    app = server.create_app(
        server.EngineThread(engine, thread, server.Watch(plan, planner)),
        model_name=plan.model.name,
        spec=plan.model,
        tokenizer=None if plan.checkpoint is None else server.load_tokenizer(Path(plan.checkpoint)),
        eos_token_ids=plan.model.eos_token_ids,
        limits=limits if max_waiting is None else replace(limits, max_waiting=max_waiting),
        keys=keys,
        hosts=server.AllowedHosts(exposure.host, exposure.allowed_hosts),
    )
    try:
        server.serve(app, exposure.host, exposure.port, drain_s=drain_s or server.DRAIN_S)
    finally:
        if log is not None:
            log.close()


def find_planner(plan: Plan, profile_path: str | None) -> BackgroundPlanner | None:
    """What re-plans; None where it cannot, which the log says."""
    import logging

    from xgpt.app.replanning import BackgroundPlanner, find_profile

    if plan.devices_per_replica * plan.replicas > 1:
        reason = "workers on several devices cannot go over to another plan while they serve"
        logging.getLogger(__name__).warning("re-planning is off", extra={"fields": {"reason": reason}})
        return None
    try:
        return BackgroundPlanner(plan, find_profile(plan, profile_path))
    except InputError as error:
        if profile_path is not None:
            raise
        logging.getLogger(__name__).warning("re-planning is off", extra={"fields": {"reason": str(error)}})
        return None
