"""Run a plan: in this process, or behind the endpoint."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xgpt.app.serving_vllm import build_vllm_engine, can_change_plan
from xgpt.errors import InputError, MachineError
from xgpt.schema import EngineKind, Plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from ssl import SSLContext

    from xgpt.app.replanning import BackgroundPlanner
    from xgpt.policies import Schedule
    from xgpt.schema.step_log import StepRecord
    from xrunner.cluster.executor import RemoteExecutor
    from xrunner.engine import Engine
    from xrunner.executor import Deploy, Executor
    from xrunner.replicas import Replicas
    from xrunner.server import ApiKeys, Limits
    from xrunner.server.observe.traces import Tracer
    from xrunner.worker import Worker

logger = logging.getLogger(__name__)

MIN_SECRET = 16
"""Characters of what machines share."""


@dataclass(frozen=True)
class Nodes:
    """The machines that run a plan together, and which of them this one is.

    Args:
        rendezvous: address and port at which the first machine is met.
        passphrase: what all of them share, and nobody else knows.
    """

    count: int
    rank: int
    rendezvous: str
    passphrase: str

    @classmethod
    def of(cls, count: int, rank: int, rendezvous: str | None) -> Nodes | None:
        """What a command line says; None: there is one machine.

        Raises:
            InputError: something is missing, or of no use.
        """
        import os

        if count == 1:
            if rank or rendezvous:
                raise InputError("nnodes", 1, "--node-rank and --rdzv-endpoint go with --nnodes 2 or more")
            return None
        if rank >= count:
            raise InputError("node-rank", rank, f"machines are numbered from 0 to {count - 1}")
        host, _, port = (rendezvous or "").rpartition(":")
        if not host or not port.isdecimal():
            raise InputError("rdzv-endpoint", rendezvous, "machine 0's address and a free port: HOST:PORT")
        passphrase = os.environ.get("XGPT_CLUSTER_SECRET", "")
        if len(passphrase) < MIN_SECRET:
            accepted = f"set it to the same {MIN_SECRET} or more characters on every machine"
            raise InputError("XGPT_CLUSTER_SECRET", "*" * len(passphrase), accepted)
        return cls(count, rank, f"{host}:{port}", passphrase)

    @property
    def port(self) -> int:
        """Of the rendezvous."""
        return int(self.rendezvous.rpartition(":")[2])

    @property
    def host(self) -> str:
        """This machine's address, on the interface that leads to the others."""
        from xrunner.cluster.sockets import address_towards

        return address_towards(self.rendezvous.rpartition(":")[0])


def build_engine(
    plan: Plan, on_step: Callable[[StepRecord], None] | None = None, nodes: Nodes | None = None
) -> Engine | Replicas:
    """The engine of a plan with its weights loaded, warmed up.

    One device is run in this process, several by a process each. `close` ends them.

    Args:
        nodes: None: this machine is the only one.

    Raises:
        InputError: the plan is for another engine.
        MachineError: the plan is for devices that are not here.
    """
    from xgpt import policies
    from xgpt.app.checking import check_devices
    from xgpt.app.profiles import check_engine
    from xrunner.engine import Engine
    from xrunner.replicas import Replicas

    check_engine(plan, "native")
    check_devices(plan, 1 if nodes is None else nodes.count)
    if plan.replicas > 1:
        return Replicas(partial(build_replica, plan), plan.replicas, on_step=on_step)
    if plan.devices_per_replica > 1:
        return build_replica(plan, 0, on_step, nodes)
    schedule = policies.build(plan)
    worker = _one_worker(plan, schedule)
    return Engine(schedule, worker, on_step=on_step, deploy=_redeployer(worker))


def build_replica(
    plan: Plan, number: int, on_step: Callable[[StepRecord], None] | None = None, nodes: Nodes | None = None
) -> Engine:
    """The engine of one replica, with a process for each of its devices."""
    from xgpt import policies
    from xrunner.engine import Engine

    workers = _workers(plan, number, nodes)
    return Engine(policies.build(plan), workers, on_step=on_step, deploy=_redeployer_of(workers))


def _one_worker(plan: Plan, schedule: Schedule) -> Worker:
    """All of a model in this process."""
    from xrunner.build import WorkerSettings, build_worker, warm_up

    worker = build_worker(
        WorkerSettings(
            spec=plan.model,
            dtype=plan.dtype,
            checkpoint=None if plan.checkpoint is None else Path(plan.checkpoint),
            seed=plan.seed,
            num_blocks=schedule.pool.kv_blocks,
            block_size=plan.block_size,
            device="cuda" if plan.cluster.device.type == "gpu" else "cpu",
            threads=plan.profile.num_threads,
            layouts=plan.profile.layouts,
        )
    )
    warm_up(worker)
    return worker


def _redeployer(worker: Worker) -> Deploy:
    """Sets another plan's K/V memory up beside the weights, which stay where they are."""
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


def _redeployer_of(workers: RemoteExecutor) -> Deploy:
    """Has the same workers take another plan's stages: each reads its new part, which is in the page cache by now."""

    def deploy(schedule: Schedule) -> Executor:
        nonlocal workers
        workers = workers.redeployed(schedule.stages)
        return workers

    return deploy


def _workers(plan: Plan, replica: int, nodes: Nodes | None) -> RemoteExecutor:
    """A process for each device of a replica."""
    from xrunner.cluster.deployment import Deployment
    from xrunner.cluster.executor import RemoteExecutor
    from xrunner.cluster.fleet import Fleet
    from xrunner.cluster.sockets import Secret
    from xrunner.executor import WorkerLost

    deployment = Deployment.of(plan)
    if nodes is None:
        fleet = Fleet(deployment.num_workers, first_device=replica * deployment.num_workers)
    else:
        fleet = Fleet(
            deployment.num_workers,
            num_nodes=nodes.count,
            host=nodes.host,
            port=nodes.port,
            secret=Secret.from_passphrase(nodes.passphrase),
        )
    executor = RemoteExecutor(fleet, deployment)
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
        MachineError: the plan is for devices that are not here, or the first machine cannot be met.
    """
    import signal

    from xgpt.app.checking import check_devices
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


@dataclass(frozen=True)
class Exposure:
    """Where a server listens, and who may ask it."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    def check(self) -> ApiKeys | None:
        """The keys, if any.

        Raises:
            InputError: the file holds none, or there must be some.
        """
        from xrunner.server import ApiKeys, check_exposure

        keys = None if self.api_key_file is None else ApiKeys.read(self.api_key_file)
        check_exposure(self.host, keys)
        return keys

    def tls(self) -> SSLContext | None:
        """The certificate to show, if any.

        Raises:
            InputError: it cannot be read, or does not go with its key.
        """
        from xrunner.server.http.tls import KEY, server_context

        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise InputError(KEY, str(self.ssl_keyfile), "it goes with --ssl-certfile")
            return None
        return server_context(self.ssl_certfile, self.ssl_keyfile)


def serve_plan(
    plan: Plan,
    exposure: Exposure,
    limits: Limits,
    *,
    drain_s: float | None = None,
    shutdown_delay_s: float = 0.0,
    log_level: str = "info",
    step_log: Path | None = None,
    replan: bool = True,
    profile_path: str | None = None,
    nodes: Nodes | None = None,
    engine: EngineKind = "native",
    otlp_endpoint: str | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        drain_s, shutdown_delay_s: see `xrunner.server.serve`.
        nodes: None: this machine is the only one.
        replan: go over to other plans when lengths change.
        profile_path: the profile that the plan was made from; None: the cached one.
        otlp_endpoint: see `open_tracer`.
    """
    from xgpt.app.checking import check_runs, missing
    from xgpt.checkpoint import sampling_defaults
    from xgpt.io import StepLogWriter
    from xrunner import server

    keys, tls = exposure.check(), exposure.tls()
    check_runs(plan, 1 if nodes is None else nodes.count, engine)
    defaults = {} if plan.checkpoint is None else sampling_defaults(Path(plan.checkpoint))
    server.log_json(log_level)
    build = partial(build_engine, nodes=nodes) if engine == "native" else build_vllm_engine
    if engine == "vllm" and replan and not can_change_plan(plan):
        logger.warning("re-planning is off: vLLM keeps a plan for several devices as it is")
        replan = False
    for line in missing(plan, profile_path, replan=replan):
        logger.warning(line)
    planner = find_planner(plan, profile_path) if replan else None
    tracer = open_tracer(otlp_endpoint)
    with ExitStack() as at_end:
        if tracer is not None:
            at_end.callback(tracer.close)
        log = None if step_log is None else StepLogWriter(step_log)
        if log is not None:
            at_end.callback(log.close)
        if planner is not None:
            planner.start()  # it loads while the engine does
            at_end.callback(planner.stop)
        thread = server.single_thread()
        running = thread.submit(build, plan, log).result()
        at_end.callback(lambda: thread.submit(running.close).result())
        engine_thread = server.EngineThread(running, thread, server.Watch(plan, planner))
        if log is not None:
            engine_thread.metrics.tell_lost_steps(lambda: log.num_lost)
        model = server.ServedModel(
            plan.model.name,
            plan.model,
            None if plan.checkpoint is None else server.load_tokenizer(Path(plan.checkpoint)),
            frozenset(plan.model.eos_token_ids),
            defaults,
        )
        app = server.create_app(
            engine_thread,
            model,
            limits=limits,
            keys=keys,
            hosts=server.AllowedHosts(exposure.host, exposure.allowed_hosts),
            tracer=tracer,
        )
        server.serve(
            app,
            exposure.host,
            exposure.port,
            drain_s=drain_s or server.DRAIN_S,
            shutdown_delay_s=shutdown_delay_s,
            tls=tls,
        )


def open_tracer(endpoint: str | None) -> Tracer | None:
    """Where traces go: to an OTLP endpoint, or where OpenTelemetry's environment variables say; None: nowhere.

    Raises:
        InputError: the endpoint is none, or OpenTelemetry is not installed.
    """
    import os

    variables = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if endpoint is None and (
        os.environ.get("OTEL_TRACES_EXPORTER") == "none" or not any(map(os.environ.get, variables))
    ):
        return None
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise InputError("--otlp-endpoint", endpoint, "give a URL, as in http://localhost:4318")
    try:
        from xrunner.server.observe.traces import Tracer
    except ImportError as error:
        if endpoint is None:
            # Whoever runs the cluster sets the variables for every program on it.
            logging.getLogger(__name__).warning("traces are off", extra={"fields": {"reason": str(error)}})
            return None
        raise InputError("--otlp-endpoint", endpoint, "it takes OpenTelemetry: pip install 'xgpt[otel]'") from None
    return Tracer.to(endpoint)


def find_planner(plan: Plan, profile_path: str | None) -> BackgroundPlanner | None:
    """What re-plans; None where the plan's profile is not here, which `missing` says.

    Raises:
        InputError: `profile_path` is not the plan's profile.
    """
    from xgpt.app.profiles import profile_of
    from xgpt.app.replanning import BackgroundPlanner

    try:
        return BackgroundPlanner(plan, profile_of(plan, profile_path))
    except InputError:
        if profile_path is not None:
            raise
        return None
