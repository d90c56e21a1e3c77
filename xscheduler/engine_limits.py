"""Explain why an engine's kernels or loader cannot run a model that is divided among devices in a certain way."""

from __future__ import annotations

from xgpt.core.schema import Block, EngineSpec, ModelSpec, Quantization

GROUPED = ("fp8_block", "int4")
"""Weight formats with one scale for each block or group of weights. No block or group may be divided among devices."""

SHARING = ("vllm", "sglang")
"""Engines for which xgpt models replicas that share the experts of a layer. TensorRT-LLM's enable_attention_dp shares
them, too.
"""


def why_not_divided(model: ModelSpec, engine: EngineSpec | None, tp: int, ep: int = 1) -> str | None:
    """Return the reason why an engine cannot divide a model's layers among `tp` devices, or None if it can.

    vLLM, SGLang and TensorRT-LLM refuse to load shards that cut an FP8 block of 128 x 128 weights or a group of 4-bit
    weights.

    Args:
        engine: None means xgpt's own engine. It unpacks weights, so only heads, widths and experts must be divisible.
        ep: number of parts into which the experts of a layer are divided. Each part holds whole experts.
    """
    for kind in model.kinds:
        reason = _undivided(kind, tp, ep)
        if reason is None and engine is not None and engine.framework != "xgpt":
            reason = _cut(model, kind, tp, ep)
        if reason is not None:
            return reason
    if ep > tp and (engine is None or engine.framework not in SHARING):
        return (
            f"ep {ep} exceeds the replica's tp, {tp}: xgpt models experts that replicas share (attention by data) only "
            f"for {' and '.join(SHARING)}"
        )
    return None


def _undivided(kind: Block, tp: int, ep: int) -> str | None:
    sizes: list[tuple[str, int, int]] = []
    if (attention := kind.attention) is not None:
        if attention.num_heads % tp:
            return f"{attention.num_heads} attention heads cannot be divided by {tp}"
        few, many = sorted((attention.num_kv_heads, tp))
        if attention.latent is None and many % few:
            return f"of {attention.num_kv_heads} key/value heads and {tp} devices, neither number divides the other"
    if kind.recurrent is not None:
        sizes.append(("heads of a recurrent layer", kind.recurrent.num_heads, tp))
    if kind.ffn_size:
        sizes.append(("columns of a feed-forward block", kind.ffn_size, tp))
    if (experts := kind.experts) is not None:
        sizes += [("experts", experts.number, ep), ("columns of an expert", experts.ffn_size, max(1, tp // ep))]
    return next((f"{size} {name} cannot be divided by {parts}" for name, size, parts in sizes if size % parts), None)


def _cut(model: ModelSpec, kind: Block, tp: int, ep: int) -> str | None:
    stored, parts = model.quantization, []
    if stored is None:
        return None
    if kind.ffn_size:
        parts.append((stored.of("dense"), "a feed-forward block", kind.ffn_size, tp))
    if (experts := kind.experts) is not None:
        parts.append((stored.of("experts"), "an expert", experts.ffn_size, max(1, tp // ep)))
        if experts.shared_ffn_size:
            parts.append((stored.of("shared"), "the shared experts", experts.shared_ffn_size, tp))
    if (attention := kind.attention) is not None:
        width = attention.num_heads * attention.values
        parts.append((stored.of("attention"), "attention's heads", width, tp))
    return next((reason for part in parts if (reason := _cut_part(*part)) is not None), None)


def _cut_part(stored: Quantization | None, name: str, size: int, devices: int) -> str | None:
    if stored is None or stored.kind not in GROUPED or devices == 1 or size // devices % stored.group_size == 0:
        return None
    what = "block" if stored.kind == "fp8_block" else "group"
    return (
        f"each of {devices} devices would have {size // devices:,} of the {size} columns of {name}, which is not a "
        f"multiple of {stored.group_size}, the size of a {what} with one scale"
    )
