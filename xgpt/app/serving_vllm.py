"""Run a plan in vLLM: start it with the plan's flags, watch the lengths that come, change its schedule as it runs."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xgpt.errors import MachineError
from xgpt.schema import Plan

if TYPE_CHECKING:
    import subprocess

    from xgpt.observation import Seen
    from xgpt.schema import Decision, Planner
    from xrunner.vllm.channel import ServerSide
    from xrunner.vllm.command import Launch

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Between two looks at a channel that was empty."""


def check_plan_for_vllm(plan: Plan) -> str:
    """Refuse a plan that vLLM cannot serve here.

    Returns:
        vLLM's version.

    Raises:
        InputError: the plan is for another engine, vLLM cannot run its policy, or there are no weights.
        MachineError: there is no vLLM.
    """
    from xgpt.app.profiles import check_engine
    from xrunner.vllm import TESTED_VERSION
    from xrunner.vllm.command import launch
    from xrunner.vllm.process import package_path, python, version_of

    check_engine(plan, "vllm")
    launch(plan, plan_path="plan.json")
    with package_path() as packages:
        found = version_of(python(), packages)
    if found != TESTED_VERSION:
        logger.warning("xgpt is tested with vLLM %s, this is %s", TESTED_VERSION, found)
    if plan.profile.engine_version not in (None, found):
        logger.warning("the plan's profile is of vLLM %s, this is %s", plan.profile.engine_version, found)
    return found


def serve_in_vllm(
    plan: Plan,
    host: str,
    port: int,
    *,
    step_log: Path | None = None,
    planner: Planner | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        planner: what re-plans when lengths change; None: nobody.

    Raises:
        InputError: vLLM cannot run the plan.
        MachineError: vLLM is not here, does not start, or dies.
    """
    from xgpt.io import dump_json
    from xrunner.vllm.channel import ServerSide
    from xrunner.vllm.command import launch

    port = port or free_port(host)
    with tempfile.TemporaryDirectory(prefix="xgpt-") as directory:
        plan_path, address = Path(directory) / "plan.json", f"ipc://{directory}/control"
        plan_path.write_text(dump_json(plan), encoding="utf-8")
        config = {"control": address}
        if step_log is not None:
            config["step_log"] = str(step_log.resolve())
        control = ServerSide(address)
        try:
            started = launch(plan, plan_path=str(plan_path), host=host, port=port, config=config)
            with running(started, host, port) as process:
                print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)
                _until_signal(process, lambda goes_on: asyncio.run(follow(plan, control, planner, goes_on)))
        finally:
            control.close()


def free_port(host: str) -> int:
    """A port that nobody listens on now; vLLM takes no port 0."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running(launch: Launch, host: str, port: int, log: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """vLLM's server, from when it answers until it has ended.

    Args:
        log: where vLLM's own output goes; None: its warnings and errors to standard error.

    Raises:
        MachineError: it ends before it answers.
    """
    import httpx

    from xrunner.vllm.process import last_error, package_path, preload, python, started

    vllm_python = python()
    variables = launch.variables | preload(vllm_python)
    tail: deque[str] = deque(maxlen=200)
    with package_path() as packages, started(launch.command(vllm_python), packages, variables) as process:
        reader = threading.Thread(target=_read, args=(process, tail, log))
        reader.start()
        with httpx.Client(trust_env=False, timeout=2) as client:
            while True:
                if process.poll() is not None:
                    reader.join()
                    raise MachineError(f"vLLM did not start: {last_error(list(tail))}")
                try:
                    if client.get(f"http://{host}:{port}/health").status_code == httpx.codes.OK:
                        break
                except httpx.HTTPError:
                    time.sleep(0.2)
        yield process
    reader.join()


def _read(process: subprocess.Popen[str], tail: deque[str], log: Path | None) -> None:
    assert process.stdout is not None
    with process.stdout, (log or Path("/dev/null")).open("w", encoding="utf-8") as file:
        for line in process.stdout:
            tail.append(line)
            file.write(line)
            # What it says once it is to end, its engine gone under it, is no news.
            is_to_end = process.stdin is None or process.stdin.closed
            if log is None and not is_to_end and any(level in line for level in ("ERROR", "CRITICAL")):
                print(line.rstrip(), file=sys.stderr, flush=True)


def _until_signal(process: subprocess.Popen[str], beside: Callable[[Callable[[], bool]], None]) -> None:
    stopping = threading.Event()

    def stop(*_: object) -> None:
        stopping.set()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    worker = threading.Thread(target=beside, args=(lambda: not stopping.is_set(),))
    worker.start()
    try:
        while not stopping.wait(0.2):
            if process.poll() is not None:
                raise MachineError(f"vLLM died with exit code {process.returncode}")
    finally:
        stopping.set()
        worker.join()
        for number, handler in previous.items():
            signal.signal(number, handler)


async def follow(plan: Plan, control: ServerSide, planner: Planner | None, goes_on: Callable[[], bool]) -> None:
    """Observe what comes of the requests; where the planner finds a better plan, have the schedulers change to it."""
    from xgpt.io import sha256
    from xrunner.server import Watch
    from xrunner.vllm.channel import Accepted, Arrived, Ended, Gone, Refused, Running

    watch = Watch(plan, planner)
    running = plan
    seen: dict[tuple[int, int], tuple[Seen, float]] = {}

    def decided(decision: Decision) -> None:
        if decision.action != "keep":
            control.send(watch.plan)

    watch.start(lambda schedule: None)  # the schedule is built where it runs
    watch.on_decision = decided
    while goes_on():
        received = control.receive(0)
        if received is None:
            await asyncio.sleep(POLL_S)
            continue
        engine, message = received
        match message:
            case Arrived():
                now_s = time.perf_counter()
                seen[engine, message.number] = watch.arrive(message.input_length, message.max_output), now_s
            case Running():
                for number, generated in message.generated.items():
                    seen[engine, number][0].generated = generated
            case Ended():
                request, arrived_s = seen.pop((engine, message.number))
                request.generated = message.output_length
                watch.end(request, arrived_s)
            case Gone():
                seen.pop((engine, message.number), None)
            case Accepted():
                if message.plan_sha256 == sha256(watch.plan):
                    running = watch.plan
                logger.info("vLLM follows a plan", extra={"fields": {"plan_sha256": message.plan_sha256}})
            case Refused():
                watch.go_over_to(running)
                logger.warning("vLLM keeps its plan", extra={"fields": {"reason": message.reason}})
    await watch.stop()
