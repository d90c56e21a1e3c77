"""What every encoder-decoder family offers: from outside a decoder-only model's, inside an encoder, too.

A sequence that is encoded comes with its whole prompt and the token that the decoder starts with; one that decodes
comes with its last token. In the cache, the places of a prompt hold the keys and values of cross-attention, made once;
the places behind it hold those of the decoder's self-attention. So a request takes as many blocks as in a decoder-only
model, and gives all of them back at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xgpt.schema import ModelSpec
from xrunner.attention import AttentionBackend, Batch
from xrunner.kv_cache import KvCache, write_kv
from xrunner.layers import Attend, Attention, CrossAttention, Empty, RelativeBias
from xrunner.models.base import Model


class CrossLayer(nn.Module):
    """Attention to the decoder's tokens, then to the encoder's, then the feed-forward block, each after a norm."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: Attention,
        cross_norm: nn.Module,
        cross: CrossAttention,
        mlp_norm: nn.Module,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.cross_norm = cross_norm
        self.cross = cross
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(self, hidden: Tensor, memory: Tensor | None, batch: Batch, attend: Attend, recall: Attend) -> Tensor:
        """`attend` looks at the decoder's tokens, `recall` at the encoder's. # [tokens, hidden] -> same"""
        hidden = hidden + self.attention(self.attention_norm(hidden), batch.positions, attend)
        hidden = hidden + self.cross(self.cross_norm(hidden), memory, recall)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Stack(nn.Module):
    """An encoder's or a decoder's layers, the position bias that they share, and the norm behind them."""

    def __init__(self, layers: Iterable[nn.Module], position_bias: RelativeBias, final_norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.position_bias = position_bias
        self.final_norm = final_norm


class EncoderDecoderModel(Model):
    """Embedding, encoder, decoder, head; relative positions, and scores that are not divided by sqrt(head_dim)."""

    last_modules = ("encoder.final_norm", "decoder.final_norm", "lm_head")

    def __init__(self, spec: ModelSpec, empty: Empty = torch.empty) -> None:
        super().__init__(spec, empty)
        self.decoder_start = (spec.bos_token_id or 0,)
        self.encoder = Stack(
            [self._layer(empty) for _ in range(spec.num_encoder_layers)],
            RelativeBias(empty, spec, bidirectional=True),
            self._norm(empty),
        )
        self.decoder = Stack(
            [self._cross_layer(empty) for _ in range(spec.num_layers)],
            RelativeBias(empty, spec, bidirectional=False),
            self._norm(empty),
        )

    def drop_decoder(self) -> None:
        """Keep the embedding and the encoder."""
        self.runs_decoder = False
        del self.decoder, self.lm_head

    def _cross_layer(self, empty: Empty) -> CrossLayer:
        return CrossLayer(
            self._norm(empty),
            self.attention(empty),
            self._norm(empty),
            CrossAttention(empty, self.spec),
            self._norm(empty),
            self.mlp(empty),
        )

    def forward(
        self, batch: Batch, cache: KvCache, backend: AttentionBackend, received: Tensor | None = None
    ) -> Tensor:
        """One step; returns the logits of all sequences: each decodes or ends its prompt. # [sequences, vocab]"""
        assert received is None, "a stage is run by `encode` and `decode`: what is read goes through all of them first"
        return self.decode(batch, self.encode(batch), cache, backend)

    def encode(self, batch: Batch, received: Tensor | None = None) -> Tensor | None:
        """The encoder over a step's prompts, one after the other; None where there are none.

        A stage other than the last returns hidden states, for the next to receive. # [prompt tokens, hidden]
        """
        assert batch.prompt_len is not None
        lengths = batch.prompt_len[batch.num_decodes :].tolist()
        if not lengths:
            return None
        attend = self.reading(lengths, batch.token_ids.device)
        prompts = _tokens(batch, _is_prompt(batch))
        hidden = self.token_embedding(prompts.token_ids) if received is None else received
        for layer in self.encoder.layers:
            hidden = layer(hidden, prompts, attend)
        return self.encoder.final_norm(hidden) if self.has_head else hidden

    def reading(self, lengths: list[int], device: torch.device) -> Attend:
        """How the encoder attends within prompts of these lengths, the same in all layers."""
        place = torch.arange(max(lengths), device=device)
        bias = self.encoder.position_bias(place - place[:, None])
        return partial(attend_both_ways, lengths=lengths, bias=bias.permute(2, 0, 1).contiguous())

    def decode(
        self,
        batch: Batch,
        memory: Tensor | None,
        cache: KvCache,
        backend: AttentionBackend,
        received: Tensor | None = None,
    ) -> Tensor:
        """The decoder over each sequence's one token.

        Args:
            memory: what the encoder has read in this step. # [prompt tokens, hidden]
            received: a stage's other than the first. # [sequences, hidden]

        Returns:
            logits, or hidden states of a stage other than the last. # [sequences, vocab or hidden]
        """
        assert batch.prompt_len is not None and len(batch.logit_rows) == len(batch.context_len)
        own, recalled = own_tokens(batch), recalling(batch)
        lookup = self.lookup(batch, cache.block_size)
        hidden = self.token_embedding(own.token_ids) if received is None else received
        for layer, layer_cache in zip(self.decoder.layers, cache.layers, strict=True):
            recall = partial(recall_prompts, cache=layer_cache, batch=recalled, backend=backend)
            hidden = layer(hidden, memory, own, partial(lookup.attend, cache=layer_cache), recall)
        return self.head(hidden) if self.has_head else hidden

    def lookup(self, batch: Batch, block_size: int) -> OwnTokens:
        """How the decoder attends to its own tokens, the same in all layers."""
        assert batch.prompt_len is not None
        slots = batch.cache_slots[_last(batch)]
        return OwnTokens(batch, batch.prompt_len, slots, self.decoder.position_bias, block_size)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits. # [rows, hidden] -> [rows, vocab]"""
        return self.lm_head(self.decoder.final_norm(hidden) * self.spec.head_scale)


def own_tokens(batch: Batch) -> Batch:
    """The batch with each sequence's one decoder token alone."""
    return _tokens(batch, _last(batch))


def recalling(batch: Batch) -> Batch:
    """The batch as cross-attention sees it: one token a sequence looks at its prompt, new prompts are written."""
    assert batch.prompt_len is not None
    num_sequences = len(batch.prompt_len)
    ones = torch.arange(num_sequences + 1, dtype=torch.int32, device=batch.token_ids.device)
    return replace(
        _tokens(batch, _is_prompt(batch)),
        query_start=ones,
        context_len=batch.prompt_len,
        num_decodes=num_sequences,
        max_query_len=1,
    )


def _last(batch: Batch) -> Tensor:
    """Of each sequence the one token that is the decoder's. # int64 [sequences]"""
    return batch.query_start[1:].long() - 1


def _is_prompt(batch: Batch) -> Tensor:
    """# bool [tokens]"""
    is_prompt = torch.ones_like(batch.token_ids, dtype=torch.bool)
    is_prompt[_last(batch)] = False
    return is_prompt


def _tokens(batch: Batch, chosen: Tensor) -> Batch:
    """The batch with these tokens alone; what it says of sequences stays. # bool [tokens] or int64 [chosen]"""
    return replace(
        batch,
        token_ids=batch.token_ids[chosen],
        positions=batch.positions[chosen],
        cache_slots=batch.cache_slots[chosen],
    )


def attend_both_ways(q: Tensor, k: Tensor, v: Tensor, *, lengths: list[int], bias: Tensor) -> Tensor:
    """Each prompt attends to all of itself. # each [tokens, heads, dim] -> [tokens, heads * dim]"""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    prompts = zip(lengths, *(x.split(lengths) for x in (q, k, v, out)), strict=True)
    for n, queries, keys, values, rows in prompts:
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=bias[:, :n, :n],
            scale=1.0,
        )
        rows.copy_(attended[0].transpose(0, 1))
    return out.flatten(1)


def recall_prompts(
    q: Tensor, k: Tensor, v: Tensor, *, cache: Tensor, batch: Batch, backend: AttentionBackend
) -> Tensor:
    """Keep the keys and values of new prompts, then let each sequence's token attend to its whole prompt.

    To a backend this is a step in which all decode: its division by sqrt(dim) is undone beforehand.
    """
    return backend.forward(q * q.shape[-1] ** 0.5, k, v, cache, batch)


class OwnTokens:
    """Self-attention of one decoder token a sequence, in plain torch: all sequences at once, padded to the longest.

    Where to look and what to add is the same in all layers, so it is worked out once a step.
    """

    def __init__(self, batch: Batch, prompt_len: Tensor, slots: Tensor, bias: RelativeBias, block_size: int) -> None:
        self._slots = slots
        prompt_len = prompt_len.long()[:, None]
        num_own = batch.context_len.long()[:, None] - prompt_len
        place = torch.arange(int(num_own.max()), device=slots.device)[None]
        kept = prompt_len + place.minimum(num_own - 1)  # [sequences, own], where padding is the last token again
        self._blocks = batch.block_tables.long().gather(1, kept // block_size)
        self._offsets = kept % block_size
        added = bias(place - (num_own - 1)).float().masked_fill(beyond(place, num_own)[..., None], float("-inf"))
        self._bias = added.transpose(1, 2)  # [sequences, heads, own]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, cache: Tensor) -> Tensor:
        """Write `k` and `v` into the cache, then attend. # each [sequences, heads, dim] -> [sequences, heads * dim]"""
        write_kv(k, v, cache, self._slots)
        keys, values = (half[self._blocks, :, self._offsets].float() for half in cache)  # [sequences, own, heads, dim]
        scores = torch.einsum("shd,sohd->sho", q.float(), keys) + self._bias
        return torch.einsum("sho,sohd->shd", scores.softmax(dim=-1), values).to(q.dtype).flatten(1)


def beyond(place: Tensor, num_own: Tensor) -> Tensor:
    """True where there is padding and no token. # [1, own], [sequences, 1] -> bool [sequences, own]"""
    return place >= num_own
