"""Route a trace's requests to replicas by their prefixes, as `ReplicaRouter` does (xgpt.core.policies.routing)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpt.core.policies.routing import BLOCKS_A_KEY, MOST_KEYS, ReplicaRouter
from xgpt.core.schema import PlanDraft
from xgpt.core.trace_blocks import TracePrefixes
from xsimulator.counts.arrivals import NONE
from xsimulator.counts.chains import chains_of, number_of
from xsimulator.counts.compiled import kept


def homes_of(prefixes: TracePrefixes, inputs: npt.NDArray[np.int64], plan: PlanDraft) -> npt.NDArray[np.int64]:
    """Return each request's replica. # [requests]"""
    size, slack = BLOCKS_A_KEY * plan.block_size, ReplicaRouter.of(plan).slack
    stream = chains_of(prefixes, inputs, np.ones_like(inputs), size)
    load, most = np.zeros(plan.replicas, np.int64), int(plan.replicas * plan.estimate.decode_batch)
    keys = np.full((stream.num_keys + 1, 3), NONE, np.int32)
    prompts = stream.chains["prompt"].astype(np.int64)
    return route(inputs // size, prompts, stream.firsts, stream.trace_block, size, keys, load, slack, most, MOST_KEYS)


HOME, BEFORE, AFTER = range(3)
"""Columns of `keys`: where a prefix was last sent, and its neighbours in the queue of least recently used prefixes. The
last row has the queue's ends.
"""


@kept
def route(blocks, prompts, firsts, trace_block, size, keys, load, slack, most_inside, most_keys):
    chosen, oldest, num_keys, queue = np.empty(len(blocks), np.int64), 0, 0, len(keys) - 1
    keys[queue, BEFORE] = keys[queue, AFTER] = queue
    for i in range(len(blocks)):
        if i - oldest > most_inside:
            load[chosen[oldest]] -= 1
            oldest += 1
        found = blocks[i]
        while found and keys[number_of(firsts, prompts[i], found - 1, size, trace_block), HOME] == NONE:
            found -= 1
        number = np.argmin(load)
        if found:
            home = keys[number_of(firsts, prompts[i], found - 1, size, trace_block), HOME]
            if load[home] - load[number] <= slack * (found / blocks[i]) ** 2:
                number = home
        for block in range(blocks[i]):
            key = number_of(firsts, prompts[i], block, size, trace_block)
            if keys[key, HOME] == NONE:
                num_keys += 1
            else:
                keys[keys[key, BEFORE], AFTER], keys[keys[key, AFTER], BEFORE] = keys[key, AFTER], keys[key, BEFORE]
            last = keys[queue, BEFORE]
            keys[key, HOME], keys[key, BEFORE], keys[key, AFTER] = number, last, queue
            keys[last, AFTER] = keys[queue, BEFORE] = key
        while num_keys > most_keys:
            first = keys[queue, AFTER]
            keys[queue, AFTER], keys[keys[first, AFTER], BEFORE] = keys[first, AFTER], queue
            keys[first, HOME] = NONE
            num_keys -= 1
        load[number] += 1
        chosen[i] = number
    return chosen
