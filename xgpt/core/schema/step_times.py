"""The few numbers from which a scheduling rule predicts step times."""

from __future__ import annotations

from pydantic import Field, model_validator

from xgpt.core.schema.base import Frozen


class StepTimes(Frozen):
    """A model of the seconds of a step through all stages of its lane.

    The time is a sum of three parts. The first is for the step's tokens: a table, linear between points. The second is
    for its prompts' attention: another table. For a chunk [start, end), the difference between the values at the two
    ends. The third is for its decodes, and depends on their number and on the number of tokens that they attend to. The
    model is fitted to the profile, with the error `error`. Scheduling rules use it, but no figure of a plan depends on
    it.
    """

    tokens: tuple[int, ...] = Field(min_length=2)
    """Numbers of tokens of a step, rising from 0."""
    tokens_s: tuple[float, ...] = Field(min_length=2)
    """Seconds of these numbers of tokens, without attention."""
    prompts: tuple[int, ...] = Field(min_length=2)
    """Numbers of tokens of a prompt, rising from 0."""
    prompts_s: tuple[float, ...] = Field(min_length=2)
    """Seconds of the attention of prompts of these lengths."""
    decode_s: float
    """Seconds of each decode, in addition to those of its token."""
    context_s: float
    """Seconds of each token that a decode attends to."""
    error: float
    """Median relative error against the profile's step times."""

    @model_validator(mode="after")
    def _check(self) -> StepTimes:
        for points, seconds, name in (
            (self.tokens, self.tokens_s, "tokens"),
            (self.prompts, self.prompts_s, "prompts"),
        ):
            if len(points) != len(seconds) or points[0] or list(points) != sorted(set(points)):
                raise ValueError(
                    f"{name}: points must rise from 0 and have one time each; there are {len(points)} points and "
                    f"{len(seconds)} times"
                )

        return self
