"""Start a plan's engine in a separate process, and end the process when serving ends."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xgpt.checkpoints.files import sampling_defaults
from xgpt.checkpoints.hub import id_of
from xgpt.core import policies
from xgpt.core.errors import InputError
from xgpt.core.io import StepLogWriter
from xgpt.core.processes import run_module
from xgpt.core.schema import Plan, Profile
from xgpt.rules import name_of
from xgpt.serving.checking import missing
from xgpt.serving.engine_order import EngineOrder
from xprofiler.store import check_engine, profile_of
from xrunner.channel import EngineLost
from xrunner.channel.remote import EngineProcess, RemoteEngine
from xrunner.grammar import grammars_of
from xrunner.logs import log_json
from xrunner.server.api.text import ServedModel, load_tokenizer
from xrunner.server.engine_client import EngineClient
from xrunner.server.observe.watch import Watch
from xrunner.vllm.engine import VllmEngine
from xrunner.vllm.machines import Machines
from xscheduler.replanning.replanner import BackgroundPlanner

if TYPE_CHECKING:
    from xgpt.core.policies import Pool
    from xgpt.requests import ServeFields

logger = logging.getLogger(__name__)


@contextmanager
def running(
    plan: Plan, request: ServeFields, machines: Machines | None = None
) -> Iterator[tuple[EngineClient, ServedModel]]:
    """Start a plan's engine in a separate process, its planner and its step log. All end with the context.

    Args:
        machines: the machines on which vLLM runs the plan. None means only this machine.

    Yields:
        The engine's client, and the model with its tokenizer. The caller must start the client.

    Raises:
        InputError: the plan cannot be run in the requested way.
        MachineError: the engine does not start.
    """
    checkpoint = None if plan.checkpoint is None else Path(plan.checkpoint)
    log_json(request.log_level)
    planner = _planner(plan, request)
    with ExitStack() as at_end:
        log = None if request.step_log is None else StepLogWriter(request.step_log)
        if log is not None:
            at_end.callback(log.close)
        if planner is not None:
            planner.start()  # the planner loads while the engine and the tokenizer load
            at_end.callback(planner.stop)
        engine = start_engine(plan, request, machines)
        at_end.callback(engine.close)
        if log is not None:
            engine.listen(log)
        client = EngineClient(engine, Watch(plan, planner))
        if log is not None:
            client.metrics.tell_lost_steps(lambda: log.num_lost)
        codec = load_tokenizer(checkpoint) if checkpoint is not None else None
        ends = set(plan.model.eos_token_ids)
        if codec is not None and codec.eos_token_id is not None:
            ends.add(codec.eos_token_id)
        if codec is not None and codec.chat_template is not None:
            print(codec.form, file=sys.stderr, flush=True)
        names = tuple(filter(None, (plan.model.name, id_of(plan.checkpoint))))
        yield (
            client,
            ServedModel(
                request.served_model_names or names,
                plan.model,
                codec,
                frozenset(ends),
                grammars_of(None if request.engine == "vllm" else checkpoint, plan.model),
                {} if checkpoint is None else sampling_defaults(checkpoint),
                "" if checkpoint is None else str(checkpoint.resolve()),
            ),
        )


def start_engine(plan: Plan, request: ServeFields, machines: Machines | None = None) -> RemoteEngine:
    """Start a plan's engine: xgpt's in a separate process, or vLLM. Return the engine once it is ready for requests."""
    if request.engine == "vllm":
        return VllmEngine(plan, reuse=request.reuse, machines=machines)
    check_engine(plan, "xgpt")

    def launch(plan: Plan) -> EngineProcess:
        order = EngineOrder(
            plan=plan,
            batching=request.batching,
            reuse=request.reuse,
            log_level=request.log_level,
            ray=request.ray,
            core_waits=request.step_log is not None,
            rule=None if request.rule is None else name_of(request.rule),
        )
        return EngineProcess(run_module("xgpt.serving.engine_process"), order.model_dump_json().encode())

    def limits_of(plan: Plan) -> Pool:
        if request.batching == "flat":
            return policies.build(plan).pool
        return policies.build_rows(plan, request.batching).pool

    limits = limits_of(plan)
    try:
        return RemoteEngine(launch(plan), limits, launch, limits_of)
    except EngineLost as error:  # killed or hung, which says nothing about the plan
        logger.error("%s; starting it again", error)
        return RemoteEngine(launch(plan), limits, launch, limits_of)


def _planner(plan: Plan, request: ServeFields) -> BackgroundPlanner | None:
    replan = request.replan
    if request.engine == "vllm" and replan and plan.num_devices > 1:
        logger.warning("re-planning is off: vLLM cannot change to another plan on several devices")
        replan = False
    if request.batching != "flat" and replan:
        logger.warning("re-planning is off: batches in rows do not support it")
        replan = False
    if request.rule is not None and replan:
        logger.warning("re-planning is off: it would judge the plan without the rule of one's own")
        replan = False
    for line in missing(plan, request.profile, replan=replan):
        logger.warning(line)
    return find_planner(plan, request.profile) if replan else None


def find_planner(plan: Plan, given: str | Profile | None) -> BackgroundPlanner | None:
    """Return the planner for re-planning, or None if the plan's profile is not on this machine (see `missing`)."""
    try:
        return BackgroundPlanner(plan, profile_of(plan, given))
    except InputError:
        if given is not None:
            raise
        return None
