"""What a plan states of itself: predicted figures, the rate it keeps its bounds up to, and the proof of its search."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.step_times import StepTimes

UNVERIFIED = ("max_arrival_rate_per_s", "arrival_rate_gap")


class JointLengths(Frozen):
    """Effect of a trace's own pairs of lengths, compared with independent inputs and outputs, as closed forms assume.

    Figures are relative differences of two simulations of the same lengths.
    """

    correlation: float
    """Pearson's correlation of input and output length."""
    throughput: float
    """Relative difference of throughput."""
    latency: float
    """Relative difference of latency."""


class MixingEdge(Frozen):
    """The cost of mixed steps beyond which (or below which) a plan of another policy would serve more."""

    mixing: float
    """Extra time of a mixed step, as a share of the time of its decodes alone (see `EngineSpec.mixing`)."""
    policy: str
    """The other plan's policy."""


class ReuseEstimate(Frozen):
    """The reuse that a plan expects: the share of prompts that is cached, and the memory that holds it.

    Memory is divided: a block that holds prompts for later requests is not available to outputs.
    """

    share: float = Field(ge=0, le=1)
    """Share of all prompt tokens whose K/V an earlier request left in the cache."""
    most_share: float = Field(ge=0, le=1)
    """The same share with unlimited memory."""
    kept_blocks: NonNegativeInt
    """Number of K/V blocks of each encoding stage that hold prompts, of running and of earlier requests."""
    alone: float | None = None
    """The objective, in requests a second, of the best plan without reuse; None: not planned."""


class Capacity(Frozen):
    """The highest arrival rate at which a plan keeps its bounds, waiting included, by simulation.

    A request keeps them where its time from arrival to the last token, that from arrival to the first token, and its
    mean gap between tokens are within the bounds, with the headroom left free. The rate is the highest at which the
    constraint's quantile of `num_requests` simulated requests keeps them; the `warm_up_requests` before those are left
    out. Lengths and gaps between arrivals are drawn from `seed`, the same at every rate.
    """

    rate_per_s: float
    """Requests a second."""
    error: float | None = None
    """Relative standard deviation of the rate over further draws of lengths and arrivals; None: one draw alone."""
    rate_under_tighter_per_s: float | None = None
    """The rate under bounds that are 5% tighter; None: simulated only for the chosen plan, if it has no slack."""
    rate_under_looser_per_s: float | None = None
    """The rate under bounds that are 5% looser."""
    whole_s: float
    """The quantile of the time from arrival to the last token at that rate."""
    share_kept: float
    """Share of the simulated requests that kept the bounds at that rate."""
    closed_form_per_s: float | None = None
    """The rate that the closed form predicted."""
    num_requests: int
    """Number of simulated requests that count."""
    warm_up_requests: int
    """Number of simulated requests before those."""
    seed: int = 0
    """Seed of lengths and arrivals."""


class Estimate(Frozen):
    """What is predicted for a plan: at saturation, and in `capacity` for Poisson arrivals."""

    throughput_rps: NonNegativeFloat
    """Requests a second at saturation."""
    output_tokens_per_s: NonNegativeFloat
    """Output tokens a second at saturation."""
    latency_s: NonNegativeFloat
    """Latency from admission, of a request of the quantile's output length (sla "length") or the quantile of all."""
    latency_error: float | None = None
    """Relative standard error of a simulated latency (sla "request"); None: the latency is the closed form's."""
    ttft_s: NonNegativeFloat
    """Time to first token, from admission."""
    tpot_s: NonNegativeFloat
    """Mean time per output token."""
    itl_p99_s: NonNegativeFloat
    """99th percentile of the gap between two tokens of a request."""
    encode_batch: NonNegativeFloat
    """Mean number of requests encoded in a step that encodes."""
    decode_batch: NonNegativeFloat
    """Mean number of requests in decode at the start of a phase (its peak)."""
    encode_tokens: NonNegativeFloat
    """Mean number of prompt tokens in a step that encodes."""
    cycle_s: NonNegativeFloat
    """Time from one step that encodes to the next."""
    bubble_fraction: float = 0.0
    """Share of the devices' time in which their stage is idle."""
    memory_bytes: tuple[NonNegativeInt, ...] = Field(min_length=1)
    """Memory of each device of a replica."""
    cost_per_million_tokens: float | None = None
    """Cost of a million output tokens at saturation; None: no price is known."""
    capacity: Capacity | None = None
    """None: there is no bound (any rate below the throughput is kept), or it has not been simulated."""
    mixing_edge: MixingEdge | None = None
    """Where the choice of policy changes; None: nowhere from 0 to 0.4, or steps were measured."""
    joint_lengths: JointLengths | None = None
    """None: the workload is not a trace, or its lengths are all equal."""
    reuse: ReuseEstimate | None = None
    """None: the plan counts on no K/V of earlier requests."""
    simulated: tuple[str, ...] = ()
    """Names of the figures here that come from simulation; all others but `capacity` are closed forms."""
    step_times: StepTimes | None = None
    """Step times by which the rule decides; None: it uses none."""
    ranges: dict[str, tuple[float, float]] = Field(default_factory=dict, exclude_if=lambda ranges: not ranges)
    """Least and largest value of figures here, and of the capacity's `rate_per_s`, in nine of ten cases: of loads on
    this machine at rest, if its profile is fitted to a served engine, or of the measured rows of `ranges_from`."""
    ranges_from: dict[str, str] = Field(default_factory=dict, exclude_if=lambda rows: not rows)
    """Measured rows whose errors a range stands for, by figure; empty: ranges are of this machine, or not known."""
    warnings: tuple[str, ...] = ()
    """Warnings to read before the plan is used."""

    @property
    def predicts_rate(self) -> bool:
        """Whether it predicts a throughput; a plan written by hand may have zeros there."""
        return min(self.throughput_rps, self.encode_batch, self.encode_tokens) > 0

    @model_validator(mode="before")
    @classmethod
    def _without_unverified_rates(cls, data: Any) -> Any:
        """Drop the arrival rates of older files, which no simulation has confirmed."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name not in UNVERIFIED}


class SearchCertificate(Frozen):
    """How the plan was found, and its proof: no plan of the space is better by more than `gap`.

    Under objective "arrivals" the plan's own rate is simulated, with an error (`estimate.capacity.error`), and the gap
    is that to a bound in closed form: these are two uncertainties. Method "given": the settings were given and only
    scored. Method "grid": closed forms along curves were ranked, which proves nothing.
    """

    method: Literal["branch-and-bound", "exhaustive", "optuna", "grid", "given"]
    """How plans were searched for."""
    evaluations: int
    """Number of points of the space that were predicted, each counted once."""
    space_size: int
    """Number of points of the space."""
    simulations: int = 0
    """Number of plans that were simulated to decide which one keeps the bound."""
    seconds: float
    """Time that the search took."""
    gap: float | None
    """Share by which the best plan of the space can exceed this one at most; None: not proven."""
    bound: str
    """The upper bound that the gap refers to, in words."""
    rival: str | None = None
    """Another policy's plan whose arrival rate differs by less than the error of simulation; None: there is none."""
