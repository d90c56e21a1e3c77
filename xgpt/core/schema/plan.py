"""Define plan.json, which `xgpt plan` writes and `xgpt serve` executes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.cluster import ClusterSpec
from xgpt.core.schema.constraint import Admission, Constraint
from xgpt.core.schema.engine import EngineSpec
from xgpt.core.schema.estimate import Ceiling, Estimate, SearchCertificate, SearchEffort
from xgpt.core.schema.model import DType, ModelSpec, Precision
from xgpt.core.schema.policy import ChunkedSettings, Pinned, PolicySettings, StageLane
from xgpt.core.schema.recommendation import Recommendation
from xgpt.core.schema.speculation import Speculation
from xgpt.core.schema.step_log import Account
from xgpt.core.schema.workload import RequestClass, Workload

HUB = "hf://"
"""Prefix of a checkpoint that is an id on the Hugging Face Hub, not a directory."""
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9]([A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")

SLICE_TOKENS = 2048
"""Largest number of tokens that go through the layers together. A larger step runs in slices, which limits the memory
for activations.
"""

NEVER_NS = 10**15
"""The bound, in nanoseconds (eleven days), that the scheduling rule uses for requests without a bound."""

ROUNDING = 1e-9
"""A figure may exceed its ceiling by this share through rounding."""

EngineKind = Literal["xgpt", "vllm"]
SPECULATIVE_POLICIES = ("chunked", "orca")
"""Policies that support speculative decoding, because every step decodes all running requests."""
Batching = Literal["flat", "padded", "rows", "slots"]
"""Layout of a whole batch. "flat" has no padding, "padded" has one request in each row, "rows" has several concatenated
requests in each row, and "slots" has rows that are divided into slots.
"""


def is_hub_id(name: str) -> bool:
    """Return whether a name is a valid id on the Hugging Face Hub: ORGANISATION/MODEL in letters, digits and - . _"""
    return _HUB_ID.fullmatch(name) is not None and not ("--" in name or ".." in name or name.endswith(".git"))


class Stage(Frozen):
    """One pipeline stage, with its devices and layers.

    The encode lane of an encoder-decoder has no decoder layers. Its K/V blocks hold the encoder's outputs until the
    decode lane has received them.
    """

    lane: StageLane = "both"
    """The lane to which the stage belongs."""
    devices: tuple[int, ...]
    """Numbers of the stage's devices."""
    encode_layers: tuple[int, int] | None = None
    """Encoder layers [first, last), or None."""
    decode_layers: tuple[int, int]
    """Decoder layers [first, last). Stages of the encode lane that all have the whole model are prefill groups."""
    tp: PositiveInt = 1
    """Tensor-parallel degree."""
    ep: PositiveInt = 1
    """Number of parts into which a layer's experts are divided (expert-parallel degree). The devices of a part hold
    slices of its experts. If the number exceeds `tp`, several replicas run their steps together and divide the experts
    among them, so that each device holds whole experts. Each replica still has its own attention and K/V (data-parallel
    attention).
    """
    kv_blocks: PositiveInt
    """Number of K/V blocks on the stage."""


def num_groups(stages: Sequence[Stage]) -> int:
    """Return the number of groups side by side, each with all decoder layers. It is 1 for a pipeline."""
    spans = {stage.decode_layers for stage in stages}
    return len(stages) if len(spans) == 1 and min(spans)[1] else 1


class ProfileRef(Frozen):
    """The profile from which the plan was made. It has the plan's model, dtype and device.

    Attributes:
        sha256: SHA-256 of the profile's content.
        engine: The engine whose steps were timed, and for which the plan was made. None means times from a datasheet,
            for any engine.
        slowdown: Factor on the profile's times, as a server has measured it.
    """

    source: Literal["measured", "analytic", "imported"]
    """Origin of the profile's times."""
    sha256: str
    engine: str | None = None
    engine_version: str | None = None
    """Version of that engine."""
    num_threads: PositiveInt | None = None
    """Number of threads of the engine during the measurement."""
    layouts: dict[str, str] = Field(default_factory=dict)
    """On a CPU, the layout of weights by shape (OUTxIN). Key `head` states the layout of the output head's 8-bit copy.
    Keys `prompts` and `decodes` state how many keys attention reads at a time.
    """
    spread: float = 0.0
    """Share by which steps in slow periods of the measurement took longer than the mean."""
    slowdown: PositiveFloat = 1.0
    provenance: dict[str, str] = Field(default_factory=dict)
    """By name of a part of the profile, the source of its numbers."""


class PlanDraft(Frozen):
    """A schedule with its predicted figures, and no proof yet. A search compares and simulates drafts, and `proven`
    makes the best one the plan.
    """

    schema_version: Literal[1] = 1
    """Version of this format."""
    model: ModelSpec
    """The model's shape."""
    checkpoint: str | None = None
    """Directory of the checkpoint, or hf:// and a Hugging Face id. None means that weights are drawn from `seed`."""
    seed: int = 0
    """Seed for sampling, and for weights without a checkpoint."""
    dtype: DType
    """Data type of matrix products."""
    kv_dtype: DType | None = None
    """Data type of keys and values. None means the default for `dtype`."""
    cluster: ClusterSpec
    """The devices for which the plan was made."""
    engine: EngineSpec | None = None
    """The engine that runs the plan. None means an engine without a file in configs/engines."""
    workload: Workload
    """The request lengths for which the plan was made."""
    constraint: Constraint
    """The objective and the bounds of the plan."""
    policy: PolicySettings
    """The schedule and its control variables."""
    pinned: Pinned = Pinned()
    """The settings of the schedule that the user fixed."""
    speculation: Speculation | None = Field(default=None, exclude_if=lambda speculation: speculation is None)
    """Speculative decoding, or None. With it, an engine step counts as several steps of the schedule, each with one
    token for a request.
    """
    admission: Admission = Admission()
    """How requests are admitted: the order in which they enter, and the reservation of K/V memory."""
    api_servers: PositiveInt = Field(default=1, exclude_if=lambda number: number == 1)
    """Number of API server processes for each engine command. The processes share the command's requests."""
    replicas: PositiveInt = 1
    """Number of copies of the stages. Each serves different requests."""
    block_size: PositiveInt = 16
    """Number of tokens in a K/V block."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    """Stages of one replica, in the order in which a step goes through them."""
    estimate: Estimate
    """The predicted figures."""
    search: SearchEffort
    """How the plan was found."""
    profile: ProfileRef
    """The profile from which the figures were predicted."""

    def with_estimate(self, **figures: object) -> PlanDraft:
        """Return a draft with these fields of the estimate replaced."""
        return self.but(estimate=self.estimate.but(**figures))

    def but(self, **fields: Any) -> PlanDraft:
        """Return a draft with these values of fields. They are not validated. The copy of a plan is not proven."""
        return PlanDraft.model_construct(**dict(self) | {"search": self.search.effort} | fields)

    def proven(self, ceiling: Ceiling, rival: str | None = None) -> Plan:
        """Return the plan: this draft with the gap from its own figure to a ceiling. A ceiling that the figure exceeds
        proves nothing.

        Args:
            rival: see `SearchCertificate`.
        """
        most, bound = ceiling
        if most is not None and most < self.figure * (1 - ROUNDING):
            most, bound = None, f"none: the plan exceeds it ({bound})"
        elif most is not None and not self.figure:
            most, bound = None, "none: no rate keeps the bounds"
        gap = None if most is None else max(0.0, most / self.figure - 1)
        search = SearchCertificate(**dict(self.search.effort), gap=gap, bound=bound, rival=rival)
        return Plan.model_construct(**dict(self) | {"search": search})

    @property
    def figure(self) -> float:
        """The figure that a search bounds: the simulated arrival rate or the throughput at saturation, requests/s."""
        return rate_of(self) if self.constraint.maximises_arrivals else self.estimate.throughput_rps

    @property
    def sharing_replicas(self) -> int:
        """Number of replicas that divide the experts among them. 1 means that each replica has all experts."""
        return max(1, self.stages[0].ep // self.stages[0].tp)

    def step_tokens(self, budget: int) -> int:
        """Return the engine's token budget for a step that has `budget` tokens in the schedule. The two differ only
        with speculative decoding.
        """
        if self.speculation is None:
            return budget
        each, most = self.speculation.tokens_per_step, getattr(self.policy, "max_batch", 0)
        return round(each * (budget - most) + self.speculation.verified * most)

    @property
    def request_path_s(self) -> float:
        """Seconds of TTFT that are neither waiting nor steps, for a prompt of mean length, by the engine's figures."""
        return 0.0 if self.engine is None else self.engine.request_path_s(self.workload.input.mean)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.checkpoint or "").startswith(HUB) and not is_hub_id(str(self.checkpoint).removeprefix(HUB)):
            raise ValueError(f"checkpoint: after {HUB} there must be a Hugging Face id, ORGANISATION/MODEL")
        if self.speculation is not None and (len(self.stages) > 1 or self.policy.kind not in SPECULATIVE_POLICIES):
            raise ValueError(
                f"speculation: it needs one stage and {' or '.join(SPECULATIVE_POLICIES)}; the plan has "
                f"{len(self.stages)} stages of {self.policy.kind}"
            )
        lanes = set(self.policy.lanes)
        if {stage.lane for stage in self.stages} != lanes:
            raise ValueError(f"stages: {self.policy.kind} needs stages of the lanes {', '.join(sorted(lanes))}")
        for lane in lanes:
            self._check_layers(lane)
        self._check_bounds_of_rule()
        devices = [device for stage in self.stages for device in stage.devices]
        if len(set(devices)) != len(devices) or any(len(stage.devices) != stage.tp for stage in self.stages):
            raise ValueError(f"stages: each stage must list tp devices, and no device twice; listed are {devices}")
        experts = 1 if self.model.experts is None else self.model.experts.number
        if any((stage.ep <= stage.tp and stage.tp % stage.ep) or experts % stage.ep for stage in self.stages):
            parts = [stage.ep for stage in self.stages]
            says = f"stages: ep {parts} must divide the tp of its stage and the number of experts of a layer, {experts}"
            raise ValueError(says)
        if any(stage.ep % stage.tp for stage in self.stages) and self.sharing_replicas > 1:
            raise ValueError(f"stages: ep {self.stages[0].ep} is not a multiple of tp {self.stages[0].tp}")
        if self.replicas % self.sharing_replicas or (self.sharing_replicas > 1 and len(self.stages) > 1):
            raise ValueError(
                f"stages: ep {self.stages[0].ep} exceeds tp, so replicas must have one stage and form groups of "
                f"{self.sharing_replicas}; there are {self.replicas} replicas of {len(self.stages)} stages"
            )
        if self.replicas * len(devices) > self.cluster.num_devices:
            raise ValueError(
                f"replicas: {self.replicas} replicas of {len(devices)} devices do not fit on the cluster's "
                f"{self.cluster.num_devices} devices"
            )
        return self

    def _check_bounds_of_rule(self) -> None:
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
        """Check that the layers of a lane's stages are consecutive, and that a decoding lane has all decoder layers."""
        before, stages = 0, [stage for stage in self.stages if stage.lane == lane]
        if lane == "encode" and num_groups(stages) > 1:
            if len({(stage.tp, stage.ep) for stage in stages}) > 1:
                raise ValueError("stages: all groups of the encode lane need the same tp and ep")
            stages = stages[:1]
        for first, last in (stage.decode_layers for stage in stages):
            if first != before or last < first or (first == last and lane != "encode"):
                raise ValueError(f"stages: layers [{first}, {last}) do not follow [0, {before}) in the {lane} lane")
            before = last
        if before != self.model.num_layers and (lane != "encode" or before):
            raise ValueError(f"stages: the {lane} lane has {before} of {self.model.num_layers} decoder layers")

    @property
    def ttft_ns(self) -> int | None:
        """Bound on the nanoseconds from arrival to first token within the engine. None means no bound.

        It is the constraint's bound divided by 1 + headroom, less the time outside the engine.
        """
        return self._in_loop_ns(self.constraint.ttft_s, self.request_path_s)

    def account_of(self, request_class: RequestClass, key: str = "", share: float = 1.0) -> Account:
        """Return the account of a class's requests with the API key named `key`. `share` is the key's share."""
        ttft_ns, tpot_ns = (
            self._in_loop_ns(request_class.ttft_s, self.request_path_s),
            self._in_loop_ns(request_class.tpot_s, 0.0),
        )
        bounds = (NEVER_NS if bound is None else bound for bound in (ttft_ns, tpot_ns))
        return Account(f"{key}/{request_class.name}", share, request_class.priority, *bounds)

    @property
    def tpot_ns(self) -> int | None:
        """Bound on a request's mean nanoseconds between tokens, divided by 1 + headroom. None means no bound."""
        return self._in_loop_ns(self.constraint.tpot_s, 0.0)

    def _in_loop_ns(self, bound_s: float | None, outside_s: float) -> int | None:
        return None if bound_s is None else round(1e9 * max(bound_s / (1 + self.constraint.headroom) - outside_s, 0.0))

    @property
    def vllm_shares_prompts(self) -> bool:
        """Whether vLLM can share the K/V of equal prompt prefixes: the plan has one lane, and the model no attention
        window.
        """
        return self.policy.lanes == ("both",) and self.model.sliding_window is None

    @property
    def shares_prompts(self) -> bool:
        """Whether the plan's engine shares the K/V of equal prompt prefixes. No engine does if the model has an
        encoder.
        """
        return not self.model.is_encoder_decoder and (self.profile.engine != "vllm" or self.vllm_shares_prompts)

    @property
    def seeded_weights(self) -> str | None:
        """The warning that weights are random, for a plan without a checkpoint. Otherwise None."""
        if self.checkpoint is not None:
            return None
        return f"no checkpoint: weights are random (seed {self.seed}), so the output tokens mean nothing"

    @property
    def devices_per_replica(self) -> int:
        """Number of devices of one replica."""
        return len({device for stage in self.stages for device in stage.devices})

    @property
    def prefill_groups(self) -> int:
        """Number of groups side by side that encode prompts for the decode lane, each with the whole model."""
        return num_groups([stage for stage in self.stages if stage.lane == "encode"])

    @property
    def precision(self) -> Precision:
        """Data types of the model's parts in the devices' memory."""
        return Precision.of(
            self.dtype, self.cluster.device.type, self.profile.engine, self.kv_dtype, self.profile.layouts
        )

    @property
    def division(self) -> tuple[Stage, ...]:
        """How the stages divide layers and devices, whatever K/V memory is left to them."""
        return tuple(stage.model_copy(update={"kv_blocks": 0}) for stage in self.stages)

    @property
    def num_devices(self) -> int:
        """Number of devices of all replicas."""
        return self.replicas * self.devices_per_replica

    @property
    def patience_ns(self) -> int | None:
        """Nanoseconds that a request may wait before it is overdue. None means that no request is ever overdue."""
        return round(1e9 * (self.admission.patience or 0.0) * self.estimate.latency_s) or None

    @property
    def promised_output(self) -> int:
        """Number of output tokens for which memory is reserved if a request states no maximum."""
        shares = accumulate(self.workload.output.probabilities)
        most = self.admission.promise_quantile
        pairs = zip(self.workload.output.lengths, shares, strict=True)
        return next((length for length, share in pairs if share >= most - 1e-9), self.workload.output.lengths[-1])

    @property
    def may_outgrow(self) -> bool:
        """Whether an output may exceed its reservation.

        It may not in a static batch, whose memory is reserved as a whole. Nor may it in an encoder-decoder, which would
        generate all output tokens again after a preemption.
        """
        return not (self.policy.holds_finished or self.model.is_encoder_decoder)


DEPLOYED = frozenset(
    {"api_servers", "checkpoint", "pinned", "profile", "recommendation", "replicas", "seed", "speculation"}
)


class Plan(PlanDraft):
    """The content of plan.json. It has every number that a run needs."""

    search: SearchCertificate
    """How the plan was found, and the proven gap to the optimum."""
    recommendation: Recommendation | None = Field(default=None, exclude_if=lambda given: given is None)
    """What the user was told about the plan. None means a plan that was not recommended, such as what runs now."""

    @property
    def ceiling(self) -> Ceiling:
        """What the search has proven about the plan's question."""
        gap = self.search.gap
        return Ceiling(None if gap is None else (1 + gap) * self.figure, self.search.bound)

    def told(self, recommendation: Recommendation) -> Plan:
        """Return the plan with what the user is told about it."""
        told = self.model_copy(update={"recommendation": recommendation.but(plan_sha256="")})
        return self.model_copy(update={"recommendation": recommendation.but(plan_sha256=told._sha256)})

    @property
    def is_as_written(self) -> bool:
        """Whether the plan is as `told` made it: nobody has edited it since."""
        told = self.recommendation
        return told is not None and self.told(told).recommendation == told

    @property
    def digest(self) -> str:
        """The SHA-256 that plan.json states of itself or, if nobody was told about the plan, that of its content."""
        return self.recommendation.plan_sha256 if self.recommendation and self.is_as_written else self._sha256

    @property
    def _sha256(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def deployed(self, **fields: Any) -> Plan:
        """Return the plan with other values of `DEPLOYED`: where and how often it runs. Its figures stay."""
        assert fields.keys() <= DEPLOYED, fields.keys()
        return self.model_copy(update=fields)


def rate_of(plan: PlanDraft) -> float:
    """Return the simulated arrival rate up to which a plan keeps its bounds, or the throughput if not simulated."""
    found = plan.estimate.capacity
    return plan.estimate.throughput_rps if found is None else found.rate_per_s
