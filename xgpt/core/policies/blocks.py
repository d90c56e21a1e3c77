"""Manage K/V blocks. A block is free, in use by one or several requests, or cached for later requests.

A full block of a prompt (or of a prompt and its output) has a key: a hash of its tokens and of all tokens before them.
The keys of a sequence's blocks are its chain. A block that no request uses any more stays cached until memory is
needed. The least recently used block is evicted first. If several blocks were released together, the last block of the
sequence is evicted first, because a block is useless without the blocks before it.

Source: vLLM, which also has hash chains and a queue in order of last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from xgpt.core.schema.step_log import Chain

NO_CHAINS: Mapping[int, Chain] = MappingProxyType({})


class BlockTable:
    """The blocks of one request, in order.

    Attributes:
        found: number of leading blocks that were cached when the request entered.
        named: number of leading blocks that have a key, or the same content as a block with a key.
    """

    __slots__ = ("blocks", "found", "named")

    def __init__(self, found: Sequence[int]) -> None:
        self.blocks = list(found)
        self.found = self.named = len(found)


class FoundBlocks(NamedTuple):
    """The cached blocks that match the beginning of a chain."""

    chain: Chain
    most: int
    blocks: tuple[int, ...]
    num_used: int


NOTHING = FoundBlocks((), 0, (), 0)


class Blocks:
    """The K/V blocks of one lane. All stages of the lane use the same block numbers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._num_touched = 0
        self._free: list[int] = []
        self._by_key: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}
        self._uses: dict[int, int] = {}
        """Number of requests that use each block that has, or had, a key. Any other used block belongs to one
        request.
        """
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Cached blocks, in the order of their release. They have a key, and no request uses them."""
        self._found: dict[int, FoundBlocks] = {}
        """Results of `find` since keys or uses last changed, by the identity of the chain. They save time, since
        waiting requests are looked up at every step.
        """

    @property
    def num_used(self) -> int:
        return self._num_touched - len(self._free) - len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def find(self, chain: Chain, most: int) -> FoundBlocks:
        """Return the cached blocks, at most `most`, that match the beginning of a chain. Nothing changes."""
        known = self._found.get(id(chain))
        if known is not None and known.chain is chain and known.most == most:
            return known
        by_key, count = self._by_key, 0
        blocks: list[int] = []
        for key in chain[:most]:
            if key not in by_key:
                break
            blocks.append(by_key[key])
        uses = self._uses
        for block in blocks:
            count += uses[block] > 0
        found = self._found[id(chain)] = FoundBlocks(chain, most, tuple(blocks), count)
        return found

    def count_own(self, table: BlockTable, others: Sequence[int]) -> int:
        shared, uses = set(others), self._uses
        return sum(uses.get(block, 1) == 1 and block not in shared for block in table.blocks)

    def share(self, found: Sequence[int]) -> BlockTable:
        uses = self._uses
        for block in found:
            if not uses[block]:
                del self._kept[block]
            uses[block] += 1
        self._found.clear()
        return BlockTable(found)

    def grow(self, table: BlockTable) -> int:
        """Give a request one more block and return the block's number. At least one block must be free or cached."""
        if self._free:
            block = self._free.pop()
        elif self._num_touched < self.count:
            block = self._num_touched
            self._num_touched += 1
        else:
            assert self._kept, "a block is requested, but none is free or cached"
            block, _ = self._kept.popitem(last=False)
            del self._by_key[self._key.pop(block)], self._uses[block]
            self._found.clear()
        table.blocks.append(block)
        return block

    def name(self, table: BlockTable, chain: Chain, count: int) -> None:
        last = min(count, len(chain))
        for index in range(table.named, last):
            key = chain[index]
            # If the key exists, another request has computed the same content, and later requests share that request's
            # block.
            if key not in self._by_key:
                block = table.blocks[index]
                self._by_key[key] = block
                self._key[block] = key
                self._uses[block] = 1
                self._found.clear()
        table.named = max(table.named, last)

    def forget(self, chain: Chain) -> None:
        """Remove a chain's keys. Requests that use the blocks keep them."""
        self._found.clear()
        for key in chain:
            block = self._by_key.pop(key, None)
            if block is None:
                continue
            del self._key[block]
            if block in self._kept:
                del self._kept[block], self._uses[block]
                self._free.append(block)

    def release(self, table: BlockTable) -> None:
        """Release a request's blocks. A block with a key stays cached once no request uses it."""
        uses = self._uses
        for block in reversed(table.blocks):
            if block not in uses:
                self._free.append(block)
                continue
            uses[block] -= 1
            if uses[block]:
                continue
            if block in self._key:
                self._kept[block] = None
            else:  # forgotten while it was used
                del uses[block]
                self._free.append(block)
        table.blocks.clear()
        self._found.clear()
