"""The control variables of every policy: what a plan sets, what the search varies.

Each settings class declares its variables once, with the direction in which throughput and latency move; the search
space and the contract tests read them from here.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen

Direction = Literal["rises", "falls", "none"]
StageLane = Literal["both", "encode", "decode"]


class Variable(NamedTuple):
    """A control variable, and how throughput and latency move when it grows ("none": its values are enumerated)."""

    name: str
    throughput: Direction
    latency: Direction
    help: str


class TensorParallel(Frozen):
    """Tensor parallelism of a lane: `devices` of its devices run in groups of `degree`, the others one by one."""

    degree: PositiveInt = 1
    """Devices of a group."""
    devices: int = Field(default=0, ge=0)
    """Devices that run in groups."""
    ep_degree: PositiveInt = 1
    """Parts into which a group divides the experts of a layer."""


class SingleLane(Frozen):
    """Settings that the single-lane policies share.

    `tp_devices` of the devices run in groups of `tp_degree`, the others one by one.
    """

    tp_degree: PositiveInt = 1
    """Devices of a tensor-parallel group."""
    tp_devices: int = Field(default=0, ge=0)
    """Devices that run in such groups."""
    ep_degree: PositiveInt = 1
    """Parts into which such a group divides the experts of a layer."""

    tuned: ClassVar[tuple[str, ...]] = ()
    """Settings of the rule (not of the placement) other than the variables."""
    steadying: ClassVar[tuple[str, ...]] = ()
    """Settings of the rule that are numbers, 0 by default, and that `--fix` can hold."""
    lanes: ClassVar[tuple[StageLane, ...]] = ("both",)
    """The lanes of a replica's stages."""
    holds_finished: ClassVar[bool] = False
    """Whether requests keep their place until the whole batch has finished."""


class RraSettings(SingleLane):
    """Encode `encode_batch` requests, then run `decode_iterations` decode iterations, and again.

    Source: ExeGPT sec. 4.1. `encode_batch` is the average: the rule packs by tokens (sec. 5.2).
    """

    kind: Literal["rra"] = "rra"
    """The policy."""
    encode_batch: PositiveInt
    """Mean number of requests encoded in a phase (B_E)."""
    decode_iterations: PositiveInt
    """Decode iterations in a phase (N_D)."""
    microbatches: PositiveInt = 1
    """Micro-batches that pass the pipeline in turn."""
    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("encode_batch", "rises", "rises", "requests encoded a phase (B_E)"),
        Variable("decode_iterations", "falls", "falls", "decode iterations a phase (N_D)"),
    )

    @model_validator(mode="before")
    @classmethod
    def _without_thresholds(cls, data: object) -> object:
        """Plans of version 0.1 state the thresholds of a policy that is gone; null changes nothing."""
        if isinstance(data, dict) and data.get("thresholds", 0) is None:
            return {name: value for name, value in data.items() if name != "thresholds"}
        return data


class OrcaSettings(SingleLane):
    """Iteration-level scheduling: every free slot is refilled at each step, whole prompts at once.

    Source: ORCA Algorithm 1.
    """

    kind: Literal["orca"] = "orca"
    """The policy."""
    max_batch: PositiveInt
    """Largest number of requests that run at once, all micro-batches together; a step has a micro-batch's share."""
    microbatches: PositiveInt = 1
    """Micro-batches that pass the pipeline in turn."""

    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("max_batch", "rises", "rises", "largest number of requests that run at once"),
    )


class SlackBudget(Frozen):
    """A budget of prompt tokens in a step, from the time that running requests can spare.

    A running request's next token is due when its mean time per token would reach the plan's bound. A step takes as
    many prompt tokens as it can while ending, by the plan's own step times, before the first token is due.
    Source: FairBatching, arXiv 2510.14392, with deadlines from the first token on.
    """

    least_tokens: PositiveInt
    """Least number of prompt tokens in a step, however late running requests are."""
    most_tokens: PositiveInt
    """Largest number of prompt tokens in a step, however much time there is."""
    share: float = Field(default=0.95, gt=0, le=1)
    """Share of the bound on time per token at which tokens are due; the rest covers steps that take longer than the
    plan's step times, and in a pipeline the steps of other micro-batches."""
    behind_tokens: NonNegativeInt = 0
    """Number of tokens by which a running request may be late; it catches up in steps that encode little."""

    @model_validator(mode="after")
    def _check(self) -> SlackBudget:
        if self.least_tokens > self.most_tokens:
            raise ValueError(f"least_tokens: {self.least_tokens} is more than most_tokens, {self.most_tokens}")
        return self


class ChunkedSettings(SingleLane):
    """Every step decodes all running requests and fills up to `token_budget` tokens with pieces of prompts."""

    kind: Literal["chunked"] = "chunked"
    """The policy."""
    token_budget: PositiveInt
    """Largest number of tokens in the steps of all micro-batches together; with `slack`, the number at saturation."""
    max_batch: PositiveInt
    """Largest number of requests that run at once, all micro-batches together; a step has a micro-batch's share."""
    microbatches: PositiveInt = 1
    """Micro-batches that pass the pipeline in turn."""
    tuned: ClassVar[tuple[str, ...]] = ("slack",)
    slack: SlackBudget | None = None
    """Budget of prompt tokens by the time that running requests can spare; None: `token_budget` alone."""

    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("token_budget", "none", "none", "largest number of tokens in a step"),
        Variable("max_batch", "rises", "rises", "largest number of requests in a step"),
    )


class StaticSettings(SingleLane):
    """Encode a batch and decode it until its longest output has finished, then the next: FasterTransformer.

    With more encode than decode micro-batches it is DeepSpeed Inference's hybrid scheduling.
    """

    kind: Literal["static"] = "static"
    """The policy."""
    batch: PositiveInt
    """Number of requests in a batch."""
    encode_microbatches: PositiveInt = 1
    """Number of parts in which a batch is encoded."""
    decode_microbatches: PositiveInt = 1
    """Number of parts in which a batch is decoded."""

    holds_finished: ClassVar[bool] = True
    variables: ClassVar[tuple[Variable, ...]] = (Variable("batch", "none", "rises", "requests in a batch"),)

    @model_validator(mode="after")
    def _check(self) -> StaticSettings:
        if self.encode_microbatches % self.decode_microbatches:
            raise ValueError(
                f"encode_microbatches: {self.encode_microbatches} is not a multiple of decode_microbatches, "
                f"{self.decode_microbatches}"
            )
        return self


class WaaSettings(Frozen):
    """Encode on one group of devices and decode on another, asynchronously. Source: ExeGPT sec. 4.1."""

    kind: Literal["waa"] = "waa"
    """The policy."""
    allocation: Literal["compute", "memory"] = "compute"
    """How devices are divided between the lanes: by compute or by memory (WAA-C, WAA-M)."""
    encode_batch: PositiveInt
    """Number of requests encoded at once (B_E)."""
    max_decode_batch: PositiveInt
    """Largest number of requests in decode."""
    decode_microbatches: PositiveInt = 1
    """Micro-batches of the decode lane."""
    buffer_iterations: NonNegativeInt = 0
    """Least number of decode iterations from the start of an encode batch until it joins the decode batch, so that
    batches join at a steady pace; 0: each joins once it has been transferred."""
    adjustment_percent: int = Field(default=0, ge=0, lt=100, exclude_if=lambda percent: not percent)
    """Percent by which the requests in decode may differ from their mean number before an encode batch takes as many
    percent of its tokens more or fewer (ExeGPT sec. 5.2); 0: never."""
    encode_tp: TensorParallel = TensorParallel()
    """Tensor parallelism of the encode lane."""
    decode_tp: TensorParallel = TensorParallel()
    """Tensor parallelism of the decode lane."""

    tuned: ClassVar[tuple[str, ...]] = ()
    steadying: ClassVar[tuple[str, ...]] = ("adjustment_percent", "buffer_iterations")
    lanes: ClassVar[tuple[StageLane, ...]] = ("encode", "decode")
    holds_finished: ClassVar[bool] = False
    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("encode_batch", "none", "rises", "requests encoded at once (B_E)"),
        Variable("max_decode_batch", "rises", "rises", "largest number of requests in decode"),
    )


SingleLaneSettings = RraSettings | OrcaSettings | ChunkedSettings | StaticSettings
PolicySettings = Annotated[SingleLaneSettings | WaaSettings, Field(discriminator="kind")]


PolicyChoice = Literal["auto", "exegpt", "rra", "waa", "waa-c", "waa-m", "chunked", "orca", "static", "slack"]
POLICY_GROUPS: dict[str, tuple[str, ...]] = {
    "auto": ("rra", "chunked", "orca", "static", "waa-c", "waa-m"),
    "exegpt": ("rra", "waa-c", "waa-m"),
    "waa": ("waa-c", "waa-m"),
}
"""Choices that stand for several policies."""


class Pinned(Frozen):
    """What the user asked of the schedule, which re-planning keeps; the rest stands in `constraint` and `admission`."""

    policy: PolicyChoice = "auto"
    """The policy, or the group of policies."""
    fixed: dict[str, PositiveInt] = Field(default_factory=dict)
    """Values at which control variables and variables of the placement are held."""
