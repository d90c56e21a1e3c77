"""Compute how long K/V takes to move from the encode lane to the decode lane."""

from __future__ import annotations

from xsimulator.costs.curves import Line
from xsimulator.costs.step_cost import LaneCost


class TransferCost:
    """Seconds that a batch's K/V takes to move to the decode lane, by number of prompt tokens.

    Devices send at the same time, so the device with the most layers takes longest. An encoder sends only its last
    hidden states.
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
        """Seconds, by number of tokens of all prompts in the batch."""
        self.occupies = encode.profile.num_threads is not None
        """Whether a transfer takes compute time of the devices. It does on CPUs, which have no copy engine."""

    def at(self, tokens: float) -> float:
        return self.line.at(tokens)
