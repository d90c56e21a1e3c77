"""Long work says what it is doing: on a terminal as it goes, in a file in a line for each stage."""

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


def test_a_file_gets_a_line_for_each_stage_of_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with render.progress_bar() as report:
        report(0, 2, "profiling: attention")
        assert not stream.getvalue()
        monkeypatch.setattr(render, "QUIET_S", 0.0)
        for done, what in enumerate(("profiling: attention", "profiling: logits", "simulating chunked")):
            report(done, 3, what)
    assert stream.getvalue() == "profiling ...\nsimulating chunked ...\n"
