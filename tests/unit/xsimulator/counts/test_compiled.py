"""What is compiled is kept on disk until its source changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from xsimulator.costs import step_tables
from xsimulator.counts.compiled import sources


def test_loops_are_compiled_anew_where_a_helper_in_another_folder_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = sources(), Path.read_bytes
    changed = Path(step_tables.__file__)
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"# changed" if path == changed else b""))
    assert sources() != before
