"""Define a plan's predicted figures, its highest rate within the bounds, and the search's proof."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from xgpt.core.schema.base import Frozen


class JointLengths(Frozen):
    """The effect of correlated input and output lengths in a trace, which closed forms assume to be independent.

    Figures are relative differences between two simulations of the same lengths: one with lengths paired as in the
    trace, the other with lengths paired at random.
    """

    correlation: float
    """Pearson's correlation of input and output length."""
    throughput: float
    """Relative difference in throughput."""
    latency: float
    """Relative difference in latency."""


class MixingEdge(Frozen):
    """The extra time of mixed steps at which another policy's plan overtakes this plan's throughput."""

    mixing: float
    """Extra time of a mixed step, as a share of the time of a step with only its decodes (see `EngineSpec.mixing`)."""
    policy: str
    """The other plan's policy."""


class ReuseEstimate(Frozen):
    """The prefix reuse that a plan expects, and the memory for it.

    Blocks that are kept for later requests are not available for outputs.
    """

    share: float = Field(ge=0, le=1)
    """Share of all prompt tokens whose K/V is in the cache because an earlier request had the same tokens."""
    most_share: float = Field(ge=0, le=1)
    """The same share with unlimited memory."""
    kept_blocks: NonNegativeInt
    """Number of K/V blocks for prompts of running and earlier requests, on each stage that encodes."""
    alone: float | None = None
    """The objective, in requests a second, of the best plan without reuse, or None if not planned."""


class Capacity(Frozen):
    """The highest arrival rate at which a plan keeps its bounds, by simulation. Times count from arrival.

    A request keeps the bounds if three times are within their bounds, tightened by the headroom: time to the last
    token, TTFT, and the mean gap between tokens. At the highest rate, the share of the `num_requests` simulated
    requests that keep them still reaches the constraint's quantile. The `warm_up_requests` before these do not count.
    Lengths and gaps between arrivals are drawn from `seed` and are the same at every rate.
    """

    rate_per_s: float
    """Requests a second."""
    error: float | None = None
    """Relative standard deviation of the rate over several draws of lengths and arrivals. None means only one draw."""
    rate_under_tighter_per_s: float | None = None
    """The rate under bounds that are 5% tighter, or None if not simulated."""
    rate_under_looser_per_s: float | None = None
    """The rate under bounds that are 5% looser, or None if not simulated."""
    whole_s: float
    """The constraint's quantile of the time from arrival to the last token, in seconds, at the rate `rate_per_s`."""
    share_kept: float
    """Share of the simulated requests that kept the bounds at the rate `rate_per_s`."""
    closed_form_per_s: float | None = None
    """The rate that the closed form predicted, or None."""
    num_requests: int
    """Number of simulated requests that count."""
    warm_up_requests: int
    """Number of simulated requests before those that count."""
    seed: int = 0
    """Seed from which lengths and arrivals are drawn."""


class SessionEstimate(Frozen):
    """The sessions at the highest rate at which the bounds are kept, by simulation."""

    rate_per_s: float
    """Sessions that begin in a second."""
    at_once: float
    """Mean number of sessions that have begun and not ended, pauses included."""
    turns: float
    """Mean number of turns of a session."""
    reused_by_turn: tuple[float, ...]
    """Share of prompt tokens that are found in the cache, by the first, second, ... turn."""
    wait_s: float
    """The constraint's quantile of the sum of a session's times to first token."""
    time_s: float
    """The constraint's quantile of a session's time without its pauses."""
    kept_tokens: float
    """Mean number of tokens whose K/V is kept for sessions that pause, on all replicas."""
    alone_per_s: float | None = None
    """Sessions a second of the same plan if no K/V is kept between turns, or None if not simulated."""
    from_host_per_s: float | None = None
    """Sessions a second of the same plan if turns load all K/V of their sessions from host memory, or None if not
    simulated.
    """
    host_bytes: int | None = None
    """Mean size of the K/V that is then kept in host memory for sessions that pause, on all replicas."""
    routed: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """By how turns are routed (to the replica of their session, by prefix, or to the one with the fewest requests): the
    share of prompt tokens found, and the constraint's quantile of a session's waiting in seconds, at this rate. Empty
    means one replica, or not simulated.
    """
    num_sessions: int
    """Number of simulated sessions that count."""
    log_turns_kept: float | None = None
    """Share of the turns of the user's log that keep their bounds, replayed whole, or None without a log."""
    log_sessions_kept: float | None = None
    """Share of its sessions that keep the bounds on sessions."""


class StepTimes(Frozen):
    """A model of a step's seconds through all stages of its lane.

    The time is a sum of three parts. The first depends on the step's number of tokens: `tokens_s` at `tokens`. The
    second is the attention of prompts: chunk [start, end) takes f(end) - f(start), where f is `prompts_s` at `prompts`.
    Both are linear between these points. The third is the attention of decodes, and depends on their number and on the
    number of tokens to which they attend. The model is fitted to the profile. Scheduling rules use it, but no figure of
    a plan depends on it.
    """

    tokens: tuple[int, ...] = Field(min_length=2)
    """Numbers of tokens of a step, rising from 0."""
    tokens_s: tuple[float, ...] = Field(min_length=2)
    """Seconds of a step at each of `tokens`, without attention."""
    prompts: tuple[int, ...] = Field(min_length=2)
    """Numbers of tokens of a prompt, rising from 0."""
    prompts_s: tuple[float, ...] = Field(min_length=2)
    """Seconds of attention of a whole prompt at each of `prompts`."""
    decode_s: float
    """Seconds of each decode, in addition to the seconds of its token."""
    context_s: float
    """Seconds for each token to which a decode attends."""
    error: float
    """Median relative error of the model against the profile's step times."""

    @model_validator(mode="after")
    def _check(self) -> StepTimes:
        for points, seconds, name in (
            (self.tokens, self.tokens_s, "tokens"),
            (self.prompts, self.prompts_s, "prompts"),
        ):
            if len(points) != len(seconds) or points[0] or list(points) != sorted(set(points)):
                raise ValueError(
                    f"{name}: points must rise from 0 and have one time each; there are {len(points)} points and "
                    f"{len(seconds)} times"
                )

        return self


class Estimate(Frozen):
    """The predicted figures of a plan at saturation. `capacity` has those for random arrivals."""

    throughput_rps: NonNegativeFloat
    """Requests a second at saturation."""
    output_tokens_per_s: NonNegativeFloat
    """Output tokens a second at saturation."""
    latency_s: NonNegativeFloat
    """Time from admission to the last token. Under sla "length", of a request whose output length is at the quantile.
    Under sla "request", the quantile over all requests.
    """
    latency_error: float | None = None
    """Relative standard error of a simulated latency (sla "request"). None means that the latency is from the closed
    form.
    """
    ttft_s: NonNegativeFloat
    """Time to first token, from admission."""
    tpot_s: NonNegativeFloat
    """Mean time per output token."""
    itl_p99_s: NonNegativeFloat
    """99th percentile of the gap between two consecutive tokens of a request."""
    encode_batch: NonNegativeFloat
    """Mean number of requests in a step that encodes."""
    decode_batch: NonNegativeFloat
    """Mean number of decoding requests. In policies with phases, it is the number after a phase's encode step."""
    encode_tokens: NonNegativeFloat
    """Mean number of prompt tokens in a step that encodes."""
    cycle_s: NonNegativeFloat
    """Seconds from one step that encodes to the next."""
    bubble_fraction: float = 0.0
    """Mean share of the time in which a device is idle."""
    memory_bytes: tuple[NonNegativeInt, ...] = Field(min_length=1)
    """Bytes of memory in use on each device of a replica."""
    cost_per_million_tokens: float | None = None
    """Cost of a million output tokens at saturation. None means that the price is not known."""
    capacity: Capacity | None = None
    """The highest arrival rate within the bounds. None means that it was not simulated, or that there is no bound.
    Without a bound, any rate below the throughput is sustained.
    """
    mixing_edge: MixingEdge | None = None
    """The extra time of mixed steps at which another policy becomes the best. None means that no share from 0 to 0.4
    changes the best policy, or that mixed steps were measured.
    """
    joint_lengths: JointLengths | None = None
    """Effect of correlated lengths. None means that the workload is not a trace, that its lengths do not vary, or that
    it has times, so that a replay has its pairs of lengths.
    """
    reuse: ReuseEstimate | None = None
    """The expected prefix reuse. None means that the plan expects none."""
    sessions: SessionEstimate | None = Field(default=None, exclude_if=lambda found: found is None)
    """The sessions that the plan serves, or None if requests are independent."""
    simulated: tuple[str, ...] = ()
    """Names of the figures that come from simulation. All others except `capacity` come from closed forms."""
    step_times: StepTimes | None = None
    """Step times that the scheduling rule uses, or None if it uses none."""
    ranges: dict[str, tuple[float, float]] = Field(default_factory=dict, exclude_if=lambda ranges: not ranges)
    """By name of a figure or `rate_per_s`, the range that contained the measured value in nine of ten cases. If the
    profile is fitted to a served engine, the cases are loads on this machine while it is otherwise idle. Otherwise they
    are the published measurements in `ranges_from`.
    """
    ranges_from: dict[str, str] = Field(default_factory=dict, exclude_if=lambda rows: not rows)
    """By name of a figure, the published measurements whose prediction errors give its range. Empty means that ranges
    are from this machine or not known.
    """
    warnings: tuple[str, ...] = ()
    """Warnings to read before using the plan."""

    @property
    def predicts_rate(self) -> bool:
        """Whether throughput is predicted. A hand-written plan may have zeros instead."""
        return min(self.throughput_rps, self.encode_batch, self.encode_tokens) > 0


class SearchEffort(Frozen):
    """How a plan was found.

    With method "given", the user gave the settings, and only their figures were computed. With method "grid", closed
    forms ranked settings along load curves.
    """

    method: Literal["branch-and-bound", "exhaustive", "optuna", "grid", "given"]
    """The search method."""
    evaluations: int
    """Number of points of the search space whose figures were predicted."""
    space_size: int
    """Number of points of the search space."""
    simulations: int = 0
    """Number of plans that were simulated to decide which plans keep the bound."""
    seconds: float
    """Duration of the search, in seconds."""

    @property
    def effort(self) -> SearchEffort:
        """The same without a proof."""
        return SearchEffort(**{name: getattr(self, name) for name in SearchEffort.model_fields})


class SearchCertificate(SearchEffort):
    """How the plan was found, and the proof that no plan of the search space is better by more than `gap`.

    Under objective "arrivals", the gap is from the plan's simulated rate to an upper bound in closed form. It does not
    contain the rate's own error, `estimate.capacity.error`.
    """

    gap: float | None
    """Largest share by which the best plan of the search space can exceed this plan, or None if not proven."""
    bound: str
    """Description of the upper bound to which the gap refers."""
    rival: str | None = None
    """Another policy's plan whose arrival rate differs by less than the simulation's error, or None."""


class Ceiling(NamedTuple):
    """What a search has proven about a question: no plan of its space serves more than `most` requests a second.

    A ceiling says nothing about any one plan. Its gap to a plan is computed when the plan is made (`PlanDraft.proven`),
    so a proof cannot end up beside other figures.

    Attributes:
        most: None means that nothing is proven.
        bound: description of the bound, or the reason why there is none.
    """

    most: float | None
    bound: str
