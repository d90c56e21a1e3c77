"""Outputs from public reports about other servers, which lost, cut or misread their calls, and what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.xrunner.server.test_readers import FORMATS, read
from xrunner.server.api.calls import types_of
from xrunner.server.api.form import OutputForm
from xrunner.server.api.formats import Thought, marks_of
from xrunner.server.api.tools import Tool

REPORTED = json.loads(Path(__file__).with_name("reported_outputs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", REPORTED, ids=lambda row: row["case"])
def test_what_other_servers_misread_is_read(row: dict[str, Any]) -> None:
    """As a whole, by characters, and in pieces of three."""
    output = row["output"]
    functions = [
        {
            "name": name,
            "parameters": {
                "properties": {key: kind if isinstance(kind, dict) else {"type": kind} for key, kind in types.items()}
            },
        }
        for name, types in row["types"].items()
    ]
    tools = msgspec.convert([{"type": "function", "function": each} for each in functions], list[Tool])
    marks = marks_of(output + "</think>" * output.startswith("<think>"), ())
    thought = marks and Thought(marks, not output.startswith(marks.begin))
    for size in (len(output), 1, 3):
        reader = OutputForm(FORMATS[row["family"]], thought=thought).reader("auto", types=types_of(tools))
        assert reader is not None
        reasoning, text, calls = read(reader, [output[at : at + size] for at in range(0, len(output), size)])
        assert (reasoning, text) == (row["reasoning"], row["text"])
        assert [[name, json.loads(arguments)] for name, arguments in calls] == row["calls"]
