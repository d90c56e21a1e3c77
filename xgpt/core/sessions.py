"""Loads of sessions, and how sessions are drawn from their law."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.schema.workload import Pause, SessionLaw, Workload
from xgpt.core.turns import FIRST, Ints, TraceSessions
from xgpt.core.workload import Floats, TraceLengths, binned, draw, histogram, spread_of


def draw_sessions(law: SessionLaw, count: int, rng: np.random.Generator) -> TraceLengths:
    """Draw `count` sessions with their subagents. Turns are in the order of their sessions, and have no times.

    Raises:
        InputError: not even a first turn fits into `max_context`.
    """
    turns = _DrawnTurns(law, rng)
    for number, length in enumerate(draw(histogram(law.turns), count, rng).tolist()):
        turns.add_session(number, length)
    return turns.found


class _DrawnTurns:
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


SAMPLE_TURNS, LEAST_SESSIONS = 3000, 40


@lru_cache(maxsize=8)
def sample_of(law: SessionLaw, seed: int = 0) -> TraceLengths:
    """Return sessions, about `SAMPLE_TURNS` turns, that stand for a law. Plans are simulated with
    them, and ceilings hold for them.
    """
    turns = histogram(law.turns).mean
    if law.subagents is not None:
        turns *= 1 + law.subagents.share * histogram(law.subagents.turns).mean
    return draw_sessions(
        law, 2 * max(LEAST_SESSIONS // 2, round(SAMPLE_TURNS / turns / 2)), np.random.default_rng(seed)
    )


def turns_of(law: SessionLaw) -> float:
    """Return the mean number of turns of a session."""
    sample = sample_of(law)
    return len(sample.input) / sample.turns.num_sessions


def repeated(trace: TraceLengths, times: int) -> TraceLengths:
    sessions, count = trace.turns, len(trace.input)
    copy = np.repeat(np.arange(times), count)

    def moved(places: Ints, by: int) -> Ints:
        return np.where(np.tile(places, times) == FIRST, FIRST, np.tile(places, times) + by * copy)

    number, after = moved(sessions.session, sessions.num_sessions), moved(sessions.after, count)
    like, pause, common = moved(sessions.like, count), np.tile(sessions.pause_s, times), np.tile(sessions.common, times)
    inputs, outputs = np.tile(trace.input, times), np.tile(trace.output, times)
    return TraceLengths(inputs, outputs, None, sessions=TraceSessions(number, after, pause, like, common))


def workload_of_law(name: str, law: SessionLaw) -> Workload:
    sample = sample_of(law)
    return Workload(name=name, input=binned(sample.input), output=binned(sample.output), sessions=law)


def law_of(trace: TraceLengths) -> SessionLaw:
    """Return a law with the lengths, turns and pauses of a log's sessions. Forked turns count as turns."""
    sessions = trace.turns
    is_first = sessions.after == FIRST
    shared = int(sessions.common[is_first].min())
    like, later = sessions.like[~is_first], ~is_first
    before, said = trace.input[like], trace.output[like]
    left = np.clip(before + said - sessions.common[later], 0, said).sum() / max(said.sum(), 1)
    added = trace.input[later] - sessions.common[later]
    paused = sessions.pause_s[later]
    middle, p90 = (float(np.quantile(paused, q)) if len(paused) else 0.0 for q in (0.5, 0.9))
    middle = max(middle, 1e-3) if p90 > 0 else 0.0
    turns = np.bincount(np.unique(sessions.session, return_inverse=True)[1])
    return SessionLaw(
        turns=binned(turns),
        shared_prefix=shared,
        first_input=binned(np.maximum(trace.input[is_first] - shared, 1)),
        added_input=binned(np.maximum(added, 1) if len(added) else [1]),
        output=binned(trace.output),
        left_out=float(left) if left > 0.01 else 0.0,
        pause=Pause(
            median_s=middle, p90_s=max(p90, middle) or None, max_s=max(float(sessions.pause_s.max()), p90, 1.0)
        ),
        max_context=int((trace.input + trace.output).max()),
    )
