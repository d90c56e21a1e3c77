"""Predict the figures of a current deployment, with the engine, data types and memory that it has."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from xgpt.comparing.current import CurrentEngine, check_model
from xgpt.comparing.flags import Given
from xgpt.comparing.vllm_command import TABLE
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import ChunkedSettings, DType, EngineSpec, KvPromise, Plan, PlanDraft, Precision
from xgpt.resolve import load_engine, nearest_engine
from xscheduler.objectives.capacities import rated
from xscheduler.placement import Placement
from xscheduler.problem import Problem, reused_by
from xscheduler.schedule import NOT_SEARCHED, Scheduler, scheduler
from xscheduler.space import Space
from xsimulator.capacity import Trial
from xsimulator.memory import RequestBlocks


def engine_name(current: CurrentEngine) -> str:
    """Return the name of the shipped engine with which to score a deployment: its version, or the nearest known one."""
    return nearest_engine(current.framework, current.version).name


def runs_in(current: CurrentEngine, engine: EngineSpec) -> bool:
    """Return whether a deployment's engine is this engine, in any version."""
    return engine.framework == load_engine(engine_name(current)).framework


def kept_options(current: CurrentEngine, engine: EngineSpec) -> Given:
    """Return the options of a deployment's command that a plan's command for an engine repeats: none for another
    engine, and none that the newest version no longer has.
    """
    if not runs_in(current, engine):
        return {}
    is_newest = engine.version == load_engine(current.framework).version
    gone = TABLE.earlier if is_newest and current.framework == "vllm" else {}
    return {name: value for name, value in current.kept.items() if name not in gone}


def types_of(problem: Problem, current: CurrentEngine) -> tuple[DType, DType]:
    """Return the data types of a deployment: that of weights and that of K/V."""
    dtype = current.dtype or problem.model.dtype_in(current.framework)
    return dtype, current.kv_dtype or ("bfloat16" if dtype == "float8" else dtype)


def has_types(problem: Problem, current: CurrentEngine) -> bool:
    profile = problem.profile
    planned = profile.dtype, profile.kv_dtype or Precision.of(profile.dtype, problem.cluster.device.type).kv
    return types_of(problem, current) == planned


class Deployed(NamedTuple):
    """A current deployment as plans describe engines.

    Attributes:
        engine: the engine with the command's settings. None on CPUs means the engine of the profile.
        step_tokens: largest number of tokens in a step.
    """

    scheduler: Scheduler
    placement: Placement
    space: Space
    engine: EngineSpec | None
    step_tokens: int

    @property
    def in_flight(self) -> int:
        """Number of tokens of running steps that the engine counts beside a window."""
        engine, steps = self.engine, 1
        if engine is not None and engine.counts_all_steps:
            steps = max(len(self.space.limits.memory.lane), 1 + engine.schedules_ahead)
        return steps * self.step_tokens

    @property
    def holds(self) -> float:
        """Number of tokens of the longest request that fits into an otherwise empty K/V memory."""
        return self.space.limits.memory.longest_request(self.step_tokens, self.in_flight)

    @property
    def mean_running(self) -> float:
        """Mean number of running requests while others wait: requests enter as long as blocks are free. Simulations
        with this limit serve as many requests as without a limit, within 0.5%.
        """
        limits, lengths = self.space.limits, self.space.lengths
        blocks, each = limits.memory.blocks_beside(np.asarray([self.step_tokens])), limits.memory.request_blocks
        if self.engine is not None and limits.kv == "quantile":
            blocks = blocks - self.engine.spare_tokens / limits.block_size
            each += self.engine.spare_tokens_each / limits.block_size
        law = RequestBlocks.of(lengths, limits.block_size, limits.kv, request_blocks=each, on_average=True)
        return float(law.most(blocks)[0])

    def logged_tokens(self, context: int) -> int:
        """Return the number of K/V tokens that the engine logs if requests may have `context` tokens."""
        by_requests = self.engine is not None and self.engine.logs_requests
        memory = self.space.limits.memory
        return memory.logged_tokens(self.step_tokens, context, self.in_flight, by_requests=by_requests)


def deployed(problem: Problem, current: CurrentEngine) -> Deployed:
    """Return a current deployment with its placement and memory.

    Raises:
        InputError: the cluster has no such placement for the model.
        InfeasibleError: the model does not fit on the devices.
    """
    if current.drafts is None:
        problem = replace(problem, speculation=None)
    if current.text_only:
        problem = replace(problem, model=problem.model.but(tower_params=0, tower=None))
    device = problem.cluster.device
    engine = None if problem.engine is None else current.as_started(problem.engine)
    runs, share = engine, current.usable_memory
    if device.type == "gpu":
        runs = (engine or load_engine(engine_name(current))).but(max_batch=current.max_num_seqs)
        share = share or runs.memory_share
    cluster = problem.cluster.but(device=device if share is None else device.but(usable_memory=share))
    kv: KvPromise | None = "quantile" if engine is None else None  # as plans for the engine
    chooser = scheduler(replace(problem, cluster=cluster, kv=kv, engine=engine, deployed=runs))
    ep_degree = 1 if problem.model.experts is None else current.ep_degree
    placement = chooser.candidates.uniform_placement(
        "chunked", current.tp_degree, current.num_stages, current.replicas, ep_degree
    )
    step_tokens = current.step_tokens(problem.model.max_context)
    return Deployed(chooser, placement, chooser.candidates.space("chunked", placement), runs, step_tokens)


def batch_note(scored: Plan, running: CurrentEngine) -> list[str]:
    fit = scored.policy.max_batch if isinstance(scored.policy, ChunkedSettings) else running.max_num_seqs
    if fit >= running.max_num_seqs:
        return []
    return [
        f"max_batch {fit}: so many requests of these lengths fit into K/V memory at once, of {running.max_num_seqs}"
    ]


def cache_note(problem: Problem, current: CurrentEngine) -> list[str]:
    if not current.caches_prompts or problem.workload.sessions is not None:
        return []
    return ["prefix caching: no hits are counted, since the workload contains only lengths"]


def memory_note(problem: Problem, current: CurrentEngine) -> list[str]:
    """Return a note on the size of K/V memory that vLLM logs when it starts, by which a user can check predictions."""
    if problem.cluster.device.type != "gpu" or current.framework != "vllm":
        return []
    found = deployed(problem, current)
    context = current.max_model_len or problem.model.max_context
    if current.shortens:
        context = min(context, int(found.holds))
    assert found.engine is not None
    logged, each = found.logged_tokens(context), " in each replica" if current.replicas > 1 else ""
    return [f'K/V memory: {found.engine.name} should log "GPU KV cache size: {logged:,} tokens"{each} when it starts']


def score_current(problem: Problem, current: CurrentEngine, longest: int | None = None) -> Plan:
    """Return a plan with the settings and the predicted figures of a running engine. K/V memory is promised to requests
    as in plans for the engine.

    Args:
        longest: length of the workload's longest request in tokens, input and output together. None means the longest
            input plus the longest output.

    Raises:
        InputError: as in `check_current`, or the engine uses drafts with pipeline stages.
        InfeasibleError: the model does not fit on the devices, or K/V memory cannot hold the longest request.
    """
    check_current(problem, current, longest)
    if current.drafts is not None and current.num_stages > 1:
        raise InputError("current", f"{current.num_stages} stages", "xgpt scores drafts only without pipeline stages")
    found = deployed(problem, current)
    if problem.cluster.device.type == "gpu":
        _check_room(current, problem, found.holds, longest or _longest(problem))
    micro, most = found.placement.microbatches, max(found.placement.microbatches, ceil(found.mean_running))
    settings = ChunkedSettings(
        # A step runs one micro-batch. vLLM limits the tokens of a step, and the number of all running requests.
        token_budget=micro * found.step_tokens,
        max_batch=min(current.max_num_seqs, most),
        **found.placement.fixed,
    )
    plan = rated(_at_saturation(problem, current, found, settings), problem.profile)
    if plan.estimate.sessions is not None:  # at saturation, turns find what they find at the plan's rate
        reusing = replace(problem, reused=reused_by(plan, problem.workload))
        at = _at_saturation(reusing, current, deployed(reusing, current), settings).estimate
        known = {name: getattr(plan.estimate, name) for name in ("capacity", "sessions", "reuse")}
        plan = plan.but(estimate=at.but(**known))
    return plan.proven(NOT_SEARCHED)


def _at_saturation(problem: Problem, current: CurrentEngine, found: Deployed, settings: ChunkedSettings) -> PlanDraft:
    plan = found.scheduler.score(settings, found.placement, admits_by_use=True)
    draft: PlanDraft = plan
    if (plan.admission.max_running or inf) < current.max_num_seqs:  # the engine does not know it
        draft = plan.but(admission=plan.admission.but(max_running=None))
    if settings.max_batch == current.max_num_seqs:
        return draft
    # closed forms leave out that requests are preempted when blocks run out
    served, said = Trial(draft, problem.profile).saturated(), draft.estimate
    tokens = said.output_tokens_per_s * served / said.throughput_rps
    cost = said.cost_per_million_tokens and said.cost_per_million_tokens * said.output_tokens_per_s / tokens
    return draft.with_estimate(throughput_rps=served, output_tokens_per_s=tokens, cost_per_million_tokens=cost)


def _check_room(current: CurrentEngine, problem: Problem, holds: float, longest: int) -> None:
    model, needs, will = problem.model, longest, "refuse requests"
    where = f"the longest request of {problem.workload.name}"
    if not current.shortens:
        needs, will = current.max_model_len or model.max_context, "not start"
        where = "--max-model-len" if current.max_model_len else f"the context of {model.name}"
    if holds < needs:
        message = (
            f"the current deployment would {will}: its K/V memory holds {holds:.0f} tokens, but {where} needs "
            f"{needs}; give shorter requests or a smaller context, more devices, or the engine more of their memory"
        )
        raise InfeasibleError(message, binding="memory")


def check_current(problem: Problem, current: CurrentEngine, longest: int | None = None) -> None:
    """Check that the current deployment can be compared with plans for the same requests.

    Raises:
        InputError: the deployment needs too many devices, serves another model, has data types without step times or a
            division of experts that cannot be scored, or rejects requests of the workload.
    """
    cluster, lengths = problem.cluster, problem.workload
    check_model(current, problem.model.name)
    if lengths.sessions is not None and current.caches_prompts is False:
        says = "sessions are scored with K/V kept between turns: leave the flag out to compare with it"
        raise InputError("current", "no prefix caching", says)
    if current.quantization is not None and problem.model.quantization is None and problem.profile.dtype != "float8":
        accepted = (
            f"the weights of {problem.model.name} are in {problem.profile.dtype}: set `model` to the quantised "
            "checkpoint that is served"
        )
        raise InputError("current: --quantization", current.quantization, accepted)
    if current.num_devices > cluster.num_devices:
        says = f"{cluster.name} has only {cluster.num_devices}: give a larger `cluster`"
        raise InputError("current", f"{current.num_devices} devices", says)
    cuts_experts = current.framework == "vllm" and current.replicas > 1 and current.ep_degree <= current.tp_degree
    if cuts_experts and problem.model.experts is not None:
        accepted = (
            "with several replicas vLLM divides each expert among all of them, which xgpt cannot score: add "
            "--enable-expert-parallel"
        )
        raise InputError("current: --data-parallel-size", current.replicas, accepted)
    timed, runs = problem.profile.dtype, types_of(problem, current)[0]
    if problem.profile.engine == current.framework == "vllm" and runs != timed and cluster.device.type == "cpu":
        accepted = f"the profile is for {timed}: measure what runs with `xgpt profile --engine vllm --dtype {runs}`"
        raise InputError("current: --dtype", runs, accepted)
    is_known = current.dtype in (None, timed)
    if cluster.device.type == "gpu":
        is_known = has_types(problem, current)
    if not is_known:
        weights, kv = types_of(problem, current)
        accepted = f"the step times are for {problem.profile.dtype}: compare with `dtype={weights}` and `kv_dtype={kv}`"
        raise InputError("current: --dtype", f"{weights}, K/V in {kv}", accepted)
    longest = longest or _longest(problem)
    if current.max_model_len is not None and current.max_model_len < longest:
        accepted = (
            f"{lengths.name} has requests of {longest} tokens, which the engine would reject: give at least {longest}"
        )
        raise InputError("current: --max-model-len", current.max_model_len, accepted)


def _longest(problem: Problem) -> int:
    return problem.workload.input.lengths[-1] + problem.workload.output.lengths[-1]
