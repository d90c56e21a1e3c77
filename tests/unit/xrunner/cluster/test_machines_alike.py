"""Machines of a Ray cluster that differ from the first are refused in one line, before any worker starts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from xgpt.core.errors import MachineError

pytest.importorskip("ray")
NODES = [{"NodeID": "a" * 56, "NodeManagerAddress": "10.0.0.2"}]


def refused(change: dict[str, str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    from xrunner.cluster import on_ray

    there = on_ray._looking()(str(checkpoint)) | change
    remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: there))
    monkeypatch.setattr(on_ray.ray, "remote", lambda _: remote)
    monkeypatch.setattr(on_ray.ray, "get", lambda call, timeout: call)
    with pytest.raises(MachineError) as error:
        on_ray._compare(NODES, str(checkpoint))
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"xgpt": ""}, r"machine 10.0.0.2 has no xgpt, and this one xgpt with the code [0-9a-f]{12}: install the same"),
        ({"xgpt": "xgpt with the code 0"}, "has xgpt with the code 0, and this one"),
        ({"Ray": "Ray 2.0"}, "has Ray 2.0, and this one Ray"),
        ({"Python": "Python 3.9.1"}, r"has Python 3.9.1, and this one Python 3\.\d+"),
        ({"checkpoint": ""}, "has no checkpoint, .*: copy the same checkpoint to the same path"),
    ],
)
def test_a_machine_that_differs_is_named(
    change: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once cost ten minutes and 187 lines of tracebacks."""
    line = refused(change, tmp_path, monkeypatch)
    assert "\n" not in line
    assert re.search(says, line), line


def test_a_checkpoint_is_known_by_its_bytes_wherever_they_differ(tmp_path: Path) -> None:
    from xrunner.cluster import on_ray

    look, seen = on_ray._looking(), set()
    for name, data in (("a", b"x" * 3_000_000), ("b", b"x" * 2_999_999 + b"y"), ("c", b"y" + b"x" * 2_999_999)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
        seen.add(look(str(tmp_path / name))["checkpoint"])
    assert len(seen) == 3
    assert look(str(tmp_path / "a"))["checkpoint"] in seen
