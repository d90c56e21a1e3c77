"""Define the results of `xgpt bench` and `xgpt compare`: predicted and measured figures."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from xgpt.core.schema.base import Frozen


class Comparison(Frozen):
    """The predicted and the measured value of one figure.

    Attributes:
        predicted: the plan's value for a long run or, if the load is not the plan's, the value from a simulation of the
            requests.
        at_pace: value from a simulation of the requests with step times multiplied by the measured pace. None means
            that the pace is not known.
        low, high: range of the value for these requests at this machine's usual paces, or None if not known.
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
        """Whether the measured value is outside its range. False without a range."""
        return self.low is not None and self.high is not None and not self.low <= self.measured <= self.high

    @property
    def error_at_pace(self) -> float | None:
        """Relative error of `at_pace`: the error without the effect of the machine's pace. None means that the pace is
        not known.
        """
        if self.at_pace is None:
            return None
        return self.at_pace / self.measured - 1 if self.measured else 0.0


class Calibration(Frozen):
    """The correction of a profile by measured steps.

    Attributes:
        factors: by name of a table of the profile, the factor on its times.
        error_before, error_after: mean absolute relative error of step times before and after the correction, over
            steps that the fit did not use.
        bias_before, bias_after: relative error of the total time of these steps.
    """

    factors: dict[str, float]
    num_steps_used: int
    num_steps_unused: int
    error_before: float
    error_after: float
    bias_before: float
    bias_after: float


class CoreWaits(Frozen):
    """How long the engine's threads waited for CPU cores during a run, and figures without these waits.

    Attributes:
        seconds: the sum of `StepRecord.core_wait_ns` over all steps, in seconds.
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

    If the plan maximises the arrival rate, times count from arrival. `bound_kept` then states whether at least a share
    `quantile` of all requests kept the bounds. `share_within_bound` is the share that kept every bound (the goodput).
    Both are None if requests are always waiting. For other plans, times count from admission, and `bound_kept` refers
    to the latency that the plan bounds.

    `calibration_gflops` is the rate of a fixed matrix product before and after the run. It shows whether the machine's
    clock rate has changed.
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
    """Total measured time of all steps divided by their total predicted time, or None if not known."""
    paces: dict[str, float] = Field(default_factory=dict)
    """The pace of each lane, and of each replica if there are several. For a pipeline, the pace of each worker."""
    core_waits: CoreWaits | None = None
    """How long steps waited for CPU cores, or None if not known, as for workers in other processes."""
    differences: str | None = None
    """How the machine's state before the run differed from that during profiling, or None if it did not."""
    headroom: float = 0.0
    """The share by which the plan allows steps to take longer than in the profile."""
    latency_bound_s: float | None
    bound_kept: bool | None
    share_within_bound: float | None
    quantile: float = 0.99
    """Share of requests that must keep the bound."""
    counts_waiting: bool = False
    """Whether the bounded latency counts from arrival, not from admission."""
    end_to_end_p99_s: float
    calibration_gflops: tuple[float, ...] = ()
    failures: tuple[str, ...] = ()
    calibration: Calibration | None = None
    """The correction of the profile, if requested."""

    @property
    def is_disturbed(self) -> bool:
        """Whether steps took longer than the profile's times with the plan's headroom."""
        return self.pace is not None and self.pace > 1 + self.headroom

    @property
    def is_outside(self) -> bool:
        """Whether any measured value is outside its range."""
        return any(figure.is_outside for figure in self.figures)

    def figure(self, metric: str) -> Comparison:
        """Return the figure named `metric`."""
        return next(figure for figure in self.figures if figure.metric == metric)


TokensFrom = Literal["token_ids", "usage", "chunks"]


class UrlReport(Frozen):
    """The results of a replay against any OpenAI-compatible endpoint, with times measured by the client.

    Attributes:
        tokens_from: what `output_tokens_per_s` counts: token ids in the responses, else the tokens in `usage`, else
            chunks of text. Without token ids, `ttft` and `itl` are times of chunks.
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
