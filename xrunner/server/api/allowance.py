"""Compute how many tokens a request may have, from its fields, the limits, the context and the K/V memory."""

from __future__ import annotations

from typing import NamedTuple

from xgpt.core.policies import KvLimits, Request
from xgpt.core.schema import ModelSpec
from xrunner.server.api.errors import refuse
from xrunner.server.api.protocol import GenerationRequest


class Allowance(NamedTuple):
    """Two numbers for a prompt: the largest number of output tokens, and the number of output tokens for which K/V
    memory is reserved. If the second is None, memory is reserved for the first."""

    max_output: int
    promised_output: int | None = None


class OutputRule(NamedTuple):
    """The limits on the length of outputs.

    Attributes:
        default: largest number of output tokens of a request that names no maximum. None means OpenAI's default for
            completions, and the rest of the context for chats.
        most: largest number that a request may name as its maximum. None means the model's context.
        promised: tokens for which K/V memory is reserved if a request names no maximum. None means that it is reserved
            for the largest output that the request may have.
        may_outgrow: whether an output may exceed its reservation."""

    default: int | None = None
    most: int | None = None
    promised: int | None = None
    may_outgrow: bool = True


def check_tokens(
    prompt: list[int], request: GenerationRequest, spec: ModelSpec, memory: KvLimits, rule: OutputRule
) -> Allowance:
    """Return how many tokens the output of a prompt may have. Raises ApiError: 400, the prompt is empty, a token is not
    in the vocabulary, or the request does not fit in the context or the K/V memory."""
    field = request.PROMPT_FIELD
    if not prompt:
        refuse(field, "it is empty; send at least one token")
    room, capacity = spec.max_context - len(prompt), memory.kv_blocks * memory.block_size
    allowance = _allowance(request, rule, max(1, min(room, capacity - len(prompt))))
    limit = allowance.max_output
    if limit > room:
        refuse(
            field if room < 1 else "max_tokens",
            f"{len(prompt)} prompt tokens and max_tokens {limit} are too many: this model's maximum context length is "
            f"{spec.max_context} tokens; send fewer",
            "context_length_exceeded",
        )
    if not memory.can_ever_fit(Request(-1, len(prompt), limit, promised_output=allowance.promised_output)):
        of_prompts = memory.prompt_blocks * memory.block_size
        refuse(
            field if len(prompt) > of_prompts else "max_tokens",
            f"{len(prompt)} prompt tokens and max_tokens {limit} are more than the {capacity} tokens "
            f"{f'({of_prompts} in the encode lane) ' if of_prompts < capacity else ''}that this server's K/V memory "
            "holds for one request; send fewer",
            "context_length_exceeded",
        )
    for name, tokens in ((field, prompt), ("stop_token_ids", request.stop_token_ids or [0])):
        if not 0 <= min(tokens) <= max(tokens) < spec.vocab_size:
            outside = next(token for token in tokens if not 0 <= token < spec.vocab_size)
            refuse(name, f"token id {outside} is outside the vocabulary; send ids from 0 to {spec.vocab_size - 1}")
    if request.output_length is not None and request.output_length > limit:
        says = f"{request.output_length} is more than max_tokens, {limit}; lower it, or raise max_tokens"
        refuse("output_length", says)
    return allowance


def _allowance(request: GenerationRequest, rule: OutputRule, room: int) -> Allowance:
    if (named := request.named_output) is not None:
        if rule.most is not None and named > rule.most:
            refuse("max_tokens", f"{named} is more than this server's limit of {rule.most}; lower it")
        if named > room and request.may_fill_context:
            outgrows = rule.may_outgrow and rule.promised is not None and rule.promised < room
            return Allowance(room, rule.promised if outgrows else None)
        return Allowance(named)
    if rule.default is None and request.DEFAULT_OUTPUT is not None:
        return Allowance(min(request.DEFAULT_OUTPUT, rule.most or room))
    limit = min(rule.default or room, rule.most or room, room)
    if rule.promised is None or rule.promised >= limit:
        return Allowance(limit)
    return Allowance(limit, rule.promised) if rule.may_outgrow else Allowance(rule.promised)
