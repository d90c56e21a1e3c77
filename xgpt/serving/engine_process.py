"""Start a plan's engine with its weights, and run it in this process: `python -m xgpt.serving.engine_process FD`.

FD is a socket, which is this process's end of the channel to the front (`xrunner.channel`). Standard input contains an
`EngineOrder`. HTTP, the tokenizer, metrics and the step log are in the front. This process ends when the front closes
the channel or ends. It ignores signals that a terminal or a service manager sends to all processes of a server, since
the front handles them.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from xgpt.core import policies
from xgpt.core.errors import MachineError
from xgpt.core.policies import Rule, Schedule
from xgpt.core.policies.build import row_tokens
from xgpt.core.policies.routing import ReplicaRouter
from xgpt.core.schema import Batching, Plan
from xgpt.core.schema.step_log import StepRecord
from xgpt.rules import load_rule
from xgpt.serving.checking import check_devices, check_weights, nodes_of
from xgpt.serving.engine_order import EngineOrder
from xprofiler.store import check_engine
from xrunner.build import WorkerSettings, build_row_worker, build_worker, warm_up, whole_worker
from xrunner.channel.ends import EngineEnd
from xrunner.channel.host import EngineHost, HostedEngine
from xrunner.channel.messages import DecodeDown
from xrunner.channel.remote import OnStep
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.executor import RemoteExecutor
from xrunner.cluster.workers import Workers
from xrunner.cores import CoreWaitMeter, take_cores
from xrunner.engine import Engine
from xrunner.executor import Deployer, Executor, WorkerLost
from xrunner.grammar import grammars_of
from xrunner.logs import log_json
from xrunner.memory import keep_freed_memory
from xrunner.replicas import Replicas
from xrunner.tcb.worker import RowWorker
from xrunner.worker import Worker


def build_engine(
    plan: Plan,
    on_step: Callable[[StepRecord], None] | None = None,
    batching: Batching = "flat",
    ray: str | None = None,
    *,
    reuse: bool = True,
    rule: Rule | None = None,
) -> Engine | Replicas:
    """Load a plan's weights, and return the warmed-up engine.

    A plan for one device of this machine runs in this process. For any other plan, each device has a separate process.
    The engine's `close` ends these processes.

    Args:
        ray: address of the Ray cluster whose machines run the plan. None means that this machine runs it.

    Raises:
        InputError: the plan is for another engine, the plan cannot be combined with `batching`, or no Ray cluster
            answers.
        MachineError: the plan's devices are not on this machine, or not in the Ray cluster.
    """
    check_engine(plan, "xgpt")
    if ray is None:
        check_devices(plan)
    if batching != "flat":
        return Engine(policies.build_rows(plan, batching), _row_worker(plan, batching), on_step=on_step)
    if plan.replicas > 1:
        router = ReplicaRouter.of(plan) if reuse and plan.shares_prompts else None
        build = partial(build_replica, plan, reuse=reuse, ray=ray, rule=rule)
        return Replicas(build, plan.replicas, on_step=on_step, router=router)
    if plan.devices_per_replica > 1 or ray is not None:
        return build_replica(plan, 0, on_step, reuse=reuse, ray=ray, rule=rule)
    schedule = policies.build(plan, rule)
    worker = _one_worker(plan, schedule)
    return Engine(schedule, worker, on_step=on_step, deploy=_redeployer(worker, plan), reuse=reuse)


def build_replica(
    plan: Plan,
    number: int,
    on_step: Callable[[StepRecord], None] | None = None,
    *,
    reuse: bool = True,
    ray: str | None = None,
    rule: Rule | None = None,
) -> Engine:
    workers = _workers(plan, number, ray)
    return Engine(policies.build(plan, rule), workers, on_step=on_step, deploy=_redeployer_of(workers), reuse=reuse)


def _one_worker(plan: Plan, schedule: Schedule) -> Worker:
    worker = build_worker(WorkerSettings.of(plan, schedule.pool.kv_blocks))
    warm_up(worker)
    return worker


def _row_worker(plan: Plan, batching: Batching) -> RowWorker:
    worker = build_row_worker(WorkerSettings.of(plan, num_blocks=0), batching, row_tokens(plan))
    warm_up(worker)
    return worker


def _redeployer(worker: Worker, plan: Plan) -> Deployer:
    """Return a function that changes the worker to another plan: it allocates the plan's K/V memory."""
    # `deploy` must not refer to the old worker, whose memory must be freed before the next worker's is allocated.
    model, backend = worker.model, worker.backend
    layer = worker.cache.layers[0]
    dtype, device = layer.dtype, layer.device
    grammars = grammars_of(None if plan.checkpoint is None else Path(plan.checkpoint), plan.model)

    def deploy(schedule: Schedule) -> Executor:
        pool = schedule.pool
        worker = whole_worker(model, backend, pool.kv_blocks, pool.block_size, dtype, device, grammars)
        warm_up(worker)
        return worker

    return deploy


def _redeployer_of(workers: RemoteExecutor) -> Deployer:
    def deploy(schedule: Schedule) -> Executor:
        nonlocal workers
        workers = workers.redeployed(schedule.stages)
        return workers

    return deploy


def _workers(plan: Plan, replica: int, ray: str | None) -> RemoteExecutor:
    deployment = Deployment.of(plan)
    total = deployment.num_workers
    if ray is None:
        workers = Workers(total, first_device=replica * total)
    else:
        from xrunner.cluster import on_ray  # Ray is an optional package

        count = nodes_of(plan, total)
        gpus = plan.cluster.device.type == "gpu"
        machines = on_ray.reserve(ray, count, total // count, gpus=gpus, checkpoint=plan.checkpoint)
        workers = Workers(total, host=on_ray.host(), machines=machines)
    executor = RemoteExecutor(workers, deployment)
    try:
        executor.deploy()
    except WorkerLost as lost:
        executor.close()
        raise MachineError(f"the plan's workers do not start: {lost}") from None
    except BaseException:
        executor.close()
        raise
    return executor


END_S = 20.0


def main() -> None:
    # The handler is not SIG_IGN, which processes started here would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    order = EngineOrder.model_validate_json(sys.stdin.buffer.read())
    log_json(order.log_level)
    if _is_alone(order):
        keep_freed_memory()  # before another thread allocates memory, so that the engine gets no separate arena
    host = EngineHost(EngineEnd(socket.socket(fileno=int(sys.argv[1])), DecodeDown()), partial(_build, order))
    engine = threading.Thread(target=host.run, name="engine", daemon=True)
    engine.start()
    host.read()
    engine.join(END_S)
    if engine.is_alive():
        os._exit(1)


def _build(order: EngineOrder, on_step: OnStep) -> HostedEngine:
    is_alone = _is_alone(order)
    listener = CoreWaitMeter(on_step) if order.core_waits and is_alone else on_step
    rule = None if order.rule is None else load_rule(order.rule)
    check_weights(order.plan)
    engine = build_engine(order.plan, listener, order.batching, order.ray, reuse=order.reuse, rule=rule)
    if is_alone:
        take_cores()
    # Otherwise the garbage collector would scan all loaded modules in the middle of a step.
    gc.collect()
    gc.freeze()
    return engine


def _is_alone(order: EngineOrder) -> bool:
    return order.plan.num_devices == 1 and order.plan.cluster.device.type == "cpu" and order.ray is None


if __name__ == "__main__":
    main()
