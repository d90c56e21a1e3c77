"""Define request lengths: distributions in workload files, and histograms in a plan."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen


class TruncatedNormal(Frozen):
    """A normal distribution truncated to `min` and `max`. `mean` and `sd` describe the distribution before
    truncation.
    """

    kind: Literal["normal"] = "normal"
    """Kind of distribution."""
    mean: float
    """Mean before truncation."""
    sd: PositiveFloat
    """Standard deviation before truncation."""
    min: PositiveInt = 1
    """Shortest length in tokens."""
    max: PositiveInt
    """Longest length in tokens."""


class LogNormal(Frozen):
    """A log-normal distribution, given by two quantiles and cut at `min` and `max`."""

    kind: Literal["lognormal"] = "lognormal"
    """Kind of distribution."""
    median: PositiveFloat
    """Median before the cut."""
    p90: PositiveFloat
    """90th percentile before the cut."""
    min: PositiveInt = 1
    """Shortest length in tokens."""
    max: PositiveInt
    """Longest length in tokens."""

    @model_validator(mode="after")
    def _check(self) -> LogNormal:
        if self.p90 <= self.median:
            raise ValueError(f"p90: {self.p90:g} must be above the median, {self.median:g}")
        return self


class Uniform(Frozen):
    """All integer lengths from `min` to `max`, both included, with equal probability."""

    kind: Literal["uniform"] = "uniform"
    """Kind of distribution."""
    min: PositiveInt
    """Shortest length in tokens."""
    max: PositiveInt
    """Longest length in tokens."""


class Constant(Frozen):
    kind: Literal["constant"] = "constant"
    """Kind of distribution."""
    value: PositiveInt
    """The length in tokens."""


class Histogram(Frozen):
    """Lengths in rising order, with probabilities that sum to one."""

    kind: Literal["histogram"] = "histogram"
    """Kind of distribution."""
    lengths: tuple[PositiveInt, ...] = Field(min_length=1)
    """Lengths in tokens, rising."""
    probabilities: tuple[float, ...] = Field(min_length=1)
    """Probability of each length."""

    @property
    def mean(self) -> float:
        """Mean length in tokens."""
        return sum(n * share for n, share in zip(self.lengths, self.probabilities, strict=True))

    @model_validator(mode="after")
    def _check(self) -> Histogram:
        if len(self.lengths) != len(self.probabilities):
            raise ValueError(f"{len(self.lengths)} lengths but {len(self.probabilities)} probabilities")
        if any(b <= a for a, b in pairwise(self.lengths)):
            raise ValueError("lengths must rise")
        if min(self.probabilities) < 0 or abs(sum(self.probabilities) - 1) > 1e-6:
            raise ValueError(f"probabilities must be >= 0 and sum to 1, not {sum(self.probabilities):.6g}")
        return self


LengthDistribution = Annotated[
    TruncatedNormal | LogNormal | Uniform | Constant | Histogram, Field(discriminator="kind")
]


class Pause(Frozen):
    """Seconds from a turn's end to the next turn: tools run, or a user reads. Log-normal, or one value."""

    median_s: NonNegativeFloat
    """Median, in seconds."""
    p90_s: NonNegativeFloat | None = None
    """90th percentile, in seconds. None means that all pauses are equal."""
    max_s: PositiveFloat = 86_400.0
    """Longest pause. A session that pauses for longer has ended."""

    @model_validator(mode="after")
    def _check(self) -> Pause:
        if self.p90_s is not None and not 0 < self.median_s <= self.p90_s <= self.max_s:
            raise ValueError("p90_s: give 0 < median_s <= p90_s <= max_s")
        return self


class Subagents(Frozen):
    """Sessions that a turn forks. They begin with the context of that turn, whose session waits for their end."""

    share: float = Field(gt=0, lt=1)
    """Share of turns that fork."""
    turns: LengthDistribution
    """Turns of a forked session."""


class SessionLaw(Frozen):
    """Sessions: each turn's prompt is all that was said before, and a little more."""

    turns: LengthDistribution
    """Number of turns of a session."""
    shared_prefix: NonNegativeInt = 0
    """Tokens with which all sessions begin: system prompt and tools."""
    first_input: LengthDistribution
    """Further tokens of the first prompt."""
    added_input: LengthDistribution
    """Tokens that each later prompt adds: what the tool or the user said."""
    output: LengthDistribution
    """Output tokens of a turn."""
    left_out: float = Field(default=0.0, ge=0, le=1)
    """Share of each output (reasoning) that later prompts leave out."""
    pause: Pause
    """Time from a turn's end to the next turn."""
    max_context: PositiveInt
    """A session ends before a turn would exceed this number of prompt and output tokens."""
    subagents: Subagents | None = None
    """Forked sessions. None means that there are none."""


class SessionSpec(Frozen):
    """The content of a workload file of sessions."""

    name: str
    source: str = ""
    """Where the figures come from. Shipped files state it."""
    sessions: SessionLaw


class RequestClass(Frozen):
    """A class of requests with its own bounds."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")
    """Name of the class: up to 64 letters, digits and . _ @ -, beginning with a letter or digit."""
    share: float = Field(gt=0, le=1)
    """Share of all requests."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Priority of the class. Requests of higher priority enter first."""
    latency_bound_s: PositiveFloat | None = None
    """Bound on the time from arrival to the last token. None means no bound."""
    ttft_s: PositiveFloat | None = None
    """Bound on the time to first token. None means no bound."""
    tpot_s: PositiveFloat | None = None
    """Bound on the mean time per output token. None means no bound."""


def check_classes(classes: tuple[RequestClass, ...]) -> None:
    """Check that the classes' names differ and their shares sum to one.

    Raises:
        ValueError: a name is repeated, or shares do not sum to one.
    """
    names = [each.name for each in classes]
    if len(set(names)) != len(names):
        raise ValueError(f"classes: each name may appear only once, not as in {', '.join(names)}")
    total = sum(each.share for each in classes)
    if classes and abs(total - 1) > 1e-6:
        raise ValueError(f"classes: their shares sum to {total:.6g}, but must sum to 1")


class WorkloadSpec(Frozen):
    """The content of a file under configs/workloads: request lengths and their source."""

    name: str
    source: str = ""
    """Where the lengths come from. Shipped files state it."""
    input: LengthDistribution
    output: LengthDistribution
    classes: tuple[RequestClass, ...] = ()
    """Classes of requests with their own bounds. Empty means that the plan's bounds hold for all requests."""

    @model_validator(mode="after")
    def _check(self) -> WorkloadSpec:
        check_classes(self.classes)
        return self


class Workload(Frozen):
    """The request lengths for which a plan was made, as histograms."""

    name: str
    """Name of the workload."""
    input: Histogram
    """Prompt lengths."""
    output: Histogram
    """Output lengths."""
    sessions: SessionLaw | None = Field(default=None, exclude_if=lambda law: law is None)
    """The law of the sessions whose turns the requests are. None means that requests are independent."""
