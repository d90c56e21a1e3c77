"""gpt-oss: experts with biases and clamped gates, windows in every second layer, an attention sink for each head.

Source: arXiv 2508.10925. Weights in four bits (mxfp4) are not supported: checkpoints must have a floating-point dtype.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from xrunner.models.experts import MixtureOfExperts, of_one_expert
from xrunner.models.layers import Empty, GatedMlp
from xrunner.models.llama import LlamaModel

GAIN, LIMIT = 1.702, 7.0


class LimitedMlp(GatedMlp):
    """down((up(x) + 1) gate(x) sigmoid(1.702 gate(x))). The values of gate and up are clamped. Their outputs alternate
    in one weight.
    """

    takes_turns: ClassVar[bool] = True

    def forward(self, hidden: Tensor) -> Tensor:  # [tokens, hidden] -> same
        gate, up = self.gate_up(hidden).unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return self.down((up + 1) * gate * torch.sigmoid(GAIN * gate))


class GptOssModel(LlamaModel):
    checkpoint_stacked: ClassVar[dict[str, str]] = {
        "gate_up.weight": "mlp.experts.gate_up_proj",
        "gate_up.bias": "mlp.experts.gate_up_proj_bias",
        "down.weight": "mlp.experts.down_proj",
        "down.bias": "mlp.experts.down_proj_bias",
    }

    def mlp(self, empty: Empty, layer: int) -> nn.Module:
        each = of_one_expert(self.spec)
        return MixtureOfExperts(empty, self.spec, lambda: LimitedMlp(empty, each, bias=True), router_bias=True)
