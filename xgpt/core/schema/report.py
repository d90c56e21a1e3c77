"""Define the results of `xgpt bench` and `xgpt compare`, which are predicted and measured figures."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from xgpt.core.schema.base import Frozen


class Comparison(Frozen):
    """A predicted and a measured value of one figure.

    Attributes:
        predicted: the plan's value for a long run. If the load is not the plan's, it is the value from a simulation of
            the requests.
        at_pace: value from a simulation of the sent requests, with predicted step times multiplied by the pace
            (measured over predicted step time), or None if not known.
        low, high: lowest and highest value for these requests at the usual paces of this machine, or None if not known.
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
        """Whether the measured value is outside its range. False if it has no range."""
        return self.low is not None and self.high is not None and not self.low <= self.measured <= self.high

    @property
    def error_at_pace(self) -> float | None:
        """Relative error of `at_pace`: the part of the error that the machine's pace does not explain. None means that
        the pace is not known.
        """
        if self.at_pace is None:
            return None
        return self.at_pace / self.measured - 1 if self.measured else 0.0


class Calibration(Frozen):
    """The correction of a profile by measured steps.

    Attributes:
        factors: the factor on each table of the profile.
        error_before, error_after: mean absolute relative error of step times, over steps that the fit did not use.
        bias_before, bias_after: relative error of the total time of the same steps.
    """

    factors: dict[str, float]
    num_steps_used: int
    num_steps_unused: int
    error_before: float
    error_after: float
    bias_before: float
    bias_after: float


class CoreWaits(Frozen):
    """How long the engine's threads waited for cores during a run, and the figures without these waits.

    Attributes:
        seconds: seconds, over all steps, for which a thread was ready to run but waited, as Linux counts them.
        share_of_steps: share of steps that spent at least a tenth of their time waiting for cores.
        pace: the pace without these waits.
        gaps: 99th percentile of the gaps between tokens without these waits.
    """

    seconds: float
    share_of_steps: float
    pace: float
    gaps: Comparison


class BenchReport(Frozen):
    """The results of replaying a workload against a plan.

    If the plan maximises the arrival rate, times count from arrival. `bound_kept` says whether at least the plan's
    quantile of all requests kept the bounds. `share_within_bound` is the share of requests that kept every bound (the
    goodput). Both are None if requests are always waiting. For other plans, times count from admission, and
    `bound_kept` refers to the latency that the plan bounds.

    `calibration_gflops` is the rate of a fixed matrix product before and after the run, which shows whether the
    machine's clock rate has changed.
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
    """Measured time of all steps together, divided by their predicted time, or None if not known."""
    paces: dict[str, float] = Field(default_factory=dict)
    """The pace of each lane, and of each replica if there are several. For a pipeline, the pace of each worker."""
    core_waits: CoreWaits | None = None
    """How long steps waited for CPU cores, or None if not known, as for workers in other processes."""
    differences: str | None = None
    """How the machine's state before the run differed from its state during profiling, or None if it did not differ."""
    headroom: float = 0.0
    """The share by which the plan allows steps to take longer than in the profile."""
    latency_bound_s: float | None
    bound_kept: bool | None
    share_within_bound: float | None
    quantile: float = 0.99
    """Share of requests that must keep the bound."""
    counts_waiting: bool = False
    """Whether the bounded latency counts from arrival. Otherwise it counts from admission."""
    end_to_end_p99_s: float
    calibration_gflops: tuple[float, ...] = ()
    failures: tuple[str, ...] = ()
    calibration: Calibration | None = None
    """The correction of the profile, if requested."""

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine was so much slower than during profiling that steps took longer than the plan allows."""
        return self.pace is not None and self.pace > 1 + self.headroom

    @property
    def is_outside(self) -> bool:
        """Whether a measured value is outside its range."""
        return any(figure.is_outside for figure in self.figures)

    def figure(self, metric: str) -> Comparison:
        """Return the figure named `metric`."""
        return next(figure for figure in self.figures if figure.metric == metric)


TokensFrom = Literal["token_ids", "usage", "chunks"]


class UrlReport(Frozen):
    """The results of a replay against any OpenAI-compatible endpoint, with times measured by the client.

    Attributes:
        tokens_from: what `output_tokens_per_s` counts. It counts the token ids of the answers if the server sends them,
            otherwise the tokens in `usage`, and otherwise chunks of text. Without token ids, `ttft` and `itl` are times
            of chunks.
    """

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
    tokens_from: TokensFrom = "token_ids"
