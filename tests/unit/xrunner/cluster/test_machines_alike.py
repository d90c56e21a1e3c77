"""Machines of a Ray cluster that differ from the first are refused in one line, before any worker starts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.kills import start_ray
from benchmarks.lib.served_plans import one_lane, plan
from xgpt.core.errors import MachineError
from xgpt.core.io import dump_json
from xgpt.core.processes import free_port
from xrunner.cluster.looking import look

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
ROOT = Path(__file__).parents[4]
NODES = [{"NodeID": "a" * 56, "NodeManagerAddress": "10.0.0.2"}]


def refused(change: dict[str, str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    from xrunner.cluster import on_ray

    there = json.dumps(look(str(checkpoint)) | change)
    remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: there))
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


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_ray_node_with_other_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes there find the driver's directories first, and the node once passed as equal."""
    for name in ("xgpt", "xrunner"):
        shutil.copytree(ROOT / name, tmp_path / "other" / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "other" / "xgpt" / "cli" / "__init__.py").open("a") as file:
        file.write("\n")
    two = plan(one_lane([1, 1])).model_copy(update={"replicas": 1})
    two = two.model_copy(update={"cluster": two.cluster.model_copy(update={"num_nodes": 2, "devices_per_node": 1})})
    (tmp_path / "plan.json").write_text(dump_json(two))
    port = free_port()
    serve = [sys.executable, "-m", "xgpt", "serve", str(tmp_path / "plan.json"), "--port", "0"]
    serve += ["--ray", f"127.0.0.1:{port}"]
    line = r"xgpt: machine \S+ has xgpt with the code \w+, and this one xgpt with the code \w+: install the same .*"
    with ExitStack() as at_end:
        for words, path in (
            (["--head", f"--port={port}", "--include-dashboard=false"], ROOT),
            ([], tmp_path / "other"),
        ):
            monkeypatch.setenv("PYTHONPATH", str(path))
            node = start_ray(*(words or [f"--address=127.0.0.1:{port}"]))
            assert node.stdout is not None
            at_end.callback(node.stdout.close)
            at_end.callback(node.wait, 60)
            at_end.callback(node.terminate)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        for more in (["--dry-run"], []):
            ran = subprocess.run([*serve, *more], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
            assert ran.returncode == MachineError.exit_code, ran.stderr
            assert re.fullmatch(line, ran.stderr.strip()), ran.stderr


def test_a_checkpoint_is_known_by_its_bytes_wherever_they_differ(tmp_path: Path) -> None:
    seen = set()
    for name, data in (("a", b"x" * 3_000_000), ("b", b"x" * 2_999_999 + b"y"), ("c", b"y" + b"x" * 2_999_999)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
        seen.add(look(str(tmp_path / name))["checkpoint"])
    assert len(seen) == 3
    assert look(str(tmp_path / "a"))["checkpoint"] in seen
