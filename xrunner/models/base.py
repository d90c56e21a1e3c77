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
from xrunner.layers import Attend, Attention, Embedding, Empty, LayerNorm, Linear, RmsNorm


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward block, each after a norm and added to what it was given."""

    def __init__(self, attention_norm: nn.Module, attention: Attention, mlp_norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(self, hidden: Tensor, batch: Batch, attend: Attend) -> Tensor:  # [tokens, hidden] -> same
        hidden = hidden + self.attention(self.attention_norm(hidden), batch.positions, attend)
        return hidden + self.mlp(self.mlp_norm(hidden))


class DecoderModel(nn.Module):
    """Embedding, layers, head. A family says what its blocks are and what a checkpoint calls their weights.

    `layers[i](hidden, batch, attend)` maps [tokens, hidden] to the same; `attend` is any `layers.Attend`.

    Attributes:
        norm: the kind of all norms outside attention.
        checkpoint_layers: what a checkpoint calls the list of layers.
        checkpoint_names: our module to the checkpoint's: several where ours fuses them. Modules of a layer, both
            ours and theirs, are named within it ("layers.*." before ours); those not listed have our name.
        checkpoint_transposed: whether a checkpoint stores the projections of its layers as [in, out].
    """

    norm: ClassVar[type[LayerNorm | RmsNorm]] = LayerNorm
    checkpoint_layers: ClassVar[str]
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]]
    checkpoint_transposed: ClassVar[bool] = False

    def __init__(self, spec: ModelSpec, empty: Empty = torch.empty) -> None:
        super().__init__()
        self.spec = spec
        self.token_embedding = Embedding(empty, spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(self._layer(empty) for _ in range(spec.num_layers))
        self.final_norm = self.norm(empty, spec.hidden_size, spec.norm_eps)
        tied = self.token_embedding.weight if spec.tie_embeddings else None
        self.lm_head = Linear(empty, spec.hidden_size, spec.vocab_size, bias=False, weight=tied)

    def _layer(self, empty: Empty) -> DecoderLayer:
        size, eps = self.spec.hidden_size, self.spec.norm_eps
        return DecoderLayer(
            self.norm(empty, size, eps), self.attention(empty), self.norm(empty, size, eps), self.mlp(empty)
        )

    @abstractmethod
    def attention(self, empty: Empty) -> Attention:
        """The attention block of one layer."""

    @abstractmethod
    def mlp(self, empty: Empty) -> nn.Module:
        """The feed-forward block of one layer."""

    def embed(self, batch: Batch) -> Tensor:
        """# [tokens, hidden]"""
        return self.token_embedding(batch.token_ids)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the rows that are wanted. # [rows, hidden] -> [rows, vocab]"""
        return self.lm_head(self.final_norm(hidden))

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
