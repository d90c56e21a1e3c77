"""Compute the seconds of a batch in rows, and of the same requests flattened, from a profile's tables.

A slot's computation counts in full, including padding and other requests' tokens. Attention of m queries over n keys in
each slot takes as long as reading the keys once, or as m/n of the products of whole prompts of n tokens, whichever is
longer. Reading masks and writing scores does not count, since fused kernels avoid it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.policies.tcb import RowBatch
from xgpt.core.schema import ModelSpec, Profile
from xsimulator.costs.curves import Array, Grid, Line


class RowCost:
    """Computes the seconds of an encoder-decoder's batches on one device.

    Raises:
        InputError: the model has no encoder, or the profile has no table for the encoder.
    """

    def __init__(self, spec: ModelSpec, profile: Profile) -> None:
        if not spec.is_encoder_decoder or not profile.encoder_layers:
            raise InputError(
                "model", spec.name, "rows are simulated for encoder-decoders, whose profile has both halves"
            )
        layer, encoder = profile.layer(1), profile.encoder_layers[0]
        assert layer.cross is not None and encoder.tp_degree == 1
        num_layers, num_encoder_layers = spec.num_layers, spec.num_encoder_layers
        embedding = Line.of(profile.embedding)
        self._prompt_tokens = (
            Line.of(encoder.rest).scaled(num_encoder_layers)
            + Line.of(layer.cross.keys_values).scaled(num_layers)
            + embedding
        )
        self._output_tokens = Line.of(layer.rest).scaled(num_layers) + embedding + Line.of(profile.head)
        self._overhead = Line.of(profile.overhead)
        self._products = Grid(encoder.attention)
        self._own_keys, self._prompt_keys = Grid(layer.decode_attention), Grid(layer.cross.attention)
        self._num_layers, self._num_encoder_layers = num_layers, num_encoder_layers

    def rows(self, batch: RowBatch, output_lengths: Mapping[int, int], *, free_slots: bool = False) -> float:
        """Return the seconds to the last token of the longest answer or, with `free_slots`, of each slot's longest
        answer."""
        ends = np.zeros(batch.num_slots, dtype=np.int64)
        slot = np.array([place.slot for place in batch.places])
        np.maximum.at(ends, slot, [output_lengths[place.id] for place in batch.places])
        steps = np.arange(ends.max())
        slots, requests = np.full(len(steps), batch.num_slots), np.full(len(steps), len(slot))
        if free_slots:
            slots, requests = _longer(ends, steps), _longer(ends[slot], steps)
        most, width = batch.most_a_slot, batch.slot_tokens
        seconds = float(self._prompt_tokens(batch.num_tokens))
        seconds += self._num_encoder_layers * float(self._products(batch.num_slots, width))
        own_mask = self._masked(self._own_keys, slots, most, most * (steps + 1))
        prompts = self._masked(self._prompt_keys, slots, most, np.full(len(steps), width))
        seconds += self._num_layers * float((own_mask + prompts).sum())
        return seconds + float((self._output_tokens(requests) + self._overhead(requests)).sum())

    def flattened(self, prompt_lengths: Sequence[int], own_tokens: Sequence[int], read: Sequence[int]) -> float:
        """Return the seconds of one step without padding.

        Args:
            prompt_lengths: lengths of the prompts that the step encodes. Each request also gets its first token.
            own, read: for each request that decodes, the tokens of its answer, with the new one, and of its prompt.
        """
        lengths = np.asarray(prompt_lengths, float)
        own_keys = np.concatenate([np.ones(len(lengths)), np.asarray(own_tokens, float)])
        read_keys = np.concatenate([lengths, np.asarray(read, float)])
        num = len(own_keys)
        seconds = float(self._output_tokens(num)) + float(self._overhead(num))
        seconds += self._num_layers * float(
            self._own_keys(num, own_keys.mean()) + self._prompt_keys(num, read_keys.mean())
        )
        if len(lengths):
            seconds += float(self._prompt_tokens(lengths.sum()))
            grid, batch = self._products, len(lengths)
            each = Line(grid.lengths, grid(np.full_like(grid.lengths, batch), grid.lengths) / batch)
            seconds += self._num_encoder_layers * float(each(lengths).sum())
        return seconds

    def _masked(self, reading: Grid, slots: Array, queries: int, keys: Array) -> Array:
        """Return the seconds of one layer's attention of `queries` tokens over `keys` in each slot. # each [steps]"""
        return np.maximum(reading(slots, keys), self._products(slots, keys) * queries / keys)


def _longer(ends: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many of `ends` are after each step. # int64 [any], [steps] -> [steps]"""
    return (ends > steps[:, None]).sum(axis=1)
