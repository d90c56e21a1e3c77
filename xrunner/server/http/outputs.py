"""Decode a request's outputs into text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from xrunner.generation import Logprobs, Token
from xrunner.server.api.choices import Choice
from xrunner.server.api.errors import ApiError
from xrunner.server.api.protocol import GenerationRequest
from xrunner.server.api.text import CONTEXT, ServedModel
from xrunner.server.api.writers import AnswerWriter, Delta, PromptTokens
from xrunner.server.engine_client import EngineClient, TokenStream
from xrunner.server.request_info import RequestInfo
from xrunner.server.submission import CheckedPrompt, EngineOutputs, Limits, Submitted

TOKENS_AT_ONCE = 64
"""Number of tokens to decode into text before other requests may continue."""


class Outputs(EngineOutputs):
    """A request's outputs, with tokens that are decoded into text for clients."""

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        limits: Limits,
        request: GenerationRequest,
        prompts: list[CheckedPrompt],
        writer: AnswerWriter,
        info: RequestInfo,
    ) -> None:
        super().__init__(engine, model, limits, request, prompts, info)
        self._writer = writer
        self._codec = model.codec
        self._choices: dict[int, Choice] = {}
        self._unwritten: dict[int, TokenStream] = {}
        """Streams with tokens that were taken from the inbox but not written yet."""
        self._prompt_tokens: PromptTokens | None = None
        """The prompt tokens that have been counted. None means that they are not counted yet, or that a choice has
        begun since.
        """
        self.num_running = 0

    @property
    def choices(self) -> list[Choice]:
        return list(self._choices.values())

    def submit(self) -> list[Submitted]:
        """Submit either all choices to the engine or none. Raises ApiError."""
        submitted = super().submit()
        for prompt, sampling, stream in submitted:
            self._choices[stream.id] = Choice(
                len(self._choices),
                self._request,
                self._codec,
                self.stop_token_ids,
                self._writer,
                prompt.echo,
                prompt.tokens if sampling.prompt_logprobs is not None else (),
                prompt.tokens[-CONTEXT:] if self._request.goes_on else (),
            )
        self.num_running = len(self._choices)
        return submitted

    async def next(self) -> list[Delta]:
        """Return what the next tokens add to a choice, or [] if the choice has ended.

        Raises:
            ApiError: no more tokens will come.
        """
        return await self.deltas(await self.inbox.get())

    async def deltas(self, tokens: Sequence[Token] | ApiError) -> list[Delta]:
        """Return what tokens add to a choice. Raises ApiError."""
        if isinstance(tokens, ApiError):
            raise tokens
        id_ = tokens[0].id
        choice = self._choices[id_]
        if choice.finish:
            return []
        self._unwritten[id_] = self.streams[id_]
        if choice.num_tokens == 0:
            self._prompt_tokens = None
            if tokens[0].logprobs is not None:
                await self._tell_prompt(choice, tokens[0].logprobs.prompt)
        deltas = []
        for start in range(0, len(tokens), TOKENS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            deltas += [choice.push(token) for token in tokens[start : start + TOKENS_AT_ONCE]]
        if choice.finish:
            self.num_running -= 1
            if tokens[-1].finish is None:
                self._engine.cancel(self.streams[id_], finish_reason=choice.finish)
        return deltas

    async def _tell_prompt(self, choice: Choice, scores: Sequence[Logprobs]) -> None:
        """Pass the log probabilities of a prompt's tokens to its choice, a few at a time."""
        for start in range(0, len(scores), TOKENS_AT_ONCE):
            choice.echo(scores[start : start + TOKENS_AT_ONCE])
            await asyncio.sleep(0)

    def settle(self, left: str) -> None:
        """Record the answer's fields for the log line, and count its tokens against the key's limits.

        Args:
            left: the reason why unfinished outputs were removed.
        """
        log = self._info.log
        self._prompt_tokens = None
        log["prompt_tokens"] = self._num_prompt_tokens
        log["cached_tokens"] = self.prompt_tokens().cached
        log["output_tokens"] = self._num_output_tokens
        log["finish_reasons"] = sorted({choice.finish or left for choice in self._choices.values()})
        self._info.phases = tuple(self._phases())
        if self._choices and not self.num_running:
            log |= {name: round(seconds, 6) for name, seconds in self.timings().items()}
        self._quota.settle(self._num_prompt_tokens + self._num_output_tokens if self._choices else 0)

    def prompt_tokens(self) -> PromptTokens:
        """Prompt tokens and cached tokens. Each prompt counts once, with the cached tokens of its first choice."""
        if self._prompt_tokens is None:
            streams = list(self.streams.values())
            cached = sum(stream.cached_tokens for stream in streams[:: self._request.num_choices])
            self._prompt_tokens = PromptTokens(self._num_prompt_tokens, cached)
        return self._prompt_tokens

    @property
    def _num_output_tokens(self) -> int:
        """Output tokens so far."""
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def last_token_s(self) -> float:
        """Time at which the step that sampled the last token ended."""
        return max(stream.last_token_s for stream in self.streams.values())

    def take_unwritten(self) -> float:
        """Return the end time of the step that sampled the oldest token not yet written, and forget it."""
        oldest_s = float("inf")
        for stream in self._unwritten.values():
            if stream.unwritten_s:
                oldest_s = min(oldest_s, stream.unwritten_s)
                stream.unwritten_s = 0.0
        self._unwritten.clear()
        return min(oldest_s, time.perf_counter())

    def _phases(self) -> Iterator[tuple[str, float, float]]:
        """Yield the phases (waiting, encoding, decoding). Each phase lasts from its start in the first choice to its
        end in the last choice.
        """
        now_s = time.perf_counter()
        times = [(s.submitted_s, s.started_s, s.first_token_s, s.last_token_s) for s in self.streams.values()]
        edges = list(zip(*times, strict=True))  # 0 means that the event has not happened
        for name, begins, ends in zip(("waiting", "encoding", "decoding"), edges, edges[1:], strict=False):
            if begun := [begin for begin in begins if begin]:
                yield name, min(begun), max(end or now_s for end in ends)

    def timings(self) -> dict[str, float]:
        """Return the times of the slowest choice, after all choices have ended."""
        streams = self.streams.values()
        return {
            "queued_s": max(s.started_s - s.submitted_s for s in streams),
            "ttft_s": max(s.first_token_s - s.submitted_s for s in streams),
            "total_s": max(s.last_token_s - s.submitted_s for s in streams),
        }
