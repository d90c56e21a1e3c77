"""Define how one version of an engine schedules, and which times it adds to a model's step times."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen

OF_OTHERS = "chunked"
"""The policy of the schedulers of other engines than xgpt's. They admit requests in order of arrival."""
UNSOURCED = frozenset({"name", "framework", "version", "scheduler", "sources"})
"""Fields of an engine that are not figures, so they need no source."""

TIMED = ("layer_s", "step_s", "request_s", "uncaptured", "mixing", "before_admission_s", "launch_s", "tokenise_s")
"""Figures of an engine on which step times and TTFT depend."""


CPU_BLOCK_SIZE = 32
"""Number of tokens in a K/V block of vLLM on a CPU."""


class EngineSpec(Frozen):
    """How one version of an engine schedules, its own times, and its memory (configs/engines).

    Times of the loop (`layer_s` to `captured_tokens`) are put into profiles that are computed or imported for the
    engine. A measured profile already contains them. None leaves the profile's figure unchanged.
    """

    name: str
    """Name of the engine with its version, for `--engine`."""
    framework: str
    """Name of the engine without its version, as in a profile: xgpt, vllm, trtllm, sglang."""
    version: str
    """Version of that engine."""
    schedules_ahead: bool = False
    """Whether a step is scheduled while the previous step runs, before the tokens of the previous step are known."""
    scheduler: Literal["own", "xgpt"] = "own"
    """Whether the engine's own scheduler runs, or xgpt's scheduler class."""
    waiting_step_s: NonNegativeFloat = 0.0
    """Further seconds of the loop for each step that is scheduled only after the previous step has ended."""
    waiting_request_s: NonNegativeFloat = 0.0
    """Further seconds of the loop for each request in such a step."""
    mixes: bool = True
    """Whether a step of orca or chunked may both encode and decode. Otherwise prompts are encoded first, in separate
    steps.
    """
    cuts_prompts: bool = True
    """Whether a step may encode only a part of a prompt. Otherwise a prompt waits until a step can take all of it."""
    admits_by_use: bool = False
    """Whether requests enter as long as K/V memory is free, and the last one is preempted if memory runs out. Otherwise
    memory is reserved for each request's maximum output.
    """
    spare_tokens: NonNegativeInt = 0
    """If it `admits_by_use`: K/V tokens that must be free beside the prompt of a request that enters while others run.
    """
    spare_tokens_each: NonNegativeInt = 0
    """Further such tokens for each request that runs."""
    batch_wait_steps: NonNegativeInt = 0
    """Largest number of steps for which prompts wait for further prompts while requests decode."""
    batch_wait_tokens: NonNegativeInt = 0
    """Prompts wait no longer once decodes and waiting prompts together have this number of tokens."""
    receive_steps: PositiveInt = 1
    """Number of decode steps between two checks for new requests. There is also a check after each step that encodes.
    """
    layer_s: NonNegativeFloat | None = None
    """Seconds of each layer for gaps between kernels and for the smallest kernels, which profiles do not count."""
    step_s: NonNegativeFloat | None = None
    """Seconds of the loop for each step, in addition to the device's work."""
    request_s: NonNegativeFloat | None = None
    """Seconds of the loop for each request in a step."""
    uncaptured: float | None = Field(default=None, ge=1)
    """Factor on the time of a step's tokens beyond `captured_tokens`, whose kernels are launched one by one."""
    captured_tokens: NonNegativeInt | None = None
    """Largest number of tokens of a step that runs as a CUDA graph."""
    launch_s: NonNegativeFloat = 0.0
    """Seconds to launch a kernel in a step that encodes. Such steps run outside of a CUDA graph, at least in part."""
    rounds_activations: bool = False
    """Whether matrix products with 4-bit weights round activations to 8 bits, on devices with kernels for this."""
    mixing: NonNegativeFloat = 0.0
    """Extra time of a step that both encodes and decodes, as a share of the time of a step with only its decodes."""
    before_admission_s: NonNegativeFloat = 0.0
    """Seconds from a request's arrival at the server until the scheduler sees it, without `tokenise_s`."""
    tokenise_s: NonNegativeFloat = 0.0
    """Further seconds until then, for each token of the prompt."""
    stream_s: NonNegativeFloat = 0.0
    """CPU seconds of an API server for each token that it streams, or 0 if not known."""
    after_token_s: NonNegativeFloat = 0.0
    """Seconds from the end of a step until its tokens have left the server."""
    memory_share: float | None = Field(default=None, gt=0, le=1)
    """Share of a device's memory that the engine uses by default. None means the cluster's `usable_memory`."""
    shares_rest: bool = False
    """Whether `memory_share` is a share of the memory beside the weights."""
    shares_only_cache: bool = False
    """Whether `memory_share` is only for weights and K/V, and activations use the rest."""
    kept_bytes: NonNegativeInt | None = None
    """Bytes that the engine uses besides weights, K/V and activations. None means the planner's allowance."""
    graph_bytes: NonNegativeFloat = Field(default=0.0, exclude_if=lambda size: not size)
    """Bytes that the engine sets aside for CUDA graphs, for each layer and each element of a hidden state."""
    group_bytes: NonNegativeInt = 0
    """Further bytes on each device of a tensor-parallel group, for buffers of all-reduces."""
    sampling_bytes: NonNegativeFloat = 0.0
    """Bytes for logits and sampling, for each token of the vocabulary and each request of `max_batch`."""
    keeps_expert_buffers: bool = False
    """Whether the buffers between the experts' matrix products stay allocated while tokens are sampled."""
    expert_multiple: PositiveInt = 1
    """The width of an MXFP4 expert on each device is padded to a multiple of this number."""
    marlin_multiples: tuple[PositiveInt, PositiveInt] | None = None
    """On devices where Marlin's kernels run MXFP4, they pad the hidden size to a multiple of the first number and the
    width of an expert to a multiple of the second. None means the same padding as on other devices.
    """
    drops_windows: bool = False
    """Whether K/V outside the attention window of a layer is freed."""
    shares_pages: bool = Field(default=False, exclude_if=lambda shares: not shares)
    """Whether all kinds of layers take pages of one size from one pool. Otherwise each kind has memory of its own."""
    state_copies: PositiveInt = Field(default=1, exclude_if=lambda copies: copies == 1)
    """Number of pages that a request takes for each group of layers with a state."""
    counts_all_steps: bool = Field(default=False, exclude_if=lambda counts: not counts)
    """Whether the engine counts the tokens of all steps that may run at the same time beside a window when it checks
    whether a request fits. Otherwise it counts those of one step.
    """
    logs_requests: bool = Field(default=False, exclude_if=lambda logs: not logs)
    """Whether the K/V tokens in the engine's log are the number of longest requests times their length. Otherwise they
    are the blocks of a group of layers times the smallest block.
    """
    block_size: PositiveInt = 16
    """Number of tokens in a K/V block."""
    max_batch: PositiveInt | None = None
    """The engine's default limit on requests in a step. Plans do not exceed it unless `--fix` sets more."""
    token_budget: PositiveInt | None = None
    """The engine's default limit on tokens in a step. Orca does not exceed it, and chunked does not unless `--fix` sets
    more.
    """
    sources: dict[str, str] = Field(default_factory=dict)
    """The source of each figure, by field name."""

    @model_validator(mode="after")
    def _check(self) -> EngineSpec:
        fields = type(self).model_fields
        figures = fields.keys() - UNSOURCED
        stated = {name for name in figures if getattr(self, name) != fields[name].default}
        if missing := sorted(stated - self.sources.keys()):
            raise ValueError(f"sources: add the source of {', '.join(missing)}")
        if unknown := sorted(self.sources.keys() - figures):
            raise ValueError(f"sources: {', '.join(unknown)} is not a figure of an engine; leave it out")
        return self

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Names of times from another engine or version, whose sources say "as ..." or "borrowed"."""
        return tuple(name for name in TIMED if re.match(r"as |.*borrowed", self.sources.get(name, "")))

    @property
    def runs_alone(self) -> bool:
        """Whether another engine than xgpt's runs by its own scheduler: `xgpt serve` cannot change the plan of one."""
        return self.framework != "xgpt" and self.scheduler == "own"

    @property
    def takes_ours(self) -> bool:
        """Whether xgpt's scheduler can run in the engine. Only vLLM accepts such a class."""
        return self.framework in ("xgpt", "vllm")

    @property
    def with_xgpt(self) -> EngineSpec:
        """The engine with xgpt's scheduler class, which schedules a step only after the previous step has ended."""
        if self.scheduler == "xgpt":
            return self
        return self.but(scheduler="xgpt", name=f"xgpt-{self.name}", schedules_ahead=False)

    def measured_on(self, device: Literal["cpu", "gpu"]) -> EngineSpec:
        """Return the engine for a profile that was measured in it. The profile contains the times of its loop, and
        measures them without scheduling ahead. On a CPU, the engine's memory is what its command states.
        """
        of_gpus = ("memory_share", "kept_bytes", "group_bytes", "sampling_bytes", "keeps_expert_buffers")
        reset: tuple[str, ...] = (*TIMED, "step_s", "schedules_ahead", "waiting_step_s", "waiting_request_s")
        reset += ("captured_tokens",)
        reset += (*of_gpus, "stream_s", "after_token_s") if device == "cpu" else ()
        fields = type(self).model_fields
        changes: dict[str, Any] = {name: fields[name].default for name in reset}
        sources = {name: text for name, text in self.sources.items() if name not in reset}
        if device == "cpu" and self.framework == "vllm":
            changes["block_size"] = CPU_BLOCK_SIZE
            sources["block_size"] = "the smallest that vLLM's attention on CPUs accepts"
        return self.but(**changes, sources=sources)

    def runs(self, kind: str) -> bool:
        """Return whether the engine runs a policy with the scheduler that it has."""
        return kind == OF_OTHERS or "xgpt" in (self.framework, self.scheduler)

    def started_for(self, kind: str) -> EngineSpec:
        """Return the engine as it runs a policy: with xgpt's scheduler class if its own scheduler lacks the policy."""
        return self if self.runs(kind) or not self.takes_ours else self.with_xgpt

    def request_path_s(self, prompt: float) -> float:
        """Return the part of a request's TTFT, in seconds, that is neither waiting nor steps. The engine runs other
        requests meanwhile.

        Args:
            prompt: number of prompt tokens.
        """
        return self.before_admission_s + self.after_token_s + self.tokenise_s * prompt
