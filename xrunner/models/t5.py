"""T5, T5 1.1 and Flan-T5: relative positions, RMS norm before each block, no biases. The latter two have gates.

Source: arXiv 1910.10683.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from xrunner.models.encoder_decoder import EncoderDecoderModel
from xrunner.models.layers import UNSCALED, Empty, GatedMlp, Mlp, RmsNorm, SelfAttention


def _layer_names(stack: str, mlp: int) -> dict[str, tuple[str, ...]]:
    place, dense = f"{stack}.layers.*", f"layer.{mlp}.DenseReluDense"
    return {
        f"{stack}.position_bias": (f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias",),
        f"{place}.attention_norm": ("layer.0.layer_norm",),
        f"{place}.attention.qkv": tuple(f"layer.0.SelfAttention.{part}" for part in "qkv"),
        f"{place}.attention.out": ("layer.0.SelfAttention.o",),
        f"{place}.mlp_norm": (f"layer.{mlp}.layer_norm",),
        f"{place}.mlp.up": (f"{dense}.wi",),
        f"{place}.mlp.gate_up": (f"{dense}.wi_0", f"{dense}.wi_1"),
        f"{place}.mlp.down": (f"{dense}.wo",),
        f"{stack}.final_norm": (f"{stack}.final_layer_norm",),
    }


class T5Model(EncoderDecoderModel):
    norm = RmsNorm
    checkpoint_layers: ClassVar[dict[str, str]] = {"encoder.layers": "encoder.block", "decoder.layers": "decoder.block"}
    checkpoint_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "token_embedding": ("shared",),
        **_layer_names("encoder", mlp=1),
        **_layer_names("decoder", mlp=2),
        "decoder.layers.*.cross_norm": ("layer.1.layer_norm",),
        "decoder.layers.*.cross.q": ("layer.1.EncDecAttention.q",),
        "decoder.layers.*.cross.kv": ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
        "decoder.layers.*.cross.out": ("layer.1.EncDecAttention.o",),
    }

    checkpoint_copies: ClassVar[dict[str, tuple[str, ...]]] = {
        "shared.weight": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    }

    def attention(self, empty: Empty, layer: int) -> nn.Module:
        return SelfAttention(empty, self.spec, qkv_bias=False, out_bias=False, scoring=UNSCALED)

    def mlp(self, empty: Empty, layer: int) -> nn.Module:
        return GatedMlp(empty, self.spec) if self.spec.gated_ffn else Mlp(empty, self.spec, bias=False)
