"""Read the base, the scaling and the rotated dimensions of rotary embeddings from config.json."""

from __future__ import annotations

import math
from typing import Any

from xgpt.checkpoints.fields import wrong
from xgpt.checkpoints.readers.common import count

KINDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"}
        | {"original_max_position_embeddings"}
    ),
    "longrope": frozenset(
        {"short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"}
    ),
}
"""Kinds of rotary embeddings, and the settings that each kind has."""
ANY = ("default", "linear", "llama3", "yarn")
OBJECT = 'it must be an object, such as {"rope_type": "default"}'


def rope(
    config: dict[str, Any], theta: float = 10000.0, *, kinds: tuple[str, ...] = ANY, head_dim: int | None = None
) -> dict[str, Any]:
    """Return the settings of rotary embeddings. They are in `rope_theta` and `rope_scaling` or, since transformers 5,
    in `rope_parameters`. As in vLLM, `max_context` is the context after linear, YaRN or dynamic scaling. Kinds
    and settings that the family does not support are named in `unsupported`.

    If a config has both the older and the newer fields, the older ones count, as in transformers 5.

    Args:
        theta: the base if config.json states none.
        kinds: kinds of rotary embeddings that the family supports.
        head_dim: size of a head, for families that may rotate only a part of a head. None means that all dimensions are
            rotated.

    Raises:
        InputError: a setting has a value that no engine accepts.
        KeyError: a setting that the kind needs is missing.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise wrong(name, found, OBJECT)
    kind = _kind(found, kinds)
    unsupported = [] if kind else [f"{name}: {found!r}"]
    partial = [found.get("partial_rotary_factor"), config.get("partial_rotary_factor")]
    share = next((value for value in partial if value is not None), 1.0)
    if share != 1.0 and head_dim is None:
        unsupported.append(f"partial_rotary_factor: {share!r}")
    base = found.get("rope_theta", config.get("rope_theta"))
    fields: dict[str, Any] = {"rope_theta": theta if base is None else base}
    if share != 1.0 and head_dim is not None:
        turned = int(head_dim * share)
        if not 2 <= turned < head_dim or turned % 2:
            says = f"it must rotate an even number of a head's {head_dim} dimensions, at least 2 and not all"
            raise wrong("partial_rotary_factor", share, says)
        fields["rotary_dim"] = turned
    if unsupported:
        fields["unsupported"] = tuple(unsupported)
    if kind is None:
        factor = _number(found.get("factor", 1.0)) if found.get("rope_type", found.get("type")) == "dynamic" else 1.0
        fields["max_context"] = int(count(config, "max_position_embeddings") * factor)
    elif kind != "default":
        fields["rope_scaling"] = scaling = _scaling(kind, found, config)
        if kind in ("linear", "yarn"):
            unscaled = scaling.get("original_max_position") or count(config, "max_position_embeddings")
            fields["max_context"] = int(unscaled * scaling["factor"])
    return fields


def rope_by_layer(config: dict[str, Any], theta: float, sliding_theta: float) -> dict[str, Any]:
    """Return the settings of rotary embeddings for a family whose sliding-window layers have a different base (Gemma
    3).
    """
    by_kind, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(by_kind, dict) or by_kind.keys() - {"full_attention", "sliding_attention"}:
        accepted = "it must be an object with the keys full_attention and sliding_attention"
        raise wrong("rope_parameters", by_kind, accepted)
    full, sliding = by_kind.get("full_attention") or {}, by_kind.get("sliding_attention") or {}
    for name, found in (("rope_scaling", scaling), ("rope_parameters.full_attention", full)):
        if not isinstance(found, dict):
            raise wrong(name, found, OBJECT)
    rope_config = {"rope_parameters": full | scaling, "max_position_embeddings": config.get("max_position_embeddings")}
    base = config.get("rope_theta")
    fields = rope(rope_config, theta if base is None else base, kinds=("default", "linear"))
    fields.pop("max_context", None)  # Gemma 3 states the scaled context
    local = rope({"rope_parameters": sliding}, config.get("rope_local_base_freq", sliding_theta), kinds=("default",))
    return fields | {"sliding_rope_theta": local["rope_theta"]}


def _kind(found: dict[str, Any], kinds: tuple[str, ...]) -> str | None:
    kind = found.get("rope_type", found.get("type", "default"))
    if "longrope" in kinds and kind in ("su", "yarn"):
        kind = "longrope"  # earlier names in Phi-3
    if not isinstance(kind, str) or kind not in kinds:
        return None
    settings = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *KINDS[kind]}
    return None if found.keys() - settings else kind


def _scaling(kind: str, found: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    if kind == "linear":
        return {"kind": kind, "factor": _number(found["factor"])}
    longest = count(config, "max_position_embeddings")
    name = "original_max_position_embeddings"
    original = count({name: longest} | found | config, name)
    fields: dict[str, Any] = {"kind": kind, "original_max_position": original}
    if kind == "llama3":
        return fields | {name: found[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
    factor = found.get("factor")
    factor = longest / original if factor is None else _number(factor)
    fields["attention_factor"] = found.get("attention_factor")
    if kind == "yarn":
        if fields["attention_factor"] is None:
            mscale, all_dims = found.get("mscale"), found.get("mscale_all_dim")
            attention_factor = (
                (magnitude(factor, mscale) / magnitude(factor, all_dims)) if mscale and all_dims else magnitude(factor)
            )
            fields["attention_factor"] = attention_factor
        fields |= {"factor": factor, "truncate": found.get("truncate", True)}
        return fields | {"beta_fast": found.get("beta_fast") or 32.0, "beta_slow": found.get("beta_slow") or 1.0}
    if fields["attention_factor"] is None:
        fields["attention_factor"] = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return fields | {"short_factor": tuple(found["short_factor"]), "long_factor": tuple(found["long_factor"])}


def _number(factor: object) -> float:
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise wrong("rope factor", factor, "it must be a number above 0")
    return factor


def magnitude(factor: float, share: float = 1.0) -> float:
    """Return YaRN's factor on queries and keys, for a context extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0
