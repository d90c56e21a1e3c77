"""Define the settings of every policy, including the control variables that the search varies.

Each class declares its variables, and whether throughput and latency rise or fall with each. The search space and the
contract tests read these declarations.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen

Direction = Literal["rises", "falls", "none"]
StageLane = Literal["both", "encode", "decode"]


class Variable(NamedTuple):
    """A control variable, and how throughput and latency change when it grows.

    A policy has at most two variables. If `latency` is "none", each value of the variable is searched separately, so it
    should have few values (see `Forecast.values`). Other variables are searched by branch and bound.
    """

    name: str
    throughput: Direction
    latency: Direction
    help: str


class TensorParallel(Frozen):
    """Tensor parallelism of a lane: `devices` devices form groups of `degree`. Each other device is its own stage."""

    degree: PositiveInt = 1
    """Number of devices in a group."""
    devices: int = Field(default=0, ge=0)
    """Number of the lane's devices that are in groups."""
    ep_degree: PositiveInt = 1
    """Number of parts into which a group divides the experts of a layer."""


class SingleLane(Frozen):
    """Settings of all single-lane policies. `tp_devices` of a replica's devices form groups of `tp_degree`. Each other
    device is a stage by itself.
    """

    tp_degree: PositiveInt = 1
    """Number of devices in a tensor-parallel group."""
    tp_devices: int = Field(default=0, ge=0)
    """Number of devices in tensor-parallel groups."""
    ep_degree: PositiveInt = 1
    """Number of parts into which a tensor-parallel group divides the experts of a layer."""

    tuned: ClassVar[tuple[str, ...]] = ()
    """Names of the scheduling rule's settings that are neither control variables nor part of the placement."""
    steadying: ClassVar[tuple[str, ...]] = ()
    """Names of numeric settings of the scheduling rule that `--fix` can set. The default is 0."""
    lanes: ClassVar[tuple[StageLane, ...]] = ("both",)
    """The lanes of a replica."""
    holds_finished: ClassVar[bool] = False
    """Whether finished requests keep their slots until the whole batch has finished."""


class RraSettings(SingleLane):
    """Encode `encode_batch` requests, run `decode_iterations` decode iterations, and repeat this.

    `encode_batch` is a mean number of requests, since the scheduling rule fills steps by tokens (ExeGPT sec. 5.2).
    Source: ExeGPT sec. 4.1.
    """

    kind: Literal["rra"] = "rra"
    """The policy."""
    encode_batch: PositiveInt
    """Mean number of requests that a phase encodes (B_E)."""
    decode_iterations: PositiveInt
    """Number of decode iterations in a phase (N_D)."""
    microbatches: PositiveInt = 1
    """Number of micro-batches that pass through the pipeline in turn."""
    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("encode_batch", "rises", "rises", "requests encoded a phase (B_E)"),
        Variable("decode_iterations", "falls", "falls", "decode iterations a phase (N_D)"),
    )


class OrcaSettings(SingleLane):
    """Iteration-level scheduling: at each step, waiting requests fill all free slots, and the step encodes their whole
    prompts.

    Source: ORCA Algorithm 1.
    """

    kind: Literal["orca"] = "orca"
    """The policy."""
    max_batch: PositiveInt
    """Largest number of running requests over all micro-batches. A step runs one micro-batch's share of them."""
    microbatches: PositiveInt = 1
    """Number of micro-batches that pass through the pipeline in turn."""

    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("max_batch", "rises", "rises", "largest number of running requests"),
    )


class SlackBudget(Frozen):
    """A limit on the prompt tokens of a step, from the slack of running requests.

    A running request's next token is due at the time when its mean time per token would reach the plan's bound. By the
    plan's step times, a step gets as many prompt tokens as it can encode before any token is due. Source: FairBatching,
    arXiv 2510.14392. In xgpt, deadlines count from the first token.
    """

    least_tokens: PositiveInt
    """Least number of prompt tokens in a step, even if running requests are late."""
    most_tokens: PositiveInt
    """Largest number of prompt tokens in a step, even if running requests have more slack."""
    share: float = Field(default=0.95, gt=0, le=1)
    """Share of the bound on TPOT after which a token is due. The rest of the bound is a margin for steps that take
    longer than predicted and, in a pipeline, for the steps of other micro-batches.
    """
    behind_tokens: NonNegativeInt = 0
    """Number of tokens by which a running request may be late. It catches up in steps with few prompt tokens."""

    @model_validator(mode="after")
    def _check(self) -> SlackBudget:
        if self.least_tokens > self.most_tokens:
            raise ValueError(f"least_tokens: {self.least_tokens} is more than most_tokens, {self.most_tokens}")
        return self


def most_running(token_budget: Any, microbatches: int) -> Any:
    """Return the largest number of running requests under vLLM's own scheduler. Each running request takes one token of
    a step.

    Args:
        token_budget: tokens in the steps of all micro-batches together, as a number or an array.
    """
    return token_budget // microbatches


class ChunkedSettings(SingleLane):
    """In every step, decode all running requests, and add chunks of prompts until the step has `token_budget`
    tokens.
    """

    kind: Literal["chunked"] = "chunked"
    """The policy."""
    token_budget: PositiveInt
    """Largest number of tokens in the steps of all micro-batches together. If `slack` limits steps instead, this is the
    number of tokens in a step at saturation.
    """
    max_batch: PositiveInt
    """Largest number of running requests over all micro-batches. A step runs one micro-batch's share of them."""
    microbatches: PositiveInt = 1
    """Number of micro-batches that pass through the pipeline in turn."""
    tuned: ClassVar[tuple[str, ...]] = ("slack",)
    slack: SlackBudget | None = None
    """Limit on prompt tokens from the slack of running requests. None means that only `token_budget` limits them."""

    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("token_budget", "none", "none", "largest number of tokens in a step"),
        Variable("max_batch", "rises", "rises", "largest number of requests in a step"),
    )


class StaticSettings(SingleLane):
    """Encode a batch, decode it until its longest output has finished, and then start the next batch, as
    FasterTransformer does.

    With more encode than decode micro-batches, this is the hybrid scheduling of DeepSpeed Inference.
    """

    kind: Literal["static"] = "static"
    """The policy."""
    batch: PositiveInt
    """Number of requests in a batch."""
    encode_microbatches: PositiveInt = 1
    """Number of parts of a batch that are encoded one after the other."""
    decode_microbatches: PositiveInt = 1
    """Number of parts of a batch that are decoded one after the other."""

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
    """Encode on one group of devices and decode on another, asynchronously.

    Source: ExeGPT sec. 4.1."""

    kind: Literal["waa"] = "waa"
    """The policy."""
    allocation: Literal["compute", "memory"] = "compute"
    """Division of devices between the lanes: by compute or by memory (WAA-C, WAA-M)."""
    encode_batch: PositiveInt
    """Number of requests that are encoded together (B_E)."""
    max_decode_batch: PositiveInt
    """Largest number of requests in both lanes."""
    decode_microbatches: PositiveInt = 1
    """Number of micro-batches of the decode lane."""
    buffer_iterations: NonNegativeInt = 0
    """Least number of decode iterations from the start of an encode batch until its requests decode. With it, batches
    join at regular intervals. 0 means that requests join once their K/V has been transferred.
    """
    adjustment_percent: int = Field(default=0, ge=0, lt=100, exclude_if=lambda percent: not percent)
    """If the number of decoding requests differs from its mean by more than this percentage, the next encode batch is
    made smaller or larger by the same percentage (ExeGPT sec. 5.2). 0 means that encode batches are never adjusted.
    """
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
"""By name, the choices that stand for several policies."""


class Pinned(Frozen):
    """The schedule's settings that the user fixed. Re-planning keeps these settings. See also `constraint` and
    `admission`.
    """

    policy: PolicyChoice = "auto"
    """The policy, or the group of policies."""
    fixed: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """Values of the control variables and the placement variables that the user fixed."""
