from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xgpt.core.errors import MachineError, XgptError
from xgpt.core.schema import Plan
from xgpt.core.schema.constraint import Bounds
from xgpt.core.schema.step_log import Account, StepRecord
from xgpt.observation.windows import Seen
from xrunner.channel.remote import RemoteEngine
from xrunner.generation import NO_TOKEN, Generation, SamplingParams, Token
from xrunner.server.api.allowance import Allowance
from xrunner.server.api.errors import ApiError
from xrunner.server.lasting_engine import LastingEngine
from xrunner.server.observe.backlog import Backlog
from xrunner.server.observe.live import Live
from xrunner.server.observe.metrics import Metrics
from xrunner.server.observe.watch import Ended, Watch

MAX_RETRY_AFTER_S = 60
LEAST_MEMORY_S, MEMORY_LATENCIES = 10.0, 8
"""Seconds over which to measure the rate at which waiting requests start: at least `LEAST_MEMORY_S` seconds, and at
least `MEMORY_LATENCIES` times the plan's latency."""

NOT_FINITE = (
    "the model's logits for this request are NaN or infinite: its weights are damaged, or its dtype is too small for "
    "them"
)

logger = logging.getLogger(__name__)
Inbox = asyncio.Queue[Sequence[Token] | ApiError]
"""Receives the tokens of one caller's requests, in the order of the engine's steps, or the reason why no more will
come. Tokens arrive one at a time. If the output is held back, they arrive all together."""


class Promise(NamedTuple):
    """Seconds from a request's submission to its last token: the estimate of `answer_s`, and the promised time."""

    expected_s: float
    promised_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The properties that all outputs of one HTTP request have in common.

    Attributes:
        end_s: time by which the outputs must be complete, on the clock of `time.perf_counter`. Infinite means never.
        has_deadline: whether the client has set `end_s`.
        read_s: time at which the whole body had arrived, on the same clock.
        hold: whether to deliver an output's tokens together at its end. Waking a task for each token would take up to a
            tenth of a decode step from the engine's cores."""

    inbox: Inbox
    account: Account
    bounds: Bounds
    stop_token_ids: frozenset[int]
    output_length: int | None
    end_s: float
    has_deadline: bool
    read_s: float
    promise: Promise | None
    hold: bool


@dataclass(slots=True)
class TokenStream:
    """A request in the engine, with the inbox for its tokens and the times of events.

    Times are on the clock of `time.perf_counter`. A time is 0 until the event happens."""

    id: int
    submission: Submission
    submitted_s: float
    seen: Seen
    tokens: list[Token]
    """Tokens so far, if the caller waits for the whole output."""
    cached_tokens: int = 0
    """Number of prompt tokens whose K/V were already cached when the request began."""
    started_s: float = 0.0
    """Start of the step that first encoded a part of the prompt."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    unwritten_s: float = 0.0
    """End of the step that sampled the oldest token that has not been written to a client."""


class EngineClient:
    """Submits requests to an engine, and delivers their tokens, from `start` to `stop`. `stop` closes the engine.

    All methods run in the event loop's thread. A lost engine is restarted (`lasting_engine`).

    Args:
        watch: observes the requests, and re-plans."""

    def __init__(self, engine: RemoteEngine, watch: Watch) -> None:
        self.metrics = Metrics(engine, watch)
        self.watch = watch
        self.failure: str | None = None
        """Why the engine stopped by itself, in one line."""
        self.fatal: XgptError | None = None
        """The failure that ends the server, because this process cannot recover from it."""
        self.on_fatal: Callable[[], None] = lambda: None
        self.is_draining = False
        """Whether the server is draining: running requests finish, and no new one starts."""
        self.remote = engine
        self._ids = itertools.count()
        self._streams: dict[int, TokenStream] = {}
        self.backlog = Backlog(max(LEAST_MEMORY_S, MEMORY_LATENCIES * watch.plan.estimate.latency_s))
        self.live = Live(engine, self.backlog, watch, self.metrics)
        self._lasting = LastingEngine(
            engine, running=lambda: watch.plan, on_step=self._deliver, on_return=self._return, on_failed=self._fail
        )

    def start(self) -> None:
        self.watch.start(self._lasting.go_over_to, lambda: self.is_draining)
        self.remote.on_refused = self.watch.go_back
        self._lasting.start()

    async def stop(self) -> None:
        await self.watch.stop()
        await self._lasting.stop()

    def drain(self) -> None:
        """Refuse new requests and stop re-planning, while running requests finish."""
        self.is_draining = True

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    def _return(self, plan: Plan) -> None:
        if self.watch.plan is not plan:
            self.watch.go_over_to(plan)

    def check_open(self) -> None:
        """Raise ApiError if no request may begin: 500 if the engine has failed, 503 if the server is shutting down."""
        if self.failure is not None:
            raise ApiError(500, self.failure)
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    def retry_after_s(self) -> int:
        """Seconds after which a refused request should be sent again. By then, half of the waiting requests should have
        started."""
        rate = self.watch.recent.rate_per_s()
        return 1 if not rate else min(MAX_RETRY_AFTER_S, max(1, round(len(self.backlog) / (2 * rate))))

    def answer_s(self, account: Account, num_outputs: int) -> float | None:
        """The result is None if the engine is idle."""
        if not self._streams:
            return None
        now_s, slowness = time.perf_counter(), self.watch.step_ratio or 1.0
        return self.backlog.answer_s(now_s, account, num_outputs, self.watch.plan, slowness, self.remote.pool.running)

    @property
    def is_restarting(self) -> bool:
        return self._lasting.is_restarting

    def submit(
        self, prompt: tuple[int, ...], allowance: Allowance, sampling: SamplingParams, submission: Submission
    ) -> TokenStream:
        generation = Generation(
            next(self._ids),
            prompt,
            allowance.max_output,
            submission.stop_token_ids,
            submission.output_length,
            sampling,
            deadline_ns=None if submission.end_s == math.inf else round(submission.end_s * 1e9),
            promised_output=allowance.promised_output,
            account=submission.account,
            arrival_ns=round(submission.read_s * 1e9),
        )
        seen = self.watch.arrive(len(prompt), allowance.max_output)
        stream = TokenStream(generation.id, submission, time.perf_counter(), seen, [])
        self.metrics.handover_s.observe(stream.submitted_s - submission.read_s)
        self._streams[stream.id] = stream
        self.backlog.join(stream.id, len(prompt), stream.submitted_s, submission.account)
        self.metrics.prompt_tokens.inc(len(prompt))
        self._lasting.submit(generation)
        return stream

    def cancel(self, stream: TokenStream, *, finish_reason: str = "cancelled") -> None:
        if self._streams.pop(stream.id, None) is not None:
            self.backlog.leave(stream.id)
            self._lasting.cancel(stream.id)
            self.metrics.note_account(stream.submission.account, stream.seen)
            if finish_reason == "stop":
                self._end(stream)
            self.metrics.requests.labels(finish_reason).inc()
            if finish_reason in ("stop", "deadline"):
                self._note_deadline(stream, time.perf_counter())

    def _note_deadline(self, stream: TokenStream, end_s: float) -> None:
        if stream.submission.has_deadline:
            self.metrics.note_deadline(met=end_s <= stream.submission.end_s, prompt_tokens=stream.seen.input_length)

    def _give_up(self, stream: TokenStream, token: Token) -> None:
        del self._streams[stream.id]
        self.backlog.leave(stream.id)
        self.metrics.note_account(stream.submission.account, stream.seen)
        self.metrics.requests.labels("failed").inc()
        if token.token == NO_TOKEN and not token.error:
            error = ApiError(500, NOT_FINITE, code="not_finite")
        else:
            why = token.error and f": {token.error}"
            error = ApiError(500, f"the engine could not continue this request{why}", code="engine_error")
        stream.submission.inbox.put_nowait(error)

    def _end(self, stream: TokenStream) -> None:
        first_s, whole_s = stream.first_token_s - stream.submitted_s, stream.last_token_s - stream.submitted_s
        gap_s = (whole_s - first_s) / max(stream.seen.generated - 1, 1)
        submission = stream.submission
        is_kept = self.metrics.note_bounds(submission.account, (whole_s, first_s, gap_s), submission.bounds)
        if submission.promise is not None:
            self.backlog.note_answer(*submission.promise, took_s=whole_s)
        latency_s = time.perf_counter() - stream.started_s
        self.watch.end(stream.seen, Ended(stream.seen.generated, latency_s, first_s, whole_s, is_kept))

    def _note_starts(self, record: StepRecord) -> None:
        """A request starts with the step that prefills its first prompt chunk. The engine reads the clock before the
        inbox, so a request may have been submitted just after the step's start."""
        for id_, first_token, _ in record.encode:
            if (stream := self._streams.get(id_)) and not stream.started_s:
                stream.started_s = max(record.start_ns / 1e9, stream.submitted_s)
                stream.cached_tokens = first_token
                self.metrics.cached_tokens.inc(first_token)

    def _deliver(self, tokens: list[Token], records: list[StepRecord]) -> None:
        metrics, now_s = self.metrics, time.perf_counter()
        start_s = min((record.start_ns / 1e9 for record in records), default=now_s)
        end_s = max((record.end_ns / 1e9 for record in records), default=now_s)
        for record in records:
            self._note_starts(record)
            self.watch.note(record)
            if self.watch.wants_step(record):
                self.watch.judge_step(record, self._seen(record))
        metrics.step_s.observe(end_s - start_s)
        metrics.output_tokens.inc(sum(token.finish != "error" for token in tokens))
        for token in tokens:
            stream = self._streams.get(token.id)
            if stream is None:  # cancelled while the step ran
                continue
            if token.finish == "error":
                self._give_up(stream, token)
                continue
            if not stream.first_token_s:
                stream.first_token_s = end_s
                metrics.ttft_s.observe(end_s - stream.submitted_s)
            else:
                metrics.inter_token_s.observe(end_s - stream.last_token_s)
            stream.seen.generated += 1
            stream.last_token_s = end_s
            stream.unwritten_s = stream.unwritten_s or end_s
            if token.finish is not None:
                del self._streams[token.id]
                metrics.e2e_s.observe(end_s - stream.submitted_s)
                metrics.requests.labels(token.finish).inc()
                metrics.note_account(stream.submission.account, stream.seen)
                self._note_deadline(stream, end_s)
                self._end(stream)
            if not stream.submission.hold:
                stream.submission.inbox.put_nowait((token,))
                continue
            stream.tokens.append(token)
            if token.finish is not None:
                stream.submission.inbox.put_nowait(stream.tokens)
        encoded = (chunk[0] for record in records for chunk in record.encode)
        self.backlog.begin((*encoded, *(token.id for token in tokens)), start_s, end_s)

    def _seen(self, record: StepRecord) -> dict[int, Seen]:
        ids = (*record.decode, *(chunk[0] for chunk in record.encode))
        return {id_: self._streams[id_].seen for id_ in ids if id_ in self._streams}

    def _fail(self, error: XgptError) -> None:
        self.failure = f"the engine has failed: {error}"
        self.fatal = error if isinstance(error, MachineError) else XgptError(self.failure)
        logger.error(self.failure)
        for stream in self._streams.values():
            self.metrics.requests.labels("failed").inc()
            stream.submission.inbox.put_nowait(ApiError(500, self.failure))
        self._streams.clear()
        self.backlog.clear()
        self.on_fatal()
