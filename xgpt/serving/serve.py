"""Serve a plan behind xgpt's endpoint."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import socket
from ssl import SSLContext
from threading import Event
from typing import TYPE_CHECKING

import click

from xgpt.checkpoints.files import default_output
from xgpt.core import policies
from xgpt.core.errors import InputError, MachineError
from xgpt.core.network import split_address
from xgpt.core.output_files import check_step_log
from xgpt.core.processes import raise_file_limit, stops_on_signal
from xgpt.core.schema import Pinned, Plan
from xgpt.requests import ServeFields
from xgpt.rules import load_rule
from xgpt.serving.checking import check_plan, check_plan_for_vllm, check_weights, located, missing
from xgpt.serving.running import running
from xprofiler.others import differences
from xprofiler.store import profile_of
from xrunner.server.access.hosts import AllowedHosts, check_exposure
from xrunner.server.access.keys import ApiKeys, Classes
from xrunner.server.api.text import load_tokenizer
from xrunner.server.http.app import create_app
from xrunner.server.http.listener import check_address
from xrunner.server.http.process import DRAIN_S, KEY, server_context
from xrunner.server.http.process import serve as serve_app
from xrunner.server.http.watchdog import inherited_listener
from xrunner.server.submission import Limits
from xrunner.vllm.command import launch
from xrunner.vllm.machines import Machines, follow

if TYPE_CHECKING:
    from xrunner.server.observe.spans import Tracer


class ServeRequest(ServeFields):
    def keys(self, plan: Plan) -> ApiKeys | None:
        """Return the API keys in `api_key_file`, or None if no file is given.

        Raises:
            InputError: the file contains no key, or names a class that the plan does not have. Or other machines can
                reach `host`, and no file is given.
        """
        names = [each.name for each in plan.constraint.classes]
        keys = None if self.api_key_file is None else ApiKeys.read(self.api_key_file, names)
        check_exposure(self.host, keys)
        return keys

    def tls(self) -> SSLContext | None:
        """Return the TLS context, or None if no certificate is given."""
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise InputError(KEY, str(self.ssl_keyfile), "it needs `ssl_certfile`")
            return None
        return server_context(self.ssl_certfile, self.ssl_keyfile)

    def classes(self, plan: Plan) -> Classes:
        return Classes(plan, self.answer_within_of)

    def limits(self, plan: Plan) -> Limits:
        """Return the limits on requests. The default of max_tokens is `default_max_tokens` or else the checkpoint's
        max_new_tokens.
        """
        default, most = self.default_max_tokens, self.max_max_tokens
        if default is None and plan.checkpoint is not None and (named := default_output(Path(plan.checkpoint))):
            default = min(named, most or named)
        return Limits(
            max_waiting=self.max_waiting,
            answer_within_s=self.answer_within_s,
            request_timeout_s=self.request_timeout_s,
            default_max_tokens=default,
            max_max_tokens=most,
        )

    def check_batching(self, plan: Plan) -> None:
        if self.batching == "flat":
            return
        if self.engine != "xgpt":
            raise InputError("--batching", self.batching, f"--engine {self.engine} runs only flat batches: use flat")
        policies.build_rows(plan, self.batching)

    def check_rule(self, plan: Plan) -> None:
        """Check that the engine and the plan can run a rule of one's own.

        Raises:
            InputError: the rule cannot be loaded, or vLLM, rows or two lanes run the plan.
        """
        if self.rule is None:
            return
        if self.engine != "xgpt" or self.batching != "flat":
            raise InputError("rule", self.rule, "it runs in xgpt's own engine with flat batches: leave the others out")
        policies.build(plan, load_rule(self.rule))

    def check_reuse(self, plan: Plan) -> None:
        """Check that reuse is on if the plan counts on it. Otherwise the plan's figures would be wrong."""

        in_vllm = self.engine == "vllm"
        off = {
            "reuse": not self.reuse,
            "batching": self.batching != "flat",
            "engine": in_vllm and not plan.vllm_shares_prompts,
        }
        if plan.estimate.reuse is None or not any(off.values()):
            return
        field = next(name for name, is_off in off.items() if is_off)
        share = f"{100 * plan.estimate.reuse.share:.0f}%"
        accepted = (
            f"the plan relies on the reuse of {share} of prompt tokens: leave this option out, or plan without a trace"
        )
        raise InputError(field, getattr(self, field), accepted)

    def check_machines(self) -> None:
        """Check that the engine supports the options for several machines."""
        if self.engine == "vllm":
            if self.ray is not None:
                raise InputError("ray", self.ray, "vLLM reaches other machines through `nnodes`: leave `ray` out")
            return
        for name in ("nnodes", "node_rank", "master_addr"):
            if getattr(self, name) != type(self).model_fields[name].default:
                says = "it applies only to vLLM; xgpt's own engine reaches other machines through `ray`"
                raise InputError(name, getattr(self, name), says)
        if self.ray is not None and self.batching != "flat":
            raise InputError("ray", self.ray, f"batching={self.batching} runs only on this machine: leave `ray` out")


def serve(plan: Plan, request: ServeRequest, on_note: Callable[[str], None] = lambda line: None) -> None:
    """Serve a plan until SIGTERM or SIGINT. If vLLM runs a replica on several machines, only its first machine answers
    requests.

    Args:
        on_note: called with a line of text about each process that starts or, in a dry run, about what this machine
            lacks.

    Raises:
        InputError: this machine cannot serve the plan as requested.
        MachineError: devices, memory or a port are missing, or the engine does not start.
    """
    raise_file_limit()
    if request.step_log is not None:
        check_step_log(request.step_log, force=request.force)
    plan = located(plan, request.checkpoint)
    if request.replan_policies == "all":
        plan = plan.deployed(pinned=Pinned())
    request.keys(plan)
    request.classes(plan)
    request.tls()
    request.check_batching(plan)
    request.check_rule(plan)
    request.check_reuse(plan)
    request.check_machines()
    limits, machines = request.limits(plan), None
    if request.engine == "vllm":
        plan, machines = share_of(plan, request)
    if (request.answer_within_s or request.answer_within_of) and not plan.estimate.predicts_rate:
        accepted = "it needs a plan that predicts throughput: plan again, or leave it out"
        raise InputError("answer_within_s", request.answer_within_s or str(request.answer_within_of), accepted)
    if request.engine == "vllm":
        span = 1 if machines is None else machines.count
        on_note(f"vLLM {check_plan_for_vllm(plan, span)}{'' if request.dry_run else ': starting'}")
    else:
        check_plan(plan, request.ray, waits=not request.dry_run)
    bound = inherited_listener()
    if bound is None and (machines is None or not machines.rank):
        _check_port(request, on_note)
    if request.dry_run:
        if (tracer := open_tracer(request.otlp_endpoint)) is not None:
            tracer.close()
        if request.engine != "vllm":
            check_weights(plan)
        if plan.checkpoint is not None:
            load_tokenizer(Path(plan.checkpoint))
        for line in missing(plan, request.profile, replan=request.replan):
            on_note(line)
        return
    if (differs := _differences(plan, request)) is not None:
        on_note(differs)
    with _no_end_by_hangup():
        if machines is not None and machines.rank:
            follow_first(plan, machines)
        else:
            _serve(plan, request, limits, machines, bound)


def _check_port(request: ServeRequest, on_note: Callable[[str], None]) -> None:
    try:
        check_address(request.host, request.port)
    except MachineError as error:
        if not request.dry_run:
            raise
        on_note(str(error))


def _differences(plan: Plan, request: ServeRequest) -> str | None:
    if not plan.cluster.is_local or plan.profile.source != "measured":
        return None
    try:
        return differences(profile_of(plan, request.profile))
    except InputError:  # `missing` reports this
        return None


@contextmanager
def _no_end_by_hangup() -> Iterator[None]:
    """Ignore SIGHUP while the server starts. A running server reads its key file again on SIGHUP, but now it has just
    read it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)


def _serve(plan: Plan, request: ServeRequest, limits: Limits, machines: Machines | None, bound: socket | None) -> None:
    keys, tls = request.keys(plan), request.tls()
    with ExitStack() as at_end:
        tracer = open_tracer(request.otlp_endpoint)
        if tracer is not None:
            at_end.callback(tracer.close)
        engine, model = at_end.enter_context(running(plan, request, machines))
        app = create_app(
            engine,
            model,
            limits=limits,
            keys=keys,
            classes=request.classes(plan),
            hosts=AllowedHosts(request.host, request.allowed_hosts, request.allowed_origins),
            tracer=tracer,
        )
        serve_app(
            app,
            request.host,
            request.port,
            drain_s=request.drain_s or DRAIN_S,
            shutdown_delay_s=request.shutdown_delay_s,
            tls=tls,
            bound=bound,
            restarts=click.get_current_context(silent=True) is not None,  # another program is not started again
        )


def open_tracer(endpoint: str | None) -> Tracer | None:
    """Return a tracer for the OTLP endpoint in `endpoint` or in OpenTelemetry's environment variables, or None if there
    is none.

    If only the variables name an endpoint and OpenTelemetry is not installed, log this and return None.

    Raises:
        InputError: `endpoint` is not a URL, or it is given and OpenTelemetry is not installed.
    """
    variables = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if endpoint is None and (
        os.environ.get("OTEL_TRACES_EXPORTER") == "none" or not any(map(os.environ.get, variables))
    ):
        return None
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise InputError("otlp_endpoint", endpoint, "give a URL, as in http://localhost:4318")
    try:
        from xrunner.server.observe.spans import Tracer
    except ImportError as error:
        if endpoint is None:
            # An administrator may set these variables for all programs on a cluster.
            logging.getLogger(__name__).warning(
                "no OpenTelemetry traces are sent, since the library is not installed",
                extra={"fields": {"reason": str(error)}},
            )
            return None
        raise InputError("otlp_endpoint", endpoint, "install OpenTelemetry: pip install 'xgpt-serve[otel]'") from None
    return Tracer.to(endpoint)


MASTER_PORT = 29500


def share_of(plan: Plan, request: ServeRequest) -> tuple[Plan, Machines | None]:
    """Return the part of a plan that this machine serves, and the machines that serve this part together. None means
    that this machine serves it alone.

    A machine serves either whole replicas or a part of one replica. Replicas that span machines have separate
    endpoints, each on the replica's first machine. A gateway in front of the endpoints must distribute the requests.

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
        return plan.deployed(replicas=here // each), None
    if len(plan.policy.lanes) > 1:
        accepted = "for its lanes on several machines use `xgpt export --to llm-d` or `--to dynamo`"
        raise InputError("plan.policy", plan.policy.kind, accepted)
    try:
        host, port = split_address(request.master_addr or "", MASTER_PORT)
    except ValueError:
        accepted = "give the address of the replica's first machine, as HOST or HOST:PORT"
        raise InputError("master_addr", request.master_addr, accepted) from None
    span = each // here
    return plan.deployed(replicas=1), Machines(span, rank % span, host, port)


def follow_first(plan: Plan, machines: Machines) -> None:
    """Run this machine's part of a replica. It ends when the engine on the replica's first machine stops, or on
    SIGTERM.
    """
    ended = Event()
    with stops_on_signal(ended):
        follow(plan, machines, machines.spread(launch(plan, plan_path="plan.json")), ended.is_set)
