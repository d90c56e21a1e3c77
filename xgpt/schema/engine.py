"""What an engine of one version adds to the steps of a model: its loop, captured batches, scheduling."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from xgpt.schema.base import Frozen

UNSOURCED = frozenset({"name", "framework", "version", "sources"})
"""Fields of an engine that are no figures."""


class EngineSpec(Frozen):
    """An engine of one version, as configs/engines describes it: how it schedules, what it costs, what it keeps.

    Times of the loop (`layer_s` to `captured_tokens`) are part of profiles that are computed or imported for the
    engine; a measured profile has them in its steps. Where one is None, the profile's own stands.
    """

    name: str
    """Name of the engine and its version, by which `--engine` finds it."""
    framework: str
    """The engine alone, as a profile names it: native, vllm, trtllm, sglang."""
    version: str
    """Version of that engine."""
    schedules_ahead: bool = False
    """Whether a step is decided while the one before it runs, before that one's tokens are known."""
    mixes: bool = True
    """Whether a step both encodes and decodes by default; otherwise steps that encode come first."""
    cuts_prompts: bool = True
    """Whether a prompt is cut to fit a step by default; otherwise it waits for one that has room for all of it."""
    layer_s: NonNegativeFloat | None = None
    """Seconds of a layer outside its operators: gaps between kernels, and the smallest of them."""
    step_s: NonNegativeFloat | None = None
    """Seconds of the loop for each step, without what is hidden behind the device's work."""
    request_s: NonNegativeFloat | None = None
    """Seconds of the loop for each request in a step."""
    uncaptured: float | None = Field(default=None, ge=1)
    """Factor on what tokens beyond `captured_tokens` take, whose kernels are launched one by one."""
    captured_tokens: NonNegativeInt | None = None
    """Tokens up to which steps run as captured graphs."""
    mixing: NonNegativeFloat = 0.0
    """Share of what decodes take in a step of their own, by which one that also encodes takes longer than its parts."""
    before_admission_s: NonNegativeFloat = 0.0
    """Seconds from a request's arrival at the server until the scheduler sees it."""
    after_token_s: NonNegativeFloat = 0.0
    """Seconds from the end of a step until its tokens have left the server."""
    memory_share: float | None = Field(default=None, gt=0, le=1)
    """Share of a device's memory that it takes by itself; None: what the cluster says."""
    shares_rest: bool = False
    """Whether that is a share of what weights leave."""
    kept_bytes: NonNegativeInt | None = None
    """Bytes of it that hold neither weights nor K/V nor activations; None: the planner's own allowance."""
    group_bytes: NonNegativeInt = 0
    """Bytes more on a device that shares layers with others: buffers of all-reduces."""
    block_size: PositiveInt = 16
    """Tokens of a K/V block."""
    max_batch: PositiveInt | None = None
    """Requests in a step at most, where nothing else is set."""
    token_budget: PositiveInt | None = None
    """Tokens in a step at most, where nothing else is set."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Where each figure comes from, by its field."""

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
            raise ValueError(f"sources: {', '.join(missing)} is given without its source")
        if unknown := sorted(self.sources.keys() - figures):
            raise ValueError(f"sources: {', '.join(unknown)} is no figure of an engine")
        return self

    @property
    def request_path_s(self) -> float:
        """Seconds that every request takes outside of waiting and steps: to its first token, and to its last."""
        return self.before_admission_s + self.after_token_s
