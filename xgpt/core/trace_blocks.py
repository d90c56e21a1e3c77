"""Read the blocks of prompts and outputs that a trace's requests share, in Mooncake's format.

In a line of a trace, `hash_ids` has the ids of the prompt's blocks of `block_size` tokens. Equal ids mean that all
tokens up to the end of the block are equal. `output_hash_ids`, an extension of xgpt, has the ids of the blocks after
the prompt's full blocks, with the rest of the prompt and the output. The next turn of a conversation shares them.
Source: Qin et al., Mooncake, FAST 2025 (traces).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.schema.step_log import Chain
from xgpt.core.trace_files import TraceFormat

MOONCAKE_BLOCK = 512
"""Number of tokens in a block if neither the trace nor its format states this number."""


@dataclass(frozen=True, slots=True)
class TracePrefixes:
    """The blocks of a trace's requests, in the order of the requests.

    Attributes:
        block_size: number of tokens in a block. The last block of a request may have fewer.
        prompts: for each request, the ids of its prompt's blocks.
        outputs: for each request, the ids of the blocks after the prompt's full blocks. Empty means that no other
            request has them.
    """

    block_size: int
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]

    def chain(self, request: int, input_length: int, block_size: int) -> Chain:
        """Return the keys of a prompt's full K/V blocks.

        A K/V block's key states the trace's block that contains its last token. So if the trace's blocks are longer
        than K/V blocks, requests may share fewer K/V blocks than in reality.
        """
        return self._keys(self.prompts[request], 0, 0, input_length // block_size, block_size)

    def output_chain(self, request: int, input_length: int, output_length: int, block_size: int) -> Chain:
        """Return the keys of the full K/V blocks after the prompt's full ones. The last token has no K/V.

        If no other request has these blocks, they get unique keys. An engine caches them too, since it cannot know that
        no request will find them.
        """
        ids, first = self.outputs[request], input_length // self.block_size
        begin, end = input_length // block_size, (input_length + output_length - 1) // block_size
        if ids:
            return self._keys(ids, first, begin, end, block_size)
        of_request = -(request + 1) << 32
        return tuple((of_request | block).to_bytes(8, "big", signed=True) + b"own" for block in range(begin, end))

    def size_in_common(self, first: int, other: int, input_length: int) -> int:
        """Return with how many tokens of a request's prompt and output another prompt begins, in whole blocks."""
        said, prompt = self.prompts[first], self.prompts[other]
        if self.outputs[first]:
            said = said[: input_length // self.block_size] + self.outputs[first]
        same = next(
            (i for i, (a, b) in enumerate(zip(said, prompt, strict=False)) if a != b), min(len(said), len(prompt))
        )
        return same * self.block_size

    def _keys(self, ids: tuple[int, ...], offset: int, begin: int, end: int, block_size: int) -> Chain:
        """Return the keys of the K/V blocks [begin, end). `ids` has the ids of the trace's blocks from number `offset`
        on.
        """
        keys = []
        for block in range(begin, end):
            id_ = ids[((block + 1) * block_size - 1) // self.block_size - offset]
            keys.append(id_.to_bytes(8, "big", signed=True) + block.to_bytes(4, "big"))
        return tuple(keys)

    def take(self, order: npt.NDArray[np.int64]) -> TracePrefixes:
        places = order.tolist()
        return TracePrefixes(
            self.block_size, tuple(self.prompts[i] for i in places), tuple(self.outputs[i] for i in places)
        )


def read_ids(where: str, row: Mapping[str, object], input_length: int, size: int) -> tuple[int, ...]:
    return _ids(f"{where}, hash_ids", row.get("hash_ids"), -(-input_length // size))


def read_output_ids(
    where: str, row: Mapping[str, object], input_length: int, output_length: int, size: int
) -> tuple[int, ...]:
    if "output_hash_ids" not in row:
        return ()
    count = -(-(input_length + output_length) // size) - input_length // size
    return _ids(f"{where}, output_hash_ids", row["output_hash_ids"], count)


def block_size_of(where: str, row: Mapping[str, object], form: TraceFormat | None) -> int:
    size = row.get("block_size", (form and form.block_size) or MOONCAKE_BLOCK)
    if isinstance(size, int) and not isinstance(size, bool) and size >= 1:
        return size
    raise InputError(f"{where}, block_size", size, "it must be a whole number of tokens, at least 1")


def _ids(field: str, value: object, count: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(id_, int) and abs(id_) < 2**63 for id_ in value):
        raise InputError(field, value, "it must be a list of whole numbers, one for each block")
    if len(value) != count:
        raise InputError(field, f"{len(value)} ids", f"give one id for each of the request's {count} blocks")
    return tuple(value)
