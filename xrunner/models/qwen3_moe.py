"""Qwen3 with a mixture of experts in some or all layers. Source: arXiv 2505.09388."""

from __future__ import annotations

from typing import ClassVar

from xrunner.models.llama import LlamaModel
from xrunner.models.qwen3 import Qwen3Model


class Qwen3MoeModel(Qwen3Model):
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]] = LlamaModel.checkpoint_names | {
        "layers.*.mlp.router": ("mlp.gate",),
        "layers.*.mlp.experts.*.gate_up": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
        "layers.*.mlp.experts.*.down": ("mlp.experts.*.down_proj",),
    }
