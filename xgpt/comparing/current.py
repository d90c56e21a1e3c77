"""The settings of a current deployment, for any engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from xgpt.comparing.drafts import Drafts
from xgpt.core.errors import InputError
from xgpt.core.schema import DType, EngineSpec


@dataclass(frozen=True)
class CurrentEngine:
    """The settings of a running engine.

    Attributes:
        num_stages: pipeline stages of a replica, with `tp_degree` devices each.
        ep_degree: number of devices, perhaps of several replicas, that divide the experts of a layer, each holding
            whole experts.
        max_num_seqs: largest number of requests in a step.
        max_num_batched_tokens: largest number of tokens in a step.
        usable_memory: share of a device's memory that the engine uses. None means the share stated for the cluster.
        max_model_len: tokens of the longest request that the engine accepts. None means the model's context.
        shortens: whether the engine lowers `max_model_len` if K/V memory cannot hold a request of that length.
        dtype: data type in which the engine runs. None means the one in the model's config.
        kv_dtype: type of K/V. None means the dtype.
        quantization: the quantisation in the command, or None.
        notes: assumptions, as text.
        framework: name of the engine, as in configs/engines.
        version: its version, from the image's tag, or None if not known.
        model: the model in the command, or None.
        cuts_prompts: whether a step may encode a part of a prompt.
        drops_windows: whether keys and values outside the attention window of a layer are freed.
        text_only: whether the model's encoders of images and sound are not loaded.
        drafts: its speculative decoding, or None.
        kept_words: options of its command that a plan leaves as they are.
        schedules_ahead: whether a step is scheduled while the step before it runs. None means the engine's default.
    """

    tp_degree: int
    num_stages: int
    replicas: int
    ep_degree: int
    max_num_seqs: int
    max_num_batched_tokens: int
    usable_memory: float | None = None
    max_model_len: int | None = None
    shortens: bool = False
    dtype: DType | None = None
    kv_dtype: DType | None = None
    quantization: str | None = None
    notes: tuple[str, ...] = ()
    framework: str = "vllm"
    version: str | None = None
    model: str | None = None
    cuts_prompts: bool = True
    drops_windows: bool = True
    text_only: bool = False
    schedules_ahead: bool | None = None
    drafts: Drafts | None = None
    kept_words: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_devices(self) -> int:
        return self.tp_degree * self.num_stages * self.replicas

    def step_tokens(self, context: int) -> int:
        """Return the largest number of tokens of a step. If prompts are not cut, it is at least the length of the
        longest request.

        Args:
            context: the model's context.
        """
        longest = 0 if self.cuts_prompts else self.max_model_len or context
        return max(self.max_num_batched_tokens, longest)

    def as_started(self, engine: EngineSpec) -> EngineSpec:
        """Return the engine with those settings of its loop that the command changes."""
        changes: dict[str, Any] = {}
        if self.schedules_ahead is not None:
            changes["schedules_ahead"] = self.schedules_ahead
        if not self.drops_windows:
            changes["drops_windows"] = False
        if not self.cuts_prompts:
            sources = engine.sources | {"cuts_prompts": "--no-enable-chunked-prefill"}
            changes |= {"cuts_prompts": False, "sources": sources}
        return engine.model_copy(update=changes)


def is_model(served: str, name: str) -> bool:
    """Return whether the served model may be the one of this name: whether its name contains all parts of the name."""
    parts = set(re.findall(r"[a-z]+|[\d.]+[bmk]?", name.lower().rpartition("/")[2]))
    return parts <= set(re.findall(r"[a-z]+|[\d.]+[bmk]?", served.lower().rpartition("/")[2]))


def check_model(current: CurrentEngine, name: str) -> None:
    """Check that a command does not name a Hub model other than the one that the plans are for.

    Raises:
        InputError: the command names another model. A path, or a name without an owner, may be any model.
    """
    served = current.model or ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", served) and not is_model(served, name):
        accepted = f"the plans are for {name}: give `model={served}` and its `config`"
        raise InputError("current", served, accepted)
