"""From a body to an answer: what every request for tokens goes through."""

from __future__ import annotations

import time
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from xrunner.server.access.quota import Quotas
from xrunner.server.api.errors import ApiError
from xrunner.server.api.model import ServedModel
from xrunner.server.api.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    check_tokens,
    parse_chat,
    parse_completion,
    refuse,
)
from xrunner.server.api.tokenising import Tokenising, TooLong
from xrunner.server.api.writers import ChatWriter, CompletionWriter
from xrunner.server.engine_thread import EngineThread
from xrunner.server.http.answer import Answer, CheckedPrompt
from xrunner.server.http.bodies import Bodies
from xrunner.server.http.limits import Limits
from xrunner.server.request_info import RequestInfo

MAX_OUTPUTS = 1024
"""Prompts times choices of one request, at most."""
MAX_VALUES = 1 << 20
"""Tokens, and log probabilities of further ones, of one answer: as JSON about 60 MB."""
MAX_VARIABLES_BYTES = 64 << 10
"""Of chat_template_kwargs, as JSON."""


class Service:
    """Answers completions and chats of one model."""

    def __init__(self, engine_thread: EngineThread, model: ServedModel, limits: Limits) -> None:
        self._engine_thread = engine_thread
        self._model = model
        self._spec = model.spec
        self._codec = model.codec
        self._limits = limits
        self._quotas = Quotas()
        self._bodies = Bodies(limits)
        self._tokenising = None if model.codec is None else Tokenising(model.codec, model.spec.max_context)

    async def complete(self, http: Request) -> Response:
        self._begin(http)
        async with self._bodies.read(http) as body:
            return await self._complete(http, parse_completion(body))

    async def chat(self, http: Request) -> Response:
        self._begin(http)
        async with self._bodies.read(http) as body:
            return await self._chat(http, parse_chat(body))

    def _begin(self, http: Request) -> None:
        """Raises ApiError (429)."""
        info: RequestInfo = http.scope["xgpt"]
        info.quota = self._quotas.begin(info.key)

    async def _complete(self, http: Request, request: CompletionRequest) -> Response:
        self._check(request)
        limit = min(MAX_OUTPUTS, self._limits.max_waiting)
        prompts = request.prompts(max(limit, self._spec.max_context))
        if len(prompts) * request.num_choices > limit:
            refuse("prompt", f"{len(prompts)} prompts, {request.num_choices} choices each: {limit} are accepted")
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_length(len(prompt), "prompt")
        tokens = [
            await self._encode(http, prompt, "prompt") if isinstance(prompt, str) else prompt for prompt in prompts
        ]
        return self._answer(http, request, tokens, CompletionWriter)

    async def _chat(self, http: Request, request: ChatRequest) -> Response:
        self._check(request)
        if self._codec is None or self._codec.chat_template is None or self._tokenising is None:
            raise ApiError(
                400, f"{self._model.name} has no chat template; use /v1/completions", code="no_chat_template"
            )
        if len(request.messages) > self._spec.max_context:
            refuse("messages", f"{len(request.messages)} are more than the model's context of {self._spec.max_context}")
        messages = [message.for_template() for message in request.messages]
        characters = sum(sum(map(len, message.values())) for message in messages)
        self._check_length(characters, "messages")
        variables = request.chat_template_kwargs
        if variables and len(msgspec.json.encode(variables)) > MAX_VARIABLES_BYTES:
            refuse("chat_template_kwargs", f"they are longer than {MAX_VARIABLES_BYTES} bytes")
        render = partial(
            self._codec.chat_template.render,
            messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            variables=variables,
        )
        info: RequestInfo = http.scope["xgpt"]
        try:
            text = await self._tokenising.render(info.key.name, characters, render)
        except ValueError as error:
            refuse("messages", f"the chat template refuses them: {error}")
        tokens = [await self._encode(http, text, "messages", add_special_tokens=False)]
        return self._answer(http, request, tokens, ChatWriter)

    def _check(self, request: GenerationRequest) -> None:
        request.fill(self._model.sampling_defaults)
        if request.model != self._model.name:
            raise ApiError(
                404,
                f"model: {request.model!r} is not served here; ask for {self._model.name!r}",
                param="model",
                code="model_not_found",
            )
        if request.stops and self._codec is None:
            refuse("stop", "this model has no tokenizer; send stop_token_ids")
        if request.seed is not None and not self._engine_thread.takes_seeds:
            refuse("seed", "vLLM keeps to no seed on CPUs; leave it out")

    def _check_length(self, characters: int, field: str) -> None:
        """Refuse a text that is not worth the time and memory of taking it apart."""
        if self._codec is None:
            refuse(field, "this model has no tokenizer; send token ids")
        context = self._spec.max_context
        if characters > context * self._codec.longest_token:
            reason = f"{characters} characters are more than any {context} tokens, the model's context, hold"
            refuse(field, reason, "context_length_exceeded")

    async def _encode(self, http: Request, text: str, field: str, *, add_special_tokens: bool = True) -> list[int]:
        self._check_length(len(text), field)
        assert self._tokenising is not None
        info: RequestInfo = http.scope["xgpt"]
        try:
            tokens = await self._tokenising.encode(info.key.name, text, add_special_tokens=add_special_tokens)
        except TooLong as error:
            if info.quota is not None:
                info.quota.settle(error.at_least)
            reason = f"{error.at_least} or more tokens are more than the model's context of {self._spec.max_context}"
            refuse(field, reason, "context_length_exceeded")
        return tokens or refuse(field, "it has no tokens")

    def _answer(
        self,
        http: Request,
        request: GenerationRequest,
        prompts: list[list[int]],
        writer: type[CompletionWriter | ChatWriter],
    ) -> Answer:
        engine_thread, capacity = self._engine_thread, self._engine_thread.capacity
        watch = self._engine_thread.watch
        rule = self._limits.output_rule(None if watch is None else watch.plan)
        info: RequestInfo = http.scope["xgpt"]
        checked = [
            CheckedPrompt(tuple(tokens), check_tokens(tokens, request, self._spec, capacity, rule))
            for tokens in prompts
        ]
        for prompt in checked:
            engine_thread.check_fits(len(prompt.tokens), prompt.allowance)
        num_tokens = request.num_choices * sum(prompt.allowance.max_output for prompt in checked)
        if (num_values := num_tokens * (1 + (request.num_logprobs or 0))) > MAX_VALUES:
            refuse(
                "max_tokens",
                f"{num_tokens} output tokens of all choices, {num_values} values with log probabilities, are more than "
                f"one answer's {MAX_VALUES}; lower max_tokens, n or logprobs, or send several requests",
            )
        return Answer(
            engine_thread,
            self._model,
            self._limits,
            request,
            checked,
            writer(
                request.model,
                int(time.time()),
                include_usage=request.include_usage,
                continuous=request.include_continuous_usage,
            ),
            info,
        )
