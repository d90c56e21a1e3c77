"""Make a planning problem from a request: resolve names, find or measure a profile, and read the acceptance of drafts.
The acceptance is given as shares or by a server's metrics page.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from xgpt.checkpoints import hub
from xgpt.checkpoints.files import read_config
from xgpt.core.errors import InputError, reason_of
from xgpt.core.progress import Progress
from xgpt.core.schema import ClusterSpec, Constraint, EngineSpec, ModelSpec, Profile, Speculation, Workload
from xgpt.core.schema.plan import HUB
from xgpt.core.sessions import turns_of
from xgpt.deciding.commands import QUANTIZES, SPECULATES
from xgpt.requests import PlanRequest
from xgpt.resolve import (
    engine_of,
    in_sessions,
    known_id,
    load_classes,
    load_cluster,
    load_engine,
    load_model,
    load_trace,
    workload_of,
)
from xgpt.served_profile import as_served
from xprofiler.store import check_belongs, dtype_of, given_profile, keep, kv_dtype_of, obtain_profile
from xscheduler.problem import Problem, runs_elsewhere
from xsimulator.lengths import Reused


def resolve(request: PlanRequest, progress: Progress | None = None, shared: int = 0) -> Problem:
    """Return a request's planning problem. Its profile is the given one, a cached one, or a newly measured or computed
    one.

    Args:
        shared: see `xprofiler.analytic.profile`.

    Raises:
        InputError: a name is not known, a file is broken, or the profile does not belong to the request.
        MachineError: the machine cannot be measured.
    """
    spec, checkpoint, found = model_of(request)
    cluster = request.cluster if isinstance(request.cluster, ClusterSpec) else load_cluster(request.cluster)
    if request.price is not None:
        cluster = cluster.but(price_per_device_hour=request.price)
    most = request.devices if isinstance(request.devices, int) else None
    if most is not None and most > cluster.num_devices:
        says = f"{cluster.name} has {cluster.num_devices}: give auto, a smaller number, or a larger `cluster`"
        raise InputError("devices", most, says)
    workload, constraint = _lengths(request, spec), _with_classes(request)
    if workload.sessions is not None and constraint.arrival_rate_per_s is not None:  # the user states sessions
        turns = turns_of(workload.sessions)
        constraint = constraint.but(arrival_rate_per_s=turns * constraint.arrival_rate_per_s)
    speculation = _speculation(request, spec)
    engine = _named_engine(request, cluster)
    profile = _profile(request, spec, checkpoint, cluster, engine, progress, shared)
    keep(profile)
    engine = engine or engine_of(profile)
    if engine is not None and engine.memory_share is not None:
        device = cluster.device.but(usable_memory=engine.memory_share)
        cluster = cluster.but(device=device)
    even = runs_elsewhere(spec, cluster, profile, engine, request.fix)
    problem = Problem(
        model=spec,
        checkpoint=found,
        cluster=cluster,
        workload=workload,
        profile=profile,
        engine=engine,
        constraint=constraint,
        kv=request.kv,
        fixed=request.fix,
        even=even,
        max_devices=most,
        speculation=speculation,
        reused=_shared_prefix(request, spec, workload, 16 if engine is None else engine.block_size),
    )
    _check_started(problem)
    return problem


def turns_in(request: PlanRequest) -> float | None:
    law = _given(request).sessions
    return None if law is None else turns_of(law)


def _given(request: PlanRequest) -> Workload:
    given, bounds = request.workload, (request.session_wait_s, request.session_time_s)
    found = workload_of(given)
    if found.sessions is None and isinstance(given, str) and bounds != (None, None):
        return in_sessions(given)
    return found


def _lengths(request: PlanRequest, spec: ModelSpec) -> Workload:
    given = _given(request)
    workload = workload_of(request.workload if given.sessions is None else given, spec, request.growth)
    if workload.sessions is None:
        if (request.session_wait_s, request.session_time_s) != (None, None):
            says = "it has no sessions: give a law of sessions, or a log with them"
            raise InputError("workload", workload.name, says)
        return workload
    for name, unset in (("shared_prefix", 0), ("outputs", 1.0), ("rate", 1.0)):
        if (value := getattr(request, name)) != unset:
            raise InputError(name, value, f"{workload.name} has sessions, whose law is a YAML file: state it there")
    return workload


def _speculation(request: PlanRequest, model: ModelSpec) -> Speculation | None:
    """Return the settings of speculative decoding, or None if the request has no draft. If the request does not state
    the number of draft tokens, it is the number of shares in `acceptance`, or `FEW_AHEAD` for a single share.
    """
    method = request.speculative
    if method is None:
        for name in ("speculative_tokens", "acceptance", "draft_model"):
            if getattr(request, name) is not None:
                raise InputError(name, getattr(request, name), "it needs `speculative`")
        return None
    if request.acceptance is None:
        ways = (
            "the probability that a draft token is accepted, the shares of steps that accept at least one, two, ... "
            "draft tokens, or the file of a server's metrics page"
        )
        raise InputError("acceptance", None, f"`speculative` needs it: give {ways}")
    if method in ("mtp", "ngram") and request.draft_model is not None:
        raise InputError("draft_model", request.draft_model, f"{method} has no draft model: leave it out")
    if method == "mtp" and not model.mtp_layers:
        raise InputError("speculative", method, f"{model.name} has no layer for multi-token prediction")
    if model.is_encoder_decoder:
        says = f"{model.name} has an encoder; only decoder-only models can have a draft"
        raise InputError("speculative", method, says)
    if any(kind.recurrent is not None for kind in model.kinds) and method == "ngram":
        raise InputError("speculative", method, f"{model.name} has recurrent layers: use mtp")
    if request.devices == "auto":
        raise InputError("devices", "auto", "with `speculative`, give a number of devices instead")
    shares = shares_of(request.acceptance, request.speculative_tokens)
    tokens = request.speculative_tokens or len(shares)
    if tokens > len(shares):
        accepted = f"`acceptance` covers {len(shares)} draft tokens: give more shares, or fewer draft tokens"
        raise InputError("speculative_tokens", tokens, accepted)
    try:
        return Speculation(method=method, tokens=tokens, acceptance=shares, draft=request.draft_model)
    except ValueError:
        raise InputError("acceptance", list(shares), "give shares from 0 to 1 that do not rise") from None


def _shared_prefix(request: PlanRequest, model: ModelSpec, workload: Workload, block_size: int) -> Reused | None:
    tokens, constraint = request.shared_prefix, request.constraint
    if not tokens:
        return None
    if model.is_encoder_decoder or any(kind.recurrent is not None for kind in model.kinds):
        accepted = f"engines cannot cache prefixes of prompts for {model.name}: leave it out"
        raise InputError("shared_prefix", tokens, accepted)
    if constraint.sla == "request" or constraint.maximise is not None:
        raise InputError("shared_prefix", tokens, "it cannot be combined with `sla=request` or `maximise`")
    if isinstance(request.workload, str):
        trace = load_trace(request.workload)
        if trace is not None and trace.prefixes is not None:
            accepted = "the trace already has the common prefixes of its prompts: leave `shared_prefix` out"
            raise InputError("shared_prefix", tokens, accepted)
    if tokens >= workload.input.lengths[-1]:
        longest = workload.input.lengths[-1]
        accepted = f"it must be shorter than the longest prompt of {workload.name}, which has {longest} tokens"
        raise InputError("shared_prefix", tokens, accepted)
    if tokens < block_size:
        accepted = f"only whole blocks of {block_size} tokens are cached: give at least {block_size}"
        raise InputError("shared_prefix", tokens, accepted)
    kept = tokens // block_size * block_size
    found = sum(
        share * min(kept, length - 1)
        for length, share in zip(workload.input.lengths, workload.input.probabilities, strict=True)
    )
    share = found / workload.input.mean
    return Reused.proportional(workload, share, float(kept), share)


def _with_classes(request: PlanRequest) -> Constraint:
    constraint = request.constraint
    classes = load_classes(request.workload) if isinstance(request.workload, str) else ()
    if not classes:
        return constraint
    for name, bound in constraint.bounds.given.items():
        raise InputError(name, bound, f"{request.workload} has classes with their own bounds: leave this bound out")
    return constraint.with_classes(classes)


def model_of(request: PlanRequest) -> tuple[ModelSpec, Path | None, str | None]:
    """Return a request's model, the directory of its checkpoint, and what a server is to load."""
    model = request.model
    if isinstance(model, ModelSpec):
        if request.config is not None:
            raise InputError("config", request.config, "it needs a Hugging Face id as `model`")
        return model, None, None
    # If only a config is given, the config is the model.
    if request.config is not None and "model" not in request.model_fields_set:
        return read_config(Path(request.config)), None, None
    model = known_id(model)
    spec, checkpoint = load_model(model, request.config)
    if hub.is_id(model) and not Path(model).exists():
        return spec, checkpoint, HUB + model
    return spec, checkpoint, None if checkpoint is None else str(checkpoint)


def _named_engine(request: PlanRequest, cluster: ClusterSpec) -> EngineSpec | None:
    if request.engine is None:
        return None
    engine = request.engine if isinstance(request.engine, EngineSpec) else load_engine(request.engine)
    if not cluster.is_local or engine.framework == "xgpt":
        return engine
    if request.profile is None:
        make = f"make one with `xgpt profile --engine {engine.framework} -o FILE` and plan with it as `profile`"
        raise InputError("engine", engine.name, f"plans for this machine need measured steps: {make}")
    return engine.measured_on(cluster.device.type)


def _check_started(problem: Problem) -> None:
    """Check that xgpt knows a command that starts the plans in the problem's engine."""
    engine, model, speculation = problem.engine, problem.model, problem.speculation
    if engine is None:
        return
    if problem.even and model.is_encoder_decoder:
        says = f"xgpt cannot start {model.name}, an encoder-decoder, in it: use `engine=xgpt`"
        raise InputError("engine", engine.framework, says)
    if speculation is not None and not (engine.framework in SPECULATES and engine.runs_alone):
        says = f"it needs {' or '.join(SPECULATES)} as `engine`, not {engine.name}"
        raise InputError("speculative", speculation.method, says)
    known = "xgpt", *QUANTIZES
    if problem.profile.dtype == "float8" and model.quantization is None and engine.framework not in known:
        says = f"{engine.framework} needs a checkpoint in float8: give one, or {' or '.join(QUANTIZES)} as `engine`"
        raise InputError("dtype", "float8", says)


def _profile(
    request: PlanRequest,
    spec: ModelSpec,
    checkpoint: Path | None,
    cluster: ClusterSpec,
    engine: EngineSpec | None,
    progress: Progress | None,
    shared: int,
) -> Profile:
    given = request.profile
    if given is None:
        return obtain_profile(
            spec,
            checkpoint,
            cluster,
            progress,
            dtype=request.dtype,
            engine=engine,
            kv_dtype=request.kv_dtype,
            as_served=as_served,
            shared=shared,
        )
    if isinstance(given, Profile):
        check_belongs(given, spec, cluster, dtype_of(spec, cluster, request.dtype, given.engine))
    else:
        given = given_profile(given, spec, cluster, request.dtype)
    if request.kv_dtype is not None:
        wanted = kv_dtype_of(cluster, given.dtype, request.kv_dtype)
        if wanted != given.kv_dtype:
            accepted = (
                f"the plan is for K/V in {request.kv_dtype}: make a profile with `xgpt profile --kv-dtype "
                f"{request.kv_dtype}`, or leave `kv_dtype` or `profile` out"
            )
            raise InputError("profile.kv_dtype", given.kv_dtype, accepted)
    if engine is not None and given.engine not in (None, engine.framework):
        accepted = f"the profile is for {given.engine}: give a version of {given.engine}, or leave `engine` out"
        raise InputError("engine", engine.name, accepted)
    return given


FEW_AHEAD = 8
"""A single acceptance share applies to this many draft tokens."""
VLLM = "vllm:spec_decode_num_"
SGLANG = "sglang:spec_accept_length"


def shares_of(given: float | tuple[float, ...] | str, tokens: int | None) -> tuple[float, ...]:
    """Return one share for each draft position. Entry i is the share of steps in which at least i + 1 draft tokens are
    accepted.

    Args:
        given: these shares; or the path of a metrics page; or one number: the probability that a draft token is
            accepted if all previous ones are.
        tokens: number of draft tokens, or None if not known.
    """
    if isinstance(given, tuple):
        return given
    if isinstance(given, str):
        return from_metrics(Path(given))
    if not 0 <= given <= 1:
        raise InputError("acceptance", given, "give a share from 0 to 1, such as 0.75")
    return _constant(given, tokens or FEW_AHEAD)


def _constant(share: float, positions: int) -> tuple[float, ...]:
    return tuple(share**position for position in range(1, positions + 1))


def from_metrics(path: Path) -> tuple[float, ...]:
    """Read a metrics page of vLLM or SGLang, and return the same shares as `shares_of`.

    vLLM counts drafts, and accepted tokens by position. SGLang states only the mean number of tokens per step. All
    positions then get the same probability of acceptance.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        way_out = "give a share such as 0.75, or the file of a server's metrics page"
        says = f"it cannot be read: {reason_of(error)}; {way_out}"
        raise InputError("acceptance", str(path), says) from None
    drafts, accepted, steps = 0.0, dict[int, float](), list[float]()
    with suppress(ValueError):  # not a metrics page from here on
        for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
            name, position = sample.name, sample.labels.get("position", "")
            if name in (f"{VLLM}drafts_total", f"{VLLM}drafts"):
                drafts += sample.value
            elif name.startswith(f"{VLLM}accepted_tokens_per_pos") and not name.endswith("_created") and position:
                accepted[int(position)] = accepted.get(int(position), 0.0) + sample.value
            elif name == SGLANG:
                steps.append(sample.value)
    if drafts and accepted:
        shares = [accepted.get(position, 0.0) / drafts for position in range(max(accepted) + 1)]
        return tuple(min(1.0, *shares[: position + 1]) for position in range(len(shares)))
    if steps:
        return _constant(_share_of(sum(steps) / len(steps)), FEW_AHEAD)
    raise InputError(
        "acceptance",
        str(path),
        f"it counts no drafts (vLLM: {VLLM}drafts_total and {VLLM}accepted_tokens_per_pos; SGLang: {SGLANG}): give the "
        "metrics page of a server that has answered requests with speculative decoding",
    )


def _share_of(tokens_per_step: float) -> float:
    """Return the probability p of acceptance for which a step has this many tokens on average: 1 + p + p^2 + ..."""
    return max(0.0, 1 - 1 / max(tokens_per_step, 1.0))
