"""Turn the texts and chats of requests into token ids, with a fair order of accounts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from xgpt.core.errors import cut
from xrunner.server.api.chat_request import ChatMessage
from xrunner.server.api.errors import ApiError, refuse
from xrunner.server.api.protocol import Prompt
from xrunner.server.api.text import ServedModel
from xrunner.server.api.tokenising import Tokenising, TooLong
from xrunner.server.api.tools import Tool, told
from xrunner.server.request_info import RequestInfo

MAX_VARIABLES_BYTES = 256 << 10
"""Largest size of chat_template_kwargs, as JSON."""


class Prompts:
    """Makes prompts for a model. The key in `info` decides when it is a request's turn."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._spec = model.spec
        self._codec = model.codec
        self.tokenising = None if model.codec is None else Tokenising(model.codec, model.spec.max_context)

    async def encode(self, info: RequestInfo, text: str, field: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text. Raise ApiError (400) if there are no tokens, or more than fit in the context."""
        self.check_length(len(text), field)
        assert self.tokenising is not None
        try:
            tokens = await self.tokenising.encode(info.key.name, text, add_special_tokens=add_special_tokens)
        except TooLong as error:
            if info.quota is not None:
                info.quota.settle(error.at_least)
            most = f"this model's maximum context length is {self._spec.max_context} tokens"
            reason = f"at least {error.at_least} tokens are too many: {most}"
            refuse(field, reason, "context_length_exceeded")
        except ValueError as error:
            refuse(field, f"this model's tokenizer cannot encode it: {error}")
        return tokens or refuse(field, "the prompt is empty; send a text with at least one token")

    async def text(self, info: RequestInfo, prompt: Prompt) -> str:
        """Return the text of a prompt. Raise ApiError (400) if it is token ids and the model has no tokenizer."""
        if isinstance(prompt, str):
            return prompt
        if self._codec is None or self.tokenising is None:
            refuse("echo", "this model has no tokenizer; leave this field out")
        decode = partial(self._codec.tokenizer.decode, prompt, skip_special_tokens=False)
        return await self.tokenising.by_turns(info.key.name, len(prompt), decode)

    async def pieces(self, info: RequestInfo, tokens: list[int]) -> list[str | None]:
        """Return each token's string in the vocabulary (as `id_to_token`), or None for an unknown id."""
        assert self._codec is not None and self.tokenising is not None
        piece = self._codec.tokenizer.id_to_token
        return await self.tokenising.by_turns(info.key.name, len(tokens), lambda: [*map(piece, tokens)])

    async def render(
        self,
        info: RequestInfo,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        given: dict[str, Any] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
    ) -> tuple[str, list[int]]:
        """Return a chat rendered by the checkpoint's template, and its tokens. Raise ApiError (400)."""
        if self._codec is None or self._codec.chat_template is None or self.tokenising is None:
            says = f"{self._model.name} has no chat template; use /v1/completions"
            raise ApiError(400, says, code="no_chat_template")
        if len(messages) > self._spec.max_context:
            refuse(
                "messages",
                f"{len(messages)} messages are more than the model's context of {self._spec.max_context} tokens; send "
                "fewer",
            )
        characters = sum(len(text) for message in messages for text in message.texts)
        self.check_length(characters, "messages")
        variables = (given or {}) | ({"tools": told(tools)} if tools else {})
        if variables and len(msgspec.json.encode(variables)) > MAX_VARIABLES_BYTES:
            refuse("chat_template_kwargs", f"together with tools it exceeds {MAX_VARIABLES_BYTES} bytes; send less")
        template, short_ids = self._codec.chat_template, self._codec.form.calls.short_ids

        def render() -> str:
            return template.render(
                [message.for_template(short_ids=short_ids) for message in messages],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )

        try:
            text = await self.tokenising.by_turns(info.key.name, characters, render)
        except ValueError as error:
            refuse("messages", f"the chat template refuses them: {cut(str(error))}")
        return text, await self.encode(info, text, "messages", add_special_tokens=add_special_tokens)

    def check_length(self, characters: int, field: str) -> None:
        if self._codec is None:
            refuse(field, "this model has no tokenizer; send token ids")
        context = self._spec.max_context
        if characters > context * self._codec.longest_token:
            reason = (
                f"{characters} characters are too many: this model's maximum context length is {context} tokens; send "
                "fewer"
            )
            refuse(field, reason, "context_length_exceeded")
