"""What `xgpt serve` offers takes effect in front of every engine, or is refused."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.lib.served_plans import one_lane, plan
from tests import fake_vllm
from tests.attack.client import ADMIN_KEY
from tests.attack.target import EVERYWHERE, PROBE, attacked
from tests.fakes import certificate_in, eventually
from xgpt.checkpoints.files import read_spec
from xgpt.core.io import dump_json
from xrunner.vllm.process import PYTHON_VARIABLE

ALICE = "alices-alices-alices"


@contextmanager
def collector() -> Iterator[tuple[str, list[str]]]:
    """Takes traces: its URL, and the paths that were asked for."""
    paths: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", paths
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.point(1, 20)
@pytest.mark.parametrize("flavour", EVERYWHERE)
@pytest.mark.long
def test_every_option_takes_effect(flavour: str, checkpoint: Path, tmp_path: Path) -> None:
    cert, key = certificate_in(tmp_path)
    moved = shutil.copytree(checkpoint, tmp_path / "moved" / "small")
    steps = tmp_path / "steps.jsonl"
    with collector() as (traces_to, traces):
        options = [
            *("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--allowed-host", "llm.example"),
            *("--default-max-tokens", "3", "--max-max-tokens", "300", "--request-timeout", "20"),
            *("--shutdown-delay", "2", "--drain-timeout", "1", "--log-level", "info", "--max-waiting", "40"),
            *("--checkpoint", str(moved), "--otlp-endpoint", traces_to, "--step-log", str(steps)),
        ]
        keys = f"alice {ALICE} requests_per_minute=2 share=2 priority=1\n"

        def gone(plan: Any) -> Any:
            return plan.model_copy(update={"checkpoint": str(tmp_path / "nowhere")})

        with attacked(flavour, checkpoint, tmp_path, *options, keys=keys, change=gone) as target:
            assert target.url.startswith("https://")
            trusting = ssl.create_default_context(cafile=cert)
            headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
            with httpx.Client(base_url=target.url, verify=trusting, trust_env=False, timeout=60) as client:

                def complete(**fields: Any) -> httpx.Response:
                    extra_headers = fields.pop("headers", {})
                    body = {"model": target.model, "prompt": [3, 4], "ignore_eos": True} | fields
                    return client.post("/v1/completions", json=body, headers=headers | extra_headers)

                assert complete().json()["usage"]["completion_tokens"] == 3
                assert complete(max_tokens=301).status_code == 400
                assert complete(prompt=[[3]] * 41, max_tokens=1).status_code in (400, 429)
                assert complete(headers={"Host": "llm.example"}).status_code == 200
                assert complete(headers={"Host": "evil.example"}).status_code == 421
                alice = {"headers": {"Authorization": f"Bearer {ALICE}"}, "max_tokens": 1}
                assert [complete(**alice).status_code for _ in range(3)] == [200, 200, 429]
                assert client.get("/plan", headers=alice["headers"]).status_code == 403
                assert any('"key":"alice"' in line for line in target.served.lines)
                assert complete(**PROBE).status_code == 200
                begin_s = time.monotonic()
                target.served.process.terminate()
                assert eventually(lambda: client.get("/ready").status_code == 503)
                assert complete(max_tokens=2).status_code == 200
            assert target.served.process.wait(60) == 0
            assert time.monotonic() - begin_s > 1.9
        assert eventually(lambda: "/v1/traces" in traces)
    assert len(steps.read_text().splitlines()) > 5


@pytest.mark.long
@pytest.mark.parametrize("flavour", EVERYWHERE)
def test_a_request_timeout_and_a_drain_end_what_takes_longer(flavour: str, checkpoint: Path, tmp_path: Path) -> None:
    options = ("--request-timeout", "0.05", "--drain-timeout", "1", "--log-level", "error")
    with attacked(flavour, checkpoint, tmp_path, *options) as target:
        status, answer = target.complete(prompt=[3, 4], max_tokens=500, ignore_eos=True, n=8)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert not any('"level":"info"' in line for line in target.served.lines)
        target.served.process.terminate()
        assert target.served.process.wait(60) == 0


REFUSED = {
    "a cluster that is not there": ("--ray", "127.0.0.1:1"),
    "a rank without machines": ("--node-rank", "1"),
    "another host without keys": ("--host", "0.0.0.0"),
    "keys that are not there": ("--api-key-file", "nowhere"),
    "a key without its certificate": ("--ssl-keyfile", "nowhere"),
    "a certificate that is not there": ("--ssl-certfile", "nowhere"),
    "a profile that is not there": ("--profile", "nowhere"),
    "a checkpoint that is not there": ("--checkpoint", "nowhere"),
    "a collector that is no URL": ("--otlp-endpoint", "nowhere"),
    "a port beyond the last": ("--port", "65536"),
    "an unwritable step log": ("--step-log", "plan.json/steps.jsonl"),
}


@pytest.mark.long
@pytest.mark.point(1)
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("engine", ["xgpt", "vllm"])
def test_what_is_of_no_use_is_refused(
    name: str, engine: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "vllm":
        monkeypatch.setenv(PYTHON_VARIABLE, str(fake_vllm.program(tmp_path)))
    monkeypatch.chdir(tmp_path)
    subject = plan(one_lane([1]), model=read_spec(checkpoint)).model_copy(update={"checkpoint": str(checkpoint)})
    Path("plan.json").write_text(dump_json(subject))
    command = [sys.executable, "-m", "xgpt", "serve", "plan.json", "--port", "0", "--engine", engine, *REFUSED[name]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode in (2, 3), ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(("xgpt: ", "Error: "))
    assert "Traceback" not in ended.stderr


@pytest.mark.long
def test_bench_has_its_key_from_the_environment(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "xgpt", "bench", "--requests", "4", "--concurrency", "2", "--json"]
    (tmp_path / "lengths.csv").write_text("input,output\n" + "4,3\n" * 4)
    command += ["--workload", str(tmp_path / "lengths.csv")]
    with attacked("one", checkpoint, tmp_path) as target:
        found = {}
        for key in (ADMIN_KEY, "another-key-another-key", "two words", ""):
            environment = os.environ | {"XGPT_API_KEY": key}
            ended = subprocess.run([*command, target.url], capture_output=True, text=True, timeout=120, env=environment)
            found[key] = ended.returncode
            if key == ADMIN_KEY:
                assert json.loads(ended.stdout)["num_failed"] == 0, ended.stderr
            else:
                assert len(ended.stderr.splitlines()) == 1
                assert "words" not in ended.stderr
    assert list(found.values()) == [0, 3, 2, 3]
