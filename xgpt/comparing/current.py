"""The settings of a deployment that runs today, for any engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from xgpt.comparing.drafts import Drafts
from xgpt.core.errors import InputError
from xgpt.core.schema import DType, EngineSpec


@dataclass(frozen=True)
class CurrentEngine:
    """The settings of a running engine.

    Attributes:
        num_stages: pipeline stages of a replica, `tp_degree` devices each.
        ep_degree: devices that divide the whole experts of a layer among them, perhaps those of several replicas.
        max_num_seqs: largest number of requests in a step.
        max_num_batched_tokens: largest number of tokens in a step.
        usable_memory: share of a device's memory that it uses; None: the cluster's.
        max_model_len: tokens of the longest request that it accepts; None: the model's context.
        shortens: whether the engine shortens it if K/V memory cannot hold a request of that length.
        dtype: type that it runs in; None: the one in the model's config.
        kv_dtype: type of K/V; None: that of the dtype.
        quantization: the quantisation that the command names; None if it names none.
        notes: assumptions, in words.
        framework: the engine, as configs/engines names it.
        version: its version, as far as the image's tag says it.
        model: the model that the command serves; None if it names none.
        cuts_prompts: whether a step may take a part of a prompt.
        drops_windows: whether it frees keys and values that have left all windows of a layer.
        text_only: whether it leaves out the encoders of images and sound that a model has.
        drafts: how it drafts tokens ahead; None: not at all.
        schedules_ahead: whether it decides a step while the one before it runs; None: as the engine does by default.
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

    @property
    def num_devices(self) -> int:
        return self.tp_degree * self.num_stages * self.replicas

    def step_tokens(self, context: int) -> int:
        """Return the tokens of a largest step, which holds the longest request if prompts are not cut.

        Args:
            context: the model's.
        """
        longest = 0 if self.cuts_prompts else self.max_model_len or context
        return max(self.max_num_batched_tokens, longest)

    def as_started(self, engine: EngineSpec) -> EngineSpec:
        """Return an engine with the loop that the command asks for."""
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
    """Return whether what a command serves may be the model of this name: its name has all parts of the model's."""
    parts = set(re.findall(r"[a-z]+|[\d.]+[bmk]?", name.lower().rpartition("/")[2]))
    return parts <= set(re.findall(r"[a-z]+|[\d.]+[bmk]?", served.lower().rpartition("/")[2]))


def check_model(current: CurrentEngine, name: str) -> None:
    """Refuse a command that names another model on the Hub than the plans are for.

    Raises:
        InputError: it does. A path or a name without an owner may be any model.
    """
    served = current.model or ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", served) and not is_model(served, name):
        accepted = f"the plans are for {name}: give `model={served}`, with its `config`"
        raise InputError("current", served, accepted)
