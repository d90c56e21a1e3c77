"""Manage the K/V memory of an engine's lanes: blocks that requests have, and blocks promised to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from xgpt.core.policies.blocks import NOTHING, Blocks, BlockTable, FoundBlocks
from xgpt.core.policies.request import Request
from xgpt.core.schema import KvPromise
from xgpt.core.schema.step_log import Chain


class KvLimits(Protocol):
    @property
    def kv_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def prompt_blocks(self) -> int: ...
    def can_ever_fit(self, request: Request) -> bool:
        """Return whether the plan's K/V memory is enough for the request if no other request runs."""


class KvMemory:
    """The K/V blocks of the lanes, with the rule for promising memory to requests.

    Args:
        encoder: whether an encoder reads the prompts. Memory then also holds the decoder's start token.
        is_whole: whether every request is promised memory for its maximum output, whatever its own `promised_output`.

    Attributes:
        prompts: blocks of the lane that encodes. It is the same object as `decodes` unless a separate lane encodes.
        num_promised: number of blocks that requests have been promised but do not have yet.
    """

    def __init__(
        self, num_blocks: int, block_size: int, kv: KvPromise = "reserve", *, encoder: bool = False, is_whole: bool
    ) -> None:
        self.block_size = block_size
        self.kv = kv
        self.encoder = encoder
        self.is_whole = is_whole
        self.decodes = self.prompts = Blocks(num_blocks)
        self.num_promised = 0

    @property
    def num_reserved(self) -> int:
        return self.decodes.num_used + self.num_promised

    @property
    def is_full(self) -> bool:
        return self.num_reserved == self.decodes.count

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def can_ever_fit(self, request: Request) -> bool:
        whole = self.blocks_for(request.longest)
        may_return = not self.encoder and (self.kv == "quantile" or request.promised < request.longest)
        prompt = whole if may_return else self.blocks_for(request.input_length)
        return whole <= self.decodes.count and prompt <= self.prompts.count

    def to_encode(self, request: Request) -> int:
        """Return how many uncached tokens of a waiting request would have to be encoded if it entered now (at least
        one).
        """
        return request.context - len(self._find(self.prompts, request).blocks) * self.block_size

    def prompt_blocks_to_enter(self, request: Request) -> int:
        return self.blocks_for(request.context) - self._find(self.prompts, request).num_used

    def num_missing(self, request: Request, overdrawn: Iterable[BlockTable]) -> int:
        """Return how many more blocks must become available before a waiting request can enter. It fits if this is 0 or
        less.

        Args:
            overdrawn: block tables of requests that may be preempted for the waiting request.
        """
        found = self._find(self.decodes, request)
        missing = self.num_reserved + self._blocks_to_enter(request) - found.num_used - self.decodes.count
        if missing > 0 and not request.generated:
            # Requests may use more memory than they were promised only while no other request needs it.
            missing -= sum(self.decodes.count_own(table, found.blocks) for table in overdrawn)
        return missing

    def open(self, request: Request) -> None:
        request.blocks = self._blocks_to_enter(request)
        request.table = self.decodes.share(self._find(self.decodes, request).blocks)

    def lacks(self, request: Request) -> bool:
        """Return whether there are still too few blocks for the promise to a request. Call this after `open`."""
        assert request.table is not None
        return self.num_reserved + request.blocks - request.table.found > self.decodes.count

    def fill(self, request: Request) -> None:
        """After `open`, give a request the blocks of its prompt and next token, and promise its further blocks."""
        table = request.table
        assert table is not None
        # A promised block is given one token early, so that a worker may run a step ahead.
        for _ in range(min(request.blocks, self.blocks_for(self.num_cached(request) + 1)) - table.found):
            self.decodes.grow(table)
        self.num_promised += request.blocks - len(table.blocks)
        if self.prompts is not self.decodes:
            table = request.prompt_table = self.prompts.share(self._find(self.prompts, request).blocks)
            for _ in range(self.blocks_for(request.context) - table.found):
                self.prompts.grow(table)
        request.encoded = request.cached = table.found * self.block_size

    def take_promised(self, request: Request) -> bool:
        assert request.table is not None
        is_promised = len(request.table.blocks) < request.blocks
        self.num_promised -= is_promised
        return is_promised

    def grow(self, request: Request) -> int:
        assert request.table is not None
        return self.decodes.grow(request.table)

    def num_spare(self, request: Request) -> int:
        """Return how many further tokens fit in a request's blocks after its next step. It is negative if this step
        does not fit.
        """
        assert request.table is not None
        return len(request.table.blocks) * self.block_size - self.num_cached(request)

    def num_cached(self, request: Request) -> int:
        return request.context + self.encoder

    def leave(self, request: Request) -> None:
        assert request.table is not None
        self.num_promised -= request.blocks - len(request.table.blocks)
        self.decodes.release(request.table)
        if request.prompt_table is not None:
            self.prompts.release(request.prompt_table)
        request.table = request.prompt_table = None
        request.blocks = 0

    def tokens_to_move(self, request: Request) -> int:
        assert request.table is not None
        return request.input_length - request.table.found * self.block_size

    def forget_prompt(self, request: Request) -> None:
        if request.table is not None:
            self.decodes.name(request.table, request.chain, request.encoded // self.block_size)
        if request.prompt_table is not None:
            self.prompts.release(request.prompt_table)
            request.prompt_table = None

    def name_prompt(self, request: Request) -> None:
        if not request.chain:
            return
        count = request.encoded // self.block_size
        if request.prompt_table is not None:
            self.prompts.name(request.prompt_table, request.chain, count)
        elif request.table is not None:
            self.decodes.name(request.table, request.chain, count)

    def name_output(self, request: Request, output: Chain) -> None:
        if request.prompt_table is None and request.table is not None:  # otherwise the request has not begun to decode
            count = (request.context - 1) // self.block_size  # the last token's K/V has not been computed
            self.decodes.name(request.table, request.chain + output, count)

    def forget_blocks(self, request: Request) -> None:
        """Remove the keys of a prompt's blocks in both lanes, including blocks that the request found in the cache."""
        self.decodes.forget(request.chain)
        if self.prompts is not self.decodes:
            self.prompts.forget(request.chain)

    def _blocks_to_enter(self, request: Request) -> int:
        if self.kv == "quantile":
            return self.blocks_for(self.num_cached(request))
        # Another plan's promise to a request does not count here, since requests of a whole batch are never preempted.
        return self.blocks_for(request.longest if self.is_whole else request.promised)

    def _find(self, blocks: Blocks, request: Request) -> FoundBlocks:
        """Return the cached blocks of a waiting request's first tokens. The last token must always be computed."""
        if not request.chain:
            return NOTHING
        return blocks.find(request.chain, (request.context - 1) // self.block_size)
