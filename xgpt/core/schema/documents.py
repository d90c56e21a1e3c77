"""Define the documents that commands print with --json, except those that xgpt also stores in files."""

from __future__ import annotations

from pydantic import Field

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.plan import Plan
from xgpt.core.schema.recommendation import AtLoad, Recommendation


class RangeOutput(Frozen):
    """The range of a plan's gain per device over all assumptions."""

    least: float
    """The smallest gain."""
    most: float | None
    """The largest gain. Null: under some assumption, the current deployment keeps the bounds at no rate."""
    worst: str
    """The assumption with the smallest gain."""
    each: dict[str, float | None] = Field(default={})
    """The gain under each assumption. Null: the current deployment then keeps the bounds at no rate."""


class CompareOutput(Frozen):
    """The plan to run, and a comparison with the current deployment."""

    plans: dict[str, Plan]
    """The best plan of each policy. The best plan of all comes first."""
    relaxed: list[Plan]
    """The best plan under each set of looser bounds."""
    current: Plan | None
    """The current deployment, evaluated as a plan. Null means that no deployment was given."""
    current_notes: list[str]
    """Assumptions about the current deployment."""
    recommendation: Recommendation
    """Whether to replace the current deployment, by what, and how sure this is."""
    gain_ranges: dict[str, RangeOutput]
    """The range of each policy's gain, over assumptions about the cost of mixed steps, the pace, lengths and bursts."""
    answer: tuple[str, ...] = ()
    """Why requests of the log are late under the current deployment, in sentences."""
    """By policy, the results of running its plan on this machine."""


class CalibratedLoadOutput(Frozen):
    """A measured load and its prediction."""

    source: str
    """The benchmark and its file."""
    used: bool
    """Whether the fit used this load. If not, the load tests the fit."""
    measured: dict[str, float]
    """Measured requests a second, mean TTFT and mean gap between tokens (in seconds)."""
    before: dict[str, float]
    """Relative error of each figure before the fit."""
    after: dict[str, float]
    """Relative error of each figure after the fit."""


class CalibrateOutput(Frozen):
    """The correction fitted to benchmarks, and the errors before and after it."""

    decode: float
    """Fitted factor on the time of the smallest step and on attention of decodes."""
    prefill: float
    """Fitted factor on the time of a step's further tokens and on attention of prompts."""
    step_s: float
    """Fitted further seconds of each step."""
    path_s: float
    """Fitted seconds that each request spends outside the engine's loop."""
    unknown: tuple[str, ...] = ()
    """The values that these loads hardly determine, and the load that would show each."""
    loads: tuple[CalibratedLoadOutput, ...]
    """The measured loads."""


class SessionsOutput(Frozen):
    """The figures of simulated sessions. Times count from a turn's arrival."""

    sessions_per_s: float
    """Sessions that begin in a second."""
    num_sessions: int
    """Number of measured sessions."""
    num_turns: int
    """Number of their turns."""
    at_once: float
    """Mean number of sessions that have begun and not ended."""
    reused_share: float
    """Share of prompt tokens whose K/V was in the cache."""
    reused_by_turn: tuple[float, ...]
    """The same by the first, second, ... turn of sessions."""
    goodput: float | None = None
    """Share of turns that keep every bound on turns."""
    goodput_of_sessions: float | None = None
    """Share of sessions that keep every bound on sessions."""
    ttft_s: dict[str, float]
    """Time to first token: mean, p50, p90, p99."""
    tpot_s: dict[str, float]
    """Mean time per output token of turns."""
    wait_s: dict[str, float]
    """Sum of a session's times to first token."""
    time_s: dict[str, float]
    """Time of a session without its pauses."""


class SimulateOutput(Frozen):
    """The figures of a simulated run. Times count from arrival with --arrival-rate, otherwise from admission."""

    num_requests: int
    """Number of requests that finished in the measured window."""
    window_s: float
    """Duration of the window, in seconds."""
    throughput_rps: float
    """Requests a second."""
    output_tokens_per_s: float
    """Output tokens a second."""
    itl_p99_s: float | None = None
    """99th percentile of the gaps between tokens of a request, or None in a simulation by counts."""
    preemptions: int
    """Number of times that a request was preempted and lost its keys and values."""
    encode_batch: float
    """Mean number of requests in a step that encodes."""
    decode_batch: float
    """Mean number of requests in a step that decodes."""
    idle_share: float | None = None
    """Share of time in which a stage is idle, as a mean over all stages. None in a simulation by counts."""
    latency_s: float | None = None
    """Mean time from admission to the last token, over requests whose output length is at the quantile."""
    request_latency_s: float | None = None
    """Quantile of the time from admission to the last token, over all requests."""
    ttft_s: float | None = None
    """Mean time from admission to the first token."""
    reused_share: float | None = None
    """Share of prompt tokens whose K/V was in the cache."""
    goodput: float | None = None
    """Share of requests that keep every bound of the plan or, with classes, of their class."""
    at_load: AtLoad | None = None
    """What a replayed log keeps, whole and in its windows. Null if no log with times was replayed."""
    goodput_by_class: dict[str, float] | None = None
    """For each class, the share of its requests that keep the bounds of the class."""
    ttft_mean_s: float | None = None
    """Mean time from arrival to the first token. Its quantiles follow."""
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_mean_s: float | None = None
    """Mean, over all requests, of the mean gap between tokens. Its quantiles follow."""
    tpot_p50_s: float | None = None
    tpot_p90_s: float | None = None
    tpot_p99_s: float | None = None
    whole_mean_s: float | None = None
    """Mean time from arrival to the last token. Its quantiles follow."""
    whole_p50_s: float | None = None
    whole_p90_s: float | None = None
    whole_p99_s: float | None = None
