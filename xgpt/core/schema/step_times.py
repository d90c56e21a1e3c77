"""The few numbers from which a rule predicts how long a plan's steps take."""

from __future__ import annotations

from pydantic import Field, model_validator

from xgpt.core.schema.base import Frozen


class StepTimes(Frozen):
    """Seconds of a step through all stages of its lane.

    The time is the sum of its tokens' (a table, linear between points), its prompts' attention (another table; for a
    piece [start, end) the difference between the two ends), and its decodes', by their number and the tokens that they
    attend to. Fitted to the profile (`error`); rules decide by it, but no figure of a plan depends on it.
    """

    tokens: tuple[int, ...] = Field(min_length=2)
    """Tokens of a step, rising from 0."""
    tokens_s: tuple[float, ...] = Field(min_length=2)
    """Seconds of these tokens, without attention."""
    prompts: tuple[int, ...] = Field(min_length=2)
    """Tokens of a prompt, rising from 0."""
    prompts_s: tuple[float, ...] = Field(min_length=2)
    """Seconds of the attention of a prompt of these tokens."""
    decode_s: float
    """Seconds of each decode, beyond its token."""
    context_s: float
    """Seconds of each token that a decode attends to."""
    error: float
    """Median relative difference from the profile's steps."""

    @model_validator(mode="after")
    def _check(self) -> StepTimes:
        for points, seconds, name in (
            (self.tokens, self.tokens_s, "tokens"),
            (self.prompts, self.prompts_s, "prompts"),
        ):
            if len(points) != len(seconds) or points[0] or list(points) != sorted(set(points)):
                raise ValueError(f"{name}: {len(points)} points, which must rise from 0, for {len(seconds)} times")
        return self
