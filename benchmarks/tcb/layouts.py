"""Build and run the batches with which TCB is compared and which xgpt does not serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from xgpt.core.policies.request import Request
from xgpt.core.policies.tcb import LEAVING_SHARE, RowBatch, places_of
from xrunner.models import Model
from xrunner.tcb.rows import Layout, rows_of

BatchCost = Callable[[npt.NDArray[np.int64], int], npt.NDArray[np.float64]]
"""(numbers of requests, tokens to which each is padded) -> seconds of each such batch."""


def length_sorted_batches(requests: Sequence[Request], cost: BatchCost, largest: int) -> list[list[Request]]:
    """Divide the requests, sorted by length, into batches of at most `largest` with the lowest total cost.

    best[i] = min over j of best[j] + cost(i - j, length of request i), for the i shortest.

    Source: TurboTransformers (arXiv 2010.05680) Algorithm 2; TCB's TTB, Figure 1(b).
    """
    ordered = sorted(requests, key=lambda one: one.input_length)
    best = np.zeros(len(ordered) + 1)
    first = np.zeros(len(ordered) + 1, dtype=np.int64)
    for end in range(1, len(ordered) + 1):
        starts = np.arange(max(0, end - largest), end)
        total = best[starts] + cost(end - starts, ordered[end - 1].input_length)
        cheapest = int(total.argmin())
        best[end], first[end] = total[cheapest], starts[cheapest]
    batches, end = [], len(ordered)
    while end:
        batches.append(ordered[first[end] : end])
        end = int(first[end])
    return batches[::-1]


def slotted_rows(
    rows: Sequence[Sequence[Request]], row_tokens: int, slot_tokens: int
) -> tuple[RowBatch, list[Request]]:
    """Return rows of `row_tokens // slot_tokens` slots. Each request goes to the first slot of its row in which it
    fits.

    Source: TCB sec. 4.2, and Algorithm 2, where `slot_tokens` is the longest request chosen by utility.

    Returns:
        The batch, and the requests that fit in no slot.
    """
    slots_per_row = row_tokens // slot_tokens
    slots: list[list[Request]] = []
    left_over: list[Request] = []
    for row in rows:
        slotted: list[list[Request]] = [[] for _ in range(slots_per_row)]
        for one in row:
            slot = next(
                (slot for slot in slotted if sum(each.input_length for each in slot) + one.input_length <= slot_tokens),
                left_over,
            )
            slot.append(one)
        slots += slotted
    return RowBatch(len(slots), slot_tokens, slots_per_row, places_of(slots)), left_over


def run_rows(
    model: Model,
    batch: RowBatch,
    prompts: Mapping[int, Sequence[int]],
    output_lengths: Mapping[int, int],
    *,
    free_slots: bool = False,
) -> dict[int, list[int]]:
    """Return the greedy tokens of each request of the batch.

    Args:
        output_lengths: number of tokens to generate for each request, at least one.
        free_slots: whether to free a slot and its memory when its requests have ended (TCB sec. 4.2.2).
    """
    layout = Layout(batch, prompts)
    lengths = np.array([output_lengths[id_] for id_ in layout.ids])
    ends = np.zeros(batch.num_slots, dtype=np.int64)
    np.maximum.at(ends, layout.slot, lengths)
    """For each slot, the number of steps until its last request has ended."""
    present, num_slots = np.arange(len(lengths)), batch.num_slots
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    """The requests of each step, and their tokens."""
    with torch.inference_mode():
        rows = rows_of(model, layout, most_steps=int(ends.max()))
        tokens = model.head(rows.first()).argmax(dim=-1)
        while True:
            steps.append((present, tokens.cpu().numpy()))
            running = ends > len(steps)
            if not running.any():
                break
            if free_slots and running.sum() <= (1 - LEAVING_SHARE) * num_slots:
                stay = np.flatnonzero(running[layout.slot[present]])
                rows.keep(stay)
                tokens, present, num_slots = tokens[torch.from_numpy(stay)], present[stay], int(running.sum())
            tokens = model.head(rows.next(tokens)).argmax(dim=-1)
    outputs: dict[int, list[int]] = {id_: [] for id_ in layout.ids}
    for count, (requests, values) in enumerate(steps):
        for request in np.flatnonzero(lengths[requests] > count):
            outputs[layout.ids[requests[request]]].append(int(values[request]))
    return outputs
