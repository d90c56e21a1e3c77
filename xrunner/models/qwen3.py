"""Qwen3, the dense ones: Llama with a norm on each head's query and key. Source: arXiv 2505.09388."""

from __future__ import annotations

from xrunner.layers import Attention, Empty, Rotary
from xrunner.models.llama import LlamaModel


class Qwen3Model(LlamaModel):
    def attention(self, empty: Empty, layer: int) -> Attention:
        bias, rotary = self.spec.attention_bias, Rotary(empty, self.spec)
        return Attention(empty, self.spec, qkv_bias=bias, out_bias=bias, rotary=rotary, qk_norm=True)
