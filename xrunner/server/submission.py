"""Check requests against limits, the model and the engine, and submit them."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from dataclasses import dataclass
from typing import NamedTuple

from xgpt.core.errors import InputError
from xgpt.core.schema import Plan
from xrunner.generation import SamplingParams, of_choices
from xrunner.server.access.quota import Quota
from xrunner.server.api.allowance import Allowance, OutputRule, check_tokens
from xrunner.server.api.errors import ApiError, refuse
from xrunner.server.api.parsing import parse_deadline
from xrunner.server.api.protocol import GenerationRequest
from xrunner.server.api.text import ServedModel
from xrunner.server.engine_client import EngineClient, Inbox, Promise, Submission, TokenStream
from xrunner.server.observe.metrics import RequestBounds
from xrunner.server.request_info import RequestInfo


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits beyond which requests are refused.

    Attributes:
        max_waiting: largest number of outputs that may wait for their first step. Further outputs get 429, unless their
            API key has fewer waiting outputs than its share of this number.
        answer_within_s: promised seconds from a request's submission to the engine to its last token. A request that
            would take longer, according to the plan and the recent pace, gets 429. None means no promise.
        max_body_bytes: longer bodies get 413.
        all_bodies_bytes: largest number of bytes of all bodies together, from their first byte until their prompts are
            token ids. The first 64 KiB of each body do not count. An account may use half of this memory. Further
            bodies get 503.
        all_requests_bytes: the same limit for requests from then until they have ended.
        body_timeout_s: seconds in which a body must arrive. A body that takes longer gets 408.
    """

    max_waiting: int = 4096
    answer_within_s: float | None = None
    request_timeout_s: float | None = 600
    default_max_tokens: int | None = None
    max_max_tokens: int | None = None
    max_body_bytes: int = 16 << 20
    all_bodies_bytes: int = 256 << 20
    all_requests_bytes: int = 1 << 30
    body_timeout_s: float = 60

    def __post_init__(self) -> None:
        most = self.max_max_tokens
        if most is not None and (self.default_max_tokens or 0) > most:
            raise InputError(
                "default_max_tokens",
                self.default_max_tokens,
                f"it is more than `max_max_tokens={most}`: lower it, or raise the other",
            )

    def output_rule(self, plan: Plan | None) -> OutputRule:
        if plan is None:
            return OutputRule(self.default_max_tokens, self.max_max_tokens)
        return OutputRule(self.default_max_tokens, self.max_max_tokens, plan.promised_output, plan.may_outgrow)


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that the model accepts, and the limits on its output's length."""

    tokens: tuple[int, ...]
    allowance: Allowance
    echo: str = ""
    """The prompt's text if the answer begins with it. Otherwise it is empty."""


class Submitted(NamedTuple):
    prompt: CheckedPrompt
    sampling: SamplingParams
    stream: TokenStream


def check_support(request: GenerationRequest, model: ServedModel, engine: EngineClient) -> None:
    """Refuse what the model or the engine does not support. Raises ApiError (400)."""
    if request.seed is not None and not engine.remote.takes_seeds:
        refuse("seed", "vLLM does not support seeds on CPUs; leave seed out")
    for token, _ in request.biases:
        if token >= model.spec.vocab_size:
            refuse("logit_bias", f"token {token} is outside the vocabulary; send ids below {model.spec.vocab_size}")
    if request.num_prompt_logprobs is not None and not engine.remote.scores_prompts:
        refuse("echo", "vLLM, batches in rows and encoders give no log probabilities of prompts; leave this field out")


def check_prompts(
    request: GenerationRequest, prompts: list[list[int]], model: ServedModel, engine: EngineClient, limits: Limits
) -> list[CheckedPrompt]:
    """Check prompts, and return them with the limits on their outputs. Raises ApiError (400)."""
    rule = limits.output_rule(None if engine.watch is None else engine.watch.plan)
    kept = [request.kept_of(tokens, model.spec.max_context) for tokens in prompts]
    checked = [
        CheckedPrompt(tuple(tokens), check_tokens(tokens, request, model.spec, engine.capacity, rule))
        for tokens in kept
    ]
    for prompt in checked:
        engine.check_fits(len(prompt.tokens), prompt.allowance)
    return checked


class EngineOutputs:
    """The outputs of a request: n for each of its prompts. All outputs are submitted to the engine together, or none.

    Attributes:
        end_s: time by which the outputs must be complete, on the clock of `time.perf_counter`. Infinite means never.
        streams: the submitted outputs by id, in the order of the answer.
    """

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        limits: Limits,
        request: GenerationRequest,
        prompts: list[CheckedPrompt],
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

    def submit(self) -> list[Submitted]:
        """Submit either all outputs to the engine or none.

        Raises:
            ApiError: 429, too many are waiting, or the key's limit of tokens per minute is reached; 500, the engine has
                failed; 503, the server is shutting down; 504, the deadline has passed.
        """
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
            bounds=RequestBounds(key.ttft_s, key.tpot_s, key.whole_s or key.answer_within_s),
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
        submitted = []
        for prompt in self._prompts:
            for sampling in choices:
                stream = self._engine.submit(prompt.tokens, prompt.allowance, sampling, submission)
                self.streams[stream.id] = stream
                submitted.append(Submitted(prompt, sampling, stream))
        return submitted

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
            raise ApiError(
                429, f"{reason}; try again in {retry_after_s} s", code="queue_full", retry_after_s=retry_after_s
            )
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
