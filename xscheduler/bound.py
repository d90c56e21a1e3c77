"""Upper bounds on throughput that hold, whatever the directions.

Of a box of settings: each setting serves at most as many requests a period as the box's largest values would, and
takes at least as long for it as the smallest values would on tables that never fall (xscheduler.minorant). As boxes
shrink, the bound closes on what is predicted; and because a box is left out once its slowest corner breaks a latency
bound, what remains open is what the constraint allows.

Of a whole space: a request passes E[I] prompt tokens and E[D] decode iterations through the device. Whatever the
schedule, each of those tokens costs at least the least seconds per token among steps of the sizes that the space
allows, and likewise for attention, head and overhead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from xsimulator.analytic import OneLaneModel
from xsimulator.cost import Line
from xsimulator.lengths import steady_decode_batch

if TYPE_CHECKING:
    from xscheduler.space import Evaluation, Space

Array = npt.NDArray[np.float64]


INTERVAL_BOUND = "intervals: most requests a period over the least period, box by box"


def interval_bound(space: Space, evaluation: Evaluation, floor: Evaluation, low: slice, high: slice) -> Array:
    """Throughput that no point of each box exceeds.

    Args:
        evaluation, floor: predictions of the boxes' corners, on the profile and on its minorant.
        low, high: where the corners with all values at their lowest, and at their highest, stand.
    """
    most, least = evaluation.performance, floor.performance
    if space.kind in ("rra", "static"):
        return most.encode_batch[high] / least.cycle[low]
    # In mixed steps the requests in decode over the time that each spends there, by Little's law.
    if not space.model.lengths.mean_decodes:
        return np.full_like(most.throughput[high], space.bound)
    return most.decode_batch[high] * least.throughput[low] / least.decode_batch[low]


class UnitCostBound:
    """Throughput that no schedule with at most so many requests in a step can exceed."""

    def __init__(self, model: OneLaneModel, max_batch: int) -> None:
        cost, lengths = model.cost, model.lengths
        self._model = model
        context = lengths.mean_decode_context
        batches = np.arange(1, max_batch + 1)
        self._decode_attention = Line(batches, cost.decode_attention(batches, context))
        encode = cost.encode_attention(lengths.inputs, lengths.input_probabilities)
        self._encode_attention = float(encode(batches).min())

    def of(self, space: Space, fastest: dict[str, int]) -> float:
        """Bound for a block of one policy's space, from the values at its fast corner."""
        most = space.capacity
        match space.kind:
            case "rra":
                encode = min(fastest["encode_batch"], most)
                decode = steady_decode_batch(space.model.lengths, encode, fastest["decode_iterations"])
                return self._pure(encode, min(decode, most))
            case "static":
                batch = min(fastest["batch"], most)
                return self._pure(batch, batch)
        batch = min(fastest["max_batch"], most)
        return self._mixed(fastest.get("token_budget", batch * space.model.lengths.max_input), batch)

    def _pure(self, encode_requests: float, decode_batch: float) -> float:
        """Steps either encode (at most that many requests) or decode (at most that many)."""
        cost, lengths = self._model.cost, self._model.lengths
        encode_tokens = encode_requests * lengths.mean_input
        encode_s = (
            lengths.mean_input * cost.tokens.least_per_unit(encode_tokens)
            + self._encode_attention
            + cost.head.least_per_unit(encode_requests)
            + cost.overhead.least_per_unit(encode_requests)
        )
        decode_s = lengths.mean_decodes * (
            cost.tokens.least_per_unit(decode_batch)
            + self._decode_attention.least_per_unit(decode_batch)
            + cost.head.least_per_unit(decode_batch)
            + cost.overhead.least_per_unit(decode_batch)
        )
        return 1.0 / float(encode_s + decode_s)

    def _mixed(self, tokens: float, batch: float) -> float:
        """Steps mix both: at most that many tokens, of at most that many requests."""
        cost, lengths = self._model.cost, self._model.lengths
        samples = 1 + lengths.mean_decodes
        seconds = (
            (lengths.mean_input + lengths.mean_decodes) * cost.tokens.least_per_unit(tokens)
            + self._encode_attention
            + lengths.mean_decodes * self._decode_attention.least_per_unit(batch)
            + samples * (cost.head.least_per_unit(batch) + cost.overhead.least_per_unit(batch))
        )
        return 1.0 / float(seconds)
