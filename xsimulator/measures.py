"""Measure throughput and latencies from a log of steps. The same definitions hold for simulated and real engines.

At saturation, latency counts from admission: the start of the step that begins to encode the request (`measure`). If
requests arrive over time, latency counts from arrival (`request_times`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.schema import Constraint, Goal
from xgpt.core.schema.step_log import StepRecord

Array = npt.NDArray[np.float64]

Batch = tuple[str, int, int]
"""The lane, micro-batch and replica of requests that decode together."""

VIRTUAL_SHARE = 0.8
"""The log must show for at least this share of admissions when a request with `quantile_output` tokens would have
ended.
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of a window of a log.

    Attributes:
        latency_s: mean time from admission to the last token of a request with `quantile_output` tokens. Every decode
            step gives a token to every running request. So each admission in the window shows this time, whatever the
            request's own length. Two cases are exceptions. In the first, all requests often end before this time (in
            static batches, or in phases longer than most outputs), and a longer request might have kept later requests
            out. In the second, steps mix encode and decode, and a longer request would have kept its slot. In both
            cases, the result is the mean TTFT plus the mean gap before each further token.
        itl_p99_s: 99th percentile of the gaps between tokens of a request.
    """

    num_requests: int
    window_s: float
    throughput_rps: float
    output_tokens_per_s: float
    latency_s: float
    request_latency_s: float
    ttft_s: float
    itl_p99_s: float
    preemptions: int
    encode_batch: float
    decode_batch: float
    latencies_s: Array

    def of_replicas(self, number: int) -> Measured:
        rps, tokens_per_s = number * self.throughput_rps, number * self.output_tokens_per_s
        return replace(self, throughput_rps=rps, output_tokens_per_s=tokens_per_s)

    def share_within(self, bound_s: float) -> float:
        """Return the share of finished requests whose time from admission to the last token is within a bound."""
        return float(np.mean(self.latencies_s <= bound_s))


def measure(
    log: Sequence[StepRecord],
    *,
    quantile: float,
    quantile_output: int,
    skip_requests: int,
    num_requests: int,
    encode_emits: bool = True,
    has_encoder: bool = False,
    may_end: bool = False,
) -> Measured:
    """Return the figures of a log's window in which about `num_requests` requests end, after the first `skip_requests`.

    The window opens and closes at the start of a step that encodes, so that it contains whole cycles.

    Args:
        may_end: whether the window may extend to the end of the log if the log is too short.
        encode_emits: whether the step that ends a prompt computes the first token. False if waa's encode lane has only
            an encoder.
        has_encoder: whether the model is an encoder-decoder. A preempted request then generates its tokens again.
    """
    steps = _Steps(log, encode_emits=encode_emits, has_encoder=has_encoder)
    first, last = steps.window(skip_requests, num_requests, may_end=may_end)
    closes_ns = steps.start[last] if last < len(log) else steps.end[-1]
    window_s = float(closes_ns - steps.start[first]) / 1e9
    finished = [id_ for record in log[first:last] for id_ in record.finished]
    tokens = sum(steps.num_tokens[id_] for id_ in finished)

    in_window = [id_ for id_, step in steps.admitted.items() if first <= step < last and id_ in steps.first_token]
    ttft = [(steps.end[steps.first_token[i]] - steps.start[steps.admitted[i]]) / 1e9 for i in in_window]
    whole = [(steps.end[steps.last_token[i]] - steps.start[steps.admitted[i]]) / 1e9 for i in finished]
    request_latency_s = float(np.quantile(whole, quantile))
    gaps, ages = steps.gaps(first, last)
    latency_s = float(np.mean(ttft))
    if any(record.encode and record.decode for record in log[first:last]):
        latency_s += (quantile_output - 1) * float(np.mean(gaps))
    else:
        virtual = steps.virtual_latencies(in_window, quantile_output)
        shown = virtual[np.isfinite(virtual)]
        if len(shown) > VIRTUAL_SHARE * len(virtual):
            latency_s = float(np.mean(shown))
        else:
            latency_s += float(mean_gaps(gaps, ages, quantile_output).sum())
    encode = [len(record.encode) for record in log[first:last] if record.encode]
    decode = [len(record.decode) for record in log[first:last] if record.decode]
    return Measured(
        num_requests=len(finished),
        window_s=window_s,
        throughput_rps=len(finished) / window_s,
        output_tokens_per_s=tokens / window_s,
        latency_s=latency_s,
        request_latency_s=request_latency_s,
        ttft_s=float(np.mean(ttft)),
        itl_p99_s=float(np.quantile(gaps, 0.99)) if len(gaps) else 0.0,
        preemptions=sum(len(record.preempted) for record in log[first:last]),
        encode_batch=float(np.mean(encode)) if encode else 0.0,
        decode_batch=float(np.mean(decode)) if decode else 0.0,
        latencies_s=np.asarray(whole),
    )


def window_of(log: Sequence[StepRecord], skip_requests: int, num_requests: int) -> Sequence[StepRecord]:
    first, last = _Steps(log, encode_emits=True).window(skip_requests, num_requests)
    return log[first:last]


def without_core_waits(log: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the log of one lane without the times that steps waited for a CPU core."""
    found, waited_ns = [], 0
    for record in log:
        start_ns = record.start_ns - waited_ns
        arrivals = tuple(each._replace(arrival_ns=each.arrival_ns - waited_ns) for each in record.arrivals)
        waited_ns += record.core_wait_ns or 0
        found.append(record._replace(start_ns=start_ns, end_ns=record.end_ns - waited_ns, arrivals=arrivals))
    return found


def steps_of_first(log: Sequence[StepRecord], num_requests: int) -> Sequence[StepRecord]:
    """Return the steps that `request_times` reads, up to the end of the first `num_requests` requests that arrived."""
    counted = set(_first_to_arrive(log, num_requests))
    ends = [i for i, record in enumerate(log) if not counted.isdisjoint(record.finished)]
    return log[: ends[-1] + 1] if ends else log


def _first_to_arrive(log: Sequence[StepRecord], num_requests: int | None) -> list[int]:
    arrived = {arrival.id: arrival.arrival_ns for record in log for arrival in record.arrivals}
    return sorted(arrived, key=lambda id_: (arrived[id_], id_))[:num_requests]


QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds from each request's arrival, waiting included. # each [requests]

    Attributes:
        tpot_s: mean gap between tokens, or 0 for an output of one token.
        num_lost: number of requests that arrived but never ended.
    """

    ttft_s: Array
    tpot_s: Array
    whole_s: Array
    num_lost: int = 0

    @classmethod
    def of_ns(cls, arrived: Array, first: Array, last: Array, tokens: npt.ArrayLike, num_lost: int = 0) -> RequestTimes:
        gaps = np.maximum(np.asarray(tokens, float) - 1, 1)
        return cls((first - arrived) / 1e9, (last - first) / gaps / 1e9, (last - arrived) / 1e9, num_lost)

    def later(self, path_s: float) -> RequestTimes:
        return replace(self, ttft_s=self.ttft_s + path_s, whole_s=self.whole_s + path_s) if path_s else self

    def excess(self, goal: Goal) -> Array:
        """Return each request's largest ratio of time to bound, over the goal's bounds without headroom."""
        worst = np.zeros(len(self.whole_s))
        for times, bound in (
            (self.whole_s, goal.latency_bound_s),
            (self.ttft_s, goal.ttft_s),
            (self.tpot_s, goal.tpot_s),
        ):
            if bound is not None:
                worst = np.maximum(worst, times / bound)
        return worst

    def share_kept(self, goal: Goal) -> float:
        return float(np.sum(self.excess(goal) <= 1)) / max(len(self.whole_s) + self.num_lost, 1)

    def goodput(self, constraint: Constraint) -> float:
        return self.share_kept(constraint.all_bounds)

    def keeps(self, constraint: Constraint) -> bool:
        return all(self.share_kept(goal) >= goal.quantile for goal in constraint.goals)

    @property
    def gaps_s(self) -> npt.NDArray[np.float64]:
        """Times per output token, without those of outputs of one token."""
        return self.tpot_s[self.tpot_s > 0]

    @property
    def figures(self) -> dict[str, float]:
        """Mean and quantiles of each time, by names such as ttft_p50_s. Outputs of one token have no tpot."""
        found = {}
        for name, times in (("ttft", self.ttft_s), ("tpot", self.gaps_s), ("whole", self.whole_s)):
            if len(times):
                found[f"{name}_mean_s"] = float(np.mean(times))
                found |= {f"{name}_p{100 * q:g}_s": quantile_of(times, q) for q in QUANTILES}
        return found


def quantile_of(values: npt.NDArray[np.float64], quantile: float) -> float:
    """Return the smallest value that at most a share 1 - `quantile` of all values exceed."""
    index = max(0, ceil(quantile * len(values) - 1e-9) - 1)
    return float(np.partition(values, index)[index])


def request_times(
    log: Sequence[StepRecord],
    num_requests: int | None = None,
    *,
    encode_emits: bool,
    of_class: str | None = None,
    tokens: npt.NDArray[np.int_] | None = None,
) -> RequestTimes:
    """Return the times, from arrival, of the first requests of a log."""
    steps = _Steps(log, encode_emits=encode_emits)
    arrivals = {arrival.id: arrival for record in log for arrival in record.arrivals}
    counted = [
        id_
        for id_ in _first_to_arrive(log, num_requests)
        if of_class is None or arrivals[id_].account.of_class == of_class
    ]
    ended = [id_ for id_ in counted if id_ in steps.last_token]
    arrival = np.asarray([arrivals[id_].arrival_ns for id_ in ended], float)
    first = steps.end[[steps.first_token[id_] for id_ in ended]]
    last = steps.end[[steps.last_token[id_] for id_ in ended]]
    counts = [steps.num_tokens[id_] for id_ in ended] if tokens is None else tokens[ended]
    return RequestTimes.of_ns(arrival, first, last, counts, len(counted) - len(ended))


class _Steps:
    """An index of a log: for each request, the steps in which it was admitted, got its tokens and ended."""

    def __init__(self, log: Sequence[StepRecord], *, encode_emits: bool, has_encoder: bool = False) -> None:
        self.log = log
        self.start = np.asarray([record.start_ns for record in log], float)
        self.end = np.asarray([record.end_ns for record in log], float)
        # Since steps of two lanes overlap, a request may be encoded in an earlier record than the one with its arrival.
        prompts = {arrival.id: arrival.input_length for record in log for arrival in record.arrivals}
        self.admitted: dict[int, int] = {}
        self.first_token: dict[int, int] = {}
        self.last_token: dict[int, int] = {}
        self.num_tokens: dict[int, int] = {}
        self._first_decode: dict[int, int] = {}
        self._batch_of: dict[int, Batch] = {}
        decode_steps: defaultdict[Batch, list[int]] = defaultdict(list)
        empty_steps: defaultdict[Batch, list[int]] = defaultdict(list)
        decoding: defaultdict[Batch, set[int]] = defaultdict(set)
        done: set[int] = set()
        for i, record in enumerate(log):
            batch = (record.lane, record.microbatch, record.replica)
            inside = decoding[batch]
            for id_ in (*record.cancelled, *record.preempted):
                decoding[self._batch_of.get(id_, batch)].discard(id_)
                if has_encoder:
                    self.num_tokens[id_] = 0
            for id_, start, length in record.encode:
                # A preempted request is encoded again, but only its first admission and its first token count.
                self.admitted.setdefault(id_, i)
                if start + length == prompts[id_] + self.num_tokens.get(id_, 0) and encode_emits:
                    self.first_token.setdefault(id_, i)
                    self.num_tokens[id_] = self.num_tokens.get(id_, 0) + 1
                    if record.lane == "both":
                        self._batch_of[id_] = batch
                        inside.add(id_)
            for id_ in record.decode:
                if id_ in done:
                    continue
                self.num_tokens[id_] = self.num_tokens.get(id_, 0) + 1
                if id_ not in self._first_decode:
                    self._first_decode[id_] = i
                    self.first_token.setdefault(id_, i)
                if id_ not in inside:
                    self._batch_of[id_] = batch
                    inside.add(id_)
            for id_ in record.finished:
                self.last_token[id_] = i
            done.update(record.finished)
            inside.difference_update(record.finished)
            if record.decode:
                decode_steps[batch].append(i)
            if not inside:
                empty_steps[batch].append(i)
        self._decode_steps = {batch: np.asarray(steps, int) for batch, steps in decode_steps.items()}
        self._empty_steps = {batch: np.asarray(steps, int) for batch, steps in empty_steps.items()}
        """For each batch, the steps after which no request of the batch decodes."""
        self._encode_emits = encode_emits

    def window(self, skip: int, count: int, *, may_end: bool = False) -> tuple[int, int]:
        ended = np.cumsum([len(record.finished) for record in self.log])
        encodes = np.asarray([bool(record.encode) for record in self.log], dtype=bool)
        ended_before = np.concatenate([[0], ended])[:-1]
        opens = np.flatnonzero(encodes & (ended_before >= skip))
        if len(opens):
            first = int(opens[0])
            before = ended[first - 1] if first else 0
            closes = np.flatnonzero(encodes & (ended_before >= before + count))
            if len(closes):
                return first, int(closes[0])
            if may_end:
                return first, len(self.log)
        num_ended = int(ended[-1]) if len(ended) else 0
        raise InputError(
            "requests",
            num_ended,
            f"the log is too short, since more than {skip + count} requests must finish before its last prompt: "
            "record a longer log",
        )

    def virtual_latencies(self, ids: Sequence[int], output_length: int) -> Array:
        """Return the seconds from each admission to the last token of a request with `output_length` tokens.

        Admissions too near the log's end are left out. An entry is NaN if all requests ended before this last token.
        """
        if output_length == 1 and self._encode_emits:
            return (self.end[[self.first_token[i] for i in ids]] - self.start[[self.admitted[i] for i in ids]]) / 1e9
        found = []
        for batch, steps in self._decode_steps.items():
            members = [id_ for id_ in ids if self._batch_of.get(id_) == batch]
            if not members:
                continue
            start = self.start[[self.admitted[id_] for id_ in members]]
            if batch[0] == "both":  # all requests may end in the step of the first token
                begin = np.asarray([self.first_token[id_] for id_ in members])
                after = np.searchsorted(steps, begin, side="right")
            else:
                begin = np.asarray([self._first_decode[id_] for id_ in members])
                after = np.searchsorted(steps, begin)
            last = after + output_length - 1 - self._encode_emits
            seen = last < len(steps)
            begin_step, end_step = begin[seen], steps[last[seen]]
            empty = self._empty_steps.get(batch, np.zeros(0, int))
            undisturbed = np.searchsorted(empty, begin_step) == np.searchsorted(empty, end_step)
            found.append(np.where(undisturbed, self.end[end_step] - start[seen], np.nan) / 1e9)
        return np.concatenate(found) if found else np.zeros(0)

    def gaps(self, first: int, last: int) -> tuple[Array, npt.NDArray[np.int_]]:
        """Return all gaps between tokens, in seconds, and for each gap the number of the token before it."""
        before: dict[int, tuple[float, int]] = {}
        gaps: list[tuple[float, int]] = []
        for i in range(len(self.log)):
            record = self.log[i]
            for id_ in record.decode:
                since, age = before.get(id_, (0.0, 0))
                if first <= i < last and age:
                    gaps.append((self.end[i] - since, age))
                before[id_] = self.end[i], age + 1
            for id_, _, _ in record.encode:
                if self.first_token.get(id_) == i:
                    before[id_] = self.end[i], 1
            if i >= last:
                break
        seconds, ages = np.asarray(gaps, float).reshape(-1, 2).T
        return seconds / 1e9, ages.astype(int)


def mean_gaps(gaps: Array, ages: npt.NDArray[np.int_], output_length: int) -> Array:
    """Return the mean gap after each token of a request, except the last token. # [output_length - 1]

    An engine does not know before a request's next token whether the request continues. So the gap after the n-th token
    of any request is predicted from requests with more than n tokens. If no request had so many, the mean of all gaps
    is used.
    """
    seen = ages < output_length
    total = np.bincount(ages[seen], gaps[seen], output_length)[1:]
    count = np.bincount(ages[seen], minlength=output_length)[1:]
    return np.where(count > 0, total / np.maximum(count, 1), float(np.mean(gaps)) if len(gaps) else 0.0)
