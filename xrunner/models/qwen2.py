"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Source: arXiv 2407.10671."""

from __future__ import annotations

from xrunner.layers import Attention, Empty, Rotary
from xrunner.models.llama import LlamaModel


class Qwen2Model(LlamaModel):
    def attention(self, empty: Empty, layer: int) -> Attention:
        return Attention(empty, self.spec, qkv_bias=True, out_bias=False, rotary=Rotary(empty, self.spec))
