"""Define the few numbers from which a scheduling rule predicts step times."""

from __future__ import annotations

from pydantic import Field, model_validator

from xgpt.core.schema.base import Frozen


class StepTimes(Frozen):
    """A model of the seconds that a step takes through all stages of its lane.

    The time is the sum of three parts. The first part, for the step's tokens, is a table that is linear between its
    points. The second part, for the attention of prompts, is another table. A chunk [start, end) takes the difference
    between the table's values at `end` and at `start`. The third part is for decodes, and depends on their number and
    on the number of tokens to which they attend. The model is fitted to the profile, with the error `error`. Scheduling
    rules use the model, but no figure of a plan depends on it.
    """

    tokens: tuple[int, ...] = Field(min_length=2)
    """Numbers of tokens of a step, rising from 0."""
    tokens_s: tuple[float, ...] = Field(min_length=2)
    """Seconds that these numbers of tokens take, without attention."""
    prompts: tuple[int, ...] = Field(min_length=2)
    """Numbers of tokens of a prompt, rising from 0."""
    prompts_s: tuple[float, ...] = Field(min_length=2)
    """Seconds that the attention of prompts of these lengths takes."""
    decode_s: float
    """Seconds of each decode, in addition to the seconds of its token."""
    context_s: float
    """Seconds for each token to which a decode attends."""
    error: float
    """Median relative error, compared with the profile's step times."""

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
