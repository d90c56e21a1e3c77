"""Turn a `GenerateRequest` into the engine's input, or refuse it with the name of the field."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xgpt.core.numbers import decimal
from xgpt.core.schema import ModelSpec
from xrunner.engine_service import METADATA
from xrunner.generation import SamplingParams, of_choices
from xrunner.grammar import choice_grammar, json_grammar, regex_grammar
from xrunner.server.api.allowance import Allowance, OutputRule
from xrunner.server.api.model import ServedModel
from xrunner.server.api.protocol import MAX_BIASES, MAX_LOGPROBS

if TYPE_CHECKING:
    from smg_grpc_proto.generated.vllm_engine_pb2 import GenerateRequest
    from smg_grpc_proto.generated.vllm_engine_pb2 import SamplingParams as ProtoSampling

MAX_CHOICES = 128
MAX_STOP_TOKENS = 128


class Invalid(ValueError):
    """A field is not supported here, or makes no sense. The call ends with INVALID_ARGUMENT."""


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A request of the gateway, checked.

    Attributes:
        choices: sampling parameters of each output.
        stop_token_ids: tokens that end an output, including those that end every output of the model.
        deadline_s: seconds from now until the deadline. None means that the request has no deadline.
        class_name, account: names of the class and the account; empty if the call states none.
    """

    prompt: tuple[int, ...]
    allowance: Allowance
    choices: tuple[SamplingParams, ...]
    stop_token_ids: frozenset[int]
    stream: bool
    deadline_s: float | None
    output_length: int | None
    class_name: str
    account: str


def read(
    request: GenerateRequest, metadata: Mapping[str, str], model: ServedModel, capacity: int, rule: OutputRule
) -> GenerationCall:
    """Return a request with everything that can be checked without the engine.

    Args:
        metadata: metadata of the call; see `METADATA`.
        capacity: tokens that the K/V memory holds.
        rule: limits on the length of outputs.

    Raises:
        Invalid: a field is not accepted; the error names the field and the reason.
    """
    _check_input(request)
    spec, given = model.spec, request.sampling_params
    prompt = _prompt(request, spec)
    output_length = _count(metadata, METADATA.output_length)
    allowance = _allowance(given, len(prompt), spec, capacity, rule)
    if output_length is not None and output_length > allowance.max_output:
        raise Invalid(f"{METADATA.output_length}: {output_length} is more than max_tokens {allowance.max_output}")
    sampling = _sampling(given, spec)
    seed = given.seed if given.HasField("seed") else secrets.randbits(64)
    num_choices = given.n or 1
    if num_choices > MAX_CHOICES:
        raise Invalid(f"n: {num_choices} is more than {MAX_CHOICES}")
    ends = frozenset(_tokens("stop_token_ids", given.stop_token_ids, spec, MAX_STOP_TOKENS))
    if is_fixed := given.min_tokens > 1 and given.min_tokens == allowance.max_output:
        ends = frozenset()
    elif given.min_tokens > 1 and (ends or not given.ignore_eos):
        raise Invalid("min_tokens: it is supported only if it equals max_tokens, or with ignore_eos; leave it out")
    runs_on = is_fixed or given.ignore_eos or output_length is not None
    return GenerationCall(
        prompt,
        allowance,
        tuple(of_choices(sampling, seed, num_choices)),
        ends if runs_on else ends | model.eos_token_ids,
        request.stream,
        _seconds(metadata, METADATA.deadline_s),
        output_length,
        metadata.get(METADATA.class_name, ""),
        metadata.get(METADATA.account, "")[:64],
    )


def _allowance(given: ProtoSampling, num_tokens: int, spec: ModelSpec, capacity: int, rule: OutputRule) -> Allowance:
    """Return how many tokens an output may have, and for how many of them K/V memory is reserved."""
    room = min(spec.max_context, capacity) - num_tokens
    if not given.HasField("max_tokens"):
        return rule.of_no_maximum(max(1, room))
    named = given.max_tokens
    if not named:
        raise Invalid("max_tokens: give at least 1; to score only the prompt, give prompt_logprobs and 1")
    if named > room:
        raise Invalid(
            f"max_tokens: {num_tokens} prompt tokens and max_tokens {named} together exceed this model's maximum "
            f"context length of {spec.max_context} or the K/V memory of {capacity} tokens"
        )
    if rule.most is not None and named > rule.most:
        raise Invalid(f"max_tokens: {named} is more than the {rule.most} that this server gives; ask for fewer")
    return Allowance(named)


def _check_input(request: GenerateRequest) -> None:
    """Refuse inputs that are not token ids."""
    if request.WhichOneof("input") != "tokenized":
        raise Invalid("input: send token ids; this engine has no tokenizer")
    for field in ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json"):
        if request.HasField(field):
            raise Invalid(f"{field}: this engine accepts only token ids")
    if request.extra_mm_inputs:
        raise Invalid("extra_mm_inputs: this engine accepts only token ids")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank:
        raise Invalid("data_parallel_rank: the engine chooses the replica itself; leave this field out")


def _prompt(request: GenerateRequest, spec: ModelSpec) -> tuple[int, ...]:
    prompt = tuple(request.tokenized.input_ids)
    given = request.sampling_params
    if given.HasField("truncate_prompt_tokens"):
        most = given.truncate_prompt_tokens
        if most < -1 or most == 0:
            raise Invalid(f"truncate_prompt_tokens: {most} is neither positive nor -1")
        prompt = prompt[-(spec.max_context - 1 if most == -1 else most) :]
    if not prompt:
        raise Invalid("input_ids: the prompt is empty")
    if len(prompt) >= spec.max_context:
        raise Invalid(
            f"input_ids: {len(prompt)} prompt tokens leave no room in this model's maximum context length of "
            f"{spec.max_context}"
        )
    if (highest := max(prompt)) >= spec.vocab_size:
        raise Invalid(f"input_ids: token id {highest} is outside the vocabulary of {spec.vocab_size}")
    return prompt


def _sampling(given: ProtoSampling, spec: ModelSpec) -> SamplingParams:
    """Return the sampling parameters. An unset number has its neutral value, as in vLLM's servicer."""
    logprobs = _logprobs(given, "logprobs")
    prompt_logprobs = _logprobs(given, "prompt_logprobs")
    if prompt_logprobs is not None and logprobs is None:
        logprobs = 0
    if len(given.logit_bias) > MAX_BIASES:
        raise Invalid(f"logit_bias: {len(given.logit_bias)} tokens are more than {MAX_BIASES}")
    _tokens("logit_bias", list(given.logit_bias), spec, MAX_BIASES)
    for name in ("top_p", "min_p"):
        _within(name, getattr(given, name), 0, 1)
    for name in ("presence_penalty", "frequency_penalty"):
        _within(name, getattr(given, name), -2, 2)
    _within("repetition_penalty", given.repetition_penalty, 0, 10)
    temperature = given.temperature if given.HasField("temperature") else 1.0
    _within("temperature", temperature, 0, 100)
    top_k = given.top_k
    return SamplingParams(
        temperature=temperature,
        top_k=0 if top_k >= 2**31 - 1 else top_k,
        top_p=given.top_p or 1.0,
        min_p=given.min_p,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty or 1.0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=tuple(given.logit_bias.items()),
        grammar=_grammar(given),
    )


def _grammar(given: ProtoSampling) -> str | None:
    """Return the grammar of the output. None means free text."""
    match given.WhichOneof("constraint"):
        case None:
            return None
        case "json_schema":
            return json_grammar(_schema(given.json_schema))
        case "json_object":
            return json_grammar({"type": "object"}) if given.json_object else None
        case "regex":
            return regex_grammar(given.regex)
        case "grammar":
            return given.grammar
        case "choice":
            return choice_grammar(list(given.choice.choices))
        case other:
            raise Invalid(f"{other}: this engine cannot restrict outputs in this way; leave the field out")


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise Invalid("json_schema: it is not JSON") from None
    if not isinstance(schema, dict):
        raise Invalid("json_schema: it must be an object")
    return schema


def _logprobs(given: ProtoSampling, field: str) -> int | None:
    if not given.HasField(field):
        return None
    count: int = getattr(given, field)
    if not 0 <= count <= MAX_LOGPROBS:
        raise Invalid(f"{field}: {count} is not between 0 and {MAX_LOGPROBS}")
    return count


def _tokens(field: str, tokens: Any, spec: ModelSpec, most: int) -> tuple[int, ...]:
    found = tuple(tokens)
    if len(found) > most:
        raise Invalid(f"{field}: {len(found)} tokens are more than {most}")
    if outside := [token for token in found if not 0 <= token < spec.vocab_size]:
        raise Invalid(f"{field}: token id {outside[0]} is outside the vocabulary of {spec.vocab_size}")
    return found


def _within(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise Invalid(f"{field}: {value:g} is not between {low:g} and {high:g}")


def _seconds(metadata: Mapping[str, str], key: str) -> float | None:
    if (text := metadata.get(key)) is None:
        return None
    try:
        value = decimal(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 86400:
        raise Invalid(f"{key}: it must be seconds, above 0 and at most 86400")
    return value


def _count(metadata: Mapping[str, str], key: str) -> int | None:
    if (text := metadata.get(key)) is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise Invalid(f"{key}: it must be a positive number")
    return int(text)
