"""The few numbers from which a rule predicts how long a plan's steps take."""

from __future__ import annotations

from pydantic import Field, model_validator

from xgpt.schema.base import Frozen


class StepTimes(Frozen):
    """Seconds of a step through all stages of its lane.

    The sum of what its tokens take, a table linear between its points; of the attention of its prompts, another one,
    for a piece [start, end) the difference of the two; and of its decodes, by their number and by all that they attend
    to. Fitted to the profile (`error`): a rule decides by it, figures of a plan do not.
    """

    tokens: tuple[int, ...] = Field(min_length=2)
    """Tokens of a step, rising from 0."""
    tokens_s: tuple[float, ...] = Field(min_length=2)
    """What they take, prompts' and decodes' attention apart."""
    prompts: tuple[int, ...] = Field(min_length=2)
    """Tokens of a prompt, rising from 0."""
    prompts_s: tuple[float, ...] = Field(min_length=2)
    """What its attention takes."""
    decode_s: float
    """What each decode takes beyond its token."""
    context_s: float
    """What each token takes that a decode attends to."""
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
