"""Define how one version of an engine schedules, and what its steps cost. The costs are added to a model's step
times.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen

UNSOURCED = frozenset({"name", "framework", "version", "scheduler", "sources"})
"""Fields of an engine that are not figures, so they need no source."""

TIMED = ("layer_s", "step_s", "request_s", "uncaptured", "mixing", "before_admission_s", "layer_path_s", "tokenise_s")
"""Figures of an engine on which step times and TTFT depend."""


class EngineSpec(Frozen):
    """The schedule, costs and memory of one version of an engine, as in a file of configs/engines.

    Times of the loop (`layer_s` to `captured_tokens`) are added to profiles that are computed or imported for the
    engine. A measured profile already contains them. A field that is None leaves the profile's figure unchanged.
    """

    name: str
    """Name of the engine with its version, as `--engine` accepts it."""
    framework: str
    """Name of the engine without its version, as in a profile: xgpt, vllm, trtllm, sglang."""
    version: str
    """Version of that engine."""
    schedules_ahead: bool = False
    """Whether a step is scheduled while the previous step runs, before the tokens of the previous step are known."""
    scheduler: Literal["own", "xgpt"] = "own"
    """The scheduler: the engine's own, or xgpt's scheduler class."""
    waiting_step_s: NonNegativeFloat = 0.0
    """Further seconds of the loop for each step that is scheduled only after the previous step, as by xgpt's scheduler.
    """
    waiting_request_s: NonNegativeFloat = 0.0
    """Further seconds for each request in such a step."""
    mixes: bool = True
    """Whether a step of orca and chunked may both encode and decode. Otherwise separate steps encode prompts first."""
    cuts_prompts: bool = True
    """Whether a step may encode a part of a prompt. Otherwise a prompt waits until a step can take all of it."""
    admits_by_use: bool = False
    """Whether requests enter as long as K/V memory is free. The last request is preempted if memory runs out. Otherwise
    memory is reserved for each request's maximum.
    """
    batch_wait_steps: NonNegativeInt = 0
    """Largest number of steps for which prompts wait for further prompts while requests decode. They wait no longer
    once the step would have `batch_wait_tokens` tokens.
    """
    batch_wait_tokens: NonNegativeInt = 0
    """Prompts wait no longer once decodes and waiting prompts together have this number of tokens."""
    receive_steps: PositiveInt = 1
    """Number of decode steps between two checks for new requests. The step after a step that encodes also checks."""
    layer_s: NonNegativeFloat | None = None
    """Seconds in each layer for gaps between kernels and for the smallest kernels, which profiles do not count."""
    step_s: NonNegativeFloat | None = None
    """Seconds of the loop for each step, not counting the seconds in which the device works."""
    request_s: NonNegativeFloat | None = None
    """Seconds of the loop for each request in a step."""
    uncaptured: float | None = Field(default=None, ge=1)
    """Factor on the time of a step's tokens beyond `captured_tokens`. The kernels for these tokens are launched one by
    one.
    """
    captured_tokens: NonNegativeInt | None = None
    """Largest number of tokens of a step that runs as a captured graph."""
    rounds_activations: bool = False
    """Whether products with 4-bit weights round activations to 8 bits, on devices that have kernels for this."""
    mixing: NonNegativeFloat = 0.0
    """Extra time of a step that both encodes and decodes, as a share of the time of a step with only its decodes."""
    before_admission_s: NonNegativeFloat = 0.0
    """Seconds from a request's arrival at the server until the scheduler sees the request, without `tokenise_s`."""
    tokenise_s: NonNegativeFloat = 0.0
    """Further seconds, for each token of the prompt, until the scheduler sees the request."""
    stream_s: NonNegativeFloat = 0.0
    """Seconds of one core for each token that an API server streams, or 0 if not known."""
    layer_path_s: NonNegativeFloat = 0.0
    """Further seconds before the first token, for each layer of the model, since the host launches a prompt's kernels
    one by one.
    """
    after_token_s: NonNegativeFloat = 0.0
    """Seconds from the end of a step until its tokens have left the server."""
    memory_share: float | None = Field(default=None, gt=0, le=1)
    """Share of a device's memory that the engine uses by default. None means the cluster's `usable_memory`."""
    shares_rest: bool = False
    """Whether `memory_share` is a share of the memory that weights leave free."""
    shares_only_cache: bool = False
    """Whether `memory_share` is only for weights and K/V. The rest of the memory is then for the activations of a
    step.
    """
    kept_bytes: NonNegativeInt | None = None
    """Bytes that the engine uses besides weights, K/V and activations. None means the planner's allowance."""
    group_bytes: NonNegativeInt = 0
    """Further bytes on each device of a tensor-parallel group, for buffers of all-reduces."""
    sampling_bytes: NonNegativeFloat = 0.0
    """Bytes of logits and sampling for each token of the vocabulary and each request of `max_batch`."""
    keeps_expert_buffers: bool = False
    """Whether the buffers between the experts' matrix products stay allocated while tokens are sampled."""
    expert_multiple: PositiveInt = 1
    """On each device, the width of an expert in MXFP4 is padded to a multiple of this number."""
    marlin_multiples: tuple[PositiveInt, PositiveInt] | None = None
    """On devices for which the engine has no kernels of its own for MXFP4, Marlin's kernels pad the hidden size to a
    multiple of the first number, and the width of an expert to a multiple of the second. None means no other padding
    than on other devices.
    """
    drops_windows: bool = False
    """Whether K/V outside the attention window of a layer is freed."""
    block_size: PositiveInt = 16
    """Number of tokens in a K/V block."""
    max_batch: PositiveInt | None = None
    """Default largest number of requests in a step. Plans do not exceed this number unless `--fix` sets more."""
    token_budget: PositiveInt | None = None
    """Default largest number of tokens in a step. The default limits orca, and also limits chunked unless `--fix` sets
    more.
    """
    sources: dict[str, str] = Field(default_factory=dict)
    """By field name, the source of each figure."""

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
        """Names of times that come from another engine or version. The sources of such times say "as ..." or
        "borrowed".
        """
        return tuple(name for name in TIMED if re.match(r"as |.*borrowed", self.sources.get(name, "")))

    @property
    def with_xgpt(self) -> EngineSpec:
        """The engine with xgpt's scheduler class, which schedules a step only after the previous step has ended."""
        if self.scheduler == "xgpt":
            return self
        return self.but(scheduler="xgpt", name=f"xgpt-{self.name}", schedules_ahead=False)

    def started_for(self, kind: str) -> EngineSpec:
        """Return the engine that runs a policy. It has xgpt's scheduler class if the engine's own scheduler lacks the
        policy.

        Only vLLM accepts such a class. vLLM's own scheduler runs only chunked prompts under a token budget.
        """
        return self.with_xgpt if self.framework == "vllm" and kind != "chunked" else self

    def request_path_s(self, prompt: float, num_layers: int) -> float:
        """Return the part of a request's time to first token, in seconds, that is spent neither waiting nor in steps.

        Args:
            prompt: number of prompt tokens.
            num_layers: number of layers of the model.
        """
        fixed_s = self.before_admission_s + self.layer_path_s * num_layers + self.after_token_s
        return fixed_s + self.tokenise_s * prompt
