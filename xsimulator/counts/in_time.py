"""Order in-time for compiled runs: the decisions of `xgpt.core.policies.in_time`, with the same arithmetic.

All requests have the same bound on TTFT. So waiting requests, sorted by due time, are in order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.policies.in_time import UNCUT_TOKENS, FirstTokens
from xsimulator.counts.arrivals import NONE, Array, Stream
from xsimulator.counts.compiled import helper

FIRST, LIVE, END, TAKEN, IN_ORDER, PAUSED, ORDERED, STOPPED_AT = range(8)
"""Indices of `InTime.counts`: places in `waiting` of the oldest request, of the oldest one that is not overdue, and
behind the youngest one; number of requests that have arrived, whether an overdue request may enter next, number of
prompts that must pause, whether the next request enters in order, and the number of steps begun when the requests that
end with the running step were last left out of the next one.
"""
UNLIMITED = np.iinfo(np.int64).max


class InTime(NamedTuple):
    """The state of order in-time, as arrays for compiled code.

    Attributes:
        at_once: number of prompts that micro-batches prefill concurrently, or 0 in other orders.
        latest_ns: for each request, the latest time at which its prefill can begin and be in time. # [requests]
        tokens, tokens_s, prompts, prompts_s: points and seconds of the step times.
        decode_s, context_s: seconds of attention for a decoding request, and for a token of context.
        waiting: from `FIRST` to `END`, waiting requests in order of arrival. # [requests]
        gives_way: whether each request is deferred. # [requests]
        jobs, took_ns, kept: scratch memory for `plan`. # [requests] each
    """

    ttft_ns: int
    patience_ns: int
    at_once: int
    decode_s: float
    context_s: float
    latest_ns: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    tokens_s: Array
    prompts: npt.NDArray[np.int64]
    prompts_s: Array
    counts: npt.NDArray[np.int64]
    waiting: npt.NDArray[np.int64]
    gives_way: npt.NDArray[np.bool_]
    jobs: npt.NDArray[np.int64]
    took_ns: Array
    kept: npt.NDArray[np.int64]

    @classmethod
    def of(cls, first: FirstTokens, patience_ns: int | None, stream: Stream) -> InTime:
        times = first.clock.times
        arrivals, inputs = np.asarray(stream.arrivals_ns, np.int64), np.asarray(stream.inputs, np.int64)
        lengths, where = np.unique(inputs, return_inverse=True)
        prompts_ns = np.asarray([first.clock.prompt_ns(length) for length in lengths.tolist()], np.int64)
        size, counts = len(inputs), np.zeros(8, np.int64)
        counts[IN_ORDER] = 1
        return cls(
            first.ttft_ns,
            UNLIMITED if patience_ns is None else patience_ns,
            first.at_once,
            times.decode_s,
            times.context_s,
            arrivals + first.ttft_ns - prompts_ns[where],
            _whole(times.tokens),
            np.asarray(times.tokens_s, float),
            _whole(times.prompts),
            np.asarray(times.prompts_s, float),
            counts,
            np.zeros(size, np.int64),
            np.zeros(size, bool),
            np.zeros(size, np.int64),
            np.zeros(size),
            np.zeros(size, np.int64),
        )


_NO_TOKENS, _NO_S = np.zeros(1, np.int64), np.zeros(1)
NOT_IN_TIME = InTime(
    *(0, 0, 0, 0.0, 0.0, _NO_TOKENS, _NO_TOKENS, _NO_S, _NO_TOKENS, _NO_S, np.zeros(8, np.int64), _NO_TOKENS),
    *(np.zeros(1, bool), _NO_TOKENS, _NO_S, _NO_TOKENS),
)
"""For runs in other orders."""


def _whole(points: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.asarray(points, np.int64)


@helper
def _at(points, values, x):
    i = min(np.searchsorted(points, x, side="right"), len(points) - 1) - 1
    return values[i] + (x - points[i]) * (values[i + 1] - values[i]) / (points[i + 1] - points[i])


@helper
def plan(s, lane, batch, it):
    """Decide which prompts are deferred, and which of the begun prompts must pause in the next step."""
    counts = it.counts
    while counts[TAKEN] < lane.tail:
        it.waiting[counts[END]] = counts[TAKEN]
        counts[TAKEN] += 1
        counts[END] += 1
    num_jobs = 0
    for i in range(len(s.batches)):
        id_ = s.batches[i].first
        while id_ != NONE:
            j = num_jobs
            while j > 0 and _due_later(s, it, it.jobs[j - 1], id_):
                it.jobs[j] = it.jobs[j - 1]
                j -= 1
            it.jobs[j] = id_
            num_jobs += 1
            id_ = s.requests[id_].after
    token_ns, now_ns = _token_ns(s, lane, batch, it), lane.now_ns
    while counts[LIVE] < counts[END] and s.requests[it.waiting[counts[LIVE]]].arrival_ns + it.ttft_ns < now_ns:
        it.gives_way[it.waiting[counts[LIVE]]] = True
        counts[LIVE] += 1
    end_ns, num_kept, begun, place = float(now_ns), 0, 0, counts[LIVE]
    first_due_ns = UNLIMITED
    while begun < num_jobs or place < counts[END]:
        if begun < num_jobs and (
            place == counts[END] or s.requests[it.jobs[begun]].arrival_ns <= s.requests[it.waiting[place]].arrival_ns
        ):
            id_ = it.jobs[begun]
            begun += 1
        else:
            id_ = it.waiting[place]
            place += 1
            it.gives_way[id_] = it.latest_ns[id_] < now_ns
            if it.gives_way[id_]:
                continue
        request = s.requests[id_]
        due_ns = request.arrival_ns + it.ttft_ns
        attention_s = _at(it.prompts, it.prompts_s, request.input) - _at(it.prompts, it.prompts_s, request.encoded)
        alone_ns = (request.input - request.encoded) * token_ns + 1e9 * attention_s
        it.gives_way[id_] = now_ns + alone_ns > due_ns
        if it.gives_way[id_]:
            continue
        it.kept[num_kept], it.took_ns[num_kept] = id_, alone_ns / it.at_once
        num_kept += 1
        took_ns = alone_ns / it.at_once
        if end_ns + alone_ns > due_ns:
            longest = 0
            for i in range(1, num_kept):
                if it.took_ns[i] > it.took_ns[longest] or (
                    it.took_ns[i] == it.took_ns[longest] and it.kept[i] < it.kept[longest]
                ):
                    longest = i
            it.gives_way[it.kept[longest]] = True
            end_ns += -it.took_ns[longest]
            num_kept -= 1
            it.kept[longest], it.took_ns[longest] = it.kept[num_kept], it.took_ns[num_kept]
        end_ns += took_ns
    for i in range(counts[LIVE], counts[END]):
        if not it.gives_way[it.waiting[i]]:
            first_due_ns = s.requests[it.waiting[i]].arrival_ns + it.ttft_ns
            break
    counts[PAUSED] = 0
    id_ = batch.first
    while id_ != NONE:
        it.gives_way[id_] = it.gives_way[id_] or s.requests[id_].arrival_ns + it.ttft_ns > first_due_ns
        counts[PAUSED] += it.gives_way[id_]
        id_ = s.requests[id_].after


@helper
def _due_later(s, it, id_, other):
    one_ns, other_ns = s.requests[id_].arrival_ns, s.requests[other].arrival_ns
    return one_ns > other_ns or (one_ns == other_ns and id_ > other)


@helper
def _token_ns(s, lane, batch, it):
    """Return the nanoseconds of a prompt token in steps that also decode the micro-batch's requests. A schedule that
    runs ahead leaves out those that end with the running step only when it makes room for the next one.
    """
    decodes, context = batch.decoding, batch.context
    if lane.has_assumed and it.counts[STOPPED_AT] != lane.end_step:
        id_ = lane.assumed_ends
        while id_ != NONE:
            request = s.requests[id_]
            if request.output == request.most:
                decodes += 1
                context += request.input + request.output
            id_ = request.ends_with
    others_s = it.decode_s * decodes + it.context_s * context
    budget = UNCUT_TOKENS + decodes if batch.token_budget >= UNLIMITED // 2 else batch.token_budget
    tokens = max(budget - decodes, 1)
    return 1e9 * (_at(it.tokens, it.tokens_s, decodes + tokens) + others_s) / tokens


@helper
def next_in_time(s, lane, it):
    counts = it.counts
    if counts[FIRST] == counts[END]:
        return NONE
    oldest = it.waiting[counts[FIRST]]
    counts[ORDERED] = not (counts[IN_ORDER] and s.requests[oldest].arrival_ns < lane.now_ns - it.patience_ns)
    if counts[ORDERED]:
        for i in range(counts[LIVE], counts[END]):
            if not it.gives_way[it.waiting[i]]:
                return it.waiting[i]
    return oldest


@helper
def enter_in_time(it, id_):
    counts = it.counts
    if it.waiting[counts[FIRST]] == id_:
        counts[FIRST] += 1
        counts[LIVE] = max(counts[LIVE], counts[FIRST])
    else:
        place = counts[LIVE]
        while it.waiting[place] != id_:
            place += 1
        counts[END] -= 1
        for i in range(place, counts[END]):
            it.waiting[i] = it.waiting[i + 1]
    counts[IN_ORDER] = counts[ORDERED]
    it.gives_way[id_] = False
