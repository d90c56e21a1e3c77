"""Llama: rotary positions, RMS norm before each block, gated SiLU, grouped-query heads. Source: arXiv 2407.21783.

Mistral (arXiv 2310.06825) has the same parts.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from xrunner.models.base import DecoderModel
from xrunner.models.experts import MixtureOfExperts, of_one_expert
from xrunner.models.layers import Empty, GatedMlp, RmsNorm, SelfAttention


class LlamaModel(DecoderModel):
    norm: ClassVar[type[RmsNorm]] = RmsNorm
    norms_heads: ClassVar[bool] = False
    has_out_bias: ClassVar[bool] = True
    checkpoint_layers: ClassVar[dict[str, str]] = {"layers": "model.layers"}
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "token_embedding": ("model.embed_tokens",),
        "layers.*.attention_norm": ("input_layernorm",),
        "layers.*.attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "layers.*.attention.q_norm": ("self_attn.q_norm",),
        "layers.*.attention.k_norm": ("self_attn.k_norm",),
        "layers.*.attention.out": ("self_attn.o_proj",),
        "layers.*.attention": ("self_attn",),
        "layers.*.mlp_norm": ("post_attention_layernorm",),
        "layers.*.mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "layers.*.mlp.down": ("mlp.down_proj",),
        "final_norm": ("model.norm",),
    }

    def attention(self, empty: Empty, layer: int) -> nn.Module:
        bias = self.spec.attention_bias
        return SelfAttention(
            empty,
            self.spec,
            qkv_bias=bias,
            out_bias=bias and self.has_out_bias,
            rotary=self.rotary(empty, layer),
            qk_norm=self.norm if self.norms_heads else None,
            scoring=self.scoring(layer),
        )

    def mlp(self, empty: Empty, layer: int) -> nn.Module:
        experts = self.spec.experts
        if experts is None or layer in experts.dense_layers:
            return GatedMlp(empty, self.spec)
        each = of_one_expert(self.spec)
        return MixtureOfExperts(empty, self.spec, lambda: GatedMlp(empty, each), router_bias=False)
