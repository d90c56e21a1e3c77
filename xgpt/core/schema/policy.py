"""Define the settings of every policy. The search varies some of them, the control variables.

Each class declares its control variables, and whether throughput and latency rise or fall with each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

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
    """Tensor parallelism of a lane. Devices outside tensor-parallel groups are stages by themselves."""

    degree: PositiveInt = 1
    """Number of devices in a tensor-parallel group."""
    devices: int = Field(default=0, ge=0)
    """Number of the lane's devices in tensor-parallel groups."""
    ep_degree: PositiveInt = 1
    """Number of parts into which a group divides the experts of a layer."""


class SingleLane(Frozen):
    """Settings of all single-lane policies. Devices outside tensor-parallel groups are stages by themselves."""

    tp_degree: PositiveInt = 1
    """Number of devices in a tensor-parallel group."""
    tp_devices: int = Field(default=0, ge=0)
    """Number of a replica's devices in tensor-parallel groups."""
    ep_degree: PositiveInt = 1
    """Number of parts into which a tensor-parallel group divides the experts of a layer."""

    tuned: ClassVar[tuple[str, ...]] = ()
    """Names of the scheduling rule's settings that are neither control variables nor part of the placement."""
    steadying: ClassVar[tuple[str, ...]] = ()
    """Names of numeric settings of the scheduling rule that `--fix` can set. The default is 0."""
    lanes: ClassVar[tuple[StageLane, ...]] = ("both",)
    """The lanes of a replica."""
    mixes: ClassVar[bool] = True
    """Whether every step may both encode and decode."""
    holds_finished: ClassVar[bool] = False
    """Whether finished requests keep their slots until the whole batch has finished."""


class RraSettings(SingleLane):
    """Alternate between encoding `encode_batch` requests and `decode_iterations` decode iterations.

    `encode_batch` is a mean, since the scheduling rule fills steps by tokens (ExeGPT sec. 5.2). Source: ExeGPT sec.
    4.1.
    """

    kind: Literal["rra"] = "rra"
    """The policy."""
    encode_batch: PositiveInt
    """Mean number of requests that a phase encodes (B_E)."""
    decode_iterations: PositiveInt
    """Number of decode iterations in a phase (N_D)."""
    microbatches: PositiveInt = 1
    """Number of micro-batches that pass through the pipeline in turn."""

    mixes: ClassVar[bool] = False
    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("encode_batch", "rises", "rises", "requests encoded a phase (B_E)"),
        Variable("decode_iterations", "falls", "falls", "decode iterations a phase (N_D)"),
    )


class OrcaSettings(SingleLane):
    """Iteration-level scheduling: each step admits waiting requests to all free slots, and encodes their whole prompts.

    Source: ORCA Algorithm 1.
    """

    kind: Literal["orca"] = "orca"
    """The policy."""
    max_batch: PositiveInt
    """Largest number of running requests over all micro-batches, each of which has an equal share."""
    microbatches: PositiveInt = 1
    """Number of micro-batches that pass through the pipeline in turn."""

    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("max_batch", "rises", "rises", "largest number of running requests"),
    )


class SlackBudget(Frozen):
    """A limit on a step's prompt tokens by the slack of running requests: the time until their next tokens are due.

    A running request's next token is due when its mean time per token since the first one would reach a share `share`
    of the bound. By the plan's step times, a step gets as many prompt tokens as it can encode before any token is due.
    Source: FairBatching, arXiv 2510.14392.
    """

    least_tokens: PositiveInt
    """Least number of prompt tokens in a step, even if running requests are late."""
    most_tokens: PositiveInt
    """Largest number of prompt tokens in a step, even if running requests have more slack."""
    share: float = Field(default=0.95, gt=0, le=1)
    """Share of the bound on TPOT after which a token is due. The rest is a margin for steps that take longer than
    predicted and, in a pipeline, for other micro-batches' steps.
    """
    behind_tokens: NonNegativeInt = 0
    """Number of tokens by which a running request may be late. It catches up in steps with fewer prompt tokens."""

    @model_validator(mode="after")
    def _check(self) -> SlackBudget:
        if self.least_tokens > self.most_tokens:
            raise ValueError(f"least_tokens: {self.least_tokens} is more than most_tokens, {self.most_tokens}")
        return self


def most_running(token_budget: Any, microbatches: int) -> Any:
    """Return the largest number of running requests under vLLM's own scheduler, where each takes one token of a step.

    Args:
        token_budget: tokens in the steps of all micro-batches together, a number or an array.
    """
    return token_budget // microbatches


class ChunkedSettings(SingleLane):
    """In every step, decode all running requests, and add prompt chunks up to `token_budget` tokens."""

    kind: Literal["chunked"] = "chunked"
    """The policy."""
    token_budget: PositiveInt
    """Largest number of tokens in the steps of all micro-batches together. With `slack`, this is instead the number of
    tokens in a step at saturation.
    """
    max_batch: PositiveInt
    """Largest number of running requests over all micro-batches, each of which has an equal share."""
    microbatches: PositiveInt = 1
    """Number of micro-batches that pass through the pipeline in turn."""
    tuned: ClassVar[tuple[str, ...]] = ("slack",)
    slack: SlackBudget | None = None
    """Limit on prompt tokens by the slack of running requests. None means that `token_budget` limits them."""

    @property
    def step_budget(self) -> int:
        """Largest number of tokens in a step of one micro-batch."""
        return self.token_budget // self.microbatches

    @property
    def most_running(self) -> int:
        """Largest number of running requests under vLLM's own scheduler (`--max-num-seqs`)."""
        return int(min(self.max_batch, most_running(self.token_budget, self.microbatches)))

    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("token_budget", "none", "none", "largest number of tokens in a step"),
        Variable("max_batch", "rises", "rises", "largest number of requests in a step"),
    )


class StaticSettings(SingleLane):
    """Encode a batch, decode until its longest output has finished, and start the next batch, as FasterTransformer
    does.

    With more encode than decode micro-batches, this is the hybrid scheduling of DeepSpeed Inference.
    """

    kind: Literal["static"] = "static"
    """The policy."""
    batch: PositiveInt
    """Number of requests in a batch."""
    encode_microbatches: PositiveInt = 1
    """Number of parts in which a batch is encoded, one after the other."""
    decode_microbatches: PositiveInt = 1
    """Number of parts in which a batch is decoded, one after the other."""

    mixes: ClassVar[bool] = False
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
    """Whether devices are divided between the lanes by compute (WAA-C) or by memory (WAA-M)."""
    encode_batch: PositiveInt
    """Mean number of requests in an encode batch (B_E)."""
    max_decode_batch: PositiveInt
    """Largest number of requests in both lanes together."""
    decode_microbatches: PositiveInt = 1
    """Number of micro-batches of the decode lane."""
    buffer_iterations: NonNegativeInt = 0
    """Least number of decode iterations from the start of an encode batch until its requests decode, so that batches
    join at regular intervals. 0 means that requests join once their K/V has been transferred.
    """
    adjustment_percent: int = Field(default=0, ge=0, lt=100, exclude_if=lambda percent: not percent)
    """If the number of decoding requests differs from its planned mean by more than this percentage, the next encode
    batch is made smaller or larger by the same percentage (ExeGPT sec. 5.2). 0 means never.
    """
    encode_tp: TensorParallel = TensorParallel()
    """Tensor parallelism of the encode lane."""
    decode_tp: TensorParallel = TensorParallel()
    """Tensor parallelism of the decode lane."""

    tuned: ClassVar[tuple[str, ...]] = ()
    steadying: ClassVar[tuple[str, ...]] = ("adjustment_percent", "buffer_iterations")
    lanes: ClassVar[tuple[StageLane, ...]] = ("encode", "decode")
    mixes: ClassVar[bool] = False
    holds_finished: ClassVar[bool] = False
    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("encode_batch", "none", "rises", "requests encoded at once (B_E)"),
        Variable("max_decode_batch", "rises", "rises", "largest number of requests in decode"),
    )


SingleLaneSettings = RraSettings | OrcaSettings | ChunkedSettings | StaticSettings
PolicySettings = Annotated[SingleLaneSettings | WaaSettings, Field(discriminator="kind")]


def engine_slots(settings: PolicySettings) -> int | None:
    """Return for how many requests vLLM's own scheduler is started, or None if it does not run the settings."""
    return settings.most_running if isinstance(settings, ChunkedSettings) else None


POLICY_WORDS: dict[str, str] = {
    "rra": "encode a batch of prompts, then run several decode steps, in turn",
    "waa": "some devices encode and the others decode; waa-c divides the devices by computation, waa-m by memory",
    "waa-c": "",
    "waa-m": "",
    "chunked": "each step decodes the running requests and encodes chunks of waiting prompts",
    "orca": "the same with whole prompts",
    "static": "a batch runs until all its requests have finished",
    "slack": (
        "chunked, but each step encodes as many prompt tokens as the running requests can wait for under `tpot_s`; "
        "simulation tunes the rule"
    ),
}
"""By name: what a policy, or a choice of some of its settings, does."""
if TYPE_CHECKING:
    PolicyChoice = str
else:
    PolicyChoice = Literal[("auto", "exegpt", *POLICY_WORDS)]
POLICY_GROUPS: dict[str, tuple[str, ...]] = {
    "auto": ("rra", "chunked", "orca", "static", "waa-c", "waa-m"),
    "exegpt": ("rra", "waa-c", "waa-m"),
    "waa": ("waa-c", "waa-m"),
}
"""By name, the choices that stand for several policies."""


class Pinned(Frozen):
    """The schedule's settings that the user fixed. Re-planning keeps them. See also `constraint` and `admission`."""

    policy: PolicyChoice = "auto"
    """The policy, or the group of policies."""
    fixed: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """Values of the control variables and the placement variables that the user fixed."""
