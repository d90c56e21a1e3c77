"""Attention over rows of several requests: it is computed over whole slots, and a mask restricts it to each request.

Ordinary serving uses the flattened batch and the backends in `xrunner.attention` instead. Source: TCB sec. 4.1.2 and
4.2.1, equations (5), (6) and (8).
"""

from __future__ import annotations

from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional as F

MASK_BYTES = 64 * 2**20
"""Largest size of the masks of slots that are attended to together, including a bias for each head."""

WIDENED_BYTES = 4 * 2**20
"""Largest size of the keys and values that are converted together: few enough to be read from a cache."""

PADDING = -1
"""The owner of a padding token."""


def attend_slots(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attend from each query, within its slot, to its allowed keys. Each query must be allowed at least one.

    Args:
        q: # [slots, heads, queries, dim]
        k, v: keys and values; their dtype may be narrower than that of q. # [slots, kv_heads, keys, dim]
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
    # A key that is not finite would make its whole slot NaN, even if it is masked; only its own request may become NaN.
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
    """Return where query and key belong to the same request; padding sees everything, so that no sum of weights is
    zero.

    # int64 [slots, queries], [slots, keys] -> bool [slots, queries, keys]
    """
    return (queries[..., None] == keys[:, None]) | (queries[..., None] == PADDING)
