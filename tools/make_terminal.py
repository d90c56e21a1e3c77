"""Draw a command's output in terminals of 80 and 120 columns, light and dark: `python -m tools.make_terminal`."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

COMMAND = "xgpt plan --model llama-3.1-8b --cluster h200x1 --workload azure-conv --latency-bound 8 --engine vllm"
WIDTHS = (80, 120)
THEMES: dict[str, TerminalTheme] = {"light": DEFAULT_TERMINAL_THEME, "dark": DIMMED_MONOKAI}
CHARACTER, MARGIN = 12.2, 8
"""Width of a character in rich's pictures, and the space around the text."""
IMAGES = Path(__file__).parents[1] / "docs" / "images"
FORMAT = """<svg viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>{styles} text {{ font: {char_height}px monospace; }}</style>
<rect fill="{background}" width="{terminal_width}" height="{terminal_height}" rx="8"/>
<g transform="translate(8, 8)"><g clip-path="none">{backgrounds}<g>{matrix}</g></g></g>
</svg>
"""


def output_at(width: int) -> str:
    """Return the command's output in a pseudo-terminal of this width."""
    master, slave = pty.openpty()
    words = [sys.executable, "-m", *COMMAND.split()]
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm-256color", "PYTHONPATH": os.getcwd()}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(words, stdout=slave, stderr=subprocess.DEVNULL, cwd=folder, env=environment)
        os.close(slave)
        found = b""
        try:
            while piece := os.read(master, 1 << 16):
                found += piece
        except OSError:  # the terminal's other end is closed
            pass
        process.wait()
    os.close(master)
    return found.decode().replace("\r\n", "\n")


def main() -> None:
    """Write a picture for each width and theme."""
    for width in WIDTHS:
        text = Text.from_ansi(f"$ {COMMAND}\n" + output_at(width))
        for name, theme in THEMES.items():
            console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
            console.print(text)
            code_format = FORMAT.replace("{background}", theme.background_color.hex)
            code_format = code_format.replace("{terminal_width}", f"{width * CHARACTER + 2 * MARGIN:g}")
            picture = console.export_svg(theme=theme, code_format=code_format)
            (IMAGES / f"plan-{width}-{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
