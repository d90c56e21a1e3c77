"""Compute from a simulated log the distribution of all requests' latencies, from admission to the last token.

The engine's steps do not depend on a request's output length until the output ends, and the distribution of lengths is
known exactly. Every running request decodes in every decode step of its micro-batch. So the log shows for each
admission when a request of any length would have had its last token.

If the log ends or no request decodes any more, the log does not show when a longer request would have had its next
tokens. The mean gaps after the same number of tokens are then used instead.

If steps mix encode and decode, a longer request would have occupied the slot of a prompt that these steps encode, so
the log does not show its times. Then far more requests are simulated, and the latencies of requests with drawn lengths
are used (`drawn_law`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.schema.step_log import StepRecord
from xsimulator.counts.arrivals import BOTH, KeptBounds, Run
from xsimulator.lengths import Lengths

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]

NUM_GROUPS = 10
"""Number of groups for the bootstrap. A group has consecutive admissions, since their latencies are correlated."""
NUM_DRAWS = 40
LEAST_ERROR = 0.003
"""Least error that is stated. If lengths are nearly equal, a schedule keeps repeating what happened at its start, so
the variation within a run understates the error.
"""


@dataclass(frozen=True)
class RequestLaw:
    """The distribution of latencies: for each admission, the latency of a request of each length.

    Attributes:
        seconds: latencies, with a column for each length, or a single column if each admission has one drawn length.
            # [admissions, lengths or 1]
        probabilities: probabilities of the lengths. # [lengths or 1]
        batch: the step of each admission. Requests with the same step form a batch. # [admissions]
    """

    seconds: Array
    probabilities: Array
    batch: Ints

    def quantile(self, q: float) -> float:
        seconds, reached = self._sorted
        return float(seconds[_reaches(reached, q)])

    def share_within(self, bound_s: float) -> float:
        seconds, reached = self._sorted
        index = int(np.searchsorted(seconds, bound_s, side="right"))
        return float(reached[index - 1]) if index else 0.0

    @property
    def is_constant(self) -> bool:
        return bool(np.ptp(self.seconds, axis=0).max() <= 1e-9 * self.seconds.max())

    def batches_beyond(self, q: float) -> int:
        """Return the number of batches with requests beyond the quantile. If there are few, the tail is uncertain."""
        return len(np.unique(self.batch[(self.seconds > self.quantile(q)).any(axis=1)]))

    def error(self, q: float) -> float:
        """Return the relative standard error of a quantile, by a bootstrap over groups of admissions."""
        num_groups = min(NUM_GROUPS, len(self.seconds))
        group = np.repeat(np.arange(len(self.seconds)) * num_groups // len(self.seconds), len(self.probabilities))
        seconds, groups, weights = self._sorted[0], group[self._order], self._weights
        total = np.asarray(np.bincount(groups, weights), float)
        # The quantile of a sample lies between the quantiles of its groups, so only latencies in this range are summed
        # for each sample.
        members = [np.flatnonzero(groups == number) for number in range(num_groups)]
        at = [rows[_reaches(np.cumsum(weights[rows]), q)] for rows in members]
        inside = slice(min(at), max(at) + 1)
        below = np.bincount(groups[: inside.start], weights[: inside.start], minlength=num_groups)
        rng = np.random.default_rng(0)
        found = []
        for _ in range(NUM_DRAWS):
            times = np.bincount(rng.integers(num_groups, size=num_groups), minlength=num_groups)
            reached = float(times @ below) + np.cumsum(weights[inside] * times[groups[inside]])
            found.append(seconds[inside][_reaches(reached, q, float(times @ total))])
        return max(float(np.std(found, ddof=1) / np.mean(found)), LEAST_ERROR)

    @cached_property
    def _order(self) -> Ints:
        return np.argsort(self.seconds, axis=None)

    @cached_property
    def _weights(self) -> Array:
        weights: Array = np.broadcast_to(self.probabilities, self.seconds.shape).ravel()[self._order]
        return weights

    @cached_property
    def _sorted(self) -> tuple[Array, Array]:
        reached = np.cumsum(self._weights)
        return self.seconds.ravel()[self._order], reached / reached[-1]


def request_law(
    seen: SeenSteps, lengths: Lengths, skip_requests: int, num_requests: int, *, encode_emits: bool = True
) -> RequestLaw:
    """Return the distribution of latencies at saturation, from `num_requests` admissions after the first
    `skip_requests`.
    """
    chosen = _chosen(seen.first_token, skip_requests, num_requests)
    decodes = lengths.outputs.astype(int) - encode_emits
    return RequestLaw(seen.latencies(chosen, decodes), lengths.output_probabilities, seen.admitted[chosen])


def drawn_law(run: Run, skip_requests: int, num_requests: int) -> RequestLaw:
    """Run until `num_requests` requests after the first `skip_requests` have ended. Return the distribution of the
    latencies that these requests had with their drawn lengths.
    """
    counted = slice(skip_requests, skip_requests + num_requests)
    run.run(KeptBounds((), counted.start, counted.stop))
    requests = run.state.requests[counted]
    return _own_law((requests["end_ns"] - requests["admitted_ns"]) / 1e9, requests["admitted_step"])


def logged_law(seen: SeenSteps, skip_requests: int, num_requests: int) -> RequestLaw:
    """Return the distribution of the latencies that `num_requests` requests had, after the first `skip_requests`."""
    chosen = _chosen(seen.last_token, skip_requests, num_requests)
    admitted = seen.admitted[chosen]
    return _own_law(seen.end_s[seen.last_token[chosen]] - seen.start_s[admitted], admitted)


def _own_law(seconds: Array, admitted: Ints) -> RequestLaw:
    return RequestLaw(seconds[:, None], np.ones(1), admitted)


def _reaches(reached: Array, q: float, total: float | None = None) -> int:
    return min(int(np.searchsorted(reached, q * (total or reached[-1]) * (1 - 1e-12))), len(reached) - 1)


def _chosen(step: Ints, skip_requests: int, num_requests: int) -> Ints:
    ids = np.flatnonzero(step >= 0)
    chosen = ids[skip_requests : skip_requests + num_requests]
    if not len(chosen):
        says = f"the log must contain more than {skip_requests} requests: record a longer log"
        raise InputError("requests", len(ids), says)
    return chosen


@dataclass(frozen=True)
class SeenSteps:
    """The steps of a log, in the order of their ends, and the steps of each request.

    Attributes:
        empty: for each micro-batch, the numbers of its decode steps before which no request decoded.
        ended: for each micro-batch, the steps without decodes after which no request decodes, because all outputs have
            one token.
        first_token: the number of the step that computes a request's first token, or -1. In an encoder's lane, it is
            the step that ends the prompt. # [requests]
        last_token: the number of the step that computes a request's last token, or -1. # [requests]
        batch: the micro-batch in which a request decodes, or -1. # [requests]
    """

    start_s: Array
    end_s: Array
    steps: dict[int, Ints]
    empty: dict[int, Ints]
    ended: dict[int, Ints]
    admitted: Ints
    first_token: Ints
    last_token: Ints
    batch: Ints
    joined: Ints

    @classmethod
    def of_run(cls, run: Run) -> SeenSteps:
        log, requests = run.log, run.state.requests
        steps, empty, ended = {}, {}, {}
        without = (log["lane"] == BOTH) & (log["decodes"] == 0) & (log["left"] == 0)
        for batch in np.unique(log["batch"][log["decodes"] > 0]).tolist():
            rows = np.flatnonzero((log["batch"] == batch) & (log["decodes"] > 0))
            steps[batch], empty[batch] = rows, np.flatnonzero(log["left"][rows] == 0) + 1
            ended[batch] = np.flatnonzero(without & (log["batch"] == batch))
        return cls(
            log["start_ns"] / 1e9,
            log["end_ns"] / 1e9,
            steps,
            empty,
            ended,
            *(requests[name] for name in ("admitted_step", "first_step", "last_step", "joined_batch", "joined_step")),
        )

    @classmethod
    def of_log(cls, log: Sequence[StepRecord]) -> SeenSteps:
        arrivals = [arrival for record in log for arrival in record.arrivals]
        prompts = {arrival.id: arrival.input_length for arrival in arrivals}
        admitted, first, last, batch_of, joined = (np.full(max(prompts, default=-1) + 1, -1) for _ in range(5))
        steps: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        empty: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        ended: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        inside: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        numbers: dict[tuple[str, int], int] = {}
        for i, record in enumerate(log):
            batch = record.lane, record.microbatch
            number = numbers.setdefault(batch, len(numbers))
            if record.decode:
                if record.lane == "decode":
                    for id_ in set(record.decode) - inside[batch]:
                        if batch_of[id_] < 0:
                            batch_of[id_], joined[id_] = number, len(steps[batch])
                    inside[batch] = set(record.decode)
                steps[batch].append(i)
            for id_, start, length in record.encode:
                if admitted[id_] < 0:
                    admitted[id_] = i
                if start + length == prompts[id_]:
                    first[id_] = i if first[id_] < 0 else first[id_]
                    if record.lane == "both":
                        if batch_of[id_] < 0:
                            batch_of[id_], joined[id_] = number, len(steps[batch])
                        inside[batch].add(id_)
            inside[batch].difference_update(record.finished)
            last[list(record.finished)] = i
            for id_ in record.preempted:
                for others in inside.values():
                    others.discard(id_)
            if record.decode and not inside[batch]:
                empty[batch].append(len(steps[batch]))
            elif record.lane == "both" and not inside[batch]:
                ended[batch].append(i)
        return cls(
            np.asarray([record.start_ns for record in log], float) / 1e9,
            np.asarray([record.end_ns for record in log], float) / 1e9,
            {numbers[batch]: np.asarray(ids, int) for batch, ids in steps.items() if ids},
            {numbers[batch]: np.asarray(empty[batch], int) for batch, ids in steps.items() if ids},
            {numbers[batch]: np.asarray(ended[batch], int) for batch, ids in steps.items() if ids},
            *(admitted, first, last, batch_of, joined),
        )

    @cached_property
    def _last(self) -> int:
        """The step of the last admission. After this step, batches shrink."""
        return len(self.start_s) if (self.admitted < 0).any() else int(self.admitted.max())

    def first_output_s(self, ids: Ints, *, encode_emits: bool) -> Array:
        """Return the times of requests' first tokens. With `encode_emits`, this is the end of the step that encodes the
        prompt, otherwise the end of the first decode step.
        """
        if encode_emits:
            return self.end_s[self.first_token[ids]]
        found = np.full(len(ids), np.nan)
        for batch, steps in self.steps.items():
            mine = self.batch[ids] == batch
            found[mine] = self.end_s[steps[self.joined[ids[mine]]]]
        return found

    def latencies(self, ids: Ints, decodes: Ints) -> Array:
        """Return the seconds from admission to last token, for each request and number of decodes. # [ids, decodes]"""
        opens = int(self.admitted[ids[0]])
        """The step at which the steady state begins. The steady state lasts until the last admission."""
        first = self.end_s[self.first_token[ids]]
        found = np.repeat((first - self.start_s[self.admitted[ids]])[:, None], len(decodes), axis=1)
        further = np.full_like(found, np.nan)
        for batch, steps in self.steps.items():
            rows = np.flatnonzero(self.batch[ids] == batch)
            if not len(rows):
                continue
            joined, end = self.joined[ids[rows]], self.end_s[steps]
            # From the end of the log on, or once no request decodes, the log does not show a longer request's decode
            # steps.
            ends = [int(np.searchsorted(steps, self._last)), len(steps) + 1]
            empty = np.sort(np.concatenate([self.empty[batch], ends]))
            until = np.minimum(empty[np.searchsorted(empty, joined + 1)], len(steps))
            ended = np.append(self.ended[batch], len(self.end_s))
            ends_in = ended[np.searchsorted(ended, self.first_token[ids[rows]])]
            until = np.minimum(until, np.searchsorted(steps, ends_in))
            known = np.minimum(decodes, np.maximum(until - joined, 0)[:, None])  # [rows, decodes]
            last = np.clip(joined[:, None] + known - 1, 0, len(steps) - 1)
            decode_s = np.where(known > 0, end[last] - first[rows, None], 0.0)
            behind = self._gaps_by_age(batch, opens)
            reach = np.minimum(np.arange(int(decodes.max()) + 1), len(behind) - 1)
            total = np.concatenate([[0.0], np.cumsum(behind[reach])])
            decode_s += total[decodes] - total[known]
            further[rows] = np.where(decodes > 0, decode_s, 0.0)
        # Under waa, a request with one output token never reaches the decode lane. If it had continued, its times there
        # would have been about those of the next request that reaches this lane.
        known = np.flatnonzero(~np.isnan(further[:, 0]))
        if len(known):
            further = further[known[np.minimum(np.searchsorted(known, np.arange(len(ids))), len(known) - 1)]]
        return found + np.nan_to_num(further)

    def _gaps_by_age(self, batch: int, opens: int) -> Array:
        """Return the mean seconds of the n-th decode step, from previous token to the step's end. # [most decodes]"""
        steps = self.steps[batch]
        gaps = np.diff(self.end_s[steps], prepend=self.start_s[steps[0]])
        total, count = np.zeros(len(steps) + 1), np.zeros(len(steps) + 1)
        mine = np.flatnonzero((self.batch == batch) & (self.last_token >= 0) & (self.first_token >= opens))
        after = np.searchsorted(steps, np.minimum(self.last_token[mine] + 1, self._last))
        firsts = self.end_s[self.first_token[mine]].tolist()
        for joined, until, first_s in zip(self.joined[mine].tolist(), after.tolist(), firsts, strict=True):
            if until > joined:
                total[: until - joined] += gaps[joined:until]
                total[0] += self.end_s[steps[joined]] - first_s - gaps[joined]
                count[: until - joined] += 1
        seen = count > 0
        mean = float(total.sum() / max(count.sum(), 1.0))
        return np.where(seen, total / np.maximum(count, 1.0), mean)[: int(seen.sum()) + 1]
