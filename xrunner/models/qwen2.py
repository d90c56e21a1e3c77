"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Source: arXiv 2407.10671."""

from __future__ import annotations

from xrunner.models.llama import LlamaModel


class Qwen2Model(LlamaModel):
    has_out_bias = False
