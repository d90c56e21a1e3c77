"""Start an engine with a planned command, wait until it is ready, and end it with all its processes."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import NamedTuple, Protocol

from xgpt.client import served_model
from xgpt.connection import own_api_key
from xgpt.core.errors import InputError, MachineError, cut
from xgpt.core.processes import end_with_parent, free_port, run_module
from xrunner.vllm.process import Reader, last_error, package_path, preload, python, started

READY_S = 900.0
"""Seconds within which an engine must be ready: vLLM compiles for minutes."""
LOOK_S = 0.5
STOP_S = 30.0
MEMORY = re.compile(
    r"out of memory|memory|KV cache|no available .*block|larger than the maximum number of tokens", re.I
)


class DidNotStart(MachineError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine did not start: {cut(' '.join(reason.split()))}")
        self.for_memory = MEMORY.search(reason) is not None


class Host(Protocol):
    def run(self, words: Sequence[str], until_s: float) -> AbstractContextManager[str]:
        """Start an engine, yield its URL when it is ready, and end it.

        Args:
            words: the engine's command with its variables, as `env NAME=VALUE vllm serve MODEL ...`.
            until_s: time on the monotonic clock at which it must be ready.

        Raises:
            DidNotStart: it ended before it was ready, or was not ready in time.
        """
        ...


def wait_ready(url: str, until_s: float, has_ended: Callable[[], str | None] = lambda: None) -> None:
    """Wait until a server answers as an OpenAI-compatible endpoint does.

    Args:
        has_ended: returns why the server has ended, or None while it runs.

    Raises:
        DidNotStart: it has ended, or does not answer in time.
    """
    while True:
        if (reason := has_ended()) is not None:
            raise DidNotStart(reason)
        with suppress(MachineError):
            asyncio.run(served_model(url, own_api_key()))
            return
        if time.monotonic() >= until_s:
            raise DidNotStart("it was not ready in time")
        time.sleep(LOOK_S)


class Vllm:
    @contextmanager
    def run(self, words: Sequence[str], until_s: float) -> Iterator[str]:
        variables, rest = split(words)
        if rest[:2] != ["vllm", "serve"]:
            says = "only vllm serve is started here: give `start` or `manual`"
            raise InputError("current", shlex.join(rest[:3]), says)
        port, vllm_python = free_port(), python()
        given, _ = parted(rest[2:], re.compile(r"--(host|port)"))
        model = [] if given[:1] and given[0].startswith("-") else ["--model"]
        command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", *model, *given]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with package_path() as packages, started(command, packages, variables | preload(vllm_python)) as process:
            reader = Reader(process)
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, until_s, lambda: None if process.poll() is None else reader.last_error())
            yield url


def parted(words: Sequence[str], flags: re.Pattern[str]) -> tuple[list[str], list[str]]:
    others, matching, left = list[str](), list[str](), iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        if not flags.fullmatch(name):
            others.append(word)
        else:
            matching += [word] if equals else [word, next(left, "")]
    return others, matching


class Template:
    """Starts engines by a user's command, in which {command}, {flags} and {port} are replaced.

    Args:
        template: for a shell, such as "ssh gpu7 {command} --port {port}". It must run until the engine ends.
        url: the engine's address, in which {port} is replaced.
    """

    def __init__(self, template: str, url: str | None) -> None:
        if "{command}" not in template and "{flags}" not in template:
            raise InputError("start", template, "it must contain {command} or {flags}, where the engine's flags belong")
        self._template, self._url = template, url or "http://127.0.0.1:{port}"

    @contextmanager
    def run(self, words: Sequence[str], until_s: float) -> Iterator[str]:
        port = str(free_port())
        _, rest = split(words)
        text = self._template.replace("{command}", shlex.join(words)).replace("{flags}", shlex.join(rest[3:]))
        url = self._url.replace("{port}", port)
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                ["sh", "-c", text.replace("{port}", port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
            )

            def has_ended() -> str | None:
                if process.poll() is None:
                    return None
                output.seek(0)
                return last_error(output.readlines()[-50:])

            try:
                wait_ready(url, until_s, has_ended)
                yield url
            finally:
                _end_group(process)


class Own:
    """Starts `xgpt serve` on this machine."""

    def run(self, words: Sequence[str], until_s: float) -> AbstractContextManager[str]:
        started_by = Template("exec {command} --port {port}", None)
        return started_by.run([*run_module("xgpt"), *words[1:]], until_s)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
            if number == signal.SIGTERM:
                continue  # its children may still run


class Manual:
    """Lets the user start engines.

    Args:
        ask: shows a command, and returns the URL at which the user has started it. "" means that it does not start.
    """

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask

    @contextmanager
    def run(self, words: Sequence[str], until_s: float) -> Iterator[str]:
        url = self._ask(shlex.join(words))
        if not url:
            raise DidNotStart("the user says so")
        wait_ready(url, time.monotonic() + STOP_S)
        yield url


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    rest = list(words[1:] if words[:1] == ["env"] else words)
    variables: dict[str, str] = {}
    while rest and re.fullmatch(r"[A-Za-z_]\w*=.*", rest[0]):
        name, _, value = rest.pop(0).partition("=")
        variables[name] = value
    return variables, rest


class ProcessorUse(NamedTuple):
    processor_s: float
    load_average: float

    @classmethod
    def now(cls) -> ProcessorUse:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(used.ru_utime + used.ru_stime, os.getloadavg()[0])
