"""The results of `xgpt bench` and `xgpt compare`: predicted and measured figures."""

from __future__ import annotations

from pydantic import Field

from xgpt.core.schema.base import Frozen


class Comparison(Frozen):
    """One figure, predicted and measured.

    Attributes:
        predicted: what the plan states of a long run; for other loads than its own, simulated of the requests.
        at_pace: simulated of the very requests that were sent, for a machine at the pace of the measured steps; None:
            not known.
        low, high: least and largest value for these requests on a machine at rest (`PACES_AT_REST`); None: not known.
    """

    metric: str
    predicted: float
    measured: float
    at_pace: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    @property
    def is_outside(self) -> bool:
        """Whether the measured figure is not within its range; one without a range is not."""
        return self.low is not None and self.high is not None and not self.low <= self.measured <= self.high

    @property
    def error_at_pace(self) -> float | None:
        """What is left of the error for these requests at the machine's pace: that of the model. None: the pace is not
        known."""
        if self.at_pace is None:
            return None
        return self.at_pace / self.measured - 1 if self.measured else 0.0


class Calibration(Frozen):
    """A profile's correction by measured steps.

    Attributes:
        factors: what each of the profile's tables is multiplied by.
        error_before, error_after: mean absolute relative error of a step's time, on steps of requests that were not
            used.
        bias_before, bias_after: relative error of the time of all those steps together.
    """

    factors: dict[str, float]
    num_steps_used: int
    num_steps_unused: int
    error_before: float
    error_after: float
    bias_before: float
    bias_after: float


class CoreWaits(Frozen):
    """What the engine's threads lost of a run's steps to other threads that had their cores, and what is left without.

    Attributes:
        seconds: of all steps, as Linux counts them: those for which a thread was ready to run and waited.
        share_of_steps: in which that was a tenth of the step's time or more.
        pace: of the steps, had they not waited.
        gaps: 99th percentile of the gaps between tokens, had no step waited.
    """

    seconds: float
    share_of_steps: float
    pace: float
    gaps: Comparison


class BenchReport(Frozen):
    """A replay of a workload against a plan.

    For a plan that maximises arrivals, `bound_kept` says whether as many of all requests as were to keep their bounds
    from arrival on did, `share_within_bound` which share kept every bound (the goodput); both are None where requests
    are always waiting. For other plans they count from admission, and
    `bound_kept` is about the latency that the plan bounds.

    `calibration_gflops` is the rate of a fixed matrix product before and after the run, by which a change of the
    machine's clock shows.
    """

    plan_sha256: str
    policy: str
    workload: str
    arrival_rate_per_s: float | None
    num_requests: int
    num_failed: int
    window_s: float
    figures: tuple[Comparison, ...]
    pace: float | None = None
    """How many times as long as predicted all steps together took; None: not known."""
    paces: dict[str, float] = Field(default_factory=dict)
    """The same of each lane, of each replica where there are several, and of each worker of a pipeline."""
    core_waits: CoreWaits | None = None
    """What other threads on the engine's cores took of that; None: not known, as of workers in other processes."""
    differences: str | None = None
    """How the machine differed before the run from what it was when it was profiled; None: it did not."""
    headroom: float = 0.0
    """The share by which the plan lets steps take longer than the profile says."""
    latency_bound_s: float | None
    bound_kept: bool | None
    share_within_bound: float | None
    quantile: float = 0.99
    """Share of requests that must keep the bound."""
    counts_waiting: bool = False
    """Whether the bound is on the time from arrival, not from admission."""
    end_to_end_p99_s: float
    calibration_gflops: tuple[float, ...] = ()
    failures: tuple[str, ...] = ()
    calibration: Calibration | None = None
    """Correction of the profile, if asked for."""

    @property
    def is_disturbed(self) -> bool:
        """Whether steps took longer than the plan allows for: the machine is not what the profile was measured on."""
        return self.pace is not None and self.pace > 1 + self.headroom

    @property
    def is_outside(self) -> bool:
        """Whether a figure that was measured is not within its range."""
        return any(figure.is_outside for figure in self.figures)

    def figure(self, metric: str) -> Comparison:
        """Return the figure of this name."""
        return next(figure for figure in self.figures if figure.metric == metric)


class UrlReport(Frozen):
    """A replay against any OpenAI-compatible endpoint, with times as the client saw them."""

    url: str
    workload: str
    num_requests: int
    num_failed: int
    throughput_rps: float
    output_tokens_per_s: float
    end_to_end_p50_s: float
    end_to_end_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float
