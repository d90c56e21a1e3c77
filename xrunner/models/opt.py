"""OPT: learned positions, layer norm before each block, ReLU, biases everywhere. Source: arXiv 2205.01068."""

from __future__ import annotations

from typing import ClassVar

from xrunner.models.gpt2 import Gpt2Model


class OptModel(Gpt2Model):
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
    checkpoint_transposed = False
    first_position = 2
