"""Implement multi-head latent attention. The cache stores one vector per token instead of every head's K/V.

The matrices that expand a vector into K/V are applied to the queries and to the results instead. So attention runs on
the stored vectors: all heads share one key, which is also the value. Source: DeepSeek-V2 (arXiv 2405.04434) sec. 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xgpt.core.schema import ModelSpec
from xrunner.attention.base import Scoring
from xrunner.models.layers import Attend, Empty, Linear, RmsNorm, Rotary, parameter

NORM_EPS = 1e-6
"""Epsilon of the norms within latent attention. The model's other norms may have a different one."""


class HeadProjections(nn.Module):
    """The matrices that compute every head's keys and values from the stored vector. # [heads * (key + value), kept]"""

    def __init__(self, empty: Empty, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = parameter(empty(rows, columns))


class LatentSelfAttention(nn.Module):
    """Self-attention over each token's stored vector: a latent part, and a key that is rotated to the token's position.

    Args:
        scoring: the layer's scoring. Its default scale is that of spec.head_dim, not of the stored vector.
    """

    def __init__(self, empty: Empty, spec: ModelSpec, *, rotary: Rotary, scoring: Scoring) -> None:
        super().__init__()
        latent = spec.latent
        assert latent is not None
        self.rank, self.head_dim = latent.kv_rank, spec.head_dim
        self.turning, self.value_dim = latent.rope_head_dim, latent.value_head_dim
        self.scoring = scoring._replace(scale=scoring.scale_of(spec.head_dim))
        bias, queries = spec.attention_bias, spec.num_heads * spec.head_dim
        if latent.q_rank is None:
            self.q: Linear | None = Linear(empty, spec.hidden_size, queries, bias=False)
        else:
            self.q = None
            self.q_a = Linear(empty, spec.hidden_size, latent.q_rank, bias=bias)
            self.q_norm = RmsNorm(empty, latent.q_rank, NORM_EPS)
            self.q_b = Linear(empty, latent.q_rank, queries, bias=False)
        self.kv_a = Linear(empty, spec.hidden_size, latent.kept_per_token, bias=bias)
        self.kv_norm = RmsNorm(empty, latent.kv_rank, NORM_EPS)
        value_rows = spec.head_dim - latent.rope_head_dim + latent.value_head_dim
        self.kv_b = HeadProjections(empty, spec.num_heads * value_rows, latent.kv_rank)
        self.out = Linear(empty, spec.num_heads * latent.value_head_dim, spec.hidden_size, bias=bias)
        self.rotary = rotary
        self._is_interleaved = latent.rope_interleaved

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:  # [tokens, hidden] -> same
        queries = self.q_b(self.q_norm(self.q_a(hidden))) if self.q is None else self.q(hidden)
        q = queries.unflatten(-1, (-1, self.head_dim))
        q, q_turning = q.split((self.head_dim - self.turning, self.turning), dim=-1)
        kept, k_turning = self.kv_a(hidden)[:, None].split((self.rank, self.turning), dim=-1)
        if self._is_interleaved:
            q_turning, k_turning = _side_by_side(q_turning), _side_by_side(k_turning)
        q_turning, k_turning = self.rotary(positions, q_turning, k_turning)
        makes = self.kv_b.weight.unflatten(0, (q.shape[1], -1))  # [heads, key + value, rank]
        makes_keys, makes_values = makes.split((q.shape[2], self.value_dim), dim=1)
        q = torch.cat((torch.einsum("thk,hkr->thr", q, makes_keys), q_turning), dim=-1)
        k = torch.cat((self.kv_norm(kept), k_turning), dim=-1)
        found = attend(q, k, k, scoring=self.scoring).unflatten(-1, (q.shape[1], -1))[..., : self.rank]
        return self.out(torch.einsum("thr,hvr->thv", found, makes_values).flatten(1))


def _side_by_side(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
