"""DeepSeek-V2 and V3: latent attention, experts in groups, shared experts, and no experts in the first layers.

Sources: arXiv 2405.04434, arXiv 2412.19437. V3's multi-token prediction layers are not run.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from xrunner.models.latent import LatentSelfAttention
from xrunner.models.layers import Empty, Rotary
from xrunner.models.llama import LlamaModel
from xrunner.models.qwen3_moe import Qwen3MoeModel


class DeepseekModel(LlamaModel):
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]] = Qwen3MoeModel.checkpoint_names | {
        "layers.*.mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "layers.*.mlp.shared.down": ("mlp.shared_experts.down_proj",),
        "layers.*.attention.q": ("self_attn.q_proj",),
        "layers.*.attention.q_b": ("self_attn.q_b_proj",),
        "layers.*.attention.q_a": ("self_attn.q_a_proj",),
        "layers.*.attention.q_norm": ("self_attn.q_a_layernorm",),
        "layers.*.attention.kv_a": ("self_attn.kv_a_proj_with_mqa",),
        "layers.*.attention.kv_norm": ("self_attn.kv_a_layernorm",),
        "layers.*.attention.kv_b": ("self_attn.kv_b_proj",),
    }

    def attention(self, empty: Empty, layer: int) -> nn.Module:
        return LatentSelfAttention(empty, self.spec, rotary=self.rotary(empty, layer), scoring=self.scoring(layer))

    def rotary(self, empty: Empty, layer: int) -> Rotary:
        assert self.spec.latent is not None
        return Rotary(empty, self.spec.but(head_dim=self.spec.latent.rope_head_dim))
