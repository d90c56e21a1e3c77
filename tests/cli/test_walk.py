"""docs/guide/walk.md, word for word: each of its commands, in order, on a checkpoint made here."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.attack.target import save_checkpoint
from tests.fakes import eventually

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", (ROOT / "docs/guide/walk.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_walk(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    save_checkpoint(tmp_path / "my-model")
    generator = random.Random(0)
    lengths = [f"{generator.randint(8, 100)},{generator.randint(4, 40)}" for _ in range(300)]
    (tmp_path / "lengths.csv").write_text("\n".join(["input,output", *lengths]) + "\n")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    said: dict[str, str] = {}
    servers = []
    try:
        for language, written in BLOCKS:
            block = written.replace("8000", port)
            command = [sys.executable, "-c", block] if language == "python" else ["bash", "-ec", block]
            if "xgpt serve" in block:
                lines: list[str] = []
                server = subprocess.Popen(
                    ["bash", "-ec", f"exec {block}"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
                )
                reader = threading.Thread(target=lines.extend, args=(server.stderr,))
                reader.start()
                servers.append((server, reader))
                assert eventually(lambda lines=lines: any("listening on" in line for line in lines), 60), lines
                continue
            ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, (block, ran.stdout, ran.stderr)
            said[block.split("\n")[0]] = ran.stdout
    finally:
        for server, reader in servers:
            server.terminate()
            assert server.wait(60) == 0
            reader.join()
            assert server.stderr is not None
            server.stderr.close()
    texts = list(said.values())
    assert "devices" in texts[0] and "arrivals/s" in texts[1]
    assert '"text_completion"' in "".join(texts) and "measured" in texts[-2]
    assert {path.name for path in tmp_path.iterdir()} >= {"plan.json", "report.html", "deploy"}
