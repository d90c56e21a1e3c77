"""From a body to an answer: what every request for tokens goes through."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from xgpt.schema import ModelSpec
from xrunner.server.answer import Answer, Prompt
from xrunner.server.engine_thread import EngineThread
from xrunner.server.info import RequestInfo
from xrunner.server.limits import Limits
from xrunner.server.protocol import (
    ApiError,
    GenerationRequest,
    check_tokens,
    parse_chat,
    parse_completion,
    refuse,
)
from xrunner.server.quota import Quotas
from xrunner.server.text import TextCodec
from xrunner.server.writers import ChatWriter, CompletionWriter

MAX_OUTPUTS = 1024
"""Prompts times choices of one request, at most."""


class Service:
    """Answers completions and chats of one model."""

    def __init__(
        self,
        engine_thread: EngineThread,
        model_name: str,
        spec: ModelSpec,
        codec: TextCodec | None,
        eos_token_ids: frozenset[int],
        limits: Limits,
    ) -> None:
        self._engine_thread = engine_thread
        self._model_name = model_name
        self._spec = spec
        self._codec = codec
        self._eos_token_ids = eos_token_ids
        self._limits = limits
        self._quotas = Quotas()

    async def complete(self, http: Request) -> Response:
        request = parse_completion(await self._body(http))
        self._check(request)
        limit = min(MAX_OUTPUTS, self._limits.max_waiting)
        prompts = request.prompts(max(limit, self._spec.max_context))
        if len(prompts) * request.num_choices > limit:
            refuse("prompt", f"{len(prompts)} prompts, {request.num_choices} choices each: {limit} are accepted")
        tokens = [await self._encode(prompt, "prompt") if isinstance(prompt, str) else prompt for prompt in prompts]
        return self._answer(http, request, tokens, CompletionWriter)

    async def chat(self, http: Request) -> Response:
        request = parse_chat(await self._body(http))
        self._check(request)
        if self._codec is None or self._codec.chat_template is None:
            raise ApiError(
                400, f"{self._model_name} has no chat template; use /v1/completions", code="no_chat_template"
            )
        render = self._codec.chat_template.render
        try:
            text = await asyncio.to_thread(
                render,
                [message.for_template() for message in request.messages],
                add_generation_prompt=request.add_generation_prompt is not False,
                variables=request.chat_template_kwargs,
            )
        except ValueError as error:
            refuse("messages", f"the chat template refuses them: {error}")
        tokens = [await self._encode(text, "messages", add_special_tokens=False)]
        return self._answer(http, request, tokens, ChatWriter)

    async def _body(self, http: Request) -> bytes:
        """Raises ApiError (429, 413, 408)."""
        info: RequestInfo = http.scope["xgpt"]
        info.quota = self._quotas.begin(info.key)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                async for part in http.stream():
                    parts.append(part)
                    size += len(part)
                    if size > self._limits.max_body_bytes:
                        raise ApiError(413, f"the body is longer than {self._limits.max_body_bytes} bytes")
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self._limits.body_timeout_s} s") from None
        info.read_s = time.perf_counter()
        return b"".join(parts)

    def _check(self, request: GenerationRequest) -> None:
        if request.model != self._model_name:
            raise ApiError(
                404,
                f"model: {request.model!r} is not served here; ask for {self._model_name!r}",
                param="model",
                code="model_not_found",
            )
        if request.stops and self._codec is None:
            refuse("stop", "this model has no tokenizer; send stop_token_ids")

    async def _encode(self, text: str, field: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._codec is None:
            refuse(field, "this model has no tokenizer; send token ids")
        longest = self._spec.max_context * self._codec.longest_token
        if len(text) > longest:
            # Not worth the time and memory of taking it apart.
            refuse(
                field,
                f"{len(text)} characters are more than any {self._spec.max_context} tokens, the model's context, hold",
                "context_length_exceeded",
            )
        tokens = await asyncio.to_thread(self._codec.encode, text, add_special_tokens=add_special_tokens)
        return tokens or refuse(field, "it has no tokens")

    def _answer(
        self,
        http: Request,
        request: GenerationRequest,
        prompts: list[list[int]],
        writer: type[CompletionWriter | ChatWriter],
    ) -> Answer:
        capacity = self._engine_thread.capacity
        watch = self._engine_thread.watch
        rule = self._limits.output_rule(None if watch is None else watch.plan)
        info: RequestInfo = http.scope["xgpt"]
        return Answer(
            self._engine_thread,
            request,
            [Prompt(tuple(tokens), check_tokens(tokens, request, self._spec, capacity, rule)) for tokens in prompts],
            writer(
                request.model,
                int(time.time()),
                include_usage=request.include_usage,
                continuous=request.include_continuous_usage,
            ),
            self._codec,
            self._eos_token_ids,
            self._limits,
            info,
        )
