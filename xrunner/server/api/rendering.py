"""Render templates in separate processes (`sandbox`). A process that takes too long is killed."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from xgpt.core.errors import InputError
from xrunner.server.api import sandbox

RENDER_S = 10.0
"""Seconds in which a template must render a chat."""
MAX_ANSWER_BYTES = 64 << 20
"""Largest rendered text, as JSON, in bytes."""
START_S = 60.0
"""Seconds in which a process must have started."""


class NotText(ValueError):
    """A template wrote something that is no text."""


class _Process:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(sandbox.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C must reach only the server, which first lets its requests end
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        try:
            self.ask(_asked("", {}), START_S)
        except BaseException:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, content: bytes, seconds: float) -> dict[str, Any]:
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            with suppress(BrokenPipeError):
                self._input.write(len(content).to_bytes(8, "little") + content)
                self._input.flush()
            head = self._output.read(8)
            if (size := int.from_bytes(head, "little")) > MAX_ANSWER_BYTES:
                self._process.kill()
                raise ValueError(f"it renders the chat to {size} bytes, but at most {MAX_ANSWER_BYTES} are accepted")
            answer = self._output.read(size)
        finally:
            timer.cancel()
        if is_late.is_set():
            raise TimeoutError(f"it takes longer than {seconds:g} s")
        if not head:
            raise EOFError
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._input.close()
        self._output.close()


_idle: list[_Process] = []
"""Processes that wait for a template. They end when this process ends, because their input is then closed."""


def _taken() -> _Process:
    with suppress(IndexError):  # another thread may take the last process at any moment
        while (process := _idle.pop()).has_ended:
            process.close()
        return process
    return _Process()


@atexit.register
def _end() -> None:
    while _idle:
        _idle.pop().close()


def _asked(source: str, given: dict[str, Any]) -> bytes:
    return json.dumps({"source": source, "given": given}).encode()


def render(source: str, given: dict[str, Any]) -> str:
    """Return the rendered template. Any thread may call this.

    Raises:
        InputError: the template is not valid.
        ValueError: the template refuses the values, with its own message, or takes too much time or memory.
        RecursionError: the values nest too deeply."""
    process: _Process | None = None
    content = _asked(source, given)
    try:
        process = _taken()
        answer = process.ask(content, RENDER_S)
    except (TimeoutError, EOFError, ValueError) as error:
        if process is not None:
            process.close()
        raise ValueError(str(error) or "the process that renders it has ended; send the request again") from None
    _idle.append(process)
    if "broken" in answer:
        raise InputError("chat_template", "", answer["broken"])
    if "surrogate" in answer:
        raise NotText("it writes half of a surrogate pair, which is no text")
    if "refused" in answer:
        raise ValueError(answer["refused"])
    text: str = answer["text"]
    return text
