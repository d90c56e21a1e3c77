"""The documents that commands print with --json, where these are not files of xgpt's own."""

from __future__ import annotations

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.plan import Plan
from xgpt.core.schema.report import BenchReport


class GainOutput(Frozen):
    """The factor by which the best plan's highest arrival rate exceeds that of the current deployment."""

    arrivals: float
    """The factor."""
    per_device: float
    """The factor for each device."""
    num_devices: int
    """Devices of the best plan."""
    current_devices: int
    """Devices of the current deployment."""


class RangeOutput(Frozen):
    """The gain for each device as it stands under every assumption."""

    least: float
    """The gain under the worst assumption."""
    most: float
    """The gain under the best."""
    worst: str
    """The worst assumption."""


class CompareOutput(Frozen):
    """Every policy at its own best under one bound."""

    plans: dict[str, Plan]
    """The best plan of each policy, the best of all first."""
    relaxed: list[Plan]
    """The best plan under each looser latency bound."""
    current: Plan | None
    """The current deployment, scored as a plan; null: none was given."""
    current_notes: list[str]
    """Assumptions about the current deployment."""
    gain: GainOutput | None
    """Gain over the current deployment; null: none was given, or it keeps the bounds at no arrival rate."""
    gain_ranges: dict[str, RangeOutput]
    """The range of each policy's gain whatever is assumed: costs of mixed steps, pace, lengths, bursts."""
    keeps_current: bool = False
    """Whether no plan gains over what runs now under every assumption: then keep it."""
    measured: dict[str, BenchReport]
    """Figures of each plan measured on this machine, by policy."""


class CalibratedLoadOutput(Frozen):
    """A measured load, next to what was predicted of it."""

    source: str
    """Benchmark and file."""
    used: bool
    """Whether the fit used it; otherwise it tells the fit's error."""
    measured: dict[str, float]
    """Requests a second, and mean seconds to the first token and between tokens."""
    before: dict[str, float]
    """Relative error of each as predicted before the fit."""
    after: dict[str, float]
    """Relative error of each after it."""


class CalibrateOutput(Frozen):
    """What a fit to benchmarks changed, and the errors before and after it."""

    pace: float
    """Factor on all step times."""
    step_s: float
    """Seconds that each step takes besides."""
    path_s: float
    """Seconds that a request takes outside of the engine's loop besides."""
    loads: tuple[CalibratedLoadOutput, ...]
    """The loads."""


class SimulateOutput(Frozen):
    """Figures of a simulated run: with --arrival-rate those that count from arrival, else those from admission."""

    num_requests: int
    """Number of requests that finished in the window."""
    window_s: float
    """Seconds of the window."""
    throughput_rps: float
    """Requests a second."""
    output_tokens_per_s: float
    """Output tokens a second."""
    itl_p99_s: float
    """99th percentile of the gaps between tokens of a request."""
    preemptions: int
    """Number of times that a request lost its keys and values."""
    encode_batch: float
    """Mean number of requests encoded in a step that encodes."""
    decode_batch: float
    """Mean number of requests decoded in a step that decodes."""
    idle_share: float
    """Share of time in which a stage is idle."""
    latency_s: float | None = None
    """Mean time from admission until a request of the quantile's length has its last token."""
    request_latency_s: float | None = None
    """The quantile over requests of the time from admission to the last token."""
    ttft_s: float | None = None
    """Mean time from admission to the first token."""
    reused_share: float | None = None
    """Share of prompt tokens whose keys and values were found."""
    goodput: float | None = None
    """Share of requests that keep every bound; of classes, those of their own."""
    goodput_by_class: dict[str, float] | None = None
    """Of each class of requests, the share that keeps its bounds."""
    ttft_mean_s: float | None = None
    """Mean time from arrival to the first token; the quantiles of it follow."""
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_mean_s: float | None = None
    """Mean over requests of the mean gap between their tokens; the quantiles of it follow."""
    tpot_p50_s: float | None = None
    tpot_p90_s: float | None = None
    tpot_p99_s: float | None = None
    whole_mean_s: float | None = None
    """Mean time from arrival to the last token; the quantiles of it follow."""
    whole_p50_s: float | None = None
    whole_p90_s: float | None = None
    whole_p99_s: float | None = None
