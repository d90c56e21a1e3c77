"""Sessions are read from the traces that people have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xgpt.core.sessions import law_of
from xgpt.core.traces import read_lengths
from xgpt.core.turns import TraceSessions
from xgpt.core.workload import TraceLengths
from xgpt.resolve import in_sessions, load_sessions


def _read(path: Path, text: str) -> tuple[TraceLengths, TraceSessions]:
    path.write_text(text)
    found = read_lengths(path)
    assert found.sessions is not None
    return found, found.sessions


def _lines(*rows: dict[str, Any]) -> str:
    return "\n".join(map(json.dumps, rows))


def test_aiperf_states_what_a_turn_adds_and_its_delay(tmp_path: Path) -> None:
    text = _lines(
        {"session_id": "a", "input_length": 1000, "output_length": 100, "timestamp": 0.0},
        {"session_id": "b", "input_length": 500, "output_length": 50, "timestamp": 2000.0},
        {"session_id": "a", "input_length": 300, "output_length": 100, "delay": 2450.3},
        {"session_id": "b", "input_length": 30, "output_length": 10, "delay": 1000},
    )
    found, sessions = _read(tmp_path / "t.jsonl", text)
    assert found.input.tolist() == [1000, 500, 1400, 580]
    assert sessions.after.tolist() == [-1, -1, 0, 1] and sessions.common.tolist() == [0, 0, 1100, 550]
    assert sessions.pause_s.tolist() == pytest.approx([0, 0, 2.4503, 1])
    assert found.timestamp_s is not None and found.timestamp_s.tolist() == pytest.approx([0, 2, 2.4503, 3])


def test_spans_of_one_conversation_are_a_session(tmp_path: Path) -> None:
    def span(name: str, begin: float, end: float, prompt: int, number: int) -> dict[str, Any]:
        values = {
            "gen_ai.conversation.id": {"stringValue": name},
            "gen_ai.usage.input_tokens": {"intValue": str(prompt)},
        }
        values["gen_ai.usage.output_tokens"] = {"intValue": "20"}
        times = {f"{key}TimeUnixNano": str(int((1.7e9 + at) * 1e9)) for key, at in (("start", begin), ("end", end))}
        return times | {"spanId": str(number), "attributes": [{"key": k, "value": v} for k, v in values.items()]}

    spans = [span("x", 0, 2, 100, 1), span("y", 1, 3, 200, 2), span("x", 5, 6, 150, 3)]
    _, sessions = _read(tmp_path / "t.json", json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}))
    assert sessions.after.tolist() == [-1, -1, 0]
    assert sessions.pause_s.tolist() == pytest.approx([0, 0, 3], abs=1e-3)
    assert sessions.common.tolist() == [0, 0, 120]


def test_chats_with_parents_have_the_blocks_in_common(tmp_path: Path) -> None:
    turn = {"output_length": 20, "type": "text"}
    text = _lines(
        turn | {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 40, "hash_ids": [1, 2, 3]},
        turn | {"chat_id": 2, "parent_chat_id": 1, "timestamp": 9.5, "input_length": 80, "hash_ids": [1, 2, 5, 6, 7]},
    )
    _, sessions = _read(tmp_path / "t.jsonl", text)
    assert sessions.common.tolist() == [0, 32] and sessions.pause_s[1] == pytest.approx(9.5 - 0.4)


def test_mooncakes_rows_are_turns_if_their_blocks_continue(tmp_path: Path) -> None:
    rows = [  # three users after a system prompt of two blocks; the third one's request comes twice
        (0, 1200, [1, 2, 10]),
        (1000, 1100, [1, 2, 11]),
        (3000, 1700, [1, 2, 20, 21]),
        (4000, 1700, [1, 2, 20, 21]),
        (9000, 2600, [1, 2, 20, 22, 23, 24]),
        (60_000, 3200, [1, 2, 20, 22, 23, 25, 26]),
    ]
    text = _lines(*({"timestamp": t, "input_length": n, "output_length": 50, "hash_ids": ids} for t, n, ids in rows))
    (tmp_path / "t.jsonl").write_text(text)
    named = str(tmp_path / "t.jsonl")
    found = load_sessions(named)
    assert found is not None and found.sessions is not None
    assert found.sessions.after.tolist() == [-1, -1, -1, -1, 2, 4]
    assert found.sessions.common.tolist() == [1024, 1024, 1024, 1024, 1536, 2560]  # with the system prompt
    assert found.sessions.pause_s[4:].tolist() == pytest.approx([6.0 - 1.0, 51.0 - 1.0])
    assert in_sessions(named).sessions is not None


def test_answers_of_a_conversation_are_turns(tmp_path: Path) -> None:
    said = [("human", 400), ("gpt", 80), ("human", 40), ("gpt", 80)]
    text = json.dumps([{"conversations": [{"from": who, "value": "x" * size} for who, size in said]}])
    found, sessions = _read(tmp_path / "t.json", text)
    assert found.input.tolist() == [100, 130] and sessions.common.tolist() == [0, 120]


def test_a_log_as_csv_and_its_law(tmp_path: Path) -> None:
    rows = [
        f"{10 * i + 7 * turn},u{i},{100 + 50 * turn},20,{10 * i + 7 * turn + 1}" for i in range(30) for turn in range(3)
    ]
    head = "timestamp_s,session_id,prompt_tokens,completion_tokens,end_time_s\n"
    found, sessions = _read(tmp_path / "t.csv", head + "\n".join(rows))
    assert sessions.num_sessions == 30 and sessions.pause_s[sessions.after >= 0].tolist() == pytest.approx([6.0] * 60)
    law = law_of(found)
    assert law.turns.lengths == (3,) and law.first_input.mean == 100 and law.added_input.mean == 30  # type: ignore[union-attr]
    assert law.pause.median_s == pytest.approx(6.0) and law.left_out == 0 and law.max_context == 220
