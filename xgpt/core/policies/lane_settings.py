"""Define the settings of the one-lane rule, and derive them for each policy: rra, orca, chunked, static."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from xgpt.core.policies.in_time import FirstTokens
from xgpt.core.policies.slack import Slack
from xgpt.core.schema import (
    ChunkedSettings,
    EngineSpec,
    OrcaSettings,
    RraSettings,
    SingleLaneSettings,
    StaticSettings,
)


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """The settings that distinguish one single-lane policy from another.

    Attributes:
        mix: whether a step may both encode and decode.
        encode_every: decode iterations between two steps that encode (only without `mix`).
        encode_tokens: mean number of prompt tokens in a step that encodes. None means no such target.
        carried_batch: mean number of requests in decode when a phase begins; used with `encode_tokens`.
        decode_batch: mean number of requests in decode after the phase's encoding; used with `encode_tokens`.
        token_budget: largest number of tokens in a step. Prompts are cut to fit. None means whole prompts.
        max_batch: largest number of requests in the lane.
        refill_when_empty: whether no request enters before the whole batch has finished.
        microbatches: number of micro-batches, each with its own rule.
        reuse_is_planned: whether `encode_tokens` counts only uncached tokens; otherwise it counts whole prompts, so
            that a plan that expects no reuse takes as many requests at a time as planned.
        encode_parts: number of steps over which the prompts of a micro-batch are encoded (only with
            `refill_when_empty`).
        ahead: whether a step is scheduled while the previous one runs, on the assumption that all requests of that step
            continue (only with `mix` and one micro-batch).
        prompts_first: whether prompts are encoded in separate steps that precede decode steps (only with `mix`).
        whole_prompts: whether a prompt waits for a step that has room for all of it or that is otherwise empty (only
            with `mix`).
        batch_wait_steps: number of steps for which prompts wait for more prompts while requests decode (only with
            `mix`).
        batch_wait_tokens: prompts stop waiting once the step would have this many tokens.
        receive_steps: number of decode steps between two checks for new requests (only with `mix`).
        slack: the rule by which prompts fill a step as far as running requests have time, instead of `token_budget`
            (only with `mix`).
        first_tokens: times at which first tokens are due; prompts that cannot be in time give way. None means that no
            prompt gives way.
    """

    mix: bool
    encode_every: int = 1
    encode_tokens: float | None = None
    carried_batch: float = 0.0
    decode_batch: float = 0.0
    token_budget: int | None = None
    max_batch: int | None = None
    refill_when_empty: bool = False
    microbatches: int = 1
    encode_parts: int = 1
    reuse_is_planned: bool = False
    ahead: bool = False
    prompts_first: bool = False
    whole_prompts: bool = False
    batch_wait_steps: int = 0
    batch_wait_tokens: int = 0
    receive_steps: int = 1
    slack: Slack | None = None
    first_tokens: FirstTokens | None = None

    def of_microbatch(self, number: int) -> LaneSettings:
        """Return the settings of one micro-batch: its share of the numbers of requests and tokens."""
        count = self.microbatches
        return replace(
            self,
            encode_tokens=None if self.encode_tokens is None else self.encode_tokens / count,
            carried_batch=self.carried_batch / count,
            decode_batch=self.decode_batch / count,
            token_budget=None if self.token_budget is None else max(1, self.token_budget // count),
            max_batch=None if self.max_batch is None else (self.max_batch + count - 1 - number) // count,
            slack=None if self.slack is None else self.slack.of_microbatch(count),
            microbatches=1,
        )


def lane_settings(
    settings: SingleLaneSettings, encode_tokens: float, decode_batch: float, decoding_share: float = 1.0
) -> LaneSettings:
    """Return the rule's settings for a policy's settings.

    Args:
        encode_tokens: the plan's mean number of prompt tokens in a step that encodes (rra only).
        decode_batch: the plan's requests in decode at the start of a phase (rra only).
        decoding_share: share of the requests that have more than one output token. The others end with their first
            token (rra only).
    """
    return RULES[settings.kind](settings, encode_tokens, decode_batch, decoding_share)


def as_run_by(engine: EngineSpec | None, settings: LaneSettings, num_stages: int = 1) -> LaneSettings:
    """Return the settings adapted to the way in which an engine runs steps that both encode and decode. None means any
    engine.

    An engine schedules ahead only if one step runs at a time: phases and static batches depend on which requests have
    ended, and a pipeline is kept busy by its micro-batches.
    """
    if engine is None or not settings.mix:
        return settings
    budget = settings.token_budget
    if budget is None and engine.token_budget is not None:
        budget = engine.token_budget * settings.microbatches
    return replace(
        settings,
        ahead=engine.schedules_ahead and num_stages == 1 and settings.microbatches == 1,
        token_budget=budget,
        prompts_first=not engine.mixes,
        whole_prompts=not engine.cuts_prompts,
        batch_wait_steps=engine.batch_wait_steps,
        batch_wait_tokens=engine.batch_wait_tokens,
        receive_steps=engine.receive_steps,
    )


def _rra(settings: RraSettings, encode_tokens: float, decode_batch: float, decoding_share: float) -> LaneSettings:
    return LaneSettings(
        mix=False,
        encode_every=settings.decode_iterations,
        encode_tokens=encode_tokens,
        carried_batch=max(decode_batch - settings.encode_batch * decoding_share, 0.0),
        decode_batch=decode_batch,
        microbatches=settings.microbatches,
    )


def _orca(settings: OrcaSettings, *_: float) -> LaneSettings:
    return LaneSettings(mix=True, max_batch=settings.max_batch, microbatches=settings.microbatches)


def _chunked(settings: ChunkedSettings, *_: float) -> LaneSettings:
    return LaneSettings(
        mix=True,
        token_budget=settings.token_budget,
        max_batch=settings.max_batch,
        microbatches=settings.microbatches,
    )


def _static(settings: StaticSettings, *_: float) -> LaneSettings:
    return LaneSettings(
        mix=False,
        max_batch=settings.batch,
        refill_when_empty=True,
        microbatches=settings.decode_microbatches,
        encode_parts=settings.encode_microbatches // settings.decode_microbatches,
    )


RULES: dict[str, Callable[[Any, float, float, float], LaneSettings]] = {
    "rra": _rra,
    "orca": _orca,
    "chunked": _chunked,
    "static": _static,
}
"""The function from each single-lane policy's settings to `LaneSettings`; see `lane_settings`."""
