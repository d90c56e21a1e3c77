"""plan.json: the schedule that `xgpt plan` writes and `xgpt serve` executes."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from xgpt.schema.base import Frozen
from xgpt.schema.cluster import ClusterSpec
from xgpt.schema.engine import EngineSpec
from xgpt.schema.model import DType, ModelSpec, Precision
from xgpt.schema.policy import ChunkedSettings, PolicySettings, StageLane
from xgpt.schema.step_log import Account
from xgpt.schema.step_times import StepTimes
from xgpt.schema.workload import RequestClass, Workload, check_classes

SLICE_TOKENS = 2048
"""Largest number of tokens that pass the layers at once: larger steps run in slices, to bound activations."""

UNVERIFIED = ("max_arrival_rate_per_s", "arrival_rate_gap")

SPARED_TAIL = 0.1
"""Share of the requests that may break a bound that a plan leaves unused, under sla "request"."""

NEVER_NS = 10**15
"""The bound of requests without one, for the rule: eleven days."""

KvPromise = Literal["reserve", "quantile"]
AdmissionOrder = Literal["fcfs", "in-time", "sjf", "lpt", "edf", "das", "slotted-das", "shuffled"]

ROW_ORDERS: tuple[AdmissionOrder, ...] = ("das", "slotted-das")
"""Orders that need `row_tokens`: they consider the prompt tokens of a row together."""
EngineKind = Literal["native", "vllm"]
Sla = Literal["length", "request"]
Objective = Literal["arrivals", "saturated"]


class Goal(NamedTuple):
    """Bounds that a share of all requests must keep together; times count from arrival.

    Attributes:
        quantile: the share.
        latency_bound_s: to the last token; None: no bound.
        ttft_s: to the first token.
        tpot_s: on the mean gap between the request's tokens.
    """

    quantile: float
    latency_bound_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


class Constraint(Frozen):
    """The objective of a plan, and the bounds that it must keep.

    Under sla "length" the bound holds for a request whose output has the quantile's length; under "request"
    it holds for the quantile of all requests (ExeGPT sec. 7.6, (b) and (a)). By default `headroom` is the profile's
    (`Profile.headroom`).

    `objective` is what the plan maximises: "arrivals", the highest arrival rate at which the quantile of all requests
    keeps the bounds, waiting included (`Capacity`), whatever the sla; "saturated", throughput while requests are always
    waiting, with latency from admission, as in the papers. Files without the field were made for the latter.
    """

    objective: Objective = "saturated"
    """What is maximised."""

    latency_bound_s: PositiveFloat | None = None
    """Bound on latency, in seconds; None: no bound."""
    quantile: float = Field(default=0.99, gt=0, lt=1)
    """Share of requests that must keep the bounds."""
    sla: Sla = "length"
    """Which latency is bounded under objective "saturated"."""
    ttft_s: PositiveFloat | None = None
    """Bound on the time to first token; None: no bound."""
    tpot_s: PositiveFloat | None = None
    """Bound on the mean time per output token; None: no bound."""
    ttft_quantile: float | None = Field(default=None, gt=0, lt=1)
    """Share of requests that must keep `ttft_s` by itself; None: `quantile` of them must keep all bounds together."""
    tpot_quantile: float | None = Field(default=None, gt=0, lt=1)
    """Share of requests that must keep `tpot_s` by itself; None: `quantile` of them must keep all bounds together."""
    arrival_rate_per_s: PositiveFloat | None = None
    """Arrival rate to sustain; None: as high as possible."""
    burstiness: float = Field(default=1.0, gt=0, le=100)
    """Coefficient of variation of the gaps between arrivals: 1 for Poisson, above 1 for bursts."""
    classes: tuple[RequestClass, ...] = ()
    """Parts of the requests with bounds of their own: those above are then the tightest of each kind."""
    headroom: float = Field(default=0.0, ge=0, lt=1)
    """Share by which steps may take longer than predicted before a bound is broken."""

    @property
    def planned_quantile(self) -> float:
        """The share of requests for which a plan is made to keep the bound; under sla "request" a little more.

        Latency jumps when one more token falls into the next encode phase, so a share that is only just kept is easily
        missed.
        """
        return self.quantile + (SPARED_TAIL * (1 - self.quantile) if self.sla == "request" else 0.0)

    @property
    def maximises_arrivals(self) -> bool:
        """Whether the arrival rate is maximised; without bounds, any rate up to saturation is sustained."""
        return self.objective == "arrivals" and self.bounds_latency

    @property
    def bounds_latency(self) -> bool:
        """Whether there is any bound."""
        return not (self.latency_bound_s is None and self.ttft_s is None and self.tpot_s is None)

    def less(self, path_s: float) -> Constraint:
        """Return the constraint with bounds less `path_s`, the seconds that a request spends outside the engine."""
        names = ("latency_bound_s", "ttft_s")
        left = {name: max(bound - path_s, 1e-9) for name in names if (bound := getattr(self, name)) is not None}
        return self.model_copy(update=left) if path_s else self

    @property
    def all_bounds(self) -> Goal:
        """All bounds together; the share of requests that keep them is the goodput."""
        return Goal(self.quantile, self.latency_bound_s, self.ttft_s, self.tpot_s)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The goals of arriving requests: `quantile` of them keep the bounds without a quantile of their own, together.

        Each bound with a quantile of its own is a further goal.
        """
        together, apart = self.all_bounds, []
        if self.ttft_quantile is not None and self.ttft_s is not None:
            together = together._replace(ttft_s=None)
            apart.append(Goal(self.ttft_quantile, ttft_s=self.ttft_s))
        if self.tpot_quantile is not None and self.tpot_s is not None:
            together = together._replace(tpot_s=None)
            apart.append(Goal(self.tpot_quantile, tpot_s=self.tpot_s))
        return ((together,) if any(together[1:]) else ()) + tuple(apart)

    def of_class(self, name: str) -> Goal:
        """The bounds of a class."""
        of = next(each for each in self.classes if each.name == name)
        return Goal(self.quantile, of.latency_bound_s, of.ttft_s, of.tpot_s)

    def with_classes(self, classes: tuple[RequestClass, ...]) -> Constraint:
        """Return a constraint of these classes, whose bounds for all are the tightest of each kind."""
        kinds = ("latency_bound_s", "ttft_s", "tpot_s")
        bounds = {kind: [bound for each in classes if (bound := getattr(each, kind)) is not None] for kind in kinds}
        tightest = {kind: min(found) for kind, found in bounds.items() if found}
        return self.model_copy(update={**tightest, "classes": classes})

    @model_validator(mode="after")
    def _check(self) -> Constraint:
        check_classes(self.classes)
        for name, bound in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            own = getattr(self, f"{name}_quantile")
            if own is not None and bound is None:
                raise ValueError(
                    f"{name}_quantile: {own:g} is the share of requests that keep {name}_s: give {name}_s, too"
                )
        return self


class Admission(Frozen):
    """Which waiting request enters next, and how K/V memory is promised.

    "reserve" sets a request's maximum aside (ORCA Algorithm 1). "quantile" admits as many requests (`max_running`)
    as fit 99.9% of the time, and preempts some where they do not fit.

    Orders in which waiting requests enter:

    - "fcfs": by arrival;
    - "in-time": so that as many as possible keep the bound on the time to first token, by the plan's step times;
    - "sjf": shortest prompt first;
    - "lpt": largest possible output first, which finishes a given set of requests soonest;
    - "edf": earliest deadline first;
    - "das", "slotted-das": TCB's deadline-aware scheduling over `row_tokens` prompt tokens at a time, also in slots;
    - "shuffled": by arrival, but each 64 consecutive requests in random order, so that neighbours' lengths mix.

    A request that has waited for longer than `patience` times the plan's latency is overdue, and every second request
    to enter is the one overdue for longest, so that none starves; None: no request is ever overdue.

    If a request names no maximum, memory is promised for the quantile `promise_quantile` of the plan's outputs: a
    longer output goes on, and is preempted when other requests need the memory beyond its promise.
    """

    order: AdmissionOrder = "fcfs"
    """Order in which waiting requests enter."""
    row_tokens: PositiveInt | None = None
    """Prompt tokens of a row, for "das" and "slotted-das" only."""
    kv: KvPromise = "reserve"
    """How K/V memory is promised."""
    max_running: PositiveInt | None = None
    """Largest number of running requests; None: as many as fit."""
    patience: PositiveFloat | None = 8.0
    """Multiple of the plan's latency after which a waiting request is overdue; None: never."""
    promise_quantile: float = Field(default=0.99, gt=0, lt=1)
    """Quantile of output lengths for which memory is promised."""

    @model_validator(mode="after")
    def _check(self) -> Admission:
        if (self.order in ROW_ORDERS) != (self.row_tokens is not None):
            accepted = " and ".join(map(repr, ROW_ORDERS))
            raise ValueError(
                f"row_tokens: {self.row_tokens} does not go with order {self.order!r}; it belongs to {accepted}"
            )
        return self


class Stage(Frozen):
    """One pipeline stage: its devices, and the layers [first, last) that they hold.

    `kv_blocks` is the number of K/V blocks of its layers. The encode lane of an encoder-decoder has no decoder layers:
    there the blocks hold the encoder's hidden states of prompts that the decode lane has not received yet.
    """

    lane: StageLane = "both"
    """Lane that the stage belongs to."""
    devices: tuple[int, ...]
    """Devices of the stage, by number."""
    encode_layers: tuple[int, int] | None = None
    """Encoder layers [first, last); None: none."""
    decode_layers: tuple[int, int]
    """Decoder layers [first, last)."""
    tp: PositiveInt = 1
    """Tensor-parallel degree."""
    ep: PositiveInt = 1
    """Number of parts into which its devices divide a layer's experts; devices of a part hold slices of its experts."""
    kv_blocks: PositiveInt
    """Number of K/V blocks."""


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
    """The rate under bounds that are 5% tighter; None: simulated for the chosen plan only."""
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

    Method "given": the settings were given and only scored. Method "grid": settings along curves of every placement
    were ranked by their arrival rate in closed form, and the best were simulated.
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


class ProfileRef(Frozen):
    """The profile from which the plan was made. Model, dtype and device are the plan's own.

    Attributes:
        sha256: hash of the profile's content, by which it is found again.
        engine: the engine whose steps it times, and which the plan is for; None: from a datasheet, for any engine.
        slowdown: factor on the profile's times, as a server has measured it.
    """

    source: Literal["measured", "analytic", "imported"]
    """Where its times came from."""
    sha256: str
    engine: str | None = None
    engine_version: str | None = None
    """Version of that engine."""
    num_threads: PositiveInt | None = None
    """Threads that it was measured with."""
    layouts: dict[str, str] = Field(default_factory=dict)
    """Layout of the weights of each shape (OUTxIN) on a CPU."""
    spread: float = 0.0
    """Share by which slow stretches of the measurement exceed the mean."""
    slowdown: PositiveFloat = 1.0
    provenance: dict[str, str] = Field(default_factory=dict)
    """Source of each part's numbers."""


class Plan(Frozen):
    """The whole of plan.json: every number that a run needs, so that the runner computes none itself."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    model: ModelSpec
    """The model's shape."""
    checkpoint: str | None = None
    """Directory of the weights, or hf:// and their Hugging Face id; None: weights are drawn from `seed`."""
    seed: int = 0
    """Seed of weights without a checkpoint, and of sampling."""
    dtype: DType
    """Type that products run in."""
    kv_dtype: DType | None = None
    """Type of keys and values; None: that of the dtype."""
    cluster: ClusterSpec
    """The devices that the plan is for."""
    engine: EngineSpec | None = None
    """The engine that runs the plan; None: any engine, known only by the profile's steps."""
    workload: Workload
    """The lengths that the plan is for."""
    constraint: Constraint
    """The objective, and the bounds that the plan keeps."""
    policy: PolicySettings
    """The schedule and its control variables."""
    admission: Admission = Admission()
    """Which request enters next, and how K/V memory is promised."""
    replicas: PositiveInt = 1
    """Copies of the stages, each serving requests of its own."""
    block_size: PositiveInt = 16
    """Tokens of a K/V block."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    """Stages of one replica, in the order in which steps pass them."""
    estimate: Estimate
    """The predicted figures."""
    search: SearchCertificate
    """How the plan was found, and its proof."""
    profile: ProfileRef
    """The profile from which the figures were predicted."""

    @property
    def request_path_s(self) -> float:
        """Seconds that a request of the mean prompt spends outside of waiting and steps, from its engine's figures."""
        return 0.0 if self.engine is None else self.engine.request_path_s(self.workload.input.mean)

    @model_validator(mode="after")
    def _check(self) -> Plan:
        lanes = set(self.policy.lanes)
        if {stage.lane for stage in self.stages} != lanes:
            raise ValueError(f"stages: {self.policy.kind} runs on lanes {', '.join(sorted(lanes))}")
        for lane in lanes:
            self._check_layers(lane)
        self._check_bounds_of_rule()
        devices = [device for stage in self.stages for device in stage.devices]
        if len(set(devices)) != len(devices) or any(len(stage.devices) != stage.tp for stage in self.stages):
            raise ValueError(f"stages: devices {devices} must be tp of each stage, and each of one stage alone")
        experts = 1 if self.model.experts is None else self.model.experts.number
        if any(stage.tp % stage.ep or experts % stage.ep for stage in self.stages):
            parts = [stage.ep for stage in self.stages]
            raise ValueError(f"stages: ep {parts} must divide tp of each stage and {experts}, the experts of a layer")
        if self.replicas * len(devices) > self.cluster.num_devices:
            raise ValueError(
                f"replicas: {self.replicas} of {len(devices)} devices do not fit in the cluster's "
                f"{self.cluster.num_devices}"
            )
        return self

    def _check_bounds_of_rule(self) -> None:
        """Check that the bound and the step times by which the rule decides are there."""
        has_times = self.estimate.step_times is not None
        if (
            isinstance(self.policy, ChunkedSettings)
            and self.policy.slack is not None
            and (self.constraint.tpot_s is None or not has_times)
        ):
            raise ValueError("policy.slack: it needs a bound on the time per output token, and estimate.step_times")
        if self.admission.order == "in-time" and (self.constraint.ttft_s is None or not has_times):
            raise ValueError("admission.order: in-time needs a bound on the time to first token, and step_times")

    def _check_layers(self, lane: str) -> None:
        """Check that a lane's stages follow each other, and hold all decoder layers where requests are decoded."""
        before = 0
        for first, last in (stage.decode_layers for stage in self.stages if stage.lane == lane):
            if first != before or last < first or (first == last and lane != "encode"):
                raise ValueError(f"stages: layers [{first}, {last}) do not follow [0, {before}) in the {lane} lane")
            before = last
        if before != self.model.num_layers and (lane != "encode" or before):
            raise ValueError(f"stages: the {lane} lane has {before} of {self.model.num_layers} decoder layers")

    @property
    def ttft_ns(self) -> int | None:
        """Nanoseconds from arrival to the first token that a request may take in the engine; None: no bound.

        Headroom and the time outside the engine are subtracted from the bound.
        """
        return self._in_loop_ns(self.constraint.ttft_s, self.request_path_s)

    def account_of(self, of: RequestClass, key: str = "", share: float = 1.0) -> Account:
        """Return what the rule goes by for the requests of a class, sent with the API key of that name and share."""
        ttft_ns, tpot_ns = self._in_loop_ns(of.ttft_s, self.request_path_s), self._in_loop_ns(of.tpot_s, 0.0)
        bounds = (NEVER_NS if bound is None else bound for bound in (ttft_ns, tpot_ns))
        return Account(f"{key}/{of.name}", share, of.priority, *bounds)

    @property
    def tpot_ns(self) -> int | None:
        """Nanoseconds that a request may take between tokens in the mean, headroom subtracted; None: no bound."""
        return self._in_loop_ns(self.constraint.tpot_s, 0.0)

    def _in_loop_ns(self, bound_s: float | None, outside_s: float) -> int | None:
        return None if bound_s is None else round(1e9 * max(bound_s / (1 + self.constraint.headroom) - outside_s, 0.0))

    @property
    def seeded_weights(self) -> str | None:
        """The warning to show with a plan that has no checkpoint; None: it has one."""
        if self.checkpoint is not None:
            return None
        return f"no checkpoint: weights are drawn from seed {self.seed}, and tokens mean nothing"

    @property
    def devices_per_replica(self) -> int:
        """Number of devices of one replica."""
        return len({device for stage in self.stages for device in stage.devices})

    @property
    def precision(self) -> Precision:
        """Types of the data in the devices' memory."""
        return Precision.of(self.dtype, self.cluster.device.type, self.profile.engine, self.kv_dtype)

    @property
    def num_devices(self) -> int:
        """Number of devices of all replicas."""
        return self.replicas * self.devices_per_replica

    @property
    def patience_ns(self) -> int | None:
        """Nanoseconds that a request may wait before it is overdue; None: it never is."""
        return round(1e9 * (self.admission.patience or 0.0) * self.estimate.latency_s) or None

    @property
    def promised_output(self) -> int:
        """Output tokens for which memory is set aside where a request names no maximum."""
        shares = accumulate(self.workload.output.probabilities)
        most = self.admission.promise_quantile
        pairs = zip(self.workload.output.lengths, shares, strict=True)
        return next((length for length, share in pairs if share >= most - 1e-9), self.workload.output.lengths[-1])

    @property
    def may_outgrow(self) -> bool:
        """Whether an output may exceed its promise.

        It may not in a static batch, whose memory is set aside as a whole, nor where an encoder would have to read the
        prompt again.
        """
        return not (self.policy.holds_finished or self.model.is_encoder_decoder)
