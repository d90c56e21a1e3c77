"""Photograph the report, the planning page and the live page of a server: `python -m tools.make_screens [FOLDER]`.

It writes NAME.png at 1280 px, and with FOLDER also NAME-400.png as a telephone shows it. It needs chromium, two cores
at rest, and some minutes.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

IMAGES = Path(__file__).parents[1] / "docs" / "images"
XGPT = (sys.executable, "-m", "xgpt")
CURRENT = "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 8"
ASKED = {"model": "qwen3-32b", "cluster": "h200x8", "workload": "azure-conv", "bound": "10", "engine": "vllm"}
ADDRESS = re.compile(r"http://\S+")
PATIENCE_S = 120.0


class Browser:
    """A headless Chromium that is told what to do over a pipe, in its DevTools protocol."""

    def __init__(self, profile: str) -> None:
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe"
        script = f'exec chromium {options} --user-data-dir="$0" about:blank 3<&{reads} 4>&{writes} >/dev/null 2>&1'
        self.process = subprocess.Popen(["bash", "-c", script, profile], pass_fds=(reads, writes))
        os.close(reads)
        os.close(writes)
        self._said, self._calls, self._session = b"", 0, ""
        targets = self("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __call__(self, method: str, **params: Any) -> Any:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._said:
                self._said += os.read(self._in, 1 << 20) or sys.exit("chromium has ended")
            said, self._said = self._said.split(b"\0", 1)
            answer = json.loads(said)
            if answer.get("id") == self._calls:
                if "error" in answer:
                    sys.exit(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def run(self, script: str) -> Any:
        return self("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def open(self, address: str, ready: str) -> None:
        """Open a page, and wait until the expression `ready` is true."""
        self("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && ({ready})")

    def wait(self, ready: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self.run(ready):
            if time.monotonic() > end:
                sys.exit(f"{self.run('location.href')} is not ready: {ready}")
            time.sleep(0.3)

    def photograph(self, path: Path, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self("Emulation.setDeviceMetricsOverride", **size)
        time.sleep(0.5)
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", captureBeyondViewport=False)["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        found = Browser(profile)
        try:
            yield found
        finally:
            found.process.terminate()
            found.process.wait(30)


@contextmanager
def started(folder: str, *command: str) -> Iterator[str]:
    """Run a command of xgpt that serves a page, and yield the address that it prints."""
    process = subprocess.Popen(
        (*XGPT, *command), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        yield next(found[0].rstrip("\",'}/") for line in process.stdout if (found := ADDRESS.search(line)))
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    small = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with TemporaryDirectory() as folder, browser() as page:

        def run(*command: str) -> None:
            subprocess.run((*XGPT, *command), cwd=folder, check=True)

        def photograph(name: str) -> None:
            page.photograph(IMAGES / f"{name}.png", 1280, 1100)
            if small is not None:
                page.photograph(small / f"{name}-400.png", 400, 3000)

        options = [f"--{name}={value}" for name, value in ASKED.items() if name != "bound"]
        run("plan", *options, f"--latency-bound={ASKED['bound']}")
        run("report", "plan.json", "-o", "report.html")
        page.open(f"file://{folder}/report.html", "true")
        photograph("report")
        with started(folder, "ui", "--port", "0", "--no-browser") as address:
            question = urlencode({**ASKED, "current": CURRENT})
            page.open(f"{address}#{question}", "document.body.dataset.state === 'settled'")
            photograph("ui")
        run("plan", "--latency-bound", "30", "-o", "own.json")
        with started(folder, "serve", "own.json", "--port", "0") as address:
            run("bench", address, "--requests", "60", "--arrival-rate", "1")
            page.open(address, "document.getElementById('kept').textContent !== '-'")
            photograph("live")


if __name__ == "__main__":
    main()
