"""Define what `xgpt check` and `xgpt tune` print and store."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.recommendation import Ranged, Recommendation

Start = Literal["started", "did not start", "died"]


class DrivenLoad(Frozen):
    """What a client measured at one arrival rate. Times count from sending a request; outputs of one token have no
    TPOT.
    """

    rate_per_s: PositiveFloat
    """Requests, or sessions, that began in a second, as a Poisson process."""
    num_sessions: NonNegativeInt | None = None
    """Number of sessions that ended. Null if independent requests were sent."""
    num_requests: NonNegativeInt
    """Number of answered requests. Turns of sessions are requests."""
    num_failed: NonNegativeInt
    """Number of requests that failed. They count as late."""
    share_kept: float = Field(ge=0, le=1)
    """Share of the requests, or of turns or sessions if fewer did, that kept all bounds."""
    kept: bool
    """Whether enough kept the bounds, for requests by a sequential test."""
    ttft_mean_s: NonNegativeFloat
    """Mean time to first token."""
    ttft_quantile_s: NonNegativeFloat
    """Quantile of the time to first token at the required share of requests."""
    tpot_mean_s: NonNegativeFloat
    """Mean time per output token."""
    tpot_quantile_s: NonNegativeFloat
    """Quantile of the time per output token at the required share of requests."""
    whole_quantile_s: NonNegativeFloat
    """Quantile of the time to the last token at the required share of requests."""
    session_wait_quantile_s: NonNegativeFloat | None = None
    """Quantile of a session's waiting: the sum of its turns' times to first token."""
    session_time_quantile_s: NonNegativeFloat | None = None
    """Quantile of a session's time without its pauses."""
    reused_share: float | None = None
    """Share of the sessions' prompt tokens that the server found in its cache. Null if its metrics do not say."""
    seconds: PositiveFloat
    """Seconds from the first request to the last answer."""


class TuneRun(Frozen):
    """One measured setting: a line of the journal."""

    token_budget: PositiveInt
    """Largest number of tokens in a step."""
    max_batch: PositiveInt
    """Largest number of requests in a step."""
    placement: NonNegativeInt = 0
    """Number of the placement among those of the search."""
    further: tuple[str, ...] = ()
    """Flags that are tried beside the settings."""
    command: str
    """Command that started the engine."""
    start: Start = "started"
    """Whether the engine became ready. "died" means that it ended while it was measured."""
    reason: str = ""
    """Why it did not start, or why it died."""
    for_memory: bool = False
    """Whether it did not start for lack of memory."""
    rate_per_s: NonNegativeFloat = 0.0
    """Highest rate at which the bounds were kept: the middle between the highest kept and the lowest broken rate. 0
    means that they were kept at no tried rate."""
    error: NonNegativeFloat = 0.0
    """Relative standard deviation of that rate."""
    loads: tuple[DrivenLoad, ...] = ()
    """The measured loads, in the order of measurement."""
    start_s: NonNegativeFloat = 0.0
    """Seconds until the engine was ready."""
    seconds: NonNegativeFloat = 0.0
    """Seconds of the whole run."""
    processor_s: NonNegativeFloat = 0.0
    """Seconds of processor time of the engine and its children, if it ran on this machine."""
    load_average: NonNegativeFloat = 0.0
    """The machine's load average over a minute at the end of the run."""


class TuneJournal(Frozen):
    """The first line of a journal: what was searched. Each further line is a `TuneRun`."""

    journal: Literal[1] = 1
    """Version of this format."""
    problem: str
    """Model, devices, workload and bounds, in words."""
    sha256: str
    """Hash of the candidates and the bounds. Another search cannot go on with this journal."""


class CheckOutput(Frozen):
    """What `xgpt check` found."""

    model: str
    """The model that the server serves."""
    loads: tuple[DrivenLoad, ...]
    """The measured loads."""
    predicted: tuple[dict[str, float], ...]
    """For each load, the figures that were predicted for it, by the names of `DrivenLoad`."""
    bounds: dict[str, float]
    """The bounds on these figures, by the same names."""
    fit: dict[str, float]
    """The fitted factors on prefill and decode, and the seconds added to each step and to each request."""
    rate_before: Ranged
    """Highest rate within the bounds, as it was predicted, with the range of nine of ten cases. Requests, or sessions
    that begin, in a second.
    """
    rate_after: Ranged
    """The same after the measurement."""
    recommendation: Recommendation
    """Whether to keep the settings."""


class WatchAlarm(Frozen):
    """An assumption of a plan that no longer holds."""

    cause: Literal["input lengths", "output lengths", "rate", "reuse", "step times"]
    """Which assumption broke."""
    planned: float
    """What the plan assumes: mean length in tokens, requests a second, share of reused prompt tokens, or seconds
    between tokens."""
    observed: float
    """What the engine's metrics show."""
    num_requests: NonNegativeInt
    """Number of requests from which this was observed."""
    text: str
    """The same in a sentence."""
    action: str = ""
    """What re-planning says, if lengths changed."""
    command: str = ""
    """The command with better settings, or "" if there is none."""
    gain: float | None = None
    """Gain of these settings in requests a second, as a share."""


class TuneOutput(Frozen):
    """What `xgpt tune` found."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    runs: tuple[TuneRun, ...]
    """The measured settings, in the order of measurement."""
    sure: float
    """Probability that no setting keeps the bounds at a rate that is higher by more than the tolerance."""
    most_per_s: float
    """Rate that no setting exceeds, with a probability of 95%."""
    ended: str
    """Why the search ended, in words."""
    recommendation: Recommendation
    """What to run."""
