"""Let xgpt's scheduling rule control vLLM's prefix cache: block b of the rule's pool is vLLM's block b + 1.

vLLM keeps its own tables, hashes and reference counts. The rule decides with which cached blocks a request enters, and
which block it gets next. So the blocks that the rule's pool keeps stay cached, whichever blocks vLLM would evict first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xgpt.core.errors import InputError
from xgpt.core.policies import BlockTable

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from xgpt.core.schema.step_log import Chain

KEY_BYTES = 16
"""Bytes of vLLM's hashes that are kept: enough to tell blocks apart."""


class Mirror:
    """Makes vLLM's K/V manager allocate the blocks that the rule's pool has chosen.

    Args:
        table_of: returns the blocks of a request that the rule has admitted.

    Raises:
        InputError: vLLM keeps several kinds of blocks, for example because some layers attend in windows.
    """

    def __init__(self, manager: KVCacheManager, table_of: Callable[[Request], BlockTable]) -> None:
        groups = manager.coordinator.single_type_managers
        if len(groups) > 1:
            accepted = "vLLM has several kinds of K/V blocks for this model; leave it off"
            raise InputError("--enable-prefix-caching", "on", accepted)
        self._group = groups[0]
        self._manager = manager
        self._blocks = manager.block_pool
        self._table_of = table_of
        self._asking: Request | None = None
        """The request for which blocks are being allocated."""
        self._allocate_slots = manager.allocate_slots
        self._take_next = self._blocks.get_new_blocks
        manager.allocate_slots = self._allocate
        self._blocks.get_new_blocks = self._take_given

    def found(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Return the cached blocks with which a request enters, and the number of their tokens."""
        table = self._table_of(request)
        blocks = tuple(self._block(number) for number in table.blocks[: table.found])
        return self._manager.create_kv_cache_blocks((blocks,)), table.found * self._group.block_size

    def _allocate(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        self._asking = request
        try:
            return self._allocate_slots(request, *args, **kwargs)
        finally:
            self._asking = None

    def _take_given(self, count: int) -> list[KVCacheBlock]:
        """Move the blocks that the rule has chosen to the front of vLLM's queue, and allocate them."""
        request, queue = self._asking, self._blocks.free_block_queue
        assert request is not None
        has = len(self._group.req_to_blocks[request.request_id])
        given = [self._block(number) for number in self._table_of(request).blocks[has : has + count]]
        assert len(given) == count, "vLLM takes more blocks than the rule has given"
        for block in given:
            queue.remove(block)
        queue.prepend_n(given)
        return self._take_next(count)

    def _block(self, number: int) -> KVCacheBlock:
        """Return vLLM's block for a number in the rule's pool; vLLM reserves its first block."""
        return self._blocks.blocks[number + 1]


def chain_of(request: Request) -> Chain:
    """Return vLLM's keys of a request's full blocks; none if its prefix cache is off."""
    return tuple(bytes(key[:KEY_BYTES]) for key in request.block_hashes)
