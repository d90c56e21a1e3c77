"""Requests as turns of sessions: which request follows which, after what pause, and with which part of its prompt.

A session is a closed loop: its next turn begins a pause after its last turn has ended. The prompt of a turn begins with
tokens of an earlier request, so that K/V kept from there can be found again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xgpt.core.schema.step_log import Chain

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FIRST = -1
"""In `TraceSessions.after`: a first turn. In `TraceSessions.like`: the prefix that all sessions share."""


@dataclass(frozen=True, slots=True)
class TraceSessions:
    """The sessions of requests. Requests are numbered by their places. # [requests] each

    Attributes:
        after: the request after whose end this one follows, or `FIRST`.
        pause_s: seconds from that end to this request. 0 for first turns.
        like: the request with whose prompt and output this prompt begins, or `FIRST`.
        common: number of prompt tokens that are the same as in `like`.
    """

    session: Ints
    after: Ints
    pause_s: Floats
    like: Ints
    common: Ints

    @property
    def num_sessions(self) -> int:
        return len(self.first)

    @property
    def first(self) -> Ints:
        return np.flatnonzero(self.after == FIRST)

    @property
    def is_plain(self) -> bool:
        """Whether no session forks, so that each turn continues the turn that it follows."""
        return bool((self.like == self.after).all() and (np.bincount(self.after + 1)[1:] <= 1).all())

    def children(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for request, after in enumerate(self.after.tolist()):
            if after != FIRST:
                found.setdefault(after, []).append(request)
        return found

    def take(self, places: Ints) -> TraceSessions:
        """Return the sessions of these requests. A turn whose predecessor is left out begins a session."""
        number = np.full(len(self.session) + 1, FIRST)  # the last entry is that of FIRST
        number[places] = np.arange(len(places))
        after, like = number[self.after[places]], number[self.like[places]]
        is_lost = (like == FIRST) & (self.like[places] != FIRST)
        return TraceSessions(
            self.session[places],
            after,
            np.where(after == FIRST, 0.0, self.pause_s[places]),
            like,
            np.where(is_lost, 0, self.common[places]),
        )


class Chains:
    """The keys of the K/V blocks of sessions' turns. A block belongs to the turn that computed its last token first."""

    def __init__(self, sessions: TraceSessions, inputs: Ints, outputs: Ints, block_size: int) -> None:
        self._size = block_size
        self._like, self._common = sessions.like.tolist(), sessions.common.tolist()
        self._ends = ((inputs + outputs - 1) // block_size).tolist()
        self._inputs = (inputs // block_size).tolist()
        self._known: dict[int, Chain] = {}

    def _whole(self, request: int) -> Chain:
        todo = [request]
        while (like := self._like[todo[-1]]) != FIRST and like not in self._known:
            todo.append(like)
        for each in reversed(todo):
            if each in self._known:
                continue
            like, kept = self._like[each], self._common[each] // self._size
            before = _keys(FIRST, 0, kept) if like == FIRST else self._known[like][:kept]
            self._known[each] = before + _keys(each, len(before), self._ends[each])
        return self._known[request]

    def prompt(self, request: int) -> Chain:
        return self._whole(request)[: self._inputs[request]]

    def output(self, request: int) -> Chain:
        """Return the keys of the full blocks after the prompt's. The last token has no K/V."""
        return self._whole(request)[self._inputs[request] :]


def _keys(owner: int, begin: int, end: int) -> Chain:
    of_owner = owner.to_bytes(8, "big", signed=True)
    return tuple(of_owner + block.to_bytes(4, "big") for block in range(begin, end))
