"""Runs a batch in rows, from its prompts to the last token of its longest answer: TCB's engine, and its baselines'.

The layers are those that serve; what differs is the layout. All slots of a batch hold equally many tokens: padding is
computed, too. A decode step computes as many tokens in each slot as the fullest has requests, until the longest answer
of the batch has ended. Keys and values lie slot by slot and stay as long; only with `free_slots` does a slot leave
whose requests have all ended. Positions restart with each request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from xgpt.policies.packing import RowBatch
from xrunner.attention import Batch
from xrunner.attention.rows import NOBODY, attend_slots, same_owner
from xrunner.models import DecoderModel, EncoderDecoderModel, Model

LEAVING_SHARE = 0.25
"""Slots leave once that share of those left has ended: each leaving copies what the others hold."""


def run_rows(
    model: Model,
    batch: RowBatch,
    prompts: Mapping[int, Sequence[int]],
    output_lengths: Mapping[int, int],
    *,
    free_slots: bool = False,
) -> dict[int, list[int]]:
    """The tokens of each request of the batch, each the one with the highest logit.

    Args:
        prompts: token ids of each request.
        output_lengths: how many tokens to generate for each, at least one.
        free_slots: let slots leave, and their memory with them, when their requests have ended (TCB sec. 4.2.2).
    """
    layout = _Layout(batch, prompts)
    lengths = layout.per_request({place.id: output_lengths[place.id] for place in batch.places}, otherwise=0)
    ends = lengths.max(axis=1)
    """Of each slot: steps until its last request has ended."""
    slots = np.arange(batch.num_slots)
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    with torch.inference_mode():
        kind = _CausalRows if isinstance(model, DecoderModel) else _EncoderDecoderRows
        rows = kind(model, layout, most_steps=int(ends.max()))
        tokens = rows.first()
        while True:
            steps.append((slots, tokens.cpu().numpy()))
            running = ends[slots] > len(steps)
            if not running.any():
                break
            if free_slots and running.mean() <= 1 - LEAVING_SHARE:
                stay = torch.from_numpy(np.flatnonzero(running)).to(tokens.device)
                rows.keep(stay)
                slots, tokens = slots[running], tokens[stay]
            tokens = rows.next(tokens)
    return layout.collect(steps, lengths)


class _Layout:
    """A batch as arrays: slots of tokens, and in each slot its requests by number.

    Attributes:
        most: requests in the fullest slot.
        token_ids, positions: 0 where there is padding. # int64 [slots, tokens]
        owner: number of the request that a token belongs to. # int64 [slots, tokens]
        length, end: of each request: tokens of its prompt, and the place of the last in its slot; 1 and 0 where there
            is no request. # int64 [slots, most]
        present: # bool [slots, most]
    """

    def __init__(self, batch: RowBatch, prompts: Mapping[int, Sequence[int]]) -> None:
        shape = (batch.num_slots, batch.slot_tokens)
        self.most = batch.most_a_slot
        self.token_ids = np.zeros(shape, dtype=np.int64)
        self.positions = np.zeros(shape, dtype=np.int64)
        self.owner = np.full(shape, NOBODY, dtype=np.int64)
        self.ids: dict[tuple[int, int], int] = {}
        number = dict.fromkeys(range(batch.num_slots), 0)
        for id_, slot, start, length in batch.places:
            tokens = slice(start, start + length)
            self.token_ids[slot, tokens] = prompts[id_]
            self.positions[slot, tokens] = np.arange(length)
            self.owner[slot, tokens] = number[slot]
            self.ids[slot, number[slot]] = id_
            number[slot] += 1
        places = {place.id: place for place in batch.places}
        self.length = self.per_request({id_: place.length for id_, place in places.items()}, otherwise=1)
        self.end = self.per_request({id_: p.start + p.length - 1 for id_, p in places.items()}, otherwise=0)
        self.present = self.per_request(dict.fromkeys(places, 1), otherwise=0) == 1

    def per_request(self, values: Mapping[int, int], otherwise: int) -> np.ndarray:
        """# int64 [slots, most]"""
        array = np.full((len(self.token_ids), self.most), otherwise, dtype=np.int64)
        for place, id_ in self.ids.items():
            array[place] = values[id_]
        return array

    def collect(self, steps: list[tuple[np.ndarray, np.ndarray]], lengths: np.ndarray) -> dict[int, list[int]]:
        """Each request's tokens out of those of all steps: (slots, tokens [slots, most])."""
        outputs: dict[int, list[int]] = {id_: [] for id_ in self.ids.values()}
        for count, (slots, tokens) in enumerate(steps):
            for row, number in zip(*np.nonzero(lengths[slots] > count), strict=True):
                outputs[self.ids[int(slots[row]), int(number)]].append(int(tokens[row, number]))
        return outputs


class _Rows(ABC):
    """A batch on the device. Requests without a prompt fill up the slots: their tokens mean nothing."""

    def __init__(self, model: Model, layout: _Layout, most_steps: int) -> None:
        self._most = layout.most
        self._device = next(model.parameters()).device
        self._num_steps = 0
        """Tokens of each request whose keys and values are kept behind the prompts'."""
        self._owner = self._tensor(layout.owner)
        self._length = self._tensor(layout.length)
        numbers = np.where(layout.present, np.arange(layout.most), NOBODY)
        self._sees_prompt = same_owner(self._tensor(numbers), self._owner)
        """# bool [slots, most, tokens]"""
        self._sees_own = torch.eye(layout.most, dtype=torch.bool, device=self._device).repeat(1, most_steps)[None]
        """A step's tokens lie side by side, so each request sees every so manieth. # bool [1, most, steps * most]"""

    @abstractmethod
    def first(self) -> Tensor:
        """Read the prompts; the first token of each request. # int64 [slots, most]"""

    @abstractmethod
    def next(self, tokens: Tensor) -> Tensor:
        """One decode step. # int64 [slots, most] -> same"""

    def keep(self, slots: Tensor) -> None:
        """Let all other slots leave."""
        self._owner, self._length = self._owner[slots], self._length[slots]
        self._sees_prompt = self._sees_prompt[slots]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class SlotCache:
    """Keys and values of one attention block, slot by slot; room for `most` tokens a slot."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._kv: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens, perhaps none; returns all so far. # each [slots, kv_heads, tokens, dim] -> [.., all, dim]"""
        if self._kv is None:
            slots, heads, _, dim = k.shape
            self._kv = k.new_empty(2, slots, heads, self._most, dim)
        end = self._used + k.shape[2]
        self._kv[0, :, :, self._used : end], self._kv[1, :, :, self._used : end] = k, v
        self._used = end
        return self._kv[0, :, :, :end], self._kv[1, :, :, :end]

    def keep(self, slots: Tensor) -> None:
        assert self._kv is not None
        self._kv = self._kv[:, slots]


def _by_slot(x: Tensor, slots: int) -> Tensor:
    """# [slots * tokens, heads, dim] -> [slots, heads, tokens, dim]"""
    return x.view(slots, len(x) // slots, *x.shape[1:]).transpose(1, 2)


def _by_token(x: Tensor) -> Tensor:
    """# [slots, heads, tokens, dim] -> [slots * tokens, heads * dim]"""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


class _CausalRows(_Rows):
    """Of decoder-only models: prompts and answers in one cache."""

    def __init__(self, model: DecoderModel, layout: _Layout, most_steps: int) -> None:
        super().__init__(model, layout, most_steps)
        self._model = model
        self._token_ids = self._tensor(layout.token_ids)
        self._positions = self._tensor(layout.positions)
        self._end = self._tensor(layout.end)
        most = self._owner.shape[1] + (most_steps - 1) * layout.most
        self._caches = [SlotCache(most) for _ in model.layers]

    def first(self) -> Tensor:
        place = torch.arange(self._owner.shape[1], device=self._device)
        allowed = same_owner(self._owner, self._owner) & (place <= place[:, None])
        hidden = self._forward(self._token_ids, self._positions, allowed).unflatten(0, self._owner.shape)
        return self._choose(hidden.gather(1, self._end[..., None].expand(-1, -1, hidden.shape[2])))

    def next(self, tokens: Tensor) -> Tensor:
        positions = self._length + self._num_steps
        self._num_steps += 1
        own = self._sees_own[..., : self._num_steps * self._most].expand(len(tokens), -1, -1)
        hidden = self._forward(tokens, positions, torch.cat((self._sees_prompt, own), dim=2))
        return self._choose(hidden.unflatten(0, tokens.shape))

    def keep(self, slots: Tensor) -> None:
        super().keep(slots)
        for cache in self._caches:
            cache.keep(slots)

    def _forward(self, token_ids: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        """# int64 [slots, tokens] twice -> [slots * tokens, hidden]"""
        batch = _batch(token_ids.flatten(), positions.flatten())
        hidden = self._model.embed(batch)
        for layer, cache in zip(self._model.layers, self._caches, strict=True):
            hidden = layer(hidden, batch, partial(_attend, slots=len(token_ids), cache=cache, allowed=allowed))
        return hidden

    def _choose(self, hidden: Tensor) -> Tensor:  # [slots, most, hidden] -> int64 [slots, most]
        return self._model.head(hidden.flatten(0, 1)).argmax(dim=-1).unflatten(0, hidden.shape[:2])


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slots: int,
    cache: SlotCache,
    allowed: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """# q, k, v [slots * tokens, heads, dim] -> [slots * tokens, heads * dim]; scale None: 1 / sqrt(dim)"""
    q, k, v = (_by_slot(x, slots) for x in (q, k, v))
    keys, values = cache.append(k, v)
    return _by_token(attend_slots(q, keys, values, allowed, bias, q.shape[-1] ** -0.5 if scale is None else scale))


def _batch(token_ids: Tensor, positions: Tensor) -> Batch:
    """What a layer needs of a batch: tokens and positions."""
    none = token_ids[:0]
    return Batch(token_ids, positions, none, none, none, none, none, num_decodes=0, max_query_len=0)


class _EncoderDecoderRows(_Rows):
    """Of encoder-decoders: cross-attention to the slot's prompts, and the answers in a cache of their own."""

    def __init__(self, model: EncoderDecoderModel, layout: _Layout, most_steps: int) -> None:
        super().__init__(model, layout, most_steps)
        self._model = model
        self._token_ids = self._tensor(layout.token_ids)
        num_layers = len(model.decoder.layers)
        self._own = [SlotCache(most_steps * layout.most) for _ in range(num_layers)]
        self._prompts = [SlotCache(self._owner.shape[1]) for _ in range(num_layers)]

    def first(self) -> Tensor:
        memory = self._encode()
        starts = torch.full_like(self._length, self._model.decoder_start[0])
        return self._decode(starts, memory)

    def next(self, tokens: Tensor) -> Tensor:
        return self._decode(tokens, None)

    def keep(self, slots: Tensor) -> None:
        super().keep(slots)
        for cache in (*self._own, *self._prompts):
            cache.keep(slots)

    def _encode(self) -> Tensor:
        """# [slots * tokens, hidden]"""
        slots, num_tokens = self._owner.shape
        place = torch.arange(num_tokens, device=self._device)
        # A request's tokens lie side by side: their distance in the slot is that in the request.
        bias = self._model.encoder.position_bias(place - place[:, None]).permute(2, 0, 1)
        allowed = same_owner(self._owner, self._owner)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (_by_slot(x, slots) for x in (q, k, v))
            return _by_token(attend_slots(q, k, v, allowed, bias, scale=1.0))

        batch = _batch(self._token_ids.flatten(), self._token_ids.flatten())
        hidden = self._model.token_embedding(batch.token_ids)
        for layer in self._model.encoder.layers:
            hidden = layer(hidden, batch, attend)
        return self._model.encoder.final_norm(hidden)

    def _decode(self, tokens: Tensor, memory: Tensor | None) -> Tensor:
        """One step; with what the encoder has read, if it is the first. # int64 [slots, most] -> same"""
        self._num_steps += 1
        num_own = self._num_steps * self._most
        step = torch.arange(num_own, device=self._device) // self._most
        bias = self._model.decoder.position_bias(step - (self._num_steps - 1)).T[:, None]  # [heads, 1, own]
        sees_own = self._sees_own[..., :num_own]
        batch = _batch(tokens.flatten(), tokens.flatten())
        hidden = self._model.token_embedding(batch.token_ids)
        for layer, own, prompts in zip(self._model.decoder.layers, self._own, self._prompts, strict=True):
            attend = partial(_attend, slots=len(tokens), cache=own, allowed=sees_own, bias=bias, scale=1.0)
            recall = partial(_attend, slots=len(tokens), cache=prompts, allowed=self._sees_prompt, scale=1.0)
            hidden = layer(hidden, memory, batch, attend, recall)
        return self._model.head(hidden).argmax(dim=-1).view_as(tokens)
