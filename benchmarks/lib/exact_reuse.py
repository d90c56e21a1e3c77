"""Check a reuse curve against an exact replay."""

from __future__ import annotations

from xgpt.core.policies import Blocks
from xgpt.core.workload import TraceLengths


def exact_share(trace: TraceLengths, capacity: int, block_size: int) -> float:
    """Return the share of cached prompt tokens if requests run one after the other on the engine's own blocks.

    Args:
        capacity: number of K/V blocks. The longest request must fit.
    """
    prefixes = trace.prefixes
    assert prefixes is not None
    blocks, found = Blocks(capacity), 0
    for number, (length, output) in enumerate(zip(trace.input.tolist(), trace.output.tolist(), strict=True)):
        chain = prefixes.chain(number, length, block_size)
        table = blocks.share(blocks.find(chain, (length - 1) // block_size).blocks)
        found += table.found * block_size
        for _ in range(-(-(length + output - 1) // block_size) - table.found):
            blocks.grow(table)
        chain += prefixes.output_chain(number, length, output, block_size)
        blocks.name(table, chain, len(chain))
        blocks.release(table)
    return float(found / trace.input.sum())
