"""Define the requests that the engine receives, and the tokens that it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from xgpt.core.schema import ANYONE, Account

FinishReason = Literal["stop", "length", "error"]
"""`error` means that the engine could not continue the request. The request's last token then does not count."""

NO_TOKEN = -1
"""Used in place of a token if the logits contain NaN, or the highest logit is infinite."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters by which a request's tokens are chosen. By default, the token with the highest logit is chosen.

    Attributes:
        temperature: divides the logits. 0 chooses the highest logit.
        top_k: keep only this number of most probable tokens. 0 keeps all.
        top_p: of the tokens that `top_k` keeps, keep only the most probable ones that together have this probability.
        min_p: keep only tokens whose probability is at least this share of the highest probability.
        seed: equal seeds give equal tokens if logits are equal. Other requests in the batch may change the last bits of
            logits (see `sampling`).
        presence_penalty: subtracted from the logit of every token in the output.
        frequency_penalty: subtracted from a token's logit once for each occurrence of the token in the output.
        repetition_penalty: divides positive logits, and multiplies negative ones, of every token in the prompt or the
            output. An encoder's prompt does not count.
        logprobs: number of most probable tokens to report in addition to the chosen one. None reports nothing.
        prompt_logprobs: number of most probable tokens to report for each prompt token except the first. Requires
            `logprobs`. None reports nothing.
        logit_bias: pairs of a token and the number that is added to its logit.
        grammar: the grammar of the output (`xrunner.grammar`). None means free text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None

    @property
    def has_penalty(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def is_plain(self) -> bool:
        chooses = self.temperature or self.has_penalty or self.logit_bias or self.grammar is not None
        return self.logprobs is None and not chooses


GREEDY = SamplingParams()

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Difference between the seeds of two outputs of one request. It is so large that the seeds are unlikely to equal those
of other requests.
"""


def of_choices(sampling: SamplingParams, seed: int, num_choices: int) -> Iterator[SamplingParams]:
    for index in range(num_choices):
        yield replace(sampling, seed=(seed + index * SEED_STRIDE) % 2**64)


class Logprobs(NamedTuple):
    """Natural logarithms of the probabilities of the chosen token and of the most probable tokens, as (token, value)
    pairs.

    Attributes:
        prompt: scores of each prompt token except the first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    prompt: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A request in the form in which the server submits it.

    Attributes:
        max_output: largest number of output tokens. The schedule knows nothing else about the output's length.
        output_length: exact number of output tokens, for benchmarks. The output then ends as if by a stop token. The
            schedule does not know this number.
        num_resumed: number of tokens at the end of `prompt` that the request had generated before a preemption.
        deadline_ns: time after which the request's tokens are useless, on the engine's clock. A request that is still
            waiting at that time ends without a token.
        arrival_ns: time at which the server received the request, on the engine's clock. None means the time at which
            the engine receives it.
    """

    id: int
    prompt: tuple[int, ...]
    max_output: int
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    output_length: int | None = None
    sampling: SamplingParams = GREEDY
    num_resumed: int = 0
    deadline_ns: int | None = None
    promised_output: int | None = None
    account: Account = ANYONE
    arrival_ns: int | None = None

    @property
    def is_scored(self) -> bool:
        """Return whether log probabilities of the prompt must be computed. If the request was preempted after
        generating tokens, they have been reported already.
        """
        return self.sampling.prompt_logprobs is not None and not self.num_resumed

    def resumed(self, generated: Sequence[int]) -> Generation:
        if not generated:
            return self
        count = len(generated)
        return replace(
            self,
            prompt=(*self.prompt, *generated),
            max_output=self.max_output - count,
            output_length=None if self.output_length is None else self.output_length - count,
            num_resumed=self.num_resumed + count,
        )

    def finish(self, token: int, count: int) -> FinishReason | None:
        if token == NO_TOKEN:
            return "error"
        if token in self.stop_token_ids or count == self.output_length:
            return "stop"
        return "length" if count == self.max_output else None


class Token(NamedTuple):
    id: int
    token: int
    finish: FinishReason | None
    logprobs: Logprobs | None = None
    error: str = ""
