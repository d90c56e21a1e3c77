"""The page of a running server, in a real browser where there is one."""

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeExecutor, fake_app, fake_engine, fake_plan, running
from xrunner.server import Watch

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=5000", "--dump-dom",
)  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_comes_to_life_in_a_browser(tmp_path: Path) -> None:
    evil = "<img src=x onerror=document.body.id='taken'>"
    plan = fake_plan()
    with running(fake_app(fake_engine(FakeExecutor()), Watch(plan), name=evil)) as url:
        body = {"model": evil, "prompt": [[1, 2, 3]] * 40, "max_tokens": 5}
        assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False).status_code == 200
        browser = subprocess.run(
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path}", url + "/"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        live = httpx.get(f"{url}/live", trust_env=False).json()
    dom = browser.stdout
    assert 'data-state="live"' in dom, browser.stderr[-2000:]
    assert "orca: max_batch 16" in dom
    assert "40 requests observed, 40 of them ended" in dom
    assert dom.count("<svg") == 6 and dom.count("<polyline") >= 6
    assert "Re-planning is off." in dom
    assert 'id="taken"' not in dom and "&lt;img src=x" in dom
    assert json.dumps(live["lengths"]["input"]["observed"]) != "null"
