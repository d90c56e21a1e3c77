"""Run encoder-decoders behind the interface of decoder-only models.

In a batch, a new sequence consists of its whole prompt and the decoder's start token. A decoding sequence consists of
its last token. In the cache, a prompt's slots hold the keys and values of cross-attention, which are computed once. The
slots after the prompt's hold the keys and values of the decoder's self-attention. The encoder's own keys and values are
needed only within one layer of one step. They have a temporary cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from xgpt.core.schema import ModelSpec
from xrunner.attention import AttentionBackend, Batch, PositionBias, Scoring, Sequences, make_batch
from xrunner.kv_cache import KvCache
from xrunner.models.base import Model
from xrunner.models.layers import Attend, CrossAttention, Empty, RelativeBias

READING_BLOCK = 16


class CrossLayer(nn.Module):
    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
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

    def forward(
        self, hidden: Tensor, memory: Tensor | None, batch: Batch, attend: Attend, cross_attend: Attend
    ) -> Tensor:
        """Run the layer. `attend` computes self-attention, `cross_attend` cross-attention.
        # [tokens, hidden] -> same
        """
        hidden = hidden + self.attention(self.attention_norm(hidden), batch.positions, attend)
        hidden = hidden + self.cross(self.cross_norm(hidden), memory, cross_attend)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Stack(nn.Module):
    def __init__(self, layers: Iterable[nn.Module], position_bias: RelativeBias, final_norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.position_bias = position_bias
        self.final_norm = final_norm


class EncoderDecoderModel(Model):
    """Embedding, encoder, decoder, head. Positions are relative, and scores are not divided by sqrt(head_dim)."""

    last_modules = ("encoder.final_norm", "decoder.final_norm", "lm_head")

    def __init__(self, spec: ModelSpec, empty: Empty = torch.empty) -> None:
        super().__init__(spec, empty)
        self.decoder_start = (spec.bos_token_id or 0,)
        self.encoder = Stack(
            [self.layer(empty, layer) for layer in range(spec.num_encoder_layers)],
            RelativeBias(empty, spec, bidirectional=True),
            self._norm(empty),
        )
        self.decoder = Stack(
            [self._cross_layer(empty, layer) for layer in range(spec.num_layers)],
            RelativeBias(empty, spec, bidirectional=False),
            self._norm(empty),
        )

    def drop_decoder(self) -> None:
        self.runs_decoder = False
        del self.decoder, self.lm_head

    def _cross_layer(self, empty: Empty, layer: int) -> CrossLayer:
        return CrossLayer(
            self._norm(empty),
            self.attention(empty, layer),
            self._norm(empty),
            CrossAttention(empty, self.spec),
            self._norm(empty),
            self.mlp(empty, layer),
        )

    def forward(
        self, batch: Batch, cache: KvCache, backend: AttentionBackend, received: Tensor | None = None
    ) -> Tensor:
        """Run one step. Return the logits for each sequence's next token. There is always one, since prompts are never
        cut. # [sequences, vocab]
        """
        assert received is None, (
            "`run` needs the whole model: run a stage by `encode` and `decode`, since prompts pass all encoder stages "
            "first"
        )
        return self.decode(batch, self.encode(batch, backend), cache, backend)

    def encode(self, batch: Batch, backend: AttentionBackend, received: Tensor | None = None) -> Tensor | None:
        """Run the encoder over a step's prompts, which are concatenated. Return None if the step has no prompts.

        Stages except the last return hidden states for the next stage. # [prompt tokens, hidden]
        """
        assert batch.prompt_len is not None
        lengths = batch.prompt_len[batch.num_decodes :]
        if not len(lengths):
            return None
        prompts = _tokens(batch, _is_prompt(batch))
        hidden = self.token_embedding(prompts.token_ids) if received is None else received
        attend = self.encoder_attention(lengths, backend, hidden)
        for layer in self.encoder.layers:
            hidden = layer(hidden, prompts, attend)
        return self.encoder.final_norm(hidden) if self.has_head else hidden

    def encoder_attention(self, lengths: Tensor, backend: AttentionBackend, hidden: Tensor) -> Attend:
        batch = reading_batch(lengths)
        num_blocks = int(batch.block_tables.max()) + 1
        cache = hidden.new_empty(2, num_blocks, self.spec.num_kv_heads, READING_BLOCK, self.spec.head_dim)
        bias = self.encoder.position_bias.of_places(batch.max_query_len)
        return biased(backend, cache, batch, bias)

    def decode(
        self,
        batch: Batch,
        memory: Tensor | None,
        cache: KvCache,
        backend: AttentionBackend,
        received: Tensor | None = None,
    ) -> Tensor:
        """Run the decoder over one token of each sequence.

        Args:
            memory: the encoder's output for this step's prompts. None if there are none. # [prompt tokens, hidden]
            received: hidden states from the previous stage, if this is not the first. # [sequences, hidden]

        Returns:
            logits in the last stage, hidden states in others. # [sequences, vocab or hidden]
        """
        assert batch.prompt_len is not None and len(batch.logit_rows) == len(batch.context_len)
        decoded, cross_batch = own_tokens(batch), recalling(batch)
        bias = self.own_bias(decoded)
        hidden = self.token_embedding(decoded.token_ids) if received is None else received
        for layer, layer_cache in zip(self.decoder.layers, cache.layers, strict=True):
            attend = biased(backend, layer_cache, decoded, bias)
            cross_attend = partial(backend.forward, cache=layer_cache, batch=cross_batch)
            hidden = layer(hidden, memory, decoded, attend, cross_attend)
        return self.head(hidden, highest_only=batch.highest_only, added=batch.added) if self.has_head else hidden

    def own_bias(self, decoded: Batch) -> PositionBias:
        assert decoded.prompt_len is not None
        return self.decoder.position_bias.of_places(int((decoded.context_len - decoded.prompt_len).max()))

    def head(self, hidden: Tensor, *, highest_only: bool = False, added: Tensor | None = None) -> Tensor:
        hidden = self.decoder.final_norm(hidden) * self.spec.head_scale
        return self.lm_head(hidden, highest_only=highest_only, added=added)


def biased(backend: AttentionBackend, cache: Tensor, batch: Batch, bias: PositionBias) -> Attend:

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scoring: Scoring) -> Tensor:
        return backend.forward(q, k, v, cache, batch, scoring._replace(bias=bias))

    return attend


def own_tokens(batch: Batch) -> Batch:
    """Return the batch for the decoder's self-attention. Each sequence has one query: its last decoder token. It
    attends to the sequence's decoder tokens and not to the prompt.
    """
    return replace(_one_each(batch, _last(batch)), first_key=batch.prompt_len)


def recalling(batch: Batch) -> Batch:
    """Return the batch for cross-attention. Each sequence has one query, which attends to the prompt. The keys and
    values of new prompts are written.
    """
    assert batch.prompt_len is not None
    return replace(_one_each(batch, _is_prompt(batch)), context_len=batch.prompt_len)


def reading_batch(lengths: Tensor) -> Batch:
    """Return the batch for the encoder's attention: whole prompts of these lengths, in consecutive blocks. # int32
    [prompts]
    """
    length = lengths.cpu().numpy()
    num_blocks = -(-length // READING_BLOCK)
    tables = (np.cumsum(num_blocks) - num_blocks)[:, None] + np.arange(num_blocks.max())
    return replace(
        make_batch(
            np.zeros(length.sum(), np.int64),
            Sequences(length, length, np.minimum(tables, num_blocks.sum() - 1).astype(np.int32)),
            block_size=READING_BLOCK,
            num_decodes=0,
            device=lengths.device,
        ),
        both_ways=True,
    )


def _one_each(batch: Batch, written: Tensor) -> Batch:
    """Return the batch with one query for each sequence. Keys and values are written for the `written` tokens.
    # bool [tokens] or indices
    """
    num_sequences = len(batch.context_len)
    return replace(
        _tokens(batch, written),
        query_start=torch.arange(num_sequences + 1, dtype=torch.int32, device=batch.token_ids.device),
        num_decodes=num_sequences,
        max_query_len=1,
    )


def _last(batch: Batch) -> Tensor:
    return batch.query_start[1:].long() - 1


def _is_prompt(batch: Batch) -> Tensor:
    is_prompt = torch.ones_like(batch.token_ids, dtype=torch.bool)
    is_prompt[_last(batch)] = False
    return is_prompt


def _tokens(batch: Batch, chosen: Tensor) -> Batch:
    return replace(
        batch,
        token_ids=batch.token_ids[chosen],
        positions=batch.positions[chosen],
        cache_slots=batch.cache_slots[chosen],
    )
