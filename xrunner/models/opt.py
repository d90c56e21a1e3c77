"""OPT: learned positions, layer norm before each block, ReLU, biases everywhere. Source: arXiv 2205.01068."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from xgpt.core.schema import ModelSpec
from xrunner.attention import Batch
from xrunner.models.base import DecoderModel
from xrunner.models.layers import Embedding, Empty, Mlp, SelfAttention

POSITION_OFFSET = 2
"""First row of the position table that is used."""


class OptModel(DecoderModel):
    checkpoint_layers: ClassVar[dict[str, str]] = {"layers": "model.decoder.layers"}
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

    first_modules = ("token_embedding", "position_embedding")

    def __init__(self, spec: ModelSpec, empty: Empty = torch.empty) -> None:
        super().__init__(spec, empty)
        self.position_embedding = Embedding(empty, spec.max_context, spec.hidden_size, POSITION_OFFSET)

    def attention(self, empty: Empty, layer: int) -> nn.Module:
        return SelfAttention(empty, self.spec, qkv_bias=True, out_bias=True)

    def mlp(self, empty: Empty, layer: int) -> nn.Module:
        return Mlp(empty, self.spec, bias=True)

    def embed(self, batch: Batch) -> Tensor:
        return self.token_embedding(batch.token_ids) + self.position_embedding(batch.positions)
