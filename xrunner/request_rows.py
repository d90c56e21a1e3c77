"""Keep the state of a worker's running requests in arrays, so that a step with hundreds of them takes a few numpy
calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

FEWEST = 64


class RequestRows:
    """One row for each request, in arrays indexed by the row.

    Attributes:
        last_token: the token to process next. # int64 [rows]
        context: number of tokens whose K/V are in the cache. # int32 [rows]
        prompt_len: number of tokens in the prompt. # int32 [rows]
        num_blocks: number of the request's blocks. # int32 [rows]
        tables: the blocks, in order. The rest of each row is arbitrary. # int32 [rows, blocks]
    """

    def __init__(self) -> None:
        self._row: dict[int, int] = {}
        self._free: list[int] = []
        self.last_token = np.zeros(0, dtype=np.int64)
        self.context = np.zeros(0, dtype=np.int32)
        self.prompt_len = np.zeros(0, dtype=np.int32)
        self.num_blocks = np.zeros(0, dtype=np.int32)
        self.tables = np.zeros((0, 1), dtype=np.int32)

    def __contains__(self, id_: int) -> bool:
        return id_ in self._row

    def __iter__(self) -> Iterator[int]:
        return iter(self._row)

    def __getitem__(self, id_: int) -> int:
        return self._row[id_]

    def of(self, ids: Collection[int]) -> np.ndarray:
        """Return the rows of requests. # int64 [requests]"""
        return np.fromiter(map(self._row.__getitem__, ids), dtype=np.int64, count=len(ids))

    def take(self, id_: int, blocks: Sequence[int], prompt_len: int) -> int:
        assert id_ not in self._row, f"request {id_} has started already"
        if not self._free:
            self._add_rows()
        row = self._row[id_] = self._free.pop()
        self._widen(len(blocks) + 1)  # a step of an encoder looks up the block after the prompt, but does not write it
        self.tables[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.prompt_len[row] = prompt_len
        return row

    def release(self, id_: int) -> int:
        row = self._row.pop(id_)
        self._free.append(row)
        return row

    def grow(self, grown: Collection[tuple[int, int]]) -> None:
        for id_, block in grown:
            row = self._row[id_]
            end = int(self.num_blocks[row])
            self._widen(end + 1)
            self.tables[row, end] = block
            self.num_blocks[row] = end + 1

    def _add_rows(self) -> None:
        before = len(self.context)
        count = max(FEWEST, 2 * before)
        self._free.extend(range(before, count))
        self.last_token = np.resize(self.last_token, count)
        self.context = np.resize(self.context, count)
        self.prompt_len = np.resize(self.prompt_len, count)
        self.num_blocks = np.resize(self.num_blocks, count)
        self.tables = np.resize(self.tables, (count, self.tables.shape[1]))

    def _widen(self, num_blocks: int) -> None:
        missing = num_blocks - self.tables.shape[1]
        if missing > 0:
            self.tables = np.pad(self.tables, ((0, 0), (0, missing)))
