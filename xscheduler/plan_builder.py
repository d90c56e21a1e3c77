"""Turn one point of a search space (one choice of settings) into a draft with all numbers that an engine needs."""

from __future__ import annotations

import numpy as np

from xgpt.core.io import sha256
from xgpt.core.schema import (
    Admission,
    Estimate,
    PlanDraft,
    PolicySettings,
    Profile,
    ProfileRef,
    ReuseEstimate,
    SearchEffort,
    Stage,
    StageLane,
)
from xgpt.core.schema.policy import engine_slots
from xscheduler.problem import Problem
from xscheduler.space import Space
from xsimulator.stages import is_grouped


def draft_of(
    problem: Problem, space: Space, values: dict[str, float], settings: PolicySettings, effort: SearchEffort
) -> PlanDraft:
    """Return one point of a search space, a choice of settings, with its predicted figures."""
    space = _started(problem, space, settings)
    profile, limits = problem.profile, space.limits
    stages, memory_bytes = _stages(space, values, problem.model.is_encoder_decoder)
    most = int(space.capacity) if space.kv == "quantile" else None
    if most is not None and (engine_slots(settings) or 0) > most:  # the engine does not know it
        most = None
    if limits.memory.request_blocks:  # each request has a state whose size does not depend on its length
        most = _slots(space, values)
    return PlanDraft(
        model=problem.model,
        checkpoint=problem.checkpoint,
        dtype=profile.dtype,
        kv_dtype=profile.kv_dtype,
        cluster=problem.cluster,
        engine=problem.engine_of(settings.kind),
        workload=problem.workload,
        constraint=problem.constraint,
        policy=settings,
        speculation=problem.speculation,
        admission=Admission(kv=space.kv, max_running=most),
        replicas=space.placement.replicas,
        block_size=limits.block_size,
        stages=stages,
        estimate=_estimate(problem, space, values, memory_bytes),
        search=effort,
        profile=ProfileRef(
            source=profile.source,
            sha256=sha256(profile),
            engine=profile.engine,
            engine_version=profile.engine_version,
            num_threads=profile.num_threads,
            layouts=profile.layouts,
            spread=profile.spread,
            provenance=profile.provenance,
        ),
    )


def _started(problem: Problem, space: Space, settings: PolicySettings) -> Space:
    """Return the space with the memory of an engine that is started with these settings. What runs has its own."""
    engine = problem.engine_of(settings.kind)
    if problem.deployed is not None or engine is None or engine.scheduler != "own" or not engine.sampling_bytes:
        return space
    slots = engine_slots(settings)
    return space if slots is None else space.sampling_for(slots)


def _slots(space: Space, values: dict[str, float]) -> int:
    return max(1, int(space.capacity_beside(np.asarray([values["peak_tokens"]]))[0]))


def _stages(
    space: Space, values: dict[str, float], is_encoder_decoder: bool
) -> tuple[tuple[Stage, ...], tuple[int, ...]]:
    stages: list[Stage] = []
    memory_bytes: list[int] = []
    device, limits = 0, space.limits
    split = limits.encode_memory is not None
    lanes: tuple[StageLane, ...] = ("encode", "decode") if split else ("both",)
    for name, layout in zip(lanes, space.placement.layouts, strict=True):
        memory = limits.encode_memory if name == "encode" and limits.encode_memory else limits.memory
        step_tokens = values["decode_batch"] if name == "decode" else values["peak_tokens"]
        slots = _slots(space, values) if memory.request_blocks else 0
        if name == "encode":
            slots = min(slots, round(values["encode_batch"]) * (len(layout.lane) + 1))
        encodes = name != "decode"
        blocks = int(memory.blocks_beside(step_tokens, encodes=encodes)[0] - slots * memory.request_blocks)
        memory_bytes += memory.device_bytes(blocks, step_tokens, slots, encodes=encodes)
        encoded = decoded = 0
        in_groups = is_grouped(layout.lane)
        for shape in layout.lane:
            encoder = (encoded, encoded + shape.encoder_layers)
            stages.append(
                Stage(
                    lane=name,
                    devices=tuple(range(device, device + shape.tp)),
                    encode_layers=encoder if is_encoder_decoder else None,
                    decode_layers=(decoded, decoded + shape.decoder_layers),
                    tp=shape.tp,
                    ep=shape.ep,
                    kv_blocks=blocks,
                )
            )
            device += shape.tp
            if not in_groups:
                encoded, decoded = encoder[1], decoded + shape.decoder_layers
    return tuple(stages), tuple(memory_bytes)


def _estimate(problem: Problem, space: Space, values: dict[str, float], memory_bytes: tuple[int, ...]) -> Estimate:
    rps, placement = values["throughput"], space.placement
    output_tokens_per_s = rps * space.lengths.mean_output
    price = problem.cluster.price_per_device_hour
    hourly = None if price is None else price * placement.num_devices * placement.replicas
    reuse = None
    if (found := problem.reused) is not None:
        blocks = found.kept_blocks(space.limits.block_size)
        reuse = ReuseEstimate(share=found.share, most_share=found.most, kept_blocks=blocks)
    return Estimate(
        throughput_rps=rps,
        output_tokens_per_s=output_tokens_per_s,
        latency_s=values["latency"],
        ttft_s=values["ttft"],
        tpot_s=values["tpot"],
        itl_p99_s=values["itl_p99"],
        encode_batch=values["encode_batch"],
        decode_batch=values["decode_batch"],
        encode_tokens=values["encode_tokens"],
        cycle_s=values["cycle"],
        bubble_fraction=values["bubble"],
        memory_bytes=memory_bytes,
        cost_per_million_tokens=None if hourly is None else hourly / 3600 / output_tokens_per_s * 1e6,
        reuse=reuse,
        warnings=(
            *_beyond_profile(problem.profile, space, values),
            *_taken_from_another(problem),
            *_set_aside(problem),
            *_unsupported(problem),
        ),
    )


def _taken_from_another(problem: Problem) -> tuple[str, ...]:
    device = problem.cluster.device
    if problem.profile.source != "analytic":
        return ()
    if device.efficiency is not None:
        like = device.efficiency.like
        says = f"the `efficiency` of {device.name} was fitted on {like}: measure a profile for closer step times"
        return () if like is None else (says,)
    taken = problem.profile.provenance.get("efficiency", "another device")
    return (
        f"{device.name} states no `efficiency`: step times assume an A40's ({taken}); measure a profile, or state it",
    )


def _set_aside(problem: Problem) -> tuple[str, ...]:
    if not problem.model.tower_params or problem.engine is None or problem.engine.framework == "xgpt":
        return ()
    if problem.engine.framework == "vllm" and problem.model.tower is not None:
        return ()  # counted
    return (
        f"{problem.model.name} also reads images or sound, and the plan does not count the memory that the engine "
        "reserves for them: serve only text (vLLM's --language-model-only), or plan with a smaller share of the memory",
    )


def _unsupported(problem: Problem) -> tuple[str, ...]:
    if not (names := problem.model.unsupported):
        return ()
    return (f"config.json of {problem.model.name}: taken to change no size: {'; '.join(names)}",)


def _beyond_profile(profile: Profile, space: Space, values: dict[str, float]) -> tuple[str, ...]:
    lengths, placement = space.lengths, space.placement
    layer, encoder = profile.layers[0], profile.encoder_layers[0] if profile.encoder_layers else None
    decode_batch = values["decode_batch"] / placement.microbatches
    encode_tokens = values["encode_tokens"] / placement.microbatches
    warnings = []
    tokens, most_tokens = decode_batch + encode_tokens, layer.rest.points[-1]
    context = lengths.max_whole_input + lengths.max_output
    if encoder is not None:  # prompts go through the encoder only; the decoder reads its output by cross-attention
        tokens, most_tokens = encode_tokens, encoder.rest.points[-1]
        context = max(lengths.max_input, lengths.max_output)
    longest = "contexts up to {:.0f} tokens (longest input with longest output, within the model's context)"
    for name, value, last in (
        ("a step of {:.0f} tokens", tokens, most_tokens),
        ("a decode batch of {:.0f} requests", decode_batch, layer.decode_attention.batches[-1]),
        (longest, context, layer.decode_attention.lengths[-1]),
    ):
        if value > last:
            size = name.format(value)
            warnings.append(f"times of {size} are extrapolated (profile: {last:.0f})")
    return tuple(warnings)
