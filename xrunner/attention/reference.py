"""The reference implementation of attention. Every other backend must agree with it."""

from __future__ import annotations

import torch
from torch import Tensor

from xrunner.attention.base import PLAIN, AttentionBackend, Batch, PositionBias, Scoring
from xrunner.kv_cache import read_kv, write_kv


class ReferenceAttention(AttentionBackend):
    """Attention in plain torch, one sequence at a time, on any device and in any dtype. The softmax is in float32."""

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Batch, scoring: Scoring = PLAIN) -> Tensor:
        write_kv(k, v, cache, batch.cache_slots)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
        firsts = [0] * len(contexts) if batch.first_key is None else batch.first_key.tolist()
        for i, (first, context) in enumerate(zip(firsts, contexts, strict=True)):
            rows = slice(starts[i], starts[i + 1])
            kept = gather_kv(cache, batch.block_tables[i], context)[:, first:]
            keys, values = kept[0], kept[-1]
            n, seen = len(q[rows]), len(keys)
            hidden = None if batch.both_ways else causal_mask(n, seen, q.device, scoring.window)
            out[rows] = attend(q[rows], keys, values, hidden, scoring)
        return out.flatten(1)


def gather_kv(cache: Tensor, table: Tensor, context: int) -> Tensor:
    block_size = cache.shape[3]
    blocks = table[: -(-context // block_size)].long()
    return read_kv(cache, blocks).transpose(2, 3).flatten(1, 2)[:, :context]


def attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scoring: Scoring) -> Tensor:
    """Return the attention of n queries of one sequence over its keys. # q [n, heads, dim], keys [context, kv_heads,
    dim] -> like q

    Args:
        hidden: True if a query does not see a key. None means that all keys are visible. # bool [n, context]
    """
    group = q.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * scoring.scale_of(q.shape[2])
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.bias is not None:
        scores += bias_of(scoring.bias, len(q), len(keys))
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    if scoring.sinks is not None:
        further = scoring.sinks.float()[:, None, None].expand(-1, len(q), 1)
        shares = torch.cat((scores, further), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        shares = scores.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", shares, values.float()).to(q.dtype)


def causal_mask(num_queries: int, context: int, device: torch.device, window: int | None = None) -> Tensor:
    """Return whether each key is hidden from each query. The queries are the last `num_queries` tokens of the context.
    # bool [num_queries, context]
    """
    query = torch.arange(context - num_queries, context, device=device)[:, None]
    key = torch.arange(context, device=device)
    return (key > query) if window is None else (key > query) | (key <= query - window)


def bias_of(bias: PositionBias, num_queries: int, context: int) -> Tensor:
    """Return the position bias between the last `num_queries` tokens of a context and all its tokens. # [heads,
    num_queries, context]
    """
    key = torch.arange(context, device=bias.values.device)
    return bias.values[:, bias.center + key[context - num_queries :, None] - key]
