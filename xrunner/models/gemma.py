"""Gemma 2 and 3: Llama with norms before and after each block, windows in some layers, and scaled embeddings.

Gemma 2 applies a soft cap to scores and logits. Gemma 3 instead normalises each head's query and key. Its layers with
windows have a separate rotary base. Sources: arXiv 2408.00118, arXiv 2503.19786.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from xrunner.attention import Batch
from xrunner.models.layers import OffsetRmsNorm
from xrunner.models.llama import LlamaModel


class Gemma2Model(LlamaModel):
    norm = OffsetRmsNorm
    norms_results = True
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]] = LlamaModel.checkpoint_names | {
        "layers.*.attention_result_norm": ("post_attention_layernorm",),
        "layers.*.mlp_norm": ("pre_feedforward_layernorm",),
        "layers.*.mlp_result_norm": ("post_feedforward_layernorm",),
    }

    def embed(self, batch: Batch) -> Tensor:
        hidden = self.token_embedding(batch.token_ids)
        # The same factor as in transformers, rounded to the type of the activations.
        return hidden * hidden.new_tensor(self.spec.hidden_size**0.5)


class Gemma3Model(Gemma2Model):
    norms_heads = True
