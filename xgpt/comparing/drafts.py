"""Read the speculative decoding of a running engine, and plan with the same draft."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from xgpt.comparing.flags import Given, count, value_of
from xgpt.core.errors import InputError
from xgpt.core.schema.speculation import MOST_AHEAD, SpeculativeMethod
from xgpt.requests import PlanRequest

ASSUMED: dict[SpeculativeMethod, float] = {"mtp": 0.8, "eagle": 0.6, "eagle3": 0.6}
"""Share of drafted tokens that are accepted if all drafted tokens before them are. mtp: DeepSeek-V3 measured 85 to 90%
of second tokens (arXiv 2412.19437 sec. 5.4.3), in its own tests. eagle: 2 to 7 tokens ahead of Llama-3.1-8B in vLLM
gave 0.59 to 0.66 (github vllm-project/vllm issue 20780), EAGLE-3 with 2 ahead of Qwen3 0.53 to 0.7 (github
Tencent/AngelSlim).
"""
METHODS: dict[str, SpeculativeMethod] = {"eagle": "eagle", "eagle3": "eagle3", "ngram": "ngram", "mtp": "mtp"}
SPEC_FLAGS = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
"""Flags of vLLM that set parts of --speculative-config."""
WITHOUT = "leave drafts out to compare the command without them"
NEUTRAL = frozenset(
    ("model", "method", "num_speculative_tokens", "revision", "code_revision", "max_model_len", "prompt_lookup_max")
) | {"prompt_lookup_min", "draft_tensor_parallel_size", "draft_sample_method", "disable_padded_drafter_batch"}
"""Parts of --speculative-config that are read, or whose effect is part of the acceptance."""


class Drafts(NamedTuple):
    """An engine's speculative decoding: method, draft tokens in each step, and the draft's checkpoint. A checkpoint of
    None means the model's own.
    """

    method: SpeculativeMethod
    tokens: int
    model: str | None = None


def vllm_drafts(given: Given, model: str | None) -> Drafts | None:
    """Return the speculative decoding of a `vllm serve` command, or None if the command has none.

    Args:
        model: the model that the command serves.

    Raises:
        InputError: the flags cannot be read, or drafts of this kind are not scored.
    """
    parts = _parts(given)
    if not parts:
        return None
    draft, named = parts.get("model"), str(parts.get("method", ""))
    if not named:  # vLLM then derives it from the draft
        named = "mtp" if draft == model else next((each for each in ("eagle3", "eagle") if each in str(draft)), "")
    method = METHODS.get("mtp" if named.endswith("_mtp") else named)
    field = "current: --speculative-config"
    if method is None:
        raise InputError(field, named or draft, f"xgpt scores only {', '.join(METHODS)}; {WITHOUT}")
    if other := sorted(set(parts) - NEUTRAL):
        raise InputError(
            field, other[0], "xgpt does not score its effect on drafts; leave it out to compare the command without it"
        )
    if "num_speculative_tokens" not in parts and method != "mtp":
        raise InputError(field, named, "give num_speculative_tokens, which vLLM requires")
    try:
        tokens = count(str(parts.get("num_speculative_tokens", 1)))
    except ValueError as error:
        raise InputError(field, parts["num_speculative_tokens"], f"num_speculative_tokens: {error}") from None
    return _drafts(field, method, tokens, None if method in ("mtp", "ngram") else draft)


def _parts(given: Given) -> dict[str, Any]:
    text = given.get("speculative-config")
    try:
        parts = {} if text is None else json.loads(text)
    except ValueError:
        parts = None
    if not isinstance(parts, dict):
        raise InputError("current: --speculative-config", text, "write a JSON object")
    return parts | {part: given[flag] for flag, part in SPEC_FLAGS.items() if flag in given}


def sglang_drafts(given: Given) -> Drafts | None:
    """Return the speculative decoding of an SGLang command, or None if the command has none.

    Raises:
        InputError: drafts of this kind, or with branches, are not scored.
    """
    algorithm = given.get("speculative-algorithm")
    if algorithm is None:
        return None
    draft, field = given.get("speculative-draft-model-path"), "current: --speculative-algorithm"
    # Without a draft model, the draft is the model's layer for multi-token prediction.
    known: dict[str, SpeculativeMethod] = {"NEXTN": "mtp", "EAGLE": "eagle" if draft else "mtp", "EAGLE3": "eagle3"}
    if algorithm not in known:
        raise InputError(field, algorithm, f"xgpt scores only {', '.join(known)}; {WITHOUT}")
    steps = value_of(given, "speculative-num-steps", count, None)
    if steps is None or given.get("speculative-eagle-topk") != "1":
        accepted = (
            "xgpt scores only drafts without branches: give --speculative-num-steps and --speculative-eagle-topk 1"
        )
        raise InputError(field, algorithm, accepted)
    return _drafts(field, known[algorithm], steps, draft)


def _drafts(field: str, method: SpeculativeMethod, tokens: int, draft: str | None) -> Drafts:
    if tokens > MOST_AHEAD:
        raise InputError(field, tokens, f"xgpt scores at most {MOST_AHEAD} draft tokens")
    return Drafts(method, tokens, draft)


def planned_with(request: PlanRequest, drafts: Drafts) -> tuple[PlanRequest, str]:
    """Return the request for plans with the same draft, and a line about its acceptance.

    Raises:
        InputError: the request has another draft, or the acceptance of this one is not known.
    """
    if request.speculative not in (None, drafts.method):
        accepted = f"plans must use the draft of the command: give {drafts.method}, or leave it out"
        raise InputError("speculative", request.speculative, accepted)
    acceptance: Any = request.acceptance
    said = f"given acceptance {acceptance}"
    if acceptance is None:
        acceptance = ASSUMED.get(drafts.method)
        if acceptance is None:
            accepted = "it depends on the text: give the shares of accepted draft tokens, or a server's metrics page"
            raise InputError("acceptance", None, accepted)
        said = f"assumed acceptance {acceptance:g}: give `acceptance`, if you know it"
    update = {"speculative": drafts.method, "speculative_tokens": drafts.tokens, "acceptance": acceptance}
    note = f"the command and the plans use {drafts.method} with {drafts.tokens} draft tokens a step; {said}"
    return request.model_copy(update=update | {"draft_model": drafts.model}), note
