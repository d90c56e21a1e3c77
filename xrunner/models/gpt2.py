"""GPT-2, and models with GPT-3's shape: learned positions, layer norm before each block, GELU, biases everywhere."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from xgpt.core.schema import ModelSpec
from xrunner.attention import Batch
from xrunner.models.base import DecoderModel
from xrunner.models.layers import Embedding, Empty, Mlp, SelfAttention


class Gpt2Model(DecoderModel):
    checkpoint_layers: ClassVar[dict[str, str]] = {"layers": "transformer.h"}
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "token_embedding": ("transformer.wte",),
        "position_embedding": ("transformer.wpe",),
        "layers.*.attention_norm": ("ln_1",),
        "layers.*.attention.qkv": ("attn.c_attn",),
        "layers.*.attention.out": ("attn.c_proj",),
        "layers.*.mlp_norm": ("ln_2",),
        "layers.*.mlp.up": ("mlp.c_fc",),
        "layers.*.mlp.down": ("mlp.c_proj",),
        "final_norm": ("transformer.ln_f",),
    }
    checkpoint_transposed = True

    first_modules = ("token_embedding", "position_embedding")
    first_position: ClassVar[int] = 0

    def __init__(self, spec: ModelSpec, empty: Empty = torch.empty) -> None:
        super().__init__(spec, empty)
        self.position_embedding = Embedding(empty, spec.max_context, spec.hidden_size, self.first_position)

    def attention(self, empty: Empty, layer: int) -> nn.Module:
        return SelfAttention(empty, self.spec, qkv_bias=True, out_bias=True)

    def mlp(self, empty: Empty, layer: int) -> nn.Module:
        return Mlp(empty, self.spec, bias=True)

    def embed(self, batch: Batch) -> Tensor:
        return self.token_embedding(batch.token_ids) + self.position_embedding(batch.positions)
