"""Find the sessions of a trace's rows: by names of sessions or parents, as answers of a conversation, or by blocks."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np

from xgpt.core.trace_blocks import TracePrefixes
from xgpt.core.trace_files import Role
from xgpt.core.trace_rows import Row, plain
from xgpt.core.turns import FIRST, Floats, Ints, TraceSessions
from xgpt.core.workload import TraceLengths

ANSWER_S = 0.02
NAMES: tuple[Role, ...] = ("session", "id", "parent")
NO_PARENT = ("", "-1", "None", "null")


class TurnRows:
    def __init__(self) -> None:
        self._after: list[int] = []
        self._delays: list[float | None] = []
        self._ends: list[float | None] = []
        self._delay_name = ""
        self._last: dict[tuple[str, str], int] = {}

    def add(self, row: Row, delay: float | None, end: float | None) -> int:
        before = FIRST
        if row.turn:
            names = {role: str(row.turn.get(role, "")) for role in NAMES}
            key = ("id", names["parent"]) if names["parent"] not in NO_PARENT else ("session", names["session"])
            before = self._last.get(key, FIRST) if key[1] else FIRST
            for role in ("id", "session"):
                if names[role]:
                    self._last[role, names[role]] = len(self._after)
        self._delay_name = row.delay_name or self._delay_name
        return self.follow(before, delay, end)

    def follow(self, before: int, delay: float | None = None, end: float | None = None) -> int:
        self._after.append(before)
        self._delays.append(delay)
        self._ends.append(end)
        return before

    def sessions(
        self,
        inputs: Ints,
        outputs: Ints,
        times: Floats | None,
        unit_s: float,
        prefixes: TracePrefixes | None,
        notes: list[str],
    ) -> TraceSessions | None:
        """Return the sessions, or None if no row follows another. Prompts that state only what a turn adds are
        completed in place.

        Args:
            times, unit_s: the rows' times as in the file, and the seconds of their unit.
        """
        after = np.asarray(self._after)
        if not len(after) or (after == FIRST).all():
            return None
        number, common, pause = np.arange(len(after)), np.zeros(len(after), np.int64), np.zeros(len(after))
        is_assumed = False
        for i in np.flatnonzero(after != FIRST).tolist():
            before = int(after[i])
            number[i] = number[before]
            whole = int(inputs[before] + outputs[before])
            delay, end = self._delays[i], self._ends[before]
            if delay is not None:
                inputs[i] += whole
                pause[i] = _unit_s(self._delay_name) * delay
            elif times is not None:
                answered = end if end is not None else times[before] + ANSWER_S / unit_s * outputs[before]
                pause[i] = max(0.0, unit_s * (times[i] - answered))
                is_assumed |= end is None
            common[i] = whole if inputs[i] >= inputs[before] else 0
            if prefixes is not None and delay is None:
                common[i] = prefixes.size_in_common(before, i, int(inputs[before]))
        if prefixes is not None:
            common[after == FIRST] = prefixes.block_size * _num_shared(
                [prefixes.prompts[i] for i in np.flatnonzero(after == FIRST)]
            )
        common = np.minimum(common, inputs)
        if is_assumed:
            notes.append(f"no row states when an answer ended: {ANSWER_S:g} s are taken for each output token")
        if prefixes is None and (after == FIRST).sum() > 1:
            notes.append("no row states what the first prompts of sessions share: nothing is taken")
        if times is None and not pause.any():
            notes.append("no row states a pause: turns follow each other at once")
        return TraceSessions(np.unique(number, return_inverse=True)[1], after, pause, after.copy(), common)


def continued(trace: TraceLengths) -> TraceLengths | None:
    """Return a trace whose rows name no sessions, with those that its blocks show, or None. The next turn is the first
    longer prompt that begins with all whole blocks of a prompt, the last of which was new there. In a session, two
    different blocks follow it: the prompt's last one, and the next turn's. More follow a prefix that sessions share.
    """
    assert trace.prefixes is not None
    rows, last, known, nexts = TurnRows(), dict[int, int](), set[int](), defaultdict[int, set[int]](set)
    for ids in trace.prefixes.prompts:
        for id_, following in pairwise(ids):
            nexts[id_].add(following)
    for i, ids in enumerate(trace.prefixes.prompts):
        whole = ids[: int(trace.input[i]) // trace.prefixes.block_size]
        before = (id_ for id_ in reversed(whole) if id_ in last and trace.input[i] > trace.input[last[id_]])
        rows.follow(next((last.pop(id_) for id_ in before), FIRST))
        if whole and whole[-1] not in known and len(nexts[whole[-1]]) <= 2:
            last[whole[-1]] = i
        known.update(whole)
    sessions = rows.sessions(trace.input, trace.output, trace.timestamp_s, 1.0, trace.prefixes, [])
    return None if sessions is None else trace._replace(sessions=sessions, prefixes=None)


def _num_shared(prompts: list[tuple[int, ...]]) -> int:
    """Return the number of blocks with which all prompts of several sessions begin."""
    alike = [len(set(ids)) == 1 for ids in zip(*prompts, strict=False)] if len(prompts) > 1 else []
    return (*alike, False).index(False)


def _unit_s(name: str) -> float:
    return {"s": 1.0, "sec": 1.0, "seconds": 1.0, "us": 1e-6, "ns": 1e-9}.get(plain(name).rpartition("_")[2], 1e-3)
