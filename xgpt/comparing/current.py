"""The settings of a deployment that runs today, for any engine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from xgpt.core.errors import InputError
from xgpt.core.schema import DType


@dataclass(frozen=True)
class CurrentEngine:
    """The settings of a running engine, which cuts prompts into chunks.

    Attributes:
        num_stages: pipeline stages of a replica, `tp_degree` devices each.
        ep_degree: parts into which these devices divide the experts of a layer.
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

    @property
    def num_devices(self) -> int:
        return self.tp_degree * self.num_stages * self.replicas


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
