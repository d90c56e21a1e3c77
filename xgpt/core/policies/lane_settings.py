"""Define the settings of the one-lane scheduling rule, and derive them for rra, orca, chunked and static."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xgpt.core.policies.in_time import FirstTokens
from xgpt.core.policies.slack import Slack
from xgpt.core.schema import ChunkedSettings, EngineSpec, OrcaSettings, RraSettings, StaticSettings
from xgpt.core.schema.policy import SingleLane


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """The settings that distinguish one single-lane policy from another.

    Attributes:
        mix: whether every step may both encode and decode (orca, chunked). Otherwise it does one of them.
        encode_every: number of decode steps in a phase (only without `mix`).
        max_batch: largest number of running requests. None means no limit.
        refill_when_empty: whether requests enter only when none runs, as a whole batch (static; only without `mix`).
        microbatches: number of micro-batches, which have equal parts of the numbers here (`of_microbatch`).
        encode_tokens: target mean number of prompt tokens in a step that encodes. None means no target.
        carried_batch: planned mean number of decoding requests when a phase begins (only with `encode_tokens`).
        decode_batch: planned mean number of decoding requests after a phase's encode step (only with `encode_tokens`).
        token_budget: largest number of tokens in a step. Prompts are cut to fit. None means no limit.
        reuse_is_planned: whether `encode_tokens` counts only uncached tokens. Otherwise it counts whole prompts,
            including cached tokens.
        encode_parts: number of steps in which the prompts of a micro-batch are encoded (only with `refill_when_empty`).
        ahead: whether a step is scheduled while the previous step runs, on the assumption that no request ends early
            (only with `mix` and one micro-batch).
        prompts_first: whether prompts are encoded in separate steps, which come before decode steps (only with `mix`).
        whole_prompts: whether prompts are not cut: a prompt waits until a step can take all of it (only with `mix`).
        batch_wait_steps: largest number of steps for which prompts wait for more prompts while requests decode (only
            with `mix`).
        batch_wait_tokens: once a step would have this number of tokens, prompts wait no longer.
        receive_steps: number of decode steps between two checks for new requests (only with `mix`).
        slack: limits a step's prompt tokens by the time until running requests' next tokens are due, instead of by
            `token_budget` (only with `mix`).
        policy: the plan's own settings, for all micro-batches together, if their policy has a rule of its own.
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
    policy: SingleLane | None = None

    def of_microbatch(self, number: int) -> LaneSettings:
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
    settings: SingleLane, encode_tokens: float, decode_batch: float, decoding_share: float = 1.0
) -> LaneSettings:
    match settings:
        case RraSettings(encode_batch=encode_batch, microbatches=microbatches):
            return LaneSettings(
                mix=False,
                encode_every=settings.decode_iterations,
                encode_tokens=encode_tokens,
                carried_batch=max(decode_batch - encode_batch * decoding_share, 0.0),
                decode_batch=decode_batch,
                microbatches=microbatches,
            )
        case OrcaSettings(max_batch=most, microbatches=microbatches):
            return LaneSettings(mix=True, max_batch=most, microbatches=microbatches)
        case ChunkedSettings(token_budget=budget, max_batch=most, microbatches=microbatches):
            return LaneSettings(mix=True, token_budget=budget, max_batch=most, microbatches=microbatches)
        case StaticSettings(encode_microbatches=encode_parts, decode_microbatches=microbatches):
            return LaneSettings(
                mix=False,
                max_batch=settings.batch,
                refill_when_empty=True,
                microbatches=microbatches,
                encode_parts=encode_parts // microbatches,
            )
    names = ("max_batch", "microbatches")
    return LaneSettings(settings.mixes, policy=settings, **{name: getattr(settings, name) for name in names})


def as_run_by(engine: EngineSpec | None, settings: LaneSettings, num_stages: int = 1) -> LaneSettings:
    """Return the settings adapted to `engine`: how it runs steps that both encode and decode. None changes nothing.

    Steps are scheduled ahead only without a pipeline, since micro-batches already keep a pipeline busy. Phases and
    static batches are never scheduled ahead, since they depend on which requests have ended.
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
