"""The latency of all requests, from admission to the last token, read off a simulated log.

A request's output length is independent of what the engine does until that output ends, and the law of lengths is
known exactly. So each admission of a log stands for requests of every length: every running request decodes in every
step of its micro-batch that decodes, so that the log shows when a request of any length, admitted there, would have had
its last token. Mixed over the law of lengths, a thousand admissions tell a quantile in the tail of a skewed law as well
as tens of thousands of requests do whose lengths are drawn.

Two things a log cannot show are put right. A longer request would have kept its slot from the prompts that came to it:
where steps mix encode and decode, requests meet fewer prompts than steps hold, by the ratio of the mean gap between
tokens to the mean step. And where nothing was left in decode (or the log ends), a request that goes on would have kept
the next ones out: mean gaps behind tokens of the same number stand in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from xgpt.errors import InputError
from xgpt.schema.step_log import StepRecord
from xsimulator.lengths import Lengths

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]

NUM_GROUPS = 10
"""Groups into which consecutive admissions, which have much in common, are put."""
NUM_DRAWS = 40
LEAST_ERROR = 0.003
"""Stated at least: where lengths hardly differ a schedule repeats itself for ever, in a way that its start decides."""


@dataclass(frozen=True)
class RequestLaw:
    """Latencies of requests of each length, admission by admission.

    Attributes:
        seconds: # [admissions, lengths]
        probabilities: of the lengths. # [lengths]
        batch: of each admission: requests of one were admitted in the same step. # [admissions]
    """

    seconds: Array
    probabilities: Array
    batch: Ints

    def quantile(self, q: float) -> float:
        """The latency that a share q of all requests keeps, s."""
        seconds, reached = self._sorted
        return float(seconds[min(int(np.searchsorted(reached, q * (1 - 1e-12))), len(seconds) - 1)])

    def share_within(self, bound_s: float) -> float:
        """Share of all requests whose latency keeps the bound."""
        seconds, reached = self._sorted
        index = int(np.searchsorted(seconds, bound_s, side="right"))
        return float(reached[index - 1]) if index else 0.0

    @property
    def is_constant(self) -> bool:
        """Whether requests of the same length all take the same time."""
        return bool(np.ptp(self.seconds, axis=0).max() <= 1e-9 * self.seconds.max())

    def batches_beyond(self, q: float) -> int:
        """Return the number of batches with requests that take longer than the quantile: few do not tell a tail."""
        return len(np.unique(self.batch[(self.seconds > self.quantile(q)).any(axis=1)]))

    def error(self, q: float) -> float:
        """Standard error of that quantile, relative: groups of admissions are drawn again and again in their place."""
        num_groups = min(NUM_GROUPS, len(self.seconds))
        group = np.arange(len(self.seconds)) * num_groups // len(self.seconds)
        rng = np.random.default_rng(0)
        order = np.argsort(self.seconds, axis=None)
        rows, columns = np.divmod(order, len(self.probabilities))
        weights, of = self.probabilities[columns], group[rows]
        found = []
        for _ in range(NUM_DRAWS):
            times = np.bincount(rng.integers(num_groups, size=num_groups), minlength=num_groups)
            reached = np.cumsum(weights * times[of])
            index = int(np.searchsorted(reached, q * reached[-1] * (1 - 1e-12)))
            found.append(self.seconds.flat[order[min(index, len(order) - 1)]])
        return max(float(np.std(found, ddof=1) / np.mean(found)), LEAST_ERROR)

    @cached_property
    def _sorted(self) -> tuple[Array, Array]:
        """All latencies, and the share of requests up to each."""
        order = np.argsort(self.seconds, axis=None)
        weights = np.broadcast_to(self.probabilities, self.seconds.shape).ravel()[order]
        reached = np.cumsum(weights)
        return self.seconds.ravel()[order], reached / reached[-1]


def request_law(
    log: Sequence[StepRecord], lengths: Lengths, skip_requests: int, num_requests: int, *, encode_emits: bool = True
) -> RequestLaw:
    """The law of the latencies of the requests admitted after the first `skip_requests`, at saturation.

    Raises:
        InputError: the log is too short for that.
    """
    seen = _Seen(log, encode_emits=encode_emits)
    ids = sorted(seen.first_token)[skip_requests : skip_requests + num_requests]
    if not ids:
        raise InputError("requests", len(seen.first_token), f"the log needs over {skip_requests} admitted requests")
    decodes = lengths.outputs.astype(int) - encode_emits
    batch = np.asarray([seen.admitted[id_] for id_ in ids])
    return RequestLaw(seen.latencies(ids, decodes), lengths.output_probabilities, batch)


class _Seen:
    """What a log shows of each request."""

    def __init__(self, log: Sequence[StepRecord], *, encode_emits: bool) -> None:
        self._log = log
        self._start = np.asarray([record.start_ns for record in log], float) / 1e9
        self._end = np.asarray([record.end_ns for record in log], float) / 1e9
        self.first_token: dict[int, int] = {}
        """Step that makes it, by request; of an encoder's lane, that ends the prompt."""
        self.admitted: dict[int, int] = {}
        self._joined: dict[int, tuple[tuple[str, int], int]] = {}
        """Lane and micro-batch in which a request decodes, and its first decode step's number there, by request."""
        prompts = {arrival.id: arrival.input_length for record in log for arrival in record.arrivals}
        waiting = sum(len(record.arrivals) for record in log)
        steps: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        empty: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        inside: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._last = len(log)
        """First step after the last admission: from there on batches shrink."""
        for i, record in enumerate(log):
            batch = record.lane, record.microbatch
            if record.decode:
                if record.lane == "decode":
                    for id_ in set(record.decode) - inside[batch]:
                        self._joined.setdefault(id_, (batch, len(steps[batch])))
                    inside[batch] = set(record.decode)
                steps[batch].append(i)
            for id_, start, length in record.encode:
                if id_ not in self.admitted:
                    self.admitted[id_] = i
                    waiting -= 1
                if start + length == prompts[id_]:
                    self.first_token.setdefault(id_, i)
                    if record.lane == "both":
                        self._joined.setdefault(id_, (batch, len(steps[batch])))
                        inside[batch].add(id_)
            inside[batch].difference_update(record.finished)
            for id_ in record.preempted:
                for others in inside.values():
                    others.discard(id_)
            if record.decode and not inside[batch]:
                empty[batch].append(len(steps[batch]))
            if waiting <= 0 and self._last == len(log):
                self._last = i
        self._steps = {batch: np.asarray(of, int) for batch, of in steps.items() if of}
        self._empty = {batch: np.asarray(empty[batch], int) for batch in self._steps}
        """Numbers of the decode steps that find nothing from before in decode."""
        self._mixed = any(record.encode and record.decode for record in log)

    def latencies(self, ids: Sequence[int], decodes: Ints) -> Array:
        """Seconds from admission to the last token, by the number of decode steps. # [ids, decodes]"""
        opens = self.admitted[ids[0]]
        """From here on batches are as in the steady state, up to the last admission."""
        admitted = self._start[[self.admitted[id_] for id_ in ids]]
        first = self._end[[self.first_token[id_] for id_ in ids]]
        found = np.repeat((first - admitted)[:, None], len(decodes), axis=1)
        for batch, steps in self._steps.items():
            rows = [row for row, id_ in enumerate(ids) if id_ in self._joined and self._joined[id_][0] == batch]
            if not rows:
                continue
            joined = np.asarray([self._joined[ids[row]][1] for row in rows])
            end = self._end[steps]
            # The last decode step that these requests are known to meet.
            ends = [int(np.searchsorted(steps, self._last)), len(steps) + 1]
            empty = np.sort(np.concatenate([self._empty[batch], ends]))
            until = np.minimum(empty[np.searchsorted(empty, joined + 1)], len(steps))
            known = np.minimum(decodes, np.maximum(until - joined, 0)[:, None])  # [rows, decodes]
            last = np.clip(joined[:, None] + known - 1, 0, len(steps) - 1)
            own = np.where(known > 0, end[last] - first[rows, None], 0.0)
            if self._mixed:
                own *= self._met_over_all(steps, opens)
            behind = self._gaps_by_age(batch, opens)
            reach = np.minimum(np.arange(int(decodes.max()) + 1), len(behind) - 1)
            total = np.concatenate([[0.0], np.cumsum(behind[reach])])
            own += total[decodes] - total[known]
            found[rows] += np.where(decodes > 0, own, 0.0)
        return found

    def _met_over_all(self, steps: Ints, opens: int) -> float:
        """The mean gap between tokens over the mean time from one decode step to the next."""
        inside = steps[(steps >= opens) & (steps < self._last)]
        gaps = np.diff(self._end[inside])
        weights = np.asarray([len(self._log[i].decode) for i in inside[1:]], float)
        return float(np.average(gaps, weights=weights) / gaps.mean()) if len(gaps) else 1.0

    def _gaps_by_age(self, batch: tuple[str, int], opens: int) -> Array:
        """Mean seconds of a request's n-th decode step, from its token before on. # [most decodes]"""
        steps = self._steps[batch]
        gaps = np.diff(self._end[steps], prepend=self._start[steps[0]])
        total, count = np.zeros(len(steps) + 1), np.zeros(len(steps) + 1)
        ended = {id_: i for i in range(len(self._log)) for id_ in self._log[i].finished}
        for id_, (own, joined) in self._joined.items():
            if own == batch and id_ in ended and self.first_token.get(id_, 0) >= opens:
                after = max(int(np.searchsorted(steps, min(ended[id_] + 1, self._last))), joined)
                total[: after - joined] += gaps[joined:after]
                count[: after - joined] += 1
        seen = count > 0
        mean = float(total.sum() / max(count.sum(), 1.0))
        return np.where(seen, total / np.maximum(count, 1.0), mean)[: int(seen.sum()) + 1]
