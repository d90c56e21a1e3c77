"""What is under way is shown on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from xgpt.cli import render


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_what_is_under_way_is_shown_on_a_terminal(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with render.at_work("simulating"):
        pass
    assert ("simulating" in stream.getvalue()) == stream.isatty()
