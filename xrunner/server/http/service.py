"""Handle a request for tokens, from its body to its answer."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from sys import getsizeof
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from xgpt.core.errors import MachineError, cut
from xrunner.grammar import MAX_BYTES, json_grammar
from xrunner.server.access.quota import Quotas
from xrunner.server.api.chat_request import ChatRequest, TokenizeRequest
from xrunner.server.api.errors import ApiError, quoted, refuse
from xrunner.server.api.parsing import (
    parse_chat,
    parse_completion,
    parse_count,
    parse_detokenize,
    parse_messages,
    parse_responses,
    parse_tokenize,
)
from xrunner.server.api.protocol import TOKEN_BYTES, CompletionRequest, DetokenizeRequest, GenerationRequest
from xrunner.server.api.text import ServedModel
from xrunner.server.api.translated import Translated
from xrunner.server.api.writers import AnswerWriter, ChatWriter, CompletionWriter
from xrunner.server.engine_client import EngineClient
from xrunner.server.http.answer import Answer
from xrunner.server.http.bodies import Bodies, RequestMemory
from xrunner.server.http.outputs import Outputs
from xrunner.server.http.prompting import Prompts
from xrunner.server.request_info import RequestInfo
from xrunner.server.submission import CheckedPrompt, Limits, check_prompts, check_support

R = TypeVar("R", CompletionRequest, ChatRequest, Translated)
P = TypeVar("P", TokenizeRequest, DetokenizeRequest, Translated)

MAX_OUTPUTS = 1024
"""Largest number of outputs of one request: its prompts times its choices."""
MAX_VALUES = 1 << 20
"""Largest number of tokens and log probabilities in one answer, which then has about 60 MB of JSON."""
CHARACTERS_A_TOKEN = 4
"""Number of characters of an echoed prompt that count as one token."""
TRIED_BYTES, PART_BYTES = MAX_BYTES, 1 << 10
"""If a JSON schema is refused, parts of it are compiled to find the wrong part. `TRIED_BYTES` is the largest total size
of these parts. Each part counts as at least `PART_BYTES`. So the search takes no longer than compiling the refused
grammar did."""
MAX_OPTIONAL = 450
"""Largest number of optional properties of an object. Each may come next, which takes llguidance four items of a row of
at most 2,000; with rows of 6,000, a step takes 40 ms."""
MAX_KEY = 60
"""Largest number of characters that messages show of a property's name."""


def _first_line(reason: str) -> str:
    """A reason about a regular expression has several lines: what failed, the expression, a line of marks, and "error:
    why"."""
    said, *more = re.sub(r"^at \d+\(\d+\): ", "", reason.strip()).split("\n")
    why = next((line for line in more if line.startswith("error: ")), None)
    if said.endswith("regex parse error:") and why is not None:
        said = f"{said} {cut(more[0].strip(), MAX_KEY)}: {why.removeprefix('error: ')}"
    return said


def _num_optional(schema: Any) -> int:
    """Return the largest number of optional properties of one object in a JSON schema, alternatives added up."""
    if isinstance(schema, list):
        return max(map(_num_optional, schema), default=0)
    if not isinstance(schema, dict):
        return 0
    properties, required = schema.get("properties"), schema.get("required")
    own = len(properties.keys() - set(map(str, required or ()))) if isinstance(properties, dict) else 0
    for name in ("anyOf", "oneOf", "allOf"):
        own += sum(map(_num_optional, schema[name])) if isinstance(schema.get(name), list) else 0
    return max([own, *map(_num_optional, schema.values())])


def _parts(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in schema.items():
        if name in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, dict):
            yield from (
                (f"{path}.{name}.{cut(key, MAX_KEY)}", each) for key, each in value.items() if type(each) is dict
            )
        elif name in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            yield from ((f"{path}.{name}[{i}]", each) for i, each in enumerate(value) if isinstance(each, dict))
        elif name in ("items", "additionalProperties") and isinstance(value, dict):
            yield f"{path}.{name}", value


class Service:
    def __init__(self, engine: EngineClient, model: ServedModel, limits: Limits) -> None:
        self._engine = engine
        self._model = model
        self._spec = model.spec
        self._codec = model.codec
        self._limits = limits
        self._quotas = Quotas()
        self._bodies = Bodies(limits)
        self._prompts = Prompts(model)

    @property
    def posts(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        return {
            "/v1/completions": partial(self._generate, parse_completion, self._complete),
            "/v1/chat/completions": partial(self._generate, parse_chat, self._chat),
            "/v1/responses": partial(self._generate, parse_responses, self._translated),
            "/v1/messages": partial(self._generate, parse_messages, self._translated),
            "/v1/messages/count_tokens": self._count,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    async def _generate(
        self,
        parse: Callable[[bytearray], R],
        begin: Callable[[Request, R, RequestMemory], Awaitable[Answer]],
        http: Request,
    ) -> Response:
        self._begin(http)
        memory = self._bodies.memory(http)
        try:
            # The body itself is not kept while the parsed request waits to be tokenised.
            request = parse(await self._bodies.read(http, memory))
            memory.set(request.num_text_bytes)
            return await begin(http, request, memory)
        except BaseException:
            memory.free()
            raise

    @asynccontextmanager
    async def _read(self, http: Request, parse: Callable[[bytearray], P]) -> AsyncIterator[tuple[RequestInfo, P]]:
        info, memory = self._begin(http), self._bodies.memory(http)
        try:
            request = parse(await self._bodies.read(http, memory))
            memory.set(request.num_text_bytes)
            yield info, request
        finally:
            memory.free()

    def _begin(self, http: Request) -> RequestInfo:
        info: RequestInfo = http.scope["xgpt"]
        info.quota = self._quotas.begin(info.key)
        return info

    async def _complete(self, http: Request, request: CompletionRequest, memory: RequestMemory) -> Answer:
        self._check(request)
        info: RequestInfo = http.scope["xgpt"]
        limit = min(MAX_OUTPUTS, self._limits.max_waiting)
        prompts = request.prompts(max(limit, self._spec.max_context))
        if len(prompts) * request.num_choices > limit:
            refuse(
                "prompt",
                f"{len(prompts)} prompts with {request.num_choices} choices each are too many; at most {limit} choices "
                "are accepted",
            )
        for prompt in prompts:
            if isinstance(prompt, str):
                self._prompts.check_length(len(prompt), "prompt")
        special = request.add_special_tokens is not False
        tokens = [
            await self._prompts.encode(info, prompt, "prompt", add_special_tokens=special)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        checked = check_prompts(request, tokens, self._model, self._engine, self._limits)
        if request.echo:
            shown = prompts if request.truncate_prompt_tokens is None else [list(one.tokens) for one in checked]
            checked = [
                replace(one, echo=await self._prompts.text(info, prompt))
                for one, prompt in zip(checked, shown, strict=True)
            ]
        return self._answer(http, request, checked, CompletionWriter.of(request), memory)

    async def _translated(self, http: Request, request: Translated, memory: RequestMemory) -> Answer:
        try:
            return await self._chat(http, request.chat, memory, request.writer)
        except ApiError as error:
            request.refuse_as_named(error)

    async def _chat(
        self, http: Request, request: ChatRequest, memory: RequestMemory, writer: AnswerWriter | None = None
    ) -> Answer:
        self._check(request)
        info: RequestInfo = http.scope["xgpt"]
        text, tokens = await self._render(info, request)
        if self._codec is not None:
            request.form = self._codec.form.within(self._spec.vocab_size).after(text)
        await self._check_grammar(info, request)
        checked = check_prompts(request, [tokens], self._model, self._engine, self._limits)
        return self._answer(http, request, checked, writer or ChatWriter.of(request), memory)

    async def _render(self, info: RequestInfo, request: ChatRequest) -> tuple[str, list[int]]:
        tools = request.tools if request.chosen_tools != "none" else None
        return await self._prompts.render(
            info,
            request.messages,
            tools or [],
            request.template_variables,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            add_special_tokens=bool(request.add_special_tokens),
        )

    async def _count(self, http: Request) -> Response:
        async with self._read(http, parse_count) as (info, request):
            try:
                self._check(request.chat)
                _, tokens = await self._render(info, request.chat)
            except ApiError as error:
                request.refuse_as_named(error)
        return _json({"input_tokens": len(tokens)})

    async def _tokenize(self, http: Request) -> Response:
        async with self._read(http, parse_tokenize) as (info, request):
            if request.messages is not None:
                _, tokens = await self._prompts.render(
                    info,
                    request.messages,
                    request.tools or [],
                    request.chat_template_kwargs,
                    add_generation_prompt=request.add_generation_prompt is not False,
                    continue_final_message=bool(request.continue_final_message),
                )
            else:
                text = request.prompt or ""
                tokens = await self._prompts.encode(info, text, "prompt", add_special_tokens=request.add_special_tokens)
        answer = {"count": len(tokens), "max_model_len": self._spec.max_context, "tokens": tokens}
        if request.return_token_strs and self._codec is not None:
            answer["token_strs"] = await self._prompts.pieces(info, tokens)
        return _json(answer)

    async def _detokenize(self, http: Request) -> Response:
        async with self._read(http, parse_detokenize) as (info, request):
            tokens = request.tokens
        if self._codec is None:
            refuse("tokens", "this model has no tokenizer, so tokens have no text")
        most, size = self._spec.max_context, self._spec.vocab_size
        if len(tokens) > most:
            refuse("tokens", f"{len(tokens)} token ids are more than the model's context of {most}; send fewer")
        if (wrong := next((token for token in tokens if token >= size), None)) is not None:
            refuse("tokens", f"token {wrong} is outside the vocabulary; send ids below {size}")
        return _json({"prompt": await self._prompts.text(info, tokens)})

    def _check(self, request: GenerationRequest) -> None:
        request.fill(self._model.sampling_defaults)
        if request.model not in self._model.names:
            says = f"model: {quoted(request.model)} is not served here; ask for {self._model.name!r}"
            raise ApiError(404, says, param="model", code="model_not_found")
        if request.stops and self._codec is None:
            refuse("stop", "this model has no tokenizer; send stop_token_ids")
        check_support(request, self._model, self._engine)

    async def _check_grammar(self, info: RequestInfo, request: ChatRequest) -> None:
        """An engine without grammars leaves optional calls free."""
        try:
            grammar = request.grammar
            for held in filter(None, (request.format_field, "tools")):
                for path, schema in request.schemas(held):
                    if (number := _num_optional(schema)) > MAX_OPTIONAL:
                        said = f"{path} has an object with {number} optional properties; at most {MAX_OPTIONAL} can"
                        refuse(held, f"{said} be followed, so list more of them in required")
        except RecursionError:
            field = "tools" if request.chosen_tools != "none" else request.format_field
            refuse(field or "tools", "its JSON schema nests too deeply; send a flatter one")
        if grammar is None or (reason := await self._why_not(info, grammar)) is None:
            return
        is_strict = any(tool.function.strict for tool in request.tools or ())
        if request.chosen_tools == "auto" and (self._model.grammars is None or not is_strict):
            request.grammar = request.form.grammar((), "none", request.answer_rule)
            if request.grammar is None or (reason := await self._why_not(info, request.grammar)) is None:
                return
        said, part = _first_line(reason), "it"
        field = ("tools" if request.chosen_tools != "none" else request.format_field) or "tools"
        for tried in (request.format_field or "tools", "tools"):
            if part == "it" and (part := await self._wrong_part(info, request.schemas(tried), said)) != "it":
                field = tried
        refuse(field, f"{part} is not accepted: {cut(said)}")

    async def _wrong_part(self, info: RequestInfo, schemas: Iterable[tuple[str, dict[str, Any]]], said: str) -> str:
        """Return the path of the smallest part of these schemas that is refused for the same reason, or "it" if there
        is no such part."""
        found, parts, num_left = "it", iter(schemas), TRIED_BYTES
        while self._model.grammars is not None and (entry := next(parts, None)) is not None:
            path, part = entry
            grammar = json_grammar(part)
            num_left -= max(PART_BYTES, len(grammar))
            if num_left < 0:
                break
            if _first_line(await self._why_not(info, grammar) or "") == said:
                found, parts = path, _parts(path, part)
        return found

    async def _why_not(self, info: RequestInfo, grammar: str) -> str | None:
        if self._model.grammars is None or self._prompts.tokenising is None:
            return (
                "this server cannot follow grammars, because the model has no tokenizer or runs in vLLM; leave it out"
            )
        why_not = partial(self._model.grammars.why_not, grammar)
        try:
            return await self._prompts.tokenising.by_turns(info.key.name, len(grammar), why_not)
        except MachineError as error:
            return str(error)

    def _answer(
        self,
        http: Request,
        request: GenerationRequest,
        checked: list[CheckedPrompt],
        writer: AnswerWriter,
        memory: RequestMemory,
    ) -> Answer:
        info: RequestInfo = http.scope["xgpt"]
        is_scored = request.num_prompt_logprobs is not None
        num_tokens = request.num_choices * sum(
            prompt.allowance.max_output + len(prompt.tokens) * is_scored + -(-len(prompt.echo) // CHARACTERS_A_TOKEN)
            for prompt in checked
        )
        times = writer.times_scored if request.stream else 1
        if (num_values := num_tokens * (1 + times * (request.num_logprobs or 0))) > MAX_VALUES:
            refuse(
                "max_tokens",
                f"all choices together could have {num_tokens} tokens ({num_values} values with log probabilities), "
                f"but an answer may have only {MAX_VALUES}; lower max_tokens, n or logprobs, leave echo out, or send "
                "several requests",
            )
        request.forget_text()
        memory.keep(
            request.num_kept_bytes
            + writer.num_kept_bytes
            + sum(TOKEN_BYTES * len(prompt.tokens) + getsizeof(prompt.echo) for prompt in checked)
        )
        outputs = Outputs(self._engine, self._model, self._limits, request, checked, writer, info)
        return Answer(outputs, writer, memory, self._engine.metrics, stream=bool(request.stream))


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
