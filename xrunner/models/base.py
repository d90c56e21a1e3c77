"""What every decoder-only family offers to workers, weight loading and the profiler."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from xgpt.schema import ModelSpec
from xrunner.attention import AttentionBackend, Batch
from xrunner.kv_cache import KvCache
from xrunner.layers import Empty, Linear


class DecoderModel(nn.Module):
    """Embedding, layers, head. A family says what these are and what a checkpoint calls their weights.

    `layers[i](hidden, batch, attend)` maps [tokens, hidden] to the same; `attend` is any `layers.Attend`.

    Attributes:
        checkpoint_layers: what a checkpoint calls the list of layers.
        checkpoint_names: our module to the checkpoint's: several where ours fuses them. Modules of a layer, both
            ours and theirs, are named within it ("layers.*." before ours); those not listed have our name.
    """

    checkpoint_layers: ClassVar[str]
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]]
    layers: nn.ModuleList

    def __init__(self, spec: ModelSpec, empty: Empty = torch.empty) -> None:
        super().__init__()
        self.spec = spec

    @abstractmethod
    def embed(self, batch: Batch) -> Tensor:
        """# [tokens, hidden]"""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the rows that are wanted. # [rows, hidden] -> [rows, vocab]"""

    def forward(self, batch: Batch, cache: KvCache, backend: AttentionBackend) -> Tensor:
        """One step; returns the logits of `batch.logit_rows`. # [sampled, vocab]"""
        hidden = self.embed(batch)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            hidden = layer(hidden, batch, partial(backend.forward, cache=layer_cache, batch=batch))
        return self.head(hidden[batch.logit_rows])

    def prepack(self) -> None:
        """Lay all projections out for the device. Weights cannot be loaded after this."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepack()

    def checkpoint_parameters(self, name: str) -> tuple[str, ...]:
        """What a checkpoint calls the parameter `name`: several names where ours fuses several."""
        module, _, leaf = name.rpartition(".")
        place, prefix = module, ""
        if module.startswith("layers."):
            _, index, inner = module.split(".", 2)
            place, prefix = f"layers.*.{inner}", f"{self.checkpoint_layers}.{index}."
            module = inner
        theirs = self.checkpoint_names.get(place, (module,))
        return tuple(f"{prefix}{other}.{leaf}" for other in theirs)
