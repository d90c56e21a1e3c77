"""The outputs of one request: submit them to the engine, and decode their tokens into text."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Iterator, Sequence

from xgpt.core.schema.constraint import Bounds
from xrunner.generation import Logprobs, Token, of_choices
from xrunner.server.access.quota import Quota
from xrunner.server.api.choices import Choice, Delta
from xrunner.server.api.errors import ApiError
from xrunner.server.api.parsing import parse_deadline
from xrunner.server.api.protocol import GenerationRequest
from xrunner.server.api.text import CONTEXT, ServedModel
from xrunner.server.api.writers import AnswerWriter, PromptTokens
from xrunner.server.engine_client import EngineClient, Inbox, Promise, Submission, TokenStream
from xrunner.server.request_info import RequestInfo
from xrunner.server.submission import CheckedPrompt, Limits

TOKENS_AT_ONCE = 64
"""Number of tokens to decode into text before other requests may continue."""


class Outputs:
    """The outputs of a request: n for each of its prompts. Their tokens are decoded into text for the client.

    Attributes:
        end_s: time by which the outputs must be complete, on the clock of `time.perf_counter`. Infinite means never.
        streams: the submitted outputs by id, in the order of the answer."""

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
        self._engine = engine
        self._request = request
        self._prompts = prompts
        self._limits = limits
        self._info = info
        self._quota = info.quota or Quota()
        self._seconds = parse_deadline(info.deadline_header, request.deadline_s)
        self._num_prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self.inbox: Inbox = asyncio.Queue()
        self.end_s = info.received_s + min(self._seconds or math.inf, limits.request_timeout_s or math.inf)
        ends = frozenset(request.stop_token_ids or ())
        runs_on = request.ignore_eos or request.output_length is not None
        self.stop_token_ids = ends if runs_on else ends | model.eos_token_ids
        self.streams: dict[int, TokenStream] = {}
        self._writer = writer
        self._codec = model.codec
        self._choices: dict[int, Choice] = {}
        self._unwritten: dict[int, TokenStream] = {}
        """Streams with tokens that were taken from the inbox but not written yet."""
        self._prompt_tokens: PromptTokens | None = None
        """The prompt tokens that have been counted. None means that they are not counted yet, or that a choice has
        begun since."""
        self.num_running = 0

    @property
    def choices(self) -> list[Choice]:
        return list(self._choices.values())

    def submit(self) -> None:
        """Submit either all outputs to the engine or none.

        Raises:
            ApiError: 429, too many are waiting, or the key's limit of tokens per minute is reached; 500, the engine has
                failed; 503, the server is shutting down; 504, the deadline has passed."""
        self._engine.check_open()
        if self.end_s <= time.perf_counter():
            raise self.late("the request had not started")
        num_choices = self._request.num_choices
        promise = self._check_room(len(self._prompts) * num_choices)
        outputs = sum(prompt.allowance.promised_output or prompt.allowance.max_output for prompt in self._prompts)
        self._quota.reserve(self._num_prompt_tokens + num_choices * outputs)
        seed = secrets.randbits(64) if self._request.seed is None else self._request.seed
        key = self._info.key
        submission = Submission(
            inbox=self.inbox,
            account=key.account,
            bounds=Bounds(key.whole_s or key.answer_within_s, key.ttft_s, key.tpot_s),
            stop_token_ids=self.stop_token_ids,
            output_length=self._request.output_length,
            end_s=self.end_s,
            has_deadline=self._seconds is not None,
            read_s=self._info.read_s,
            promise=promise,
            # Log probabilities take far less memory as JSON text.
            hold=not (self._request.stream or self._request.stops or self._request.num_logprobs is not None),
        )
        sampling = self._request.sampling(seed)  # computed only once, since it writes the grammar
        choices = list(of_choices(sampling, seed, num_choices))
        for prompt in self._prompts:
            for sampling in choices:
                stream = self._engine.submit(prompt.tokens, prompt.allowance, sampling, submission)
                self.streams[stream.id] = stream
                self._choices[stream.id] = Choice(
                    len(self._choices),
                    self._request,
                    self._codec,
                    self.stop_token_ids,
                    self._writer.new_logprobs,
                    prompt.echo,
                    prompt.tokens if sampling.prompt_logprobs is not None else (),
                    prompt.tokens[-CONTEXT:] if self._request.goes_on else (),
                )
        self.num_running = len(self._choices)

    def _check_room(self, num_outputs: int) -> Promise | None:
        engine, limits = self._engine, self._limits
        account, within_s = self._info.key.account, self._info.key.answer_within_s or limits.answer_within_s
        promise = reason = None
        if not engine.backlog.has_room(account, num_outputs, limits.max_waiting):
            reason = f"{len(engine.backlog)} requests are already waiting; at most {limits.max_waiting} may wait"
        elif within_s is not None and (expected_s := engine.answer_s(account, num_outputs)) is not None:
            promise = Promise(expected_s, within_s)
            if (answer_s := engine.backlog.caution * expected_s) > within_s:
                reason = f"the answer would take {answer_s:.2g} s; this server promises {within_s:g} s"
        if reason is not None:
            retry_after_s = engine.retry_after_s()
            says = f"{reason}; try again in {retry_after_s} s"
            raise ApiError(429, says, code="queue_full", retry_after_s=retry_after_s)
        return promise

    def late(self, what: str) -> ApiError:
        """Return the error for an answer that comes too late. `what` names the event that has not happened in time."""
        if self.is_timeout:
            within_s = self._limits.request_timeout_s
            return ApiError(504, f"{what} within this server's limit of {within_s:g} s", code="timeout")
        return ApiError(504, f"{what} by its deadline", code="deadline_exceeded")

    @property
    def is_timeout(self) -> bool:
        """Return whether the time limit is the server's own and not the client's deadline."""
        timeout_s = self._limits.request_timeout_s
        return timeout_s is not None and timeout_s < (self._seconds or math.inf)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until `end_s`. None means no limit."""
        return None if self.end_s == math.inf else max(0.0, self.end_s - time.perf_counter())

    def take_out(self, left: str) -> None:
        for stream in self.streams.values():
            self._engine.cancel(stream, finish_reason=left)

    async def next(self) -> list[Delta]:
        """Wait for tokens, and return what they add to a choice, or [] if the choice has ended. Raises ApiError: no
        more tokens will come."""
        return await self.deltas(await self.inbox.get())

    async def deltas(self, tokens: Sequence[Token] | ApiError) -> list[Delta]:
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
        for start in range(0, len(scores), TOKENS_AT_ONCE):
            choice.echo(scores[start : start + TOKENS_AT_ONCE])
            await asyncio.sleep(0)

    def settle(self, left: str) -> None:
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
        """Each lasts from its start in the first choice to its end in the last choice."""
        now_s = time.perf_counter()
        times = [(s.submitted_s, s.started_s, s.first_token_s, s.last_token_s) for s in self.streams.values()]
        edges = list(zip(*times, strict=True))  # 0 means that the event has not happened
        for name, begins, ends in zip(("waiting", "encoding", "decoding"), edges, edges[1:], strict=False):
            if begun := [begin for begin in begins if begin]:
                yield name, min(begun), max(end or now_s for end in ends)

    def timings(self) -> dict[str, float]:
        """Return the seconds from submission to each event, for the slowest choice. All choices have ended."""
        streams = self.streams.values()
        return {
            "queued_s": max(s.started_s - s.submitted_s for s in streams),
            "ttft_s": max(s.first_token_s - s.submitted_s for s in streams),
            "total_s": max(s.last_token_s - s.submitted_s for s in streams),
        }
