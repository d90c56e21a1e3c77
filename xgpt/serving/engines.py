"""Start the engine of a plan with its weights: in this process, or in a process for each device."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xgpt.core import policies
from xgpt.core.errors import InputError, MachineError
from xgpt.core.policies import Schedule
from xgpt.core.policies.build import row_tokens
from xgpt.core.policies.routing import ReplicaRouter
from xgpt.core.schema import Batching, Plan
from xgpt.core.schema.step_log import StepRecord
from xgpt.serving.checking import check_devices
from xprofiler.store import check_engine
from xsimulator.run import shares_prompts

if TYPE_CHECKING:
    from xrunner.build import WorkerSettings
    from xrunner.cluster.executor import RemoteExecutor
    from xrunner.engine import Engine
    from xrunner.executor import Deployer, Executor
    from xrunner.replicas import Replicas
    from xrunner.tcb.worker import RowWorker
    from xrunner.worker import Worker

MIN_SECRET = 16
"""Least length of the secret that machines share."""


@dataclass(frozen=True)
class Nodes:
    """The machines that run a plan together, and which of them this one is.

    Args:
        rendezvous: address and port of the first machine.
        passphrase: the secret that all machines share.
    """

    count: int
    rank: int
    rendezvous: str
    passphrase: str

    @classmethod
    def of(cls, count: int, rank: int, rendezvous: str | None) -> Nodes | None:
        """Return the machines that arguments name; None: there is one machine.

        Raises:
            InputError: an argument is missing, or has no effect.
        """
        if count == 1:
            if rank or rendezvous:
                raise InputError("nnodes", 1, "`node_rank` and `rendezvous` need `nnodes` of 2 or more")
            return None
        if rank >= count:
            raise InputError("node_rank", rank, f"machines are numbered from 0 to {count - 1}")
        host, _, port = (rendezvous or "").rpartition(":")
        if not host or not port.isdecimal():
            raise InputError("rendezvous", rendezvous, "give machine 0's address and a free port: HOST:PORT")
        passphrase = os.environ.get("XGPT_CLUSTER_SECRET", "")
        if len(passphrase) < MIN_SECRET:
            accepted = f"set it to the same {MIN_SECRET} or more characters on every machine"
            raise InputError("XGPT_CLUSTER_SECRET", "*" * len(passphrase), accepted)
        return cls(count, rank, f"{host}:{port}", passphrase)

    @property
    def port(self) -> int:
        """Port of the rendezvous."""
        return int(self.rendezvous.rpartition(":")[2])

    @property
    def host(self) -> str:
        """This machine's address, on the interface that leads to the others."""
        from xrunner.cluster.sockets import address_towards

        return address_towards(self.rendezvous.rpartition(":")[0])


def build_engine(
    plan: Plan,
    on_step: Callable[[StepRecord], None] | None = None,
    nodes: Nodes | None = None,
    batching: Batching = "flat",
    *,
    reuse: bool = True,
) -> Engine | Replicas:
    """Return the engine of a plan, with its weights loaded and warmed up.

    One device runs in this process, several in a process each. `close` ends them.

    Args:
        nodes: machines that run the plan; None: this one only.
        batching: layout of whole batches; in rows, requests share no K/V.
        reuse: whether requests share the K/V of what their prompts have in common.

    Raises:
        InputError: the plan is for another engine, or does not go with `batching`.
        MachineError: the plan's devices are not on this machine.
    """
    from xrunner.engine import Engine
    from xrunner.replicas import Replicas

    check_engine(plan, "native")
    check_devices(plan, 1 if nodes is None else nodes.count)
    if batching != "flat":
        return Engine(policies.build_rows(plan, batching), _row_worker(plan, batching), on_step=on_step)
    if plan.replicas > 1:
        router = ReplicaRouter.of(plan) if reuse and shares_prompts(plan) else None
        return Replicas(partial(build_replica, plan, reuse=reuse), plan.replicas, on_step=on_step, router=router)
    if plan.devices_per_replica > 1:
        return build_replica(plan, 0, on_step, nodes, reuse=reuse)
    schedule = policies.build(plan)
    worker = _one_worker(plan, schedule)
    return Engine(schedule, worker, on_step=on_step, deploy=_redeployer(worker), reuse=reuse)


def build_replica(
    plan: Plan,
    number: int,
    on_step: Callable[[StepRecord], None] | None = None,
    nodes: Nodes | None = None,
    *,
    reuse: bool = True,
) -> Engine:
    """Return the engine of one replica, with a process for each of its devices."""
    from xrunner.engine import Engine

    workers = _workers(plan, number, nodes)
    return Engine(policies.build(plan), workers, on_step=on_step, deploy=_redeployer_of(workers), reuse=reuse)


def _one_worker(plan: Plan, schedule: Schedule) -> Worker:
    """Return a worker of the whole model, in this process."""
    from xrunner.build import build_worker, warm_up

    worker = build_worker(_worker_settings(plan, schedule.pool.kv_blocks))
    warm_up(worker)
    return worker


def _row_worker(plan: Plan, batching: Batching) -> RowWorker:
    """Return a worker of the whole model, in this process, that runs rows."""
    from xrunner.build import build_row_worker, warm_up

    worker = build_row_worker(_worker_settings(plan, num_blocks=0), batching, row_tokens(plan))
    warm_up(worker)
    return worker


def _worker_settings(plan: Plan, num_blocks: int) -> WorkerSettings:
    from xrunner.build import WorkerSettings

    return WorkerSettings(
        spec=plan.model,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        checkpoint=None if plan.checkpoint is None else Path(plan.checkpoint),
        seed=plan.seed,
        num_blocks=num_blocks,
        block_size=plan.block_size,
        device="cuda" if plan.cluster.device.type == "gpu" else "cpu",
        threads=plan.profile.num_threads,
        layouts=plan.profile.layouts,
    )


def _redeployer(worker: Worker) -> Deployer:
    """Return a function that sets another plan's K/V memory up; the weights stay in place."""
    from xrunner.build import warm_up, whole_worker

    # Not the worker itself: its memory must be free before the next one's is taken.
    model, backend = worker.model, worker.backend
    layer = worker.cache.layers[0]
    dtype, device = layer.dtype, layer.device

    def deploy(schedule: Schedule) -> Executor:
        pool = schedule.pool
        worker = whole_worker(model, backend, pool.kv_blocks, pool.block_size, dtype, device)
        warm_up(worker)
        return worker

    return deploy


def _redeployer_of(workers: RemoteExecutor) -> Deployer:
    """Return a function that gives the same workers another plan's stages; each reads its new part."""

    def deploy(schedule: Schedule) -> Executor:
        nonlocal workers
        workers = workers.redeployed(schedule.stages)
        return workers

    return deploy


def _workers(plan: Plan, replica: int, nodes: Nodes | None) -> RemoteExecutor:
    """Return the executor of a replica's workers, a process for each device."""
    from xrunner.cluster.deployment import Deployment
    from xrunner.cluster.executor import RemoteExecutor
    from xrunner.cluster.sockets import Secret
    from xrunner.cluster.workers import Workers
    from xrunner.executor import WorkerLost

    deployment = Deployment.of(plan)
    if nodes is None:
        workers = Workers(deployment.num_workers, first_device=replica * deployment.num_workers)
    else:
        workers = Workers(
            deployment.num_workers,
            num_nodes=nodes.count,
            host=nodes.host,
            port=nodes.port,
            secret=Secret.from_passphrase(nodes.passphrase),
        )
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


def join_nodes(plan: Plan, nodes: Nodes) -> None:
    """Run this machine's share of a plan's workers for the first machine's engine, until that ends or SIGTERM.

    Raises:
        MachineError: the plan's devices are not on this machine, or the first machine does not answer.
    """
    from xrunner.cluster.launching import LauncherSettings
    from xrunner.cluster.nodes import Node
    from xrunner.cluster.sockets import Secret

    check_devices(plan, nodes.count)
    secret = Secret.from_passphrase(nodes.passphrase).private
    node = Node(nodes.rank, LauncherSettings(f"tcp://{nodes.rendezvous}", secret, nodes.host))
    previous = signal.signal(signal.SIGTERM, lambda *_: node.end())
    try:
        node.run()
    finally:
        signal.signal(signal.SIGTERM, previous)
