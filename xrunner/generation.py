"""A request as the engine takes it, and the tokens that the engine returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from xgpt.core.schema import ANYONE, Account

FinishReason = Literal["stop", "length", "error"]
"""error: the engine could not continue the request; its last token does not count."""

NO_TOKEN = -1
"""In a token's place where the logits hold NaN, or the highest is infinite."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen; the default is the highest logit.

    Attributes:
        temperature: 0: the highest logit.
        top_k: only this number of most probable tokens; 0: all.
        top_p: of these only the most probable that together have this probability.
        min_p: of these only those at least so probable, relative to the most probable.
        seed: the same seed gives the same tokens where logits are the same; what else is in the batch may change their
            last bits, which changes a token as seldom as the highest logit (`sampling`).
        presence_penalty: taken off the logit of every token that the output holds.
        frequency_penalty: taken off it once for each time that the output holds it.
        repetition_penalty: divides the logit, where it is positive, of every token that prompt or output hold, and
            multiplies it where it is negative. An encoder's prompt does not count.
        logprobs: how many most probable tokens to report in addition to the chosen one; None: report nothing.
        prompt_logprobs: as many most probable tokens in place of each prompt token but the first; not without
            `logprobs`. None: nothing of the prompt.
        logit_bias: tokens, and what is added to their logits.
        grammar: what the output keeps to (`xrunner.grammar`); None: anything.
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
        """Whether the highest logit is all that is asked for."""
        chooses = self.temperature or self.has_penalty or self.logit_bias or self.grammar is not None
        return self.logprobs is None and not chooses


GREEDY = SamplingParams()

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Difference between the seeds of two outputs of one request, so large that other requests' seeds are others."""


def of_choices(sampling: SamplingParams, seed: int, num_choices: int) -> Iterator[SamplingParams]:
    """Yield the sampling parameters of each output of one request: the same ones, with a seed each."""
    for index in range(num_choices):
        yield replace(sampling, seed=(seed + index * SEED_STRIDE) % 2**64)


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities: of the chosen token, and of the most probable ones (token, value).

    Attributes:
        prompt: of each prompt token but the first, with the first token of a request that asks for them.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    prompt: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A request as the server hands it in.

    Attributes:
        prompt: token ids.
        max_output: output tokens at most; the schedule knows no more than this.
        stop_token_ids: tokens that end the output.
        output_length: benchmarks only: end after exactly this many tokens, as if a stop token had come then.
            Hidden from the schedule.
        sampling: how its tokens are chosen.
        num_resumed: tokens at the end of `prompt` that it had generated itself before a preemption.
        deadline_ns: after which its tokens are of no use, on the engine's clock. If it still waits then, it leaves
            without a token.
        promised_output, account: as of `Arrival`.
        arrival_ns: when the server took it in, on the engine's clock; None: when the engine does.
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
        """Whether its prompt is scored; once output is encoded again, the scores have been reported."""
        return self.sampling.prompt_logprobs is not None and not self.num_resumed

    def resumed(self, generated: Sequence[int]) -> Generation:
        """Return the request as it goes on after these tokens of its output, which are encoded with its prompt."""
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
        """Return why this output token, the `count`-th, is the last; None if it is not."""
        if token == NO_TOKEN:
            return "error"
        if token in self.stop_token_ids or count == self.output_length:
            return "stop"
        return "length" if count == self.max_output else None


class Token(NamedTuple):
    """One output token of one request; the last carries why it is the last."""

    id: int
    token: int
    finish: FinishReason | None
    logprobs: Logprobs | None = None
    error: str = ""
    """Why the engine lost the request, if it knows."""
