"""Define what the user is told: what to run, what it keeps, what it gains, and how sure this is.

`xgpt.deciding` makes the one object from plans. The terminal, --json, the report, the local page and the exports render
it, and derive nothing themselves.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.estimate import SessionEstimate

Action = Literal["run", "change", "keep"]
Copied = Literal["best", "rejected", "runner_up", "steady"]
BoundName = Literal["latency", "TTFT", "TPOT", "session waiting", "session time"]


class Ranged(Frozen):
    """A figure with the range that contains its measured value in nine of ten cases (None: not known)."""

    value: float
    """The predicted value."""
    low: float | None = None
    """Lower end of the range."""
    high: float | None = None
    """Upper end of the range."""


class Process(Frozen):
    """A process to start."""

    command: str
    """The complete command, as for a shell. It runs on one machine."""
    port: int
    """Port on which the process answers."""
    devices: tuple[int, ...] = ()
    """Numbers of the machine's devices that the process uses. Empty means a CPU."""
    node: int = 0
    """Number of the machine."""


class BoundKept(Frozen):
    """One of the user's bounds, and the margin that the plan leaves."""

    name: BoundName
    """What is bounded."""
    bound_s: PositiveFloat
    """Seconds of the bound."""
    quantile: float
    """Share of requests that must keep the bound."""
    predicted_s: float | None = None
    """The quantile of the bounded time at the user's load or, without one, at the highest rate. None: not known."""


class LostSpan(Frozen):
    """Successive windows of a log in each of which too few requests keep the bounds, beyond chance."""

    window: str
    """The time in words."""
    num_requests: int
    """Number of requests that arrive in it."""
    num_late: int
    """Number of these that miss a bound."""


class AtLoad(Frozen):
    """What a candidate keeps at the user's own load."""

    rate_per_s: PositiveFloat
    """Requests a second of the load: in the busiest window if there is a log."""
    window: str = ""
    """The busiest window of the log, in words. Empty means that the user stated the rate."""
    minute_per_s: float | None = None
    """Requests a second of the log's busiest minute, if its windows are longer. None: not known."""
    minute: str = Field(default="", exclude_if=lambda name: not name)
    """When this minute begins, in words."""
    num_requests: int | None = None
    """Number of requests in the log, or None without a log."""
    share_kept: float | None = None
    """Share of all requests of the whole log that keep the bounds, or None if not replayed."""
    worst_window: str = ""
    """The window in which the smallest share keeps the bounds."""
    worst_share_kept: float | None = None
    """The share of its requests that keep the bounds."""
    num_late: int | None = Field(default=None, exclude_if=lambda found: found is None)
    """Number of requests of the whole log that miss a bound, or None if not replayed."""
    lost: tuple[LostSpan, ...] = Field(default=(), exclude_if=lambda found: not found)
    """When too few requests keep the bounds, by time. Empty if all windows do, but for chance."""
    worst_input_ratio: float | None = Field(default=None, exclude_if=lambda found: found is None)
    """Mean input length of its requests, divided by the log's. A rate within the bounds is one of the log's lengths."""
    worst_output_ratio: float | None = Field(default=None, exclude_if=lambda found: found is None)
    """The same for output lengths."""
    confidence: float | None = None
    """Probability that the candidate sustains the load, by the errors of earlier predictions. 0 means that not even the
    prediction does, in a replay of the log. None means not known.
    """
    holds: bool = True
    """Whether the wanted share keeps the bounds, of the whole log and in each window but for chance, or without a log
    at the rate.
    """
    is_short_by_chance: bool = Field(default=False, exclude_if=lambda short: not short)
    """Whether the worst window keeps less than the wanted share, but no less than chance explains."""


class Offer(Frozen):
    """A deployment: how to start it, and what it keeps."""

    name: str
    """Policy and shape, as in "chunked, 2 replicas of TP4"."""
    policy: str
    """Kind of schedule."""
    settings: str
    """Values of the control variables, in words."""
    engine: str
    """The engine with its version. "" means that only a measured profile names it."""
    needs_xgpt: bool
    """Whether the candidate needs xgpt's scheduler or engine. Otherwise the named engine runs it by itself."""
    num_devices: PositiveInt
    """Number of devices that it uses."""
    cluster: str = Field(default="", exclude_if=lambda name: not name)
    """Name of its cluster, if another one was chosen."""
    processes: tuple[Process, ...] = ()
    """The processes to start, each with its port and devices. If there are several, they need a load balancer. Empty
    if only xgpt runs the candidate, and no file has its plan.
    """
    rate_per_s: Ranged
    """Highest arrival rate within the bounds or, without bounds, the saturated throughput."""
    simulated_s: float | None = Field(default=None, exclude_if=lambda found: found is None)
    """If the rate is near saturation, so that queues may still grow: seconds of it that were simulated."""
    sessions: SessionEstimate | None = Field(default=None, exclude_if=lambda found: found is None)
    """The sessions at this rate, or None if requests are independent."""
    at_load: AtLoad | None = None
    """What it keeps at the user's load. None means that the user stated no load."""
    cost_per_hour: float | None = None
    """Price of its devices for an hour, or None if not known."""
    cost_per_million_tokens: float | None = None
    """Price of a million output tokens, or None if not known."""
    unverified: tuple[str, ...] = ()
    """What of it fewer than ten published measurements check, in words."""


class Gain(Frozen):
    """What a candidate gains over the present deployment."""

    unit: str
    """What is compared, as in "requests/s within the bounds"."""
    now: float
    """The present deployment's value, on all its devices."""
    then: float
    """The candidate's value, on all its devices."""
    factor: Ranged | None = None
    """`then` divided by `now`. None means that the present deployment keeps the bounds at no rate."""
    per_device: Ranged | None = None
    """The same ratio per device. None means that both have as many devices, or that `factor` is None."""
    worst: str = ""
    """The assumption under which the gain is smallest."""


class Sized(Frozen):
    """A number of devices, and the probability that it sustains the load."""

    num_devices: PositiveInt
    """The number."""
    confidence: float = Field(ge=0, le=1)
    """The probability. 0 means that not even the prediction sustains the load."""
    why_not: str = ""
    """Why it is not enough, in words. Empty means that it is."""


class OfferedCluster(Frozen):
    """A cluster that was compared, with its fewest devices that sustain the load."""

    name: str
    """Name of the cluster."""
    num_devices: int | None = None
    """The fewest devices. None means that all do not suffice."""
    price_per_device_hour: float
    """Price of a device for an hour."""
    cost_per_hour: float | None = None
    """Price of these devices for an hour."""
    confidence: float | None = None
    """Probability that they sustain the load."""
    why_not: str = ""
    """Why it was not chosen, in words. Empty means that it was."""
    unverified: tuple[str, ...] = ()
    """What of its plan fewer than ten published rows check, in words."""


class Measurement(Frozen):
    """The measurement that would narrow the recommendation most."""

    narrows: str
    """What it narrows, in words."""
    command: str
    """The complete command."""


class Recommendation(Frozen):
    """What to run, what it keeps and gains, how sure this is, and what would change it."""

    action: Action
    """run: nothing runs yet; change: replace the present deployment; keep: leave it as it is."""
    model: str
    """Name of the model."""
    devices: str
    """Name of the devices, as in "8 x h100-80gb-hbm3"."""
    workload: str
    """Name of the request lengths."""
    bounds: tuple[BoundKept, ...] = ()
    """The user's bounds with the margins of the recommended candidate. Empty means that there are none."""
    nearest: tuple[BoundKept, ...] = Field(default=(), exclude_if=lambda found: not found)
    """If no schedule keeps the bounds at any rate: bounds that a schedule keeps. If a single bound is the cause, it has
    the nearest value that is kept; otherwise all are the given ones times one factor, and one alone may be tighter.
    """
    headroom: float = 0.0
    """Share of the bounds that `rate_per_s` leaves to spare: at this rate, times may be longer by so much."""
    best: Offer
    """What to run. With action "keep", the present deployment."""
    now: Offer | None = None
    """The present deployment, or None if not given."""
    gain: Gain | None = None
    """Gain of `best` over `now` or, with action "keep", of `rejected` over `now`."""
    rejected: Offer | None = None
    """With action "keep": the best other candidate."""
    confidence: float | None = None
    """Probability that the recommendation holds: that `best` sustains the user's load, or that it beats `now`."""
    wanted: float | None = Field(default=None, exclude_if=lambda found: found is None)
    """Probability with which devices must hold the user's load. None: no load is known."""
    why: str = ""
    """The reason for the action, in a sentence."""
    runner_up: Offer | None = None
    """The candidate beside the best: of the best verified shape if `best` is not verified by measurements, otherwise
    the next best that the engine runs by itself, of another shape if there is one."""
    runner_up_gain: Gain | None = None
    """Gain of `runner_up` over `now`."""
    steady: Offer | None = Field(default=None, exclude_if=lambda found: found is None)
    """The candidate of which `would_hold` counts replicas, if it is none of the others: one of a higher rate, or of
    another parallel degree.
    """
    with_more_work: Offer | None = None
    """A better candidate that needs xgpt's scheduler, or None if there is none."""
    sizes: tuple[Sized, ...] = ()
    """Numbers of devices that were considered for the load, rising. A number between two of them holds the load at
    least as surely as the lower one."""
    would_hold: int | None = None
    """If `best` does not hold the load, or less surely than wanted: a number of devices that does, as more replicas.
    None: not known.
    """
    would_hold_replicas: PositiveInt | None = Field(default=None, exclude_if=lambda found: found is None)
    """Number of replicas on these devices, each as those of the candidate that `would_hold_of` names."""
    would_hold_confidence: float | None = None
    """Probability that this number holds the load: the wanted one, unless no number reaches it. None: not known."""
    alone_share: float | None = Field(default=None, exclude_if=lambda found: found is None)
    """If no schedule keeps the bounds: the share of the log's requests that keep them if none waits for another, on any
    number of devices. None: not known.
    """
    would_hold_of: Copied = "best"
    """Of which candidate `would_hold` counts copies: of the one that takes fewest devices, of several the surest."""
    clusters: tuple[OfferedCluster, ...] = ()
    """The clusters that were compared, the cheapest first."""
    limit_per_s: float | None = None
    """Rate that no searched schedule exceeds, or None if not proven."""
    limit_devices: PositiveInt | None = Field(default=None, exclude_if=lambda found: found is None)
    """Largest number of devices of a searched schedule, or None if it is that of the best schedule found."""
    limit_gap: float | None = None
    """Share by which that rate exceeds the rate of the best schedule found."""
    saturated_per_s: float | None = None
    """Throughput of the best schedule, if the limit is one of throughput at saturation."""
    would_change: tuple[str, ...] = ()
    """What would change the recommendation, each in a sentence, the nearest first."""
    measurement: Measurement | None = None
    """The one measurement that would narrow the ranges most. None means that all steps were measured here."""
    warnings: tuple[str, ...] = ()
    """What makes the plan's figures less certain."""
    plan_sha256: str = ""
    """SHA-256 of the plan with this field empty. A plan.json in which it is right is as xgpt wrote it."""
