"""Observe which share of prompt tokens recent requests found in the prefix cache, and detect when this share changes.

Blocks are identified by the engine's keys: salted hashes that reveal nothing about a prompt. The number of remembered
keys is limited, however long prompts are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xgpt.core.reuse_distances import ReuseCurve
from xgpt.core.schema import ObservedReuse, Plan
from xgpt.core.schema.step_log import Chain, StepRecord
from xgpt.core.trace_blocks import TracePrefixes
from xgpt.core.workload import TraceLengths

Ints = npt.NDArray[np.int64]

MOST_KEYS = 131_072
"""Largest number of blocks of the remembered requests. Their keys take one megabyte."""
MOST_REQUESTS = 2048
ENOUGH = 150
LEAST_CHANGE = 0.1
SURE = 4.0
SIZES = 12


@dataclass(slots=True)
class Common:
    """A request and the keys of its K/V blocks.

    Attributes:
        left: keys of the blocks after the prompt's. These blocks stay in the cache when the request ends.
        found: number of prompt tokens that were found in the cache. None means that prefill has not begun.
        is_warm: whether earlier requests had filled the cache when prefill began.
    """

    input_length: int
    keys: Ints
    left: Ints
    found: int | None = None
    is_warm: bool = False


class ReuseWindow:
    def __init__(self, plan: Plan) -> None:
        self.block_size = plan.block_size
        self._requests: OrderedDict[int, Common] = OrderedDict()
        self._num_keys = self._num_left = 0
        self.go_over_to(plan)

    def go_over_to(self, plan: Plan) -> None:
        reuse = plan.estimate.reuse
        self._capacity = most_kept(plan) if reuse is None else reuse.kept_blocks

    def note(self, record: StepRecord) -> None:
        for arrival in record.arrivals:
            if arrival.id not in self._requests:
                request = Common(arrival.input_length, _numbers(arrival.chain), np.empty(0, np.int64))
                self._requests[arrival.id] = request
                self._count(request.keys)
        for id_, first_token, _ in record.encode:
            request_ = self._requests.get(id_)
            if request_ is not None and request_.found is None:
                request_.found, request_.is_warm = first_token, self._num_left >= self._capacity
                self._num_left += len(request_.keys) - first_token // self.block_size
        for id_, chain in record.outputs:
            if id_ in self._requests:
                left = self._requests[id_].left = _numbers(chain)
                self._num_left += len(left)
                self._count(left)

    def _count(self, keys: Ints) -> None:
        self._num_keys += len(keys)
        while len(self._requests) > 1 and (self._num_keys > MOST_KEYS or len(self._requests) > MOST_REQUESTS):
            _, gone = self._requests.popitem(last=False)
            self._num_keys -= len(gone.keys) + len(gone.left)

    def forget_before(self, first: Common) -> None:
        if any(request is first for request in self._requests.values()):
            while next(iter(self._requests.values())) is not first:
                _, gone = self._requests.popitem(last=False)
                self._num_keys -= len(gone.keys) + len(gone.left)

    def requests(self) -> list[Common]:
        return [request for request in self._requests.values() if request.found is not None]


def most_kept(plan: Plan) -> int:
    """Return the largest number of K/V blocks in which a plan can cache prompts: all blocks of the smallest stage that
    runs prefill.
    """
    return min(stage.kv_blocks for stage in plan.stages if stage.lane != "decode")


def _numbers(chain: Chain) -> Ints:
    if not chain:
        return np.empty(0, np.int64)
    return np.frombuffer(b"".join(key[:8].ljust(8) for key in chain), dtype=np.int64)


def changed(requests: Sequence[Common], share: float) -> Sequence[Common] | None:
    """Return the requests since the reused share of prompt tokens changed from `share`, or None if it has not changed
    significantly.

    While the cache fills, a lower share is no change, since it will still rise.
    """
    best: tuple[float, int] | None = None
    size = ENOUGH
    while size <= len(requests):
        tail = requests[-size:]
        found, error = share_of(tail)
        difference = found - share
        is_told = difference > 0 or all(request.is_warm for request in tail)
        if is_told and abs(difference) > max(LEAST_CHANGE, SURE * error):
            best = max(best or (0.0, 0), (abs(difference), size))
        size *= 2
    return None if best is None else requests[-best[1] :]


def share_of(requests: Sequence[Common]) -> tuple[float, float]:
    inputs = np.array([request.input_length for request in requests], float)
    found = np.array([request.found or 0 for request in requests], float)
    share = float(found.sum() / inputs.sum())
    return share, float(np.sqrt(((found - share * inputs) ** 2).sum()) / inputs.sum())


def observed_reuse(requests: Sequence[Common], block_size: int) -> ObservedReuse | None:
    """Return the reused share of prompt tokens, observed and for other cache sizes. Return None if there are fewer than
    two requests, or if they have no keys.

    For other cache sizes, the first half of the requests only fills the cache, and the second half is counted.
    """
    if len(requests) < 2 or not any(len(request.keys) for request in requests):
        return None
    inputs = np.array([request.input_length for request in requests])
    outputs = np.array([block_size * len(request.left) + 1 for request in requests])
    blocks = tuple(tuple(request.keys.tolist()) for request in requests)
    left = tuple(tuple(request.left.tolist()) for request in requests)
    curve = ReuseCurve(TraceLengths(inputs, outputs, None, TracePrefixes(block_size, blocks, left)), block_size)
    return summary_of(curve, share_of(requests)[0], len(requests) // 2)


def summary_of(curve: ReuseCurve, share: float, begin: int = 0) -> ObservedReuse:
    sizes = [float(size) for size in curve.sizes(SIZES)]
    return ObservedReuse(
        share=share,
        sizes=tuple(sizes),
        shares=tuple(curve.share(size, begin) for size in sizes),
        most=curve.share(np.inf, begin),
    )
