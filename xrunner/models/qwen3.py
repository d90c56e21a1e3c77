"""Qwen3's dense models: Llama with a norm on each head's query and key. Source: arXiv 2505.09388."""

from __future__ import annotations

from xrunner.models.llama import LlamaModel


class Qwen3Model(LlamaModel):
    norms_heads = True
