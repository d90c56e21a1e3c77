"""Describe what layers keep in memory for each request, in one form for all kinds of layers."""

from __future__ import annotations

from typing import NamedTuple

from xgpt.core.schema.model_blocks import Block

BYTES_PER_ELEMENT: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8": 1}
SCALE_BYTES = 4
"""Bytes of a scale. Each 8-bit key and each 8-bit value of a token has one scale in each head."""


class Cache(NamedTuple):
    """What a layer keeps for a request on one device.

    Attributes:
        entry_bytes: bytes of an entry.
        tokens: number of tokens that share an entry.
        window: number of latest tokens whose entries are kept. None means all tokens.
        is_state: whether there is one entry for each request, whatever its length.
    """

    entry_bytes: float
    tokens: int = 1
    window: int | None = None
    is_state: bool = False


def caches_of(block: Block, dtype: str, group: int = 1) -> tuple[Cache, ...]:
    """Return what a layer of a kind keeps, on one device of a tensor-parallel group of `group` devices.

    Compressed attention (DeepSeek-V4) keeps an entry for each `compression` tokens, an entry for each of the latest
    tokens, and the sums, in float32, from which the next entries are computed. With an index, these sums overlap.

    Args:
        dtype: type of K/V.
    """
    found = list[Cache]()
    if (recurrent := block.recurrent) is not None:
        found.append(Cache(recurrent.state_bytes / min(group, recurrent.num_heads), is_state=True))
    if (attention := block.attention) is None or not attention.keeps:
        return tuple(found)
    elements, indexer = attention.entry_elements(group), attention.indexer
    vectors = 1 if attention.latent is not None else 2 * max(attention.num_kv_heads / group, 1.0)
    entry = elements * BYTES_PER_ELEMENT[dtype] + vectors * SCALE_BYTES * (dtype == "int8")
    if dtype == "float8" and attention.eight_bit_entry is not None:
        entry = attention.eight_bit_entry
    found.append(Cache(entry, attention.compression, attention.window if attention.compression == 1 else None))
    if attention.compression > 1:
        overlap = 1 if indexer is None else 2
        widths = [elements] if indexer is None else [elements, indexer.head_dim]
        found.append(Cache(entry, window=attention.window))
        found += [Cache(8 * overlap * width, window=overlap * attention.compression) for width in widths]
    if indexer is not None and not indexer.is_shared:
        found.append(Cache(indexer.head_dim + SCALE_BYTES, attention.compression * indexer.pool))
    return tuple(found)
