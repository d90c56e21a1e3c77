"""Phi-3 and Phi-4: Llama, with fused projections in checkpoints (queries, keys and values; gate and up). Source: arXiv
2404.14219.
"""

from __future__ import annotations

from typing import ClassVar

from xrunner.models.llama import LlamaModel


class Phi3Model(LlamaModel):
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]] = LlamaModel.checkpoint_names | {
        "layers.*.attention.qkv": ("self_attn.qkv_proj",),
        "layers.*.mlp.gate_up": ("mlp.gate_up_proj",),
    }
