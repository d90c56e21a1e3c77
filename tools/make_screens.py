"""Photograph the report, the planning page and the live page of a server: `python -m tools.make_screens`. It needs
chromium, two cores at rest, and some minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

IMAGES = Path(__file__).parents[1] / "docs" / "images"
XGPT = (sys.executable, "-m", "xgpt")
PROBLEM = ("--model", "qwen3-32b", "--cluster", "h200x8", "--workload", "azure-conv", "--latency-bound", "10")
ADDRESS = re.compile(r"http://\S+")


def photograph(address: str, name: str, width: int = 1280, height: int = 1000, wait_s: float = 5.0) -> None:
    options = (f"--window-size={width},{height}", f"--timeout={1000 * wait_s:.0f}", f"--screenshot={IMAGES / name}")
    base = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    with TemporaryDirectory() as profile:
        command = (*base, f"--user-data-dir={profile}", *options, address)
        subprocess.run(command, check=True, capture_output=True, timeout=wait_s + 60)


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
    with TemporaryDirectory() as folder:

        def run(*command: str) -> None:
            subprocess.run((*XGPT, *command), cwd=folder, check=True)

        run("plan", *PROBLEM)
        run("report", "plan.json", "-o", "report.html")
        photograph(f"file://{folder}/report.html", "report.png", height=1400)
        with started(folder, "ui", "--port", "0", "--no-browser") as address:
            photograph(address, "ui.png", wait_s=45)
        run("plan", "--latency-bound", "9.8", "-o", "own.json")
        with started(folder, "serve", "own.json", "--port", "0") as address:
            run("bench", address, "--requests", "60", "--arrival-rate", "1")
            photograph(address, "live.png")


if __name__ == "__main__":
    main()
