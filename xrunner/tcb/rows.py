"""Run a row batch, from its prompts to the last token of its longest output, as TCB and its baselines do.

The layers are those of ordinary serving. All slots of a batch have the same number of tokens, so padding is computed,
too. Until the longest output has ended, a decode step computes one token of every request. Attention is computed for as
many requests in each slot as the fullest slot has. Keys and values are stored slot by slot until the batch has ended.
`Rows.keep` removes slots whose requests have all ended. Each request's positions start at 0.

Attention is computed over whole slots, with a mask. Source: TCB sec. 4.1.2 and 4.2.1, equations (5), (6) and (8).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.policies.tcb import RowBatch
from xgpt.core.schema import SLICE_TOKENS
from xrunner.attention import Batch, Scoring
from xrunner.models import DecoderModel, EncoderDecoderModel, Model

MASK_BYTES = 64 * 2**20

WIDENED_BYTES = 4 * 2**20

PADDING = -1


def attend_slots(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Compute each query's attention over the allowed keys of its slot. Each query must have at least one.

    Args:
        q: # [slots, heads, queries, dim]
        k, v: keys and values. They may have fewer bits than q. # [slots, kv_heads, keys, dim]
        allowed: # bool [slots, queries, keys], or [1, queries, keys] if equal in all slots
        bias: numbers to add to the scores, equal in all slots. # [heads, queries, keys]

    Returns:
        # like q
    """
    at_once = len(q)
    if bias is not None and len(allowed) > 1:
        at_once = min(at_once, MASK_BYTES // bias.nbytes)
    if k.dtype != q.dtype:
        at_once = min(at_once, WIDENED_BYTES // (2 * k[0].numel() * q.element_size()))
    if at_once == len(q):
        return _attend(q, k, v, allowed, bias, scale)
    at_once = max(1, at_once)
    masks = repeat(allowed) if len(allowed) == 1 else allowed.split(at_once)
    parts = zip(*(x.split(at_once) for x in (q, k, v)), masks, strict=False)
    return torch.cat([_attend(q, k, v, allowed, bias, scale) for q, k, v, allowed in parts])


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    k, v = k.to(q.dtype), v.to(q.dtype)
    attended = _masked(q, k, v, allowed, bias, scale)
    if not attended.isnan().any():
        return attended
    # A key that is not finite would make the whole slot NaN, even if the key is masked, but only the key's own request
    # may become NaN.
    is_finite = (k.isfinite() & v.isfinite()).all(3).all(1)
    k, v = (x.where(is_finite[:, None, :, None], 0) for x in (k, v))
    is_lost = (allowed & ~is_finite[:, None]).any(2)
    return _masked(q, k, v, allowed, bias, scale).masked_fill(is_lost[:, None, :, None], float("nan"))


def _masked(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    mask = allowed[:, None]
    if bias is not None:
        mask = torch.where(mask, bias, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def same_owner(queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether each query and key belong to the same request. For a query that is padding, return True for all
    keys, so that no sum of weights is zero.

    # int64 [slots, queries], [slots, keys] -> bool [slots, queries, keys]
    """
    return (queries[..., None] == keys[:, None]) | (queries[..., None] == PADDING)


class Layout:
    """A row batch as arrays: the tokens of its slots, and its requests, slot by slot.

    Attributes:
        most: number of requests in the fullest slot.
        token_ids, positions: tokens, and their positions in their requests. 0 for padding. # int64 [slots, tokens]
        owner: each token's request, by its number in the slot, or `PADDING`. # int64 [slots, tokens]
        slot, number: each request's slot, and its number among the slot's requests. # int64 [requests]
        length, end: number of each request's prompt tokens, and the index of the last one in its slot. # int64
            [requests]
    """

    def __init__(self, batch: RowBatch, prompts: Mapping[int, Sequence[int]]) -> None:
        shape = (batch.num_slots, batch.slot_tokens)
        self.most = batch.most_a_slot
        self.token_ids = np.zeros(shape, dtype=np.int64)
        self.positions = np.zeros(shape, dtype=np.int64)
        self.owner = np.full(shape, PADDING, dtype=np.int64)
        self.ids = [place.id for place in batch.places]
        self.slot = np.array([place.slot for place in batch.places])
        self.number = np.arange(len(self.ids)) - np.searchsorted(self.slot, self.slot)
        self.length = np.array([place.length for place in batch.places])
        self.end = np.array([place.start for place in batch.places]) + self.length - 1
        for (id_, slot, start, length), number in zip(batch.places, self.number, strict=True):
            tokens = slice(start, start + length)
            self.token_ids[slot, tokens] = prompts[id_]
            self.positions[slot, tokens] = np.arange(length)
            self.owner[slot, tokens] = number


class Rows(ABC):
    """A row batch on the device. In decode steps, attention is computed as if every slot had `most` requests. All other
    operations are computed only for real requests.
    """

    def __init__(self, model: Model, layout: Layout, most_steps: int) -> None:
        self._most = layout.most
        self._device = next(model.parameters()).device
        self._num_steps = 0
        self._owner = self._tensor(layout.owner)
        self._slot, self._number = self._tensor(layout.slot), self._tensor(layout.number)
        numbers = torch.full((len(layout.owner), layout.most), PADDING, device=self._device)
        numbers[self._slot, self._number] = self._number
        self._sees_prompt = same_owner(numbers, self._owner)
        self._sees_own = torch.eye(layout.most, dtype=torch.bool, device=self._device).repeat(1, most_steps)[None]
        """Whether each request's generated tokens attend to each generated token of the slot. A step's tokens are
        adjacent, one per request, so a request attends to every `most`-th token. # bool [1, most, steps * most]
        """

    @abstractmethod
    def first(self) -> Tensor:
        """Prefill the prompts. Return the hidden state from which each request's first token is computed. # [requests,
        hidden]
        """

    @abstractmethod
    def next(self, tokens: Tensor) -> Tensor:
        """Decode each request's last token. Return the hidden state from which the next token is computed.
        # int64 [requests] -> [requests, hidden]
        """

    @property
    @abstractmethod
    def _caches(self) -> Iterable[SlotCache]: ...

    def keep(self, stay: np.ndarray) -> None:
        """Keep only the requests with the indices `stay`, and their slots. # int64 [remaining]"""
        chosen = self._tensor(stay)
        slots, self._slot = self._slot[chosen].unique_consecutive(return_inverse=True)
        self._number = self._number[chosen]
        self._owner, self._sees_prompt = self._owner[slots], self._sees_prompt[slots]
        for cache in self._caches:
            cache.keep(slots)

    def _groups(self) -> Iterator[slice]:
        """Prompts are prefilled group by group, so that activations fit in memory."""
        num_slots, num_tokens = self._owner.shape
        at_once = max(1, SLICE_TOKENS // num_tokens)
        for start in range(0, num_slots, at_once):
            yield slice(start, min(start + at_once, num_slots))

    def _attend_requests(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cache: SlotCache,
        allowed: Tensor,
        bias: Tensor | None,
        scoring: Scoring,
    ) -> Tensor:
        """Compute the attention of a decode step's tokens within their slots.
        # q, k, v [requests, heads, dim] -> [requests, heads * dim]
        """
        q, k, v = (self._in_slots(x) for x in (q, k, v))
        keys, values = cache.append(k, v)
        return self._of_requests(attend_slots(q, keys, values, allowed, bias, scoring.scale_of(q.shape[-1])))

    def _in_slots(self, x: Tensor) -> Tensor:
        """Put each request's vector into its slot. # [requests, heads, dim] -> [slots, heads, most, dim]"""
        slots = x.new_zeros(len(self._owner), x.shape[1], self._most, x.shape[2])
        slots[self._slot, :, self._number] = x
        return slots

    def _of_requests(self, x: Tensor) -> Tensor:
        """Take each request's vector out of its slot. # [slots, heads, most, dim] -> [requests, heads * dim]"""
        return x[self._slot, :, self._number].flatten(1)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class SlotCache:
    def __init__(self, most: int, dtype: torch.dtype | None) -> None:
        self._most = most
        self._dtype = dtype
        self._used = 0
        self._kv: Tensor | None = None

    def fill(self, k: Tensor, v: Tensor, start: int, num_slots: int) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the first tokens of some slots, from slot `start` on. Return them as stored.

        # each [slots, kv_heads, tokens, dim] -> same
        """
        slots, heads, tokens, dim = k.shape
        if self._kv is None:
            self._kv = k.new_empty((2, num_slots, heads, self._most, dim), dtype=self._dtype)
            self._used = tokens
        keys, values = self._kv[:, start : start + slots, :, :tokens]
        keys[:], values[:] = k, v
        return keys, values

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of further tokens, if any, to all slots. Return those of all tokens so far.
        # each [slots, kv_heads, tokens, dim] -> [.., all, dim]
        """
        if self._kv is None:
            slots, heads, _, dim = k.shape
            self._kv = k.new_empty((2, slots, heads, self._most, dim), dtype=self._dtype)
        end = self._used + k.shape[2]
        self._kv[0, :, :, self._used : end], self._kv[1, :, :, self._used : end] = k, v
        self._used = end
        return self._kv[0, :, :, :end], self._kv[1, :, :, :end]

    def keep(self, slots: Tensor) -> None:
        assert self._kv is not None
        self._kv = self._kv[:, slots]


def _by_slot(x: Tensor, slots: int) -> Tensor:
    """Arrange tokens by slot. # [slots * tokens, heads, dim] -> [slots, heads, tokens, dim]"""
    return x.view(slots, len(x) // slots, *x.shape[1:]).transpose(1, 2)


def _by_token(x: Tensor) -> Tensor:
    """Undo `_by_slot` and join the heads. # [slots, heads, tokens, dim] -> [slots * tokens, heads * dim]"""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


class _CausalRows(Rows):
    """Rows of a decoder-only model. Prompts and outputs share one cache."""

    def __init__(self, model: DecoderModel, layout: Layout, most_steps: int, dtype: torch.dtype | None) -> None:
        super().__init__(model, layout, most_steps)
        self._model = model
        self._token_ids, self._positions = self._tensor(layout.token_ids), self._tensor(layout.positions)
        self._length, self._end = self._tensor(layout.length), self._tensor(layout.end)
        most = self._owner.shape[1] + (most_steps - 1) * layout.most
        self._kept = [SlotCache(most, dtype) for _ in model.layers]

    @property
    def _caches(self) -> Iterable[SlotCache]:
        return self._kept

    def first(self) -> Tensor:
        num_tokens = self._owner.shape[1]
        place = torch.arange(num_tokens, device=self._device)
        ends = []
        for slots in self._groups():
            owner = self._owner[slots]
            allowed = same_owner(owner, owner) & (place <= place[:, None])

            def attend(
                q: Tensor, k: Tensor, v: Tensor, cache: SlotCache, scoring: Scoring, slots=slots, allowed=allowed
            ) -> Tensor:
                q, k, v = (_by_slot(x, len(allowed)) for x in (q, k, v))
                k, v = cache.fill(k, v, slots.start, len(self._owner))
                return _by_token(attend_slots(q, k, v, allowed, None, scoring.scale_of(q.shape[-1])))

            here = (self._slot >= slots.start) & (self._slot < slots.stop)
            last = (self._slot[here] - slots.start) * num_tokens + self._end[here]
            ends.append(self._forward(_batch(self._token_ids[slots], self._positions[slots]), attend, last))
        return torch.cat(ends)

    def next(self, tokens: Tensor) -> Tensor:
        # A request that has ended is still computed with its slot, even beyond the model's context.
        batch = _batch(tokens, (self._length + self._num_steps).clamp(max=self._model.spec.max_context - 1))
        self._num_steps += 1
        mask = self._sees_own[..., : self._num_steps * self._most].expand(len(self._owner), -1, -1)
        allowed = torch.cat((self._sees_prompt, mask), dim=2)

        see = partial(self._attend_requests, allowed=allowed, bias=None)
        return self._forward(batch, see)

    def keep(self, stay: np.ndarray) -> None:
        self._length = self._length[self._tensor(stay)]
        super().keep(stay)

    def _forward(self, batch: Batch, attend: Callable[..., Tensor], rows: Tensor | None = None) -> Tensor:
        attends = [partial(attend, cache=cache) for cache in self._kept]
        return self._model.run_layers(self._model.embed(batch), batch, attends, rows)


class _EncoderDecoderRows(Rows):
    def __init__(self, model: EncoderDecoderModel, layout: Layout, most_steps: int, dtype: torch.dtype | None) -> None:
        super().__init__(model, layout, most_steps)
        self._model = model
        self._token_ids = self._tensor(layout.token_ids)
        num_layers = len(model.decoder.layers)
        self._own = [SlotCache(most_steps * layout.most, dtype) for _ in range(num_layers)]
        self._prompts = [SlotCache(self._owner.shape[1], dtype) for _ in range(num_layers)]

    @property
    def _caches(self) -> Iterable[SlotCache]:
        return (*self._own, *self._prompts)

    def first(self) -> Tensor:
        return self._decode(torch.full_like(self._slot, self._model.decoder_start[0]), self._encode())

    def next(self, tokens: Tensor) -> Tensor:
        return self._decode(tokens, None)

    def _encode(self) -> Tensor:
        place = torch.arange(self._owner.shape[1], device=self._device)
        # A request's tokens are adjacent, so their distance in the slot is the same as in the request.
        bias = self._model.encoder.position_bias(place - place[:, None]).permute(2, 0, 1)
        return torch.cat([self._read(self._token_ids[slots], self._owner[slots], bias) for slots in self._groups()])

    def _read(self, token_ids: Tensor, owner: Tensor, bias: Tensor) -> Tensor:
        """Run some slots through the encoder. # int64 [slots, tokens], same, [heads, tokens, tokens] -> [.., hidden]"""
        allowed = same_owner(owner, owner)

        def attend(q: Tensor, k: Tensor, v: Tensor, *, scoring: Scoring) -> Tensor:
            q, k, v = (_by_slot(x, len(owner)) for x in (q, k, v))
            return _by_token(attend_slots(q, k, v, allowed, bias, scoring.scale_of(q.shape[-1])))

        batch = _batch(token_ids)
        hidden = self._model.token_embedding(batch.token_ids)
        for layer in self._model.encoder.layers:
            hidden = layer(hidden, batch, attend)
        return self._model.encoder.final_norm(hidden)

    def _decode(self, tokens: Tensor, memory: Tensor | None) -> Tensor:
        """Run one decoder step. `memory` is the encoder's output in the first step. # int64 [requests] -> [requests,
        hidden]
        """
        slots = len(self._owner)
        self._num_steps += 1
        num_own = self._num_steps * self._most
        step = torch.arange(num_own, device=self._device) // self._most
        bias = self._model.decoder.position_bias(step - (self._num_steps - 1)).T[:, None]  # [heads, 1, own]
        sees_own = self._sees_own[..., :num_own]

        def cross_attend(q: Tensor, k: Tensor, v: Tensor, cache: SlotCache, scoring: Scoring) -> Tensor:
            keys, values = cache.append(_by_slot(k, slots), _by_slot(v, slots))
            scale = scoring.scale_of(q.shape[-1])
            return self._of_requests(attend_slots(self._in_slots(q), keys, values, self._sees_prompt, None, scale))

        batch = _batch(tokens)
        hidden = self._model.token_embedding(batch.token_ids)
        for layer, layer_own, prompts in zip(self._model.decoder.layers, self._own, self._prompts, strict=True):
            attend = partial(self._attend_requests, cache=layer_own, allowed=sees_own, bias=bias)
            hidden = layer(hidden, memory, batch, attend, partial(cross_attend, cache=prompts))
        return hidden


def rows_of(model: Model, layout: Layout, most_steps: int, dtype: torch.dtype | None = None) -> Rows:
    if isinstance(model, DecoderModel):
        return _CausalRows(model, layout, most_steps, dtype)
    assert isinstance(model, EncoderDecoderModel)
    return _EncoderDecoderRows(model, layout, most_steps, dtype)


def _batch(token_ids: Tensor, positions: Tensor | None = None) -> Batch:
    token_ids = token_ids.flatten()
    none = token_ids[:0]
    positions = none if positions is None else positions.flatten()
    return Batch(token_ids, positions, none, none, none, none, none, num_decodes=0, max_query_len=0)
