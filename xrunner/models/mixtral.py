"""Mixtral: Llama with a mixture of experts in every layer. Source: arXiv 2401.04088."""

from __future__ import annotations

from typing import ClassVar

from xrunner.models.llama import LlamaModel


class MixtralModel(LlamaModel):
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]] = LlamaModel.checkpoint_names | {
        "layers.*.mlp.router": ("block_sparse_moe.gate",),
        "layers.*.mlp.experts.*.gate_up": ("block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3"),
        "layers.*.mlp.experts.*.down": ("block_sparse_moe.experts.*.w2",),
    }
