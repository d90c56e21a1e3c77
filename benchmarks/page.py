"""Time from a move of the latency bound to the answer of `xgpt ui`, in Chromium: `python -m benchmarks.page`."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.browser import CHROMIUM, Page, browser

CASES = {
    "one device": "model=llama-3.1-8b&cluster=h200x1&workload=orca&bound=8",
    "32 devices": "model=gpt3-175b&cluster=a40x32&workload=translation&bound=40",
}
SLIDES = range(300, 1000, 50)
"""Positions of the slider, of 0 to 1000: bounds that some schedule keeps."""


def drag(page: Page, position: int) -> float:
    """Milliseconds until the plans under a new bound are shown."""
    page.run(
        f"(() => {{ const slider = document.getElementById('slider'); slider.value = {position};"
        "delete document.body.dataset.firstMs; slider.dispatchEvent(new Event('input')); })()"
    )
    page.wait("document.body.dataset.firstMs !== undefined || !document.getElementById('trouble').hidden")
    return float(page.run("document.body.dataset.firstMs ?? 'NaN'"))


def main() -> None:
    if CHROMIUM is None:
        sys.exit("no Chromium is installed")
    command = [sys.executable, "-m", "xgpt", "ui", "--port", "0", "--no-browser"]
    with tempfile.TemporaryDirectory() as directory, subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as ui:
        assert ui.stderr is not None
        url = ui.stderr.readline().split()[2]
        try:
            with browser(Path(directory)) as page:
                for name, asked in CASES.items():
                    page.open("about:blank")
                    page.open(f"{url}#{asked}")
                    begin_s = time.perf_counter()
                    page.wait("document.body?.dataset.state === 'settled'", 60)
                    settled_s = time.perf_counter() - begin_s
                    took = [ms for ms in (drag(page, position) for position in SLIDES) if ms == ms]
                    print(
                        f"{name}: first answer of {len(took)} moves {statistics.median(took):.0f} ms in the median, "
                        f"{max(took):.0f} at most; the first question settles after {settled_s:.1f} s"
                    )
        finally:
            ui.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
