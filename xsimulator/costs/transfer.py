"""Compute the cost of transferring K/V from the encode lane to the decode lane."""

from __future__ import annotations

from xsimulator.costs.curves import Line
from xsimulator.costs.step_cost import LaneCost


class TransferCost:
    """Seconds of the transfer of a batch's K/V to the decode lane, by the tokens of its prompts.

    Devices transfer their shares at the same time, so the one with the most layers takes longest. An encoder sends only
    its last hidden states.
    """

    def __init__(self, encode: LaneCost, decode: LaneCost) -> None:
        assert encode.profile.kv_transfer is not None
        spec = encode.spec
        line = Line.of(encode.profile.kv_transfer)
        if encode.has_encoder:
            share = spec.hidden_size / (2 * spec.num_layers * spec.num_kv_heads * spec.head_dim)
        else:
            stages = (*encode.stages, *decode.stages)
            share = max(stage.decoder_layers / stage.tp for stage in stages) / spec.num_layers
        self.line = Line(line.points / share, line.values)
        """Seconds by the tokens of all prompts of the batch."""
        self.occupies = encode.profile.num_threads is not None
        """Whether a transfer takes compute time of the devices: a CPU has no copy engine."""

    def at(self, tokens: float) -> float:
        return self.line.at(tokens)
