"""What an engine of one version adds to the steps of a model: its loop, captured batches, scheduling."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen

UNSOURCED = frozenset({"name", "framework", "version", "scheduler", "sources"})
"""Fields of an engine that are not figures, and so need no source."""

TIMED = ("layer_s", "step_s", "request_s", "uncaptured", "mixing", "before_admission_s", "layer_path_s", "tokenise_s")
"""Figures of an engine that step times and first tokens hang on."""


class EngineSpec(Frozen):
    """An engine of one version, as a file of configs/engines describes it: its schedule, its costs, its memory.

    Times of the loop (`layer_s` to `captured_tokens`) enter profiles that are computed or imported for the engine; the
    steps of a measured profile contain them. None: the profile's own figure is used.
    """

    name: str
    """Name of the engine and its version, by which `--engine` finds it."""
    framework: str
    """The engine alone, as a profile names it: native, vllm, trtllm, sglang."""
    version: str
    """Version of that engine."""
    schedules_ahead: bool = False
    """Whether a step is decided while the one before it runs, before that one's tokens are known."""
    scheduler: Literal["own", "xgpt"] = "own"
    """Whether the engine decides steps by itself, or xgpt's scheduler class in it does."""
    waiting_step_s: NonNegativeFloat = 0.0
    """Further seconds of the loop for each step where it is decided after the one before, as by xgpt's scheduler."""
    waiting_request_s: NonNegativeFloat = 0.0
    """Further seconds then for each request in a step."""
    mixes: bool = True
    """Whether a step of orca and chunked both encodes and decodes; otherwise steps that encode come first."""
    cuts_prompts: bool = True
    """Whether such a step cuts a prompt that does not fit; otherwise the prompt waits for one that has room for it."""
    admits_by_use: bool = False
    """Whether requests enter by the K/V memory in use, and the last one is preempted if it runs out; otherwise each
    request's maximum is set aside."""
    batch_wait_steps: NonNegativeInt = 0
    """Steps in which prompts wait for others while requests decode, unless the step has `batch_wait_tokens`."""
    batch_wait_tokens: NonNegativeInt = 0
    """Tokens of a step, decodes and the prompts that wait, from which on they wait no longer."""
    layer_s: NonNegativeFloat | None = None
    """Seconds of a layer outside its operators: gaps between kernels, and the smallest of them."""
    step_s: NonNegativeFloat | None = None
    """Seconds of the loop for each step, apart from those that overlap with the device's work."""
    request_s: NonNegativeFloat | None = None
    """Seconds of the loop for each request in a step."""
    uncaptured: float | None = Field(default=None, ge=1)
    """Factor on the time of tokens beyond `captured_tokens`, whose kernels are launched one by one."""
    captured_tokens: NonNegativeInt | None = None
    """Largest number of tokens of a step that runs as a captured graph."""
    rounds_activations: bool = False
    """Whether products with weights of four bits round activations to eight, on devices that have kernels for it."""
    mixing: NonNegativeFloat = 0.0
    """Extra time of a step that both encodes and decodes, as a share of the time that its decodes take alone."""
    before_admission_s: NonNegativeFloat = 0.0
    """Seconds from a request's arrival at the server until the scheduler sees it, apart from `tokenise_s`."""
    tokenise_s: NonNegativeFloat = 0.0
    """Seconds more of them for each token of its prompt."""
    layer_path_s: NonNegativeFloat = 0.0
    """Seconds more of them for each of the model's layers: kernels of a prompt that the host launches one by one."""
    after_token_s: NonNegativeFloat = 0.0
    """Seconds from the end of a step until its tokens have left the server."""
    memory_share: float | None = Field(default=None, gt=0, le=1)
    """Share of a device's memory that the engine uses by default; None: the cluster's `usable_memory`."""
    shares_rest: bool = False
    """Whether that is a share of the memory that weights leave free."""
    shares_only_cache: bool = False
    """Whether it is for weights and K/V only, and a step's activations have the rest."""
    kept_bytes: NonNegativeInt | None = None
    """Bytes of it for anything but weights, K/V and activations; None: the planner's own allowance."""
    group_bytes: NonNegativeInt = 0
    """Further bytes on a device of a tensor-parallel group: buffers of all-reduces."""
    sampling_bytes: NonNegativeFloat = 0.0
    """Bytes of logits and sampling for each token of the vocabulary and each request of `max_batch`."""
    keeps_expert_buffers: bool = False
    """Whether the buffers between the products of experts stay allocated while tokens are sampled."""
    expert_multiple: PositiveInt = 1
    """Number of which the width of an expert in MXFP4 is padded to a multiple on each device."""
    marlin_multiples: tuple[PositiveInt, PositiveInt] | None = None
    """Numbers of which the hidden size and that width are padded to multiples by Marlin's kernels, which run on devices
    older than Hopper and on GeForce; None: as everywhere."""
    drops_windows: bool = False
    """Whether keys and values that have left all windows of a layer are freed."""
    block_size: PositiveInt = 16
    """Tokens of a K/V block."""
    max_batch: PositiveInt | None = None
    """Largest number of requests in a step by default: plans stay within it, unless `--fix` holds more."""
    token_budget: PositiveInt | None = None
    """Largest number of tokens in a step by default: orca's limit, and the largest budget of chunked, unless `--fix`
    holds more."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Source of each figure, by its field."""

    @model_validator(mode="before")
    @classmethod
    def _forget(cls, data: Any) -> Any:
        """Drop a figure of older files that no prediction read."""
        return {k: v for k, v in data.items() if k != "stream_interval"} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check(self) -> EngineSpec:
        fields = type(self).model_fields
        figures = fields.keys() - UNSOURCED
        stated = {name for name in figures if getattr(self, name) != fields[name].default}
        if missing := sorted(stated - self.sources.keys()):
            raise ValueError(f"sources: {', '.join(missing)} needs an entry in sources")
        if unknown := sorted(self.sources.keys() - figures):
            raise ValueError(f"sources: {', '.join(unknown)} is not a figure of an engine; leave it out")
        return self

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Names of figures of its times that are of another engine or version: sources say "as ..." or "borrowed"."""
        return tuple(name for name in TIMED if re.match(r"as |.*borrowed", self.sources.get(name, "")))

    @property
    def with_xgpt(self) -> EngineSpec:
        """The engine with xgpt's scheduler class in it, which decides each step after the one before."""
        if self.scheduler == "xgpt":
            return self
        name = {"scheduler": "xgpt", "name": f"xgpt-{self.name}"}
        return self.model_copy(update={**name, "schedules_ahead": False})

    def started_for(self, kind: str) -> EngineSpec:
        """Return the engine as it is started for a policy: with xgpt's scheduler class if it does not run it by itself.

        Only vLLM takes such a class, and by itself runs only chunked prompts under a token budget.
        """
        return self.with_xgpt if self.framework == "vllm" and kind != "chunked" else self

    def request_path_s(self, prompt: float, num_layers: int) -> float:
        """Return the seconds that a request spends outside of waiting and steps before each of its tokens.

        Args:
            prompt: its tokens.
            num_layers: the model's.
        """
        fixed_s = self.before_admission_s + self.layer_path_s * num_layers + self.after_token_s
        return fixed_s + self.tokenise_s * prompt
