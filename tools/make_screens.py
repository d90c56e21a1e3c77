"""Photograph the report, the planning page and the live page of a server: `python -m tools.make_screens [FOLDER]`.

It writes NAME.png at 1280 px, and with FOLDER also NAME-400.png as a telephone shows it. It needs chromium, two cores
at rest, and some minutes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlencode

from tests.browser import browser

IMAGES = Path(__file__).parents[1] / "docs" / "images"
XGPT = (sys.executable, "-m", "xgpt")
CURRENT = "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 8"
ASKED = {"model": "qwen3-32b", "cluster": "h200x8", "workload": "azure-conv", "bound": "10", "engine": "vllm"}
ADDRESS = re.compile(r"http://\S+")
PATIENCE_S = 120.0


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
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, browser(Path(folder, "profile")) as page:

        def run(*command: str) -> None:
            subprocess.run((*XGPT, *command), cwd=folder, check=True)

        def photograph(name: str, address: str, ready: str = "true") -> None:
            page.open(address)
            page.wait(f"document.readyState === 'complete' && ({ready})", PATIENCE_S)
            page.call("Emulation.setScrollbarsHidden", hidden=True)
            shots = [(IMAGES / f"{name}.png", 1280, 1100)]
            shots += [] if small is None else [(small / f"{name}-400.png", 400, 3000)]
            for path, width, height in shots:
                page.call(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=height,
                    deviceScaleFactor=1,
                    mobile=width < 500,
                )
                page.shoot(path, whole=False)

        options = [f"--{name}={value}" for name, value in ASKED.items() if name != "bound"]
        run("plan", *options, f"--latency-bound={ASKED['bound']}")
        run("report", "plan.json", "-o", "report.html")
        photograph("report", f"file://{folder}/report.html")
        with started(folder, "ui", "--port", "0", "--no-browser") as address:
            question = urlencode({**ASKED, "current": CURRENT})
            photograph("ui", f"{address}#{question}", "document.body.dataset.state === 'settled'")
        run("plan", "--latency-bound", "30", "-o", "own.json")
        rate = json.loads(Path(folder, "own.json").read_text())["estimate"]["capacity"]["rate_per_s"]
        with started(folder, "serve", "own.json", "--port", "0") as address:
            run("bench", address, "--requests", "60", f"--arrival-rate={0.8 * rate}")
            photograph("live", address, "document.getElementById('kept').textContent !== '-'")


if __name__ == "__main__":
    main()
