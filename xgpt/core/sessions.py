"""Loads of sessions, and how sessions are drawn from their law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.schema.workload import Pause, SessionLaw, Workload
from xgpt.core.turns import FIRST, TraceSessions
from xgpt.core.workload import Floats, TraceLengths, binned, draw, histogram, spread_of


def draw_sessions(law: SessionLaw, count: int, rng: np.random.Generator) -> TraceLengths:
    """Draw `count` sessions with their subagents. Turns are in the order of their sessions, and have no times.

    Raises:
        InputError: not even a first turn fits into `max_context`.
    """
    turns = _Turns(law, rng)
    for number, length in enumerate(draw(histogram(law.turns), count, rng).tolist()):
        turns.add_session(number, length)
    return turns.found


class _Turns:
    def __init__(self, law: SessionLaw, rng: np.random.Generator) -> None:
        self._law, self._rng = law, rng
        self._next: dict[str, list[int]] = {}
        self._rows: list[tuple[int, int, int, int, float, int, int]] = []

    def _one(self, name: str) -> int:
        """Return the next length of a kind. They are drawn a thousand at a time, so that their mean is steady."""
        drawn = self._next.setdefault(name, [])
        if not drawn:
            drawn += draw(histogram(getattr(self._law, name)), 1000, self._rng).tolist()
        return drawn.pop()

    def add_session(self, number: int, length: int) -> None:
        law = self._law
        first, output = law.shared_prefix + self._one("first_input"), self._one("output")
        first = min(first, law.max_context - output)
        if first <= law.shared_prefix:
            says = f"a first turn of {law.shared_prefix} shared and {output} output tokens does not fit into it"
            raise InputError("max_context", law.max_context, says)
        self._rows.append((first, output, number, FIRST, 0.0, FIRST, law.shared_prefix))
        self._go_on(number, length - 1, len(self._rows) - 1, forks=True)

    def _go_on(self, number: int, left: int, like: int, *, forks: bool) -> int:
        """Add further turns after the turn `like`, and return the last one."""
        law, last = self._law, like
        for _ in range(left):
            before, said = self._rows[like][:2]
            if forks and law.subagents is not None and self._rng.random() < law.subagents.share:
                turns = int(draw(histogram(law.subagents.turns), 1, self._rng)[0])
                last = self._go_on(number, turns, like, forks=False)
            kept = before + said - round(law.left_out * said)
            prompt, output = kept + self._one("added_input"), self._one("output")
            if prompt + output > law.max_context:
                break
            common = before + (said if kept == before + said else 0)
            pause = float(pauses(law.pause, 1, self._rng)[0])
            self._rows.append((prompt, output, number, last, pause, like, common))
            last = like = len(self._rows) - 1
        return last

    @property
    def found(self) -> TraceLengths:
        inputs, outputs, session, after, pause, like, common = (
            np.asarray(column) for column in zip(*self._rows, strict=True)
        )
        return TraceLengths(
            inputs, outputs, None, sessions=TraceSessions(session, after, pause.astype(float), like, common)
        )


def pauses(law: Pause, count: int, rng: np.random.Generator) -> Floats:
    """Draw pauses in seconds. # [count]"""
    if law.p90_s is None or law.p90_s == law.median_s:
        return np.full(count, law.median_s)
    drawn = rng.lognormal(math.log(law.median_s), spread_of(law.median_s, law.p90_s), count)
    return np.minimum(drawn, law.max_s)


@dataclass(frozen=True, eq=False)
class Sessions:
    """A load of sessions.

    Attributes:
        trace: sessions of the law, or of a log. With a log, `timestamp_s` has the recorded times.
        law: the law from which further sessions are drawn. None means that sessions of the log are repeated.
    """

    name: str
    trace: TraceLengths
    law: SessionLaw | None = None

    @classmethod
    def of(cls, name: str, law: SessionLaw) -> Sessions:
        return cls(name, draw_sessions(law, NUM_DRAWN, np.random.default_rng(0)), law)

    @cached_property
    def workload(self) -> Workload:
        """The lengths of the turns, in bins."""
        return Workload(name=self.name, input=binned(self.trace.input), output=binned(self.trace.output))

    @property
    def num_turns(self) -> float:
        """Mean number of turns of a session."""
        return len(self.trace.input) / self._sessions.num_sessions

    @property
    def pause_s(self) -> float:
        """Mean seconds of all pauses of a session."""
        return float(self._sessions.pause_s.sum()) / self._sessions.num_sessions

    @property
    def _sessions(self) -> TraceSessions:
        assert self.trace.sessions is not None
        return self.trace.sessions

    def draw(self, count: int, rng: np.random.Generator) -> TraceLengths:
        """Return `count` sessions in random order: of the law or, at random, of the log."""
        if self.law is not None:
            return draw_sessions(self.law, count, rng)
        of_session = np.argsort(self._sessions.session, kind="stable")
        starts = np.searchsorted(self._sessions.session[of_session], np.arange(self._sessions.session.max() + 2))
        chosen = rng.integers(0, len(starts) - 1, count)
        places = [of_session[starts[i] : starts[i + 1]] for i in chosen.tolist()]
        parts = [self.trace.take(part) for part in places]
        return joined(parts)


NUM_DRAWN = 400
"""Number of sessions from which the lengths of a law's turns are taken."""


def joined(parts: Sequence[TraceLengths]) -> TraceLengths:
    """Return sessions one after the other, each as a session of its own."""
    begins = np.cumsum([0, *(len(part.input) for part in parts)])
    sessions = [part.sessions for part in parts if part.sessions is not None]
    columns = {}
    for name in ("after", "like"):
        moved = [getattr(each, name) + begin for each, begin in zip(sessions, begins, strict=False)]
        columns[name] = np.concatenate(
            [np.where(getattr(each, name) == FIRST, FIRST, one) for each, one in zip(sessions, moved, strict=True)]
        )
    for name in ("pause_s", "common"):
        columns[name] = np.concatenate([getattr(each, name) for each in sessions])
    number = np.repeat(np.arange(len(parts)), np.diff(begins))
    lengths = [np.concatenate([getattr(part, name) for part in parts]) for name in ("input", "output")]
    return TraceLengths(lengths[0], lengths[1], None, sessions=TraceSessions(number, **columns))
