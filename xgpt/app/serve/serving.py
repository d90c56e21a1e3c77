"""Serve a plan behind the endpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from xgpt.app.plan.profiles import profile_of
from xgpt.app.plan.request import Name
from xgpt.app.replanning import BackgroundPlanner
from xgpt.app.serve.checking import check_plan, check_plan_for_vllm, check_runs, located, missing
from xgpt.app.serve.engines import Nodes, build_engine, join_nodes
from xgpt.app.serve.serving_vllm import build_vllm_engine, can_change_plan
from xgpt.errors import InputError
from xgpt.policies.tcb import Batching
from xgpt.schema import EngineKind, Frozen, Plan, Profile

if TYPE_CHECKING:
    from ssl import SSLContext

    from xrunner.server import ApiKeys, Limits
    from xrunner.server.observe.traces import Tracer
    from xrunner.server.served import ServedEngine

logger = logging.getLogger(__name__)


class ServeRequest(Frozen):
    """How a plan is to be served: at which address, for which clients, within which limits.

    Attributes:
        host: an address other than this machine's own takes an `api_key_file`.
        port: 0: any free one.
        api_key_file: lines of [NAME] KEY [SETTINGS].
        allowed_hosts: further names of this server.
        ssl_certfile, ssl_keyfile: in PEM; with them HTTPS is spoken.
        max_waiting: requests that may wait; more are refused.
        answer_within_s: time to a whole answer, waiting included; a request that would take longer is refused.
        request_timeout_s: time to a whole answer, after which it is ended; None: as long as it takes.
        default_max_tokens: of a request that names none; None: completions 16, chats the rest of the context.
        max_max_tokens: the most that a request may ask for.
        drain_s: time in which requests may end after SIGTERM; None: 30 s.
        shutdown_delay_s: time after SIGTERM in which only /ready changes.
        batching: how a whole batch is laid out: without padding, or in rows, which take a plan of whole batches.
        reuse: requests share the K/V of what their prompts have in common, with those of the same API key alone.
        step_log: file that gets every executed step, a JSON line each.
        replan: go over to better plans when lengths change.
        profile: the plan's own; None: the one that is kept here.
        checkpoint: the directory of the weights; None: the one that the plan names.
        nnodes, node_rank: machines that run the plan together, and which of them this is.
        rendezvous: HOST:PORT at which machine 0 is met.
        otlp_endpoint: URL that traces are sent to; None: as OpenTelemetry's environment variables say.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    max_waiting: PositiveInt = 4096
    answer_within_s: PositiveFloat | None = None
    request_timeout_s: PositiveFloat | None = 600.0
    default_max_tokens: PositiveInt | None = None
    max_max_tokens: PositiveInt | None = None
    drain_s: PositiveFloat | None = None
    shutdown_delay_s: NonNegativeFloat = 0.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    step_log: Path | None = None
    replan: bool = True
    profile: Name | Profile | None = None
    checkpoint: Name | None = None
    engine: EngineKind = "native"
    batching: Batching = "flat"
    reuse: bool = True
    nnodes: PositiveInt = 1
    node_rank: NonNegativeInt = 0
    rendezvous: str | None = None
    otlp_endpoint: str | None = None

    def keys(self) -> ApiKeys | None:
        """Return the keys, if any.

        Raises:
            InputError: the file holds none, or there must be some.
        """
        from xrunner.server import ApiKeys, check_exposure

        keys = None if self.api_key_file is None else ApiKeys.read(self.api_key_file)
        check_exposure(self.host, keys)
        return keys

    def tls(self) -> SSLContext | None:
        """Return the certificate to show, if any.

        Raises:
            InputError: it cannot be read, or does not go with its key.
        """
        from xrunner.server.http.tls import KEY, server_context

        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise InputError(KEY, str(self.ssl_keyfile), "it goes with `ssl_certfile`")
            return None
        return server_context(self.ssl_certfile, self.ssl_keyfile)

    def limits(self) -> Limits:
        """Return what of requests is refused.

        Raises:
            InputError: the limits contradict each other.
        """
        from xrunner.server import Limits

        return Limits(
            max_waiting=self.max_waiting,
            answer_within_s=self.answer_within_s,
            request_timeout_s=self.request_timeout_s,
            default_max_tokens=self.default_max_tokens,
            max_max_tokens=self.max_max_tokens,
        )

    def check_batching(self, plan: Plan) -> None:
        """Refuse rows that the engine or the plan cannot run.

        Raises:
            InputError: vLLM runs the plan, or it does not run whole batches on one device.
        """
        from xgpt import policies

        if self.batching == "flat":
            return
        if self.engine != "native":
            raise InputError("--batching", self.batching, f"--engine {self.engine} takes flat")
        policies.build_rows(plan, self.batching)

    def check_reuse(self, plan: Plan) -> None:
        """Refuse to run a plan that counts on what requests share without it: none of its figures would hold.

        Raises:
            InputError: names what turns reuse off.
        """
        from xrunner.vllm.command import reuses

        in_vllm = self.engine == "vllm"
        off = {"reuse": not self.reuse, "batching": self.batching != "flat", "engine": in_vllm and not reuses(plan)}
        if plan.estimate.reuse is None or not any(off.values()):
            return
        field = next(name for name, is_off in off.items() if is_off)
        share = f"{100 * plan.estimate.reuse.share:.0f}%"
        accepted = f"the plan counts on {share} of prompt tokens found: leave it out, or plan for lengths alone"
        raise InputError(field, getattr(self, field), accepted)

    def nodes(self) -> Nodes | None:
        """Return the machines that run the plan together; None: this one is alone.

        Raises:
            InputError: something is missing, or vLLM is to run on several.
        """
        nodes = Nodes.of(self.nnodes, self.node_rank, self.rendezvous)
        if nodes is not None and self.engine == "vllm":
            accepted = "vLLM is started on this machine alone; leave it out, or `engine=vllm`"
            raise InputError("nnodes", self.nnodes, accepted)
        return nodes


def serve(
    plan: Plan, request: ServeRequest, on_note: Callable[[str], None] = lambda line: None, *, dry_run: bool = False
) -> None:
    """Serve until SIGTERM or SIGINT; on a machine other than the first, run this one's share of the workers.

    Args:
        on_note: is told what is about to be started, and in a dry run what is missing here.
        dry_run: check all that can be checked, and start nothing.

    Raises:
        InputError: the plan or the request cannot be served so, here.
        MachineError: devices, memory or a port are missing, or the engine does not start.
    """
    plan = located(plan, request.checkpoint)
    request.keys()
    request.tls()
    request.check_batching(plan)
    request.check_reuse(plan)
    nodes, limits = request.nodes(), request.limits()
    if request.answer_within_s is not None and not plan.estimate.predicts_rate:
        accepted = "the plan's estimate is 0; plan again, or leave it out"
        raise InputError("answer_within_s", request.answer_within_s, accepted)
    if request.engine == "vllm":
        on_note(f"vLLM {check_plan_for_vllm(plan)}{'' if dry_run else ': starting'}")
    elif dry_run:
        check_plan(plan, request.nnodes)
    if dry_run:
        for line in missing(plan, request.profile, replan=request.replan):
            on_note(line)
    elif nodes is not None and nodes.rank:
        join_nodes(plan, nodes)
    else:
        _serve(plan, request, limits, nodes)


def _serve(plan: Plan, request: ServeRequest, limits: Limits, nodes: Nodes | None) -> None:
    from xgpt.checkpoint import sampling_defaults
    from xgpt.io import StepLogWriter
    from xrunner import server
    from xrunner.grammar import grammars_of

    keys, tls = request.keys(), request.tls()
    engine, replan = request.engine, request.replan
    check_runs(plan, request.nnodes, engine)
    defaults = {} if plan.checkpoint is None else sampling_defaults(Path(plan.checkpoint))
    server.log_json(request.log_level)
    build: Callable[..., ServedEngine] = partial(build_vllm_engine, reuse=request.reuse)
    if engine == "native":
        build = partial(build_engine, nodes=nodes, batching=request.batching, reuse=request.reuse)
    if engine == "vllm" and replan and not can_change_plan(plan):
        logger.warning("re-planning is off: vLLM keeps a plan for several devices as it is")
        replan = False
    if request.batching != "flat" and replan:
        logger.warning("re-planning is off: a plan in rows is served as it is")
        replan = False
    for line in missing(plan, request.profile, replan=replan):
        logger.warning(line)
    planner = find_planner(plan, request.profile) if replan else None
    tracer = open_tracer(request.otlp_endpoint)
    with ExitStack() as at_end:
        if tracer is not None:
            at_end.callback(tracer.close)
        log = None if request.step_log is None else StepLogWriter(request.step_log)
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
        checkpoint = None if plan.checkpoint is None or engine == "vllm" else Path(plan.checkpoint)
        grammars = grammars_of(checkpoint, plan.model)
        model = server.ServedModel(
            plan.model.name,
            plan.model,
            None if plan.checkpoint is None else server.load_tokenizer(Path(plan.checkpoint)),
            frozenset(plan.model.eos_token_ids),
            grammars,
            defaults,
        )
        app = server.create_app(
            engine_thread,
            model,
            limits=limits,
            keys=keys,
            hosts=server.AllowedHosts(request.host, request.allowed_hosts),
            tracer=tracer,
        )
        server.serve(
            app,
            request.host,
            request.port,
            drain_s=request.drain_s or server.DRAIN_S,
            shutdown_delay_s=request.shutdown_delay_s,
            tls=tls,
        )


def open_tracer(endpoint: str | None) -> Tracer | None:
    """Return where traces go: to an OTLP endpoint, or where OpenTelemetry's environment variables say; None: nowhere.

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
        raise InputError("otlp_endpoint", endpoint, "give a URL, as in http://localhost:4318")
    try:
        from xrunner.server.observe.traces import Tracer
    except ImportError as error:
        if endpoint is None:
            # A cluster's administrator sets these variables for every program on it.
            logging.getLogger(__name__).warning("traces are off", extra={"fields": {"reason": str(error)}})
            return None
        raise InputError("otlp_endpoint", endpoint, "it takes OpenTelemetry: pip install 'xgpt-serve[otel]'") from None
    return Tracer.to(endpoint)


def find_planner(plan: Plan, given: str | Profile | None) -> BackgroundPlanner | None:
    """Return what re-plans; None where the plan's profile is not here, which `missing` says.

    Raises:
        InputError: `given` is not the plan's profile.
    """
    try:
        return BackgroundPlanner(plan, profile_of(plan, given))
    except InputError:
        if given is not None:
            raise
        return None
