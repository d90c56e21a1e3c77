"""Build the engine of a plan, and run it in a thread of its own for as long as it is served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xgpt.checkpoints.files import sampling_defaults
from xgpt.core.errors import InputError
from xgpt.core.io import StepLogWriter
from xgpt.core.schema import Plan, Profile
from xgpt.serving.checking import missing
from xgpt.serving.engines import Nodes, build_engine
from xgpt.serving.vllm import build_vllm_engine, can_change_plan
from xprofiler.store import profile_of
from xscheduler.replanning.replanner import BackgroundPlanner

if TYPE_CHECKING:
    from xgpt.serving.serve import ServeRequest
    from xrunner.server import EngineClient, ServedModel
    from xrunner.server.served import ServedEngine

logger = logging.getLogger(__name__)


@contextmanager
def running(
    plan: Plan, request: ServeRequest, nodes: Nodes | None = None, *, with_text: bool = True
) -> Iterator[tuple[EngineClient, ServedModel]]:
    """Build the engine of a plan, its planner and its step log; end them with the context.

    Args:
        nodes: machines that run the plan; None: this one only.
        with_text: read the tokenizer and the chat template; whoever talks to the engine has none of its own.

    Yields:
        The engine's thread, not yet started, and the model with its tokenizer.

    Raises:
        InputError: the plan cannot be run in the requested way.
        MachineError: the engine does not start.
    """
    from xrunner import server
    from xrunner.core_waits import CoreWaits
    from xrunner.cores import take_cores
    from xrunner.grammar import grammars_of
    from xrunner.memory import keep_freed_memory

    engine = request.engine
    in_one_process = engine == "native" and plan.num_devices == 1 and plan.cluster.device.type == "cpu"
    if in_one_process:
        keep_freed_memory()  # before any other thread takes memory: the engine's would have an arena of its own
    defaults = {} if plan.checkpoint is None else sampling_defaults(Path(plan.checkpoint))
    server.log_json(request.log_level)
    build: Callable[..., ServedEngine] = partial(build_vllm_engine, reuse=request.reuse)
    if engine == "native":
        build = partial(build_engine, nodes=nodes, batching=request.batching, reuse=request.reuse)
    planner = _planner(plan, request)
    with ExitStack() as at_end:
        log = None if request.step_log is None else StepLogWriter(request.step_log)
        if log is not None:
            at_end.callback(log.close)
        if planner is not None:
            planner.start()  # it loads while the engine does
            at_end.callback(planner.stop)
        thread = server.single_thread()
        built = thread.submit(build, plan, CoreWaits(log) if log and in_one_process else log).result()
        at_end.callback(lambda: thread.submit(built.close).result())
        if in_one_process:
            thread.submit(take_cores).result()
        client = server.EngineClient(built, thread, server.Watch(plan, planner))
        if log is not None:
            client.metrics.tell_lost_steps(lambda: log.num_lost)
        checkpoint = None if plan.checkpoint is None else Path(plan.checkpoint)
        codec = server.load_tokenizer(checkpoint) if checkpoint is not None and with_text else None
        ends = set(plan.model.eos_token_ids)
        if codec is not None and codec.eos_token_id is not None:
            ends.add(codec.eos_token_id)
        yield (
            client,
            server.ServedModel(
                request.served_model_names or (plan.model.name,),
                plan.model,
                codec,
                frozenset(ends),
                grammars_of(None if engine == "vllm" else checkpoint, plan.model),
                defaults,
                "" if checkpoint is None else str(checkpoint.resolve()),
            ),
        )


def _planner(plan: Plan, request: ServeRequest) -> BackgroundPlanner | None:
    """Return the planner for re-planning; None: it is off, and the log says why."""
    replan = request.replan
    if request.engine == "vllm" and replan and not can_change_plan(plan):
        logger.warning("re-planning is off: vLLM cannot change a plan for several devices")
        replan = False
    if request.batching != "flat" and replan:
        logger.warning("re-planning is off: it does not go with batches in rows")
        replan = False
    for line in missing(plan, request.profile, replan=replan):
        logger.warning(line)
    return find_planner(plan, request.profile) if replan else None


def find_planner(plan: Plan, given: str | Profile | None) -> BackgroundPlanner | None:
    """Return the planner for re-planning; None if the plan's profile is not on this machine (see `missing`).

    Raises:
        InputError: `given` is not the plan's profile.
    """
    try:
        return BackgroundPlanner(plan, profile_of(plan, given))
    except InputError:
        if given is not None:
            raise
        return None
