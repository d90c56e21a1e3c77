"""OPT: learned positions, layer norm before each block, ReLU, biases everywhere. Source: arXiv 2205.01068."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from xgpt.schema import ModelSpec
from xrunner.attention import Batch
from xrunner.layers import Attend, Attention, Embedding, Empty, LayerNorm, Linear, Mlp
from xrunner.models.base import DecoderModel

POSITION_OFFSET = 2
"""The position table's first rows are never used."""


class OptLayer(nn.Module):
    def __init__(self, spec: ModelSpec, empty: Empty) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(empty, spec.hidden_size, spec.norm_eps)
        self.attention = Attention(
            empty,
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            qkv_bias=True,
            out_bias=True,
        )
        self.mlp_norm = LayerNorm(empty, spec.hidden_size, spec.norm_eps)
        self.mlp = Mlp(empty, spec.hidden_size, spec.ffn_size, spec.activation, bias=True)

    def forward(self, hidden: Tensor, batch: Batch, attend: Attend) -> Tensor:  # [tokens, hidden] -> same
        hidden = hidden + self.attention(self.attention_norm(hidden), attend)
        return hidden + self.mlp(self.mlp_norm(hidden))


class OptModel(DecoderModel):
    checkpoint_layers = "model.decoder.layers"
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "token_embedding": ("model.decoder.embed_tokens",),
        "position_embedding": ("model.decoder.embed_positions",),
        "layers.*.attention_norm": ("self_attn_layer_norm",),
        "layers.*.attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "layers.*.attention.out": ("self_attn.out_proj",),
        "layers.*.mlp_norm": ("final_layer_norm",),
        "layers.*.mlp.up": ("fc1",),
        "layers.*.mlp.down": ("fc2",),
        "final_norm": ("model.decoder.final_layer_norm",),
    }

    def __init__(self, spec: ModelSpec, empty: Empty = torch.empty) -> None:
        super().__init__(spec, empty)
        self.token_embedding = Embedding(empty, spec.vocab_size, spec.hidden_size)
        self.position_embedding = Embedding(empty, spec.max_context, spec.hidden_size, POSITION_OFFSET)
        self.layers = nn.ModuleList(OptLayer(spec, empty) for _ in range(spec.num_layers))
        self.final_norm = LayerNorm(empty, spec.hidden_size, spec.norm_eps)
        tied = self.token_embedding.weight if spec.tie_embeddings else None
        self.lm_head = Linear(empty, spec.hidden_size, spec.vocab_size, bias=False, weight=tied)

    def embed(self, batch: Batch) -> Tensor:
        return self.token_embedding(batch.token_ids) + self.position_embedding(batch.positions)

    def head(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.final_norm(hidden))
