"""Define a plan's constraint (the objective and the bounds), and the plan's admission of requests."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.workload import RequestClass, check_classes

SPARED_TAIL = 0.1
"""Share of the permitted violations of the bound that a plan leaves unused under sla "request"."""

KvPromise = Literal["reserve", "quantile"]
AdmissionOrder = Literal["fcfs", "in-time", "sjf", "lpt", "edf", "das", "shuffled"]
Sla = Literal["length", "request"]
Objective = Literal["arrivals", "saturated"]
SearchMethod = Literal["branch-and-bound", "exhaustive", "optuna"]


BOUND_NAMES = {"latency_bound_s": "latency", "ttft_s": "TTFT", "tpot_s": "TPOT"}


class Bounds(NamedTuple):
    """The three bounds, in seconds. None means no bound."""

    latency_bound_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """The bounds that are not None, by name."""
        return {name: bound for name, bound in self._asdict().items() if bound is not None}


class Goal(NamedTuple):
    """Bounds that a share of all requests must keep, all of them at once. Times are seconds from arrival.

    Attributes:
        quantile: share of all requests that must keep all the bounds.
        latency_bound_s: bound on the time to the last token. None means no bound.
        ttft_s: bound on the time to the first token.
        tpot_s: bound on the mean gap between a request's tokens.
    """

    quantile: float
    latency_bound_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


class Constraint(Frozen):
    """The objective and the bounds of a plan.

    Under sla "length", the latency bound holds for a request whose output length is at the quantile (ExeGPT sec. 7.6
    (b)). Under sla "request", a share `quantile` of all requests must keep it (sec. 7.6 (a)). If `headroom` is not set,
    plans use `Profile.headroom`.

    The plan maximises the `objective`. "arrivals" is the highest arrival rate at which a share `quantile` of all
    requests keeps the bounds, with times counted from arrival (`Capacity`). The sla then has no effect. "saturated" is
    the throughput while requests are always waiting. Latency then counts from admission, as in the papers.
    """

    objective: Objective = "saturated"
    """The quantity that the plan maximises."""

    latency_bound_s: PositiveFloat | None = None
    """Bound on the time to the last token, in seconds. None means no bound."""
    quantile: float = Field(default=0.99, gt=0, lt=1)
    """Share of requests that must keep the bounds."""
    sla: Sla = "length"
    """Meaning of the latency bound under objective "saturated"."""
    ttft_s: PositiveFloat | None = None
    """Bound on the time to first token. None means no bound."""
    tpot_s: PositiveFloat | None = None
    """Bound on the mean time per output token. None means no bound."""
    ttft_quantile: float | None = Field(default=None, gt=0, lt=1)
    """Share of requests that must keep `ttft_s`. None means that it is among the bounds that a share `quantile` must
    keep.
    """
    tpot_quantile: float | None = Field(default=None, gt=0, lt=1)
    """Share of requests that must keep `tpot_s`. None means that it is among the bounds that a share `quantile` must
    keep.
    """
    session_wait_s: PositiveFloat | None = Field(default=None, exclude_if=lambda bound: bound is None)
    """Bound on the sum of a session's times to first token. None means no bound."""
    session_time_s: PositiveFloat | None = Field(default=None, exclude_if=lambda bound: bound is None)
    """Bound on the time from a session's start to its last token, without its pauses. None means no bound."""
    arrival_rate_per_s: PositiveFloat | None = None
    """Arrival rate to sustain, requests a second. None means as high as possible."""
    burstiness: float = Field(default=1.0, gt=0, le=100)
    """Coefficient of variation of the gaps between arrivals, which is 1 for Poisson arrivals and above 1 for bursts."""
    classes: tuple[RequestClass, ...] = ()
    """Classes of requests with their own bounds. Each bound above is then the tightest among the classes."""
    headroom: float = Field(default=0.0, ge=0, lt=1)
    """Share by which steps may take longer than predicted without breaking a bound."""
    maximise: str | None = Field(default=None, exclude_if=lambda text: text is None)
    """Under objective "saturated", an expression over the plan's figures (`xscheduler.expression`) that is maximised
    instead of throughput. None means throughput.
    """

    @property
    def planned_quantile(self) -> float:
        """The share of requests that must keep the bound in a plan's predictions.

        Under sla "request", this share is slightly above the quantile. Latency jumps when one more token falls into the
        next encode phase, so a plan that just reaches the quantile would easily miss it.
        """
        return self.quantile + (SPARED_TAIL * (1 - self.quantile) if self.sla == "request" else 0.0)

    @property
    def maximises_arrivals(self) -> bool:
        """Whether the plan maximises the arrival rate. Without bounds it does not, since any rate up to saturation is
        sustained.
        """
        return self.objective == "arrivals" and self.bounds_latency

    @property
    def counts_from(self) -> str:
        """From when the bounded latency counts: "arrival" or "admission"."""
        return "arrival" if self.maximises_arrivals else "admission"

    @property
    def bounds_latency(self) -> bool:
        """Whether any time of a request or a session is bounded."""
        return any(bound is not None for bound in (*self.bounds, *self.session_bounds))

    @property
    def session_bounds(self) -> tuple[float | None, float | None]:
        """The bounds on a session's waiting and on its time."""
        return self.session_wait_s, self.session_time_s

    @property
    def bounds(self) -> Bounds:
        """The bounds on latency, TTFT and TPOT."""
        return Bounds(self.latency_bound_s, self.ttft_s, self.tpot_s)

    @property
    def allowed_latency_s(self) -> float:
        """The largest predicted latency, in seconds, with which the bound is kept even if steps take longer by the
        headroom. Infinite means no bound.
        """
        return math.inf if self.latency_bound_s is None else self.latency_bound_s / (1 + self.headroom)

    def less(self, path_s: float) -> Constraint:
        """Return the constraint with the bounds on latency and TTFT reduced by `path_s`: the seconds that a request
        spends outside the engine.
        """
        names = ("latency_bound_s", "ttft_s")
        left = {name: max(bound - path_s, 1e-9) for name in names if (bound := getattr(self, name)) is not None}
        return self.but(**left) if path_s else self

    def looser(self, factor: float | None) -> Constraint:
        """Return the constraint with all bounds multiplied by a factor. None means without bounds."""
        return self.but(**{name: factor and factor * bound for name, bound in self.bounds.given.items()})

    @property
    def all_bounds(self) -> Goal:
        """All bounds as one goal. The share of requests that keep it is the goodput."""
        return Goal(self.quantile, *self.bounds)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """One goal for each bound with its own quantile, and one for all other bounds together."""
        together, apart = self.all_bounds, []
        if self.ttft_quantile is not None and self.ttft_s is not None:
            together = together._replace(ttft_s=None)
            apart.append(Goal(self.ttft_quantile, ttft_s=self.ttft_s))
        if self.tpot_quantile is not None and self.tpot_s is not None:
            together = together._replace(tpot_s=None)
            apart.append(Goal(self.tpot_quantile, tpot_s=self.tpot_s))
        return ((together,) if any(together[1:]) else ()) + tuple(apart)

    def of_class(self, name: str) -> Goal:
        """Return the bounds of a class."""
        request_class = next(each for each in self.classes if each.name == name)
        return Goal(self.quantile, request_class.latency_bound_s, request_class.ttft_s, request_class.tpot_s)

    def with_classes(self, classes: tuple[RequestClass, ...]) -> Constraint:
        """Return the constraint with these classes. Each of its bounds becomes the tightest among the classes."""
        bounds = {
            kind: [bound for each in classes if (bound := getattr(each, kind)) is not None] for kind in Bounds._fields
        }
        tightest = {kind: min(found) for kind, found in bounds.items() if found}
        return self.but(**tightest, classes=classes)

    @model_validator(mode="after")
    def _check(self) -> Constraint:
        check_classes(self.classes)
        for name, bound in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            quantile = getattr(self, f"{name}_quantile")
            if quantile is not None and bound is None:
                raise ValueError(
                    f"{name}_quantile: {quantile:g} is the share of requests that keep {name}_s: give {name}_s as well"
                )
        return self


class Admission(Frozen):
    """How requests are admitted: the order in which they enter, and the reservation of K/V memory.

    With `kv` "reserve", memory is reserved for a request's maximum output (ORCA Algorithm 1). With "quantile", up to
    `max_running` requests enter: the number that fits in memory 99.9% of the time. If they do not fit, some are
    preempted.

    Orders in which waiting requests enter:

    - "fcfs": by arrival;
    - "in-time": so that as many requests as possible keep the bound on TTFT, by the plan's step times;
    - "sjf": shortest prompt first;
    - "lpt": largest maximum output first, which finishes a given set of requests soonest;
    - "edf": earliest deadline first;
    - "das": TCB's deadline-aware scheduling, for rows of `row_tokens` prompt tokens;
    - "shuffled": by arrival, but at random within each 64 consecutive requests (ExeGPT sec. 6).

    A request is overdue once it has waited longer than `patience` times the plan's latency. While there are overdue
    requests, every second request that enters is the one that has waited longest. So no request starves.

    If a request states no maximum, memory is reserved for the quantile `promise_quantile` of the plan's output lengths.
    A longer output may exceed its reservation, but it is preempted if other requests need the memory.
    """

    order: AdmissionOrder = "fcfs"
    """Order in which waiting requests enter."""
    row_tokens: PositiveInt | None = None
    """Number of prompt tokens in a row, for "das" only."""
    eta: float = Field(default=0.5, gt=0, lt=1, exclude_if=lambda eta: eta == 0.5)
    """Share of a row's requests that "das" chooses only by utility, before deadlines count."""
    kv: KvPromise = "reserve"
    """How K/V memory is reserved: for a request's maximum output, or as its output grows."""
    max_running: PositiveInt | None = None
    """Largest number of running requests. None means as many as fit in memory."""
    patience: PositiveFloat | None = 8.0
    """Multiple of the plan's predicted latency after which a waiting request is overdue. None means never."""
    promise_quantile: float = Field(default=0.99, gt=0, lt=1)
    """Quantile of output lengths for which memory is reserved if a request states no maximum."""

    @model_validator(mode="after")
    def _check(self) -> Admission:
        if (self.order == "das") != (self.row_tokens is not None):
            says = f"row_tokens: {self.row_tokens} cannot be used with order {self.order!r}; only 'das' uses it"
            raise ValueError(says)
        return self
