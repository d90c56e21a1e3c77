"""plan.json: the schedule that `xgpt plan` writes and `xgpt serve` executes."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from xgpt.schema.base import Frozen
from xgpt.schema.cluster import ClusterSpec
from xgpt.schema.model import DType, ModelSpec
from xgpt.schema.policy import PolicySettings
from xgpt.schema.workload import Workload

SLICE_TOKENS = 2048
"""Tokens that go through the layers at once: a larger step runs in slices, so that activations stay bounded."""

UNVERIFIED = ("max_arrival_rate_per_s", "arrival_rate_gap")

SPARED_TAIL = 0.1
"""Of the share of requests that may break a bound on all of them, what a plan leaves unused."""

KvPromise = Literal["reserve", "quantile"]
AdmissionOrder = Literal["fcfs", "sjf", "lpt", "edf", "das"]
EngineKind = Literal["native", "vllm"]
Sla = Literal["length", "request"]
Objective = Literal["arrivals", "saturated"]
StageLane = Literal["both", "encode", "decode"]


class Constraint(Frozen):
    """What a plan must keep.

    Under sla "length" the bound holds for a request whose output has the quantile's length; under "request"
    it holds for the quantile of all requests (ExeGPT sec. 7.6, (b) and (a)). `headroom` is the share of the
    bound that the planner leaves unused (`Profile.headroom`).

    `objective` is what the plan maximises: "arrivals", the highest arrival rate at which the quantile of all requests
    keeps the bounds with waiting counted (`Capacity`), whatever the sla; "saturated", throughput while requests always
    wait, with latency counted from admission, as the papers do. Plans of files without it were made for the latter.
    """

    objective: Objective = "saturated"

    latency_bound_s: PositiveFloat | None = None
    quantile: float = Field(default=0.99, gt=0, lt=1)
    sla: Sla = "length"
    ttft_s: PositiveFloat | None = None
    tpot_s: PositiveFloat | None = None
    arrival_rate_per_s: PositiveFloat | None = None
    headroom: float = Field(default=0.0, ge=0, lt=1)

    @property
    def planned_quantile(self) -> float:
        """The share of requests that a plan is made to keep the bound for: under sla "request" a little more.

        Where a request of one token more meets another encode phase, latency jumps, and a share that is just kept is
        soon broken.
        """
        return self.quantile + (SPARED_TAIL * (1 - self.quantile) if self.sla == "request" else 0.0)

    @property
    def maximises_arrivals(self) -> bool:
        """Without bounds every rate is kept up to saturation: the two objectives are one."""
        return self.objective == "arrivals" and self.bounds_latency

    @property
    def bounds_latency(self) -> bool:
        return not (self.latency_bound_s is None and self.ttft_s is None and self.tpot_s is None)


class Admission(Frozen):
    """Who enters next, and how K/V memory is promised.

    "reserve" sets a request's maximum aside (ORCA Algorithm 1). "quantile" lets in as many requests (`max_running`)
    as fit in all but one of a thousand moments, and preempts where they do not.

    Who waits enters in the order of arrival ("fcfs"), the shortest prompt first ("sjf"), the longest output that may
    come first ("lpt": work that is all at hand ends soonest), the earliest deadline first ("edf"), or by TCB's
    deadline-aware scheduling over `row_tokens` prompt tokens at a time ("das"). A request that has waited for longer
    than `patience` times the plan's latency is overdue, and every second one to enter is the one overdue for longest,
    so that none starves; None: never.

    For an output whose request names no maximum, memory is promised for this quantile of the plan's outputs
    (`promise_quantile`): it may run on, and is preempted where others need what it takes beyond.
    """

    order: AdmissionOrder = "fcfs"
    row_tokens: PositiveInt | None = None
    kv: KvPromise = "reserve"
    max_running: PositiveInt | None = None
    patience: PositiveFloat | None = 8.0
    promise_quantile: float = Field(default=0.99, gt=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> Admission:
        if (self.order == "das") != (self.row_tokens is not None):
            raise ValueError(
                f"row_tokens: {self.row_tokens} does not go with order {self.order!r}; it belongs to 'das'"
            )
        return self


class Stage(Frozen):
    """One pipeline stage: which devices hold which layers, [first, last).

    `kv_blocks` are those of its layers' K/V. The encode lane of an encoder-decoder has no decoder layers: there they
    count the prompts that the encoder has read and the decode lane has not received, in hidden states.
    """

    lane: StageLane = "both"
    devices: tuple[int, ...]
    encode_layers: tuple[int, int] | None = None
    decode_layers: tuple[int, int]
    tp: PositiveInt = 1
    kv_blocks: PositiveInt


class JointLengths(Frozen):
    """What a trace's own pairs of lengths do, against inputs and outputs drawn apart, as all closed forms take them.

    Both simulated, on the same lengths; relative differences.
    """

    correlation: float
    """Pearson's, of input and output."""
    throughput: float
    latency: float


class Capacity(Frozen):
    """The highest Poisson arrival rate at which a plan keeps its bounds with waiting counted, by simulation.

    A request keeps them where its time from arrival to the last token, that from arrival to the first token, and its
    mean gap between tokens are within the bounds, headroom left. The rate is the highest at which the constraint's
    quantile of `num_requests` simulated requests keeps them; the `warm_up_requests` before those are left out. Lengths
    and gaps between arrivals are drawn from `seed`, the same at every rate.
    """

    rate_per_s: float
    rate_under_tighter_per_s: float | None = None
    """The same under bounds that are 5% tighter; None: of the chosen plan alone."""
    rate_under_looser_per_s: float | None = None
    """The same under bounds that are 5% looser."""
    whole_s: float
    """The quantile of the time from arrival to the last token at that rate."""
    share_kept: float
    """Share of the simulated requests that kept the bounds at that rate."""
    closed_form_per_s: float | None = None
    """The rate that the closed form predicted."""
    num_requests: int
    warm_up_requests: int
    seed: int = 0


class Estimate(Frozen):
    """What the simulator predicts for a plan at saturation."""

    throughput_rps: NonNegativeFloat
    output_tokens_per_s: NonNegativeFloat
    latency_s: NonNegativeFloat
    """The latency that the bound is compared with; leaves out waiting for admission."""
    latency_error: float | None = None
    """Relative standard error of a latency that is simulated (sla "request"); None: it is the closed form's."""
    ttft_s: NonNegativeFloat
    tpot_s: NonNegativeFloat
    itl_p99_s: NonNegativeFloat
    encode_batch: NonNegativeFloat
    """Mean requests encoded in a step that encodes."""
    decode_batch: NonNegativeFloat
    """Mean requests in decode at the start of a phase (its peak)."""
    encode_tokens: NonNegativeFloat
    """Mean prompt tokens in a step that encodes."""
    cycle_s: NonNegativeFloat
    bubble_fraction: float = 0.0
    """Share of the devices' time in which their stage has nothing to do."""
    memory_bytes: tuple[NonNegativeInt, ...] = Field(min_length=1)
    cost_per_million_tokens: float | None = None
    capacity: Capacity | None = None
    """None: no bound was given (any rate below the throughput is kept), or it has not been simulated."""
    joint_lengths: JointLengths | None = None
    """None: the workload is no trace, or its lengths are all alike."""
    warnings: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_unverified_rates(cls, data: Any) -> Any:
        """Plans of older files name an arrival rate of the closed form, which simulation need not confirm."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name not in UNVERIFIED}


class SearchCertificate(Frozen):
    """How the plan was found, and how near it is to the best: no plan of the space beats it by over `gap`.

    Method "given": somebody's own settings, scored and not searched for. Method "grid": settings along curves of every
    placement, by their arrival rate, in closed form and then simulated.
    """

    method: Literal["branch-and-bound", "exhaustive", "optuna", "grid", "given"]
    evaluations: int
    """Points of the space that were predicted, each counted once."""
    space_size: int
    simulations: int = 0
    """Plans that were simulated to settle which one keeps the bound."""
    seconds: float
    gap: float | None
    bound: str


class ProfileRef(Frozen):
    """Where the numbers came from. What else a profile is of, its plan says: model, dtype and device.

    Attributes:
        sha256: of the profile's content, by which the plan finds it again.
        engine: whose steps it times, and so what the plan is for; None: a datasheet's, for whichever engine.
        slowdown: how many times as long as the profile says everything is taken to last: what a server has measured.
    """

    source: Literal["measured", "analytic", "imported"]
    sha256: str
    engine: str | None = None
    engine_version: str | None = None
    num_threads: PositiveInt | None = None
    layouts: dict[str, str] = Field(default_factory=dict)
    """How weights of each shape (OUTxIN) are kept on a CPU."""
    spread: float = 0.0
    slowdown: PositiveFloat = 1.0
    provenance: dict[str, str] = Field(default_factory=dict)
    """Where each part's numbers came from."""


class Plan(Frozen):
    """The whole of plan.json. Numbers that the run needs are resolved here; the runner recomputes none."""

    schema_version: Literal[1] = 1
    model: ModelSpec
    checkpoint: str | None = None
    """Directory of the weights; None: weights drawn from `seed`."""
    seed: int = 0
    dtype: DType
    cluster: ClusterSpec
    workload: Workload
    constraint: Constraint
    policy: PolicySettings
    admission: Admission = Admission()
    replicas: PositiveInt = 1
    block_size: PositiveInt = 16
    stages: tuple[Stage, ...] = Field(min_length=1)
    estimate: Estimate
    search: SearchCertificate
    profile: ProfileRef

    @model_validator(mode="after")
    def _check(self) -> Plan:
        lanes = {"encode", "decode"} if self.policy.kind == "waa" else {"both"}
        if {stage.lane for stage in self.stages} != lanes:
            raise ValueError(f"stages: {self.policy.kind} runs on lanes {', '.join(sorted(lanes))}")
        for lane in lanes:
            self._check_layers(lane)
        devices = [device for stage in self.stages for device in stage.devices]
        if len(set(devices)) != len(devices) or any(len(stage.devices) != stage.tp for stage in self.stages):
            raise ValueError(f"stages: devices {devices} must be tp of each stage, and each of one stage alone")
        if self.replicas * len(devices) > self.cluster.num_devices:
            raise ValueError(
                f"replicas: {self.replicas} of {len(devices)} devices do not fit in the cluster's "
                f"{self.cluster.num_devices}"
            )
        return self

    def _check_layers(self, lane: str) -> None:
        """A lane's stages follow each other, and hold all decoder layers where requests are decoded."""
        before = 0
        for first, last in (stage.decode_layers for stage in self.stages if stage.lane == lane):
            if first != before or last < first or (first == last and lane != "encode"):
                raise ValueError(f"stages: layers [{first}, {last}) do not follow [0, {before}) in the {lane} lane")
            before = last
        if before != self.model.num_layers and (lane != "encode" or before):
            raise ValueError(f"stages: the {lane} lane has {before} of {self.model.num_layers} decoder layers")

    @property
    def seeded_weights(self) -> str | None:
        """What is to be said wherever the plan is shown or served without a checkpoint; None: it has one."""
        if self.checkpoint is not None:
            return None
        return f"no checkpoint: weights are drawn from seed {self.seed}, and tokens mean nothing"

    @property
    def devices_per_replica(self) -> int:
        """Devices that one replica runs on; the cluster may have more."""
        return len({device for stage in self.stages for device in stage.devices})

    @property
    def patience_ns(self) -> int | None:
        """How long a request may wait before it is overdue; None: as long as it takes, or nothing is predicted."""
        return round(1e9 * (self.admission.patience or 0.0) * self.estimate.latency_s) or None

    @property
    def promised_output(self) -> int:
        """Output tokens that memory is set aside for where a request names no maximum."""
        shares = accumulate(self.workload.output.probabilities)
        most = self.admission.promise_quantile
        pairs = zip(self.workload.output.lengths, shares, strict=True)
        return next((length for length, share in pairs if share >= most - 1e-9), self.workload.output.lengths[-1])

    @property
    def may_outgrow(self) -> bool:
        """Whether an output may run on beyond its promise: not in a batch that is set aside whole, nor where an encoder
        would have to read it again."""
        return not (self.policy.holds_finished or self.model.is_encoder_decoder)
