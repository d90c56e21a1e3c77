"""A real Chromium that tests drive, through the pipe of its debugging protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Page:
    """One page of a browser.

    Attributes:
        complaints: what it has written to its console as an error, and exceptions of its scripts.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest = b""
        self._sent = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol.

        Raises:
            RuntimeError: it failed.
        """
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._sent:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str, within_s: float = 30.0) -> None:
        """Until an expression in the page is true.

        Raises:
            TimeoutError: it does not become so.
        """
        until_s = time.monotonic() + within_s
        while not self.run(condition):
            if time.monotonic() > until_s:
                raise TimeoutError(f"{condition}: {self.run('document.body.innerText')}")
            time.sleep(0.02)

    def shoot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the whole page, or of what the window shows."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._reading, 1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._rest += read
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.complaints.append(str(event["params"]["entry"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page of a headless Chromium until the end of the block.

    Args:
        profile: a directory of its own.
    """
    assert CHROMIUM is not None
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()

    def own_pipes() -> None:  # it reads from 3 and writes to 4
        spare = os.dup(to_us), os.dup(to_browser)
        os.dup2(spare[1], 3)
        os.dup2(spare[0], 4)

    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
        preexec_fn=own_pipes,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(to_us)
    try:
        yield Page(from_browser, from_us)
    finally:
        process.kill()
        process.wait()
        os.close(from_us)
        os.close(from_browser)
