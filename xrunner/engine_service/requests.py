"""Turn a `GenerateRequest` into a request of the HTTP endpoint, so that the same checks apply."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from xrunner.engine_service import METADATA
from xrunner.grammar import choice_grammar, json_grammar, regex_grammar
from xrunner.server.api.errors import refuse
from xrunner.server.api.parsing import refusal_of
from xrunner.server.api.protocol import MAX_INT, MAX_LOGPROBS, GenerationRequest

if TYPE_CHECKING:
    from smg_grpc_proto.generated.vllm_engine_pb2 import GenerateRequest
    from smg_grpc_proto.generated.vllm_engine_pb2 import SamplingParams as ProtoSampling

NOT_OURS = frozenset(
    {
        *("stop", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
        *("grammar_from_first_token", "json_schema", "json_object", "regex", "structural_tag", "choice"),
    }
)
"""Fields that are not passed on: those for the gateway, one whose value this engine always assumes, and constraints."""


class TokensRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """A gateway's request. Its prompt is token ids, and its constraint has become a grammar."""

    PROMPT_FIELD = "input_ids"
    SCORES_FIELD = "prompt_logprobs"

    input_ids: list[int]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    grammar: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.prompt_logprobs is not None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs


def read(request: GenerateRequest, metadata: Mapping[str, str], model: str) -> TokensRequest:
    """Parse a gateway's request, with all checks that need no model.

    Args:
        metadata: metadata of the call. See `METADATA`.
        model: the model's name. `request` does not have it.

    Raises:
        ApiError: 400, a field is not accepted. The error names the field and the reason.
    """
    if request.WhichOneof("input") != "tokenized":
        refuse("input", "send token ids; this engine has no tokenizer")
    given = {field.name: value for field, value in request.ListFields()}
    for name in ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json", "extra_mm_inputs"):
        if name in given:
            refuse(name, "this engine accepts only token ids; leave the field out")
    if given.get("data_parallel_rank"):
        refuse("data_parallel_rank", "the engine chooses the replica itself; leave this field out")
    sampling = request.sampling_params
    fields: dict[str, Any] = {
        field.name: value for field, value in sampling.ListFields() if field.name not in NOT_OURS
    }  # numbers that are unset have the neutral value, as in vLLM's servicer
    if constraint := sampling.WhichOneof("constraint"):
        fields["grammar"] = _grammar(sampling, constraint)
    if fields.get("max_tokens") == 0:
        refuse("max_tokens", "give at least 1; to score only the prompt, give prompt_logprobs and 1")
    if fields.get("top_k", 0) >= MAX_INT:
        del fields["top_k"]
    fields["stop_token_ids"] = list(sampling.stop_token_ids)
    fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    keys = {"deadline_s": METADATA.deadline_s, "output_length": METADATA.output_length}
    fields |= {name: metadata[key] for name, key in keys.items() if key in metadata}
    fields |= {"model": model, "stream": request.stream, "input_ids": list(request.tokenized.input_ids)}
    try:
        read = msgspec.convert(fields, TokensRequest, strict=False)  # numbers in metadata are text
    except msgspec.ValidationError as error:
        raise refusal_of(error, TokensRequest) from None
    read.check()
    return read


def _grammar(given: ProtoSampling, constraint: str) -> str | None:
    """Return the grammar of the output. None means free text."""
    match constraint:
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
    refuse(constraint, "this engine cannot restrict outputs in this way; leave the field out")


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        refuse("json_schema", "it is not JSON")
    if not isinstance(schema, dict):
        refuse("json_schema", "it must be an object")
    return schema
