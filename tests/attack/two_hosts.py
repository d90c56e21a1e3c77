"""Two hosts on this machine: namespaces, each with its own host name, network and processes, joined by a pair of
virtual interfaces. Each has one device and a Ray node. Namespaces need root."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from xgpt.core.errors import MachineError
from xgpt.core.io import dump_json
from xgpt.core.schema import Plan

HOSTS = ("xgpt-host-0", "xgpt-host-1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
INTERFACE = "xgpt-link"
"""The interface's name in both namespaces. Both ends are created in one namespace, so each first has another name."""
TOKEN = "0123456789abcdef" * 2
FIRST_PROCESS = """
import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.1)
"""
"""Each host's process 1, which reaps orphaned processes. When it ends, all processes of the host end."""
RAY_PORT = 6379
PROGRAM = r'"(.*?)"'
"""The names of programs in the output of `ss`."""


def ip(*arguments: str) -> str:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MachineError("there is no `ip` command here; install iproute2") from None
    if done.returncode:
        raise MachineError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}; namespaces take root")
    return done.stdout


@contextmanager
def two_hosts() -> Iterator[None]:
    with ExitStack() as stack:
        left = ip("netns", "list").split()
        for host in HOSTS:
            if host in left:
                ip("netns", "del", host)  # of a run that was killed
            ip("netns", "add", host)
            stack.callback(ip, "netns", "del", host)
        ends = [f"{INTERFACE}{number}" for number in range(2)]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end, address in zip(HOSTS, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", host)
            ip("-n", host, "link", "set", end, "name", INTERFACE)
            ip("-n", host, "address", "add", f"{address}/24", "dev", INTERFACE)
            ip("-n", host, "link", "set", INTERFACE, "up")
            ip("-n", host, "link", "set", "lo", "up")
            first_processes[host] = stack.enter_context(_first_process(host))
        yield


first_processes: dict[str, int] = {}
"""The id, outside of the host, of each host's process 1."""


@contextmanager
def _first_process(host: str) -> Iterator[int]:
    """Start a host's process 1 under the host's name, and yield the process's id outside of the host."""
    command = ["sh", "-c", 'hostname "$0" && exec "$@"', host, sys.executable, "-c", FIRST_PROCESS]
    separate = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with subprocess.Popen(["ip", "netns", "exec", host, *separate, *command]) as process:
        try:
            while (first := child(process.pid)) is None:
                time.sleep(0.05)
            yield first
        finally:
            process.kill()


def child(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def terminate(server: subprocess.Popen[str]) -> None:
    """Send SIGTERM to a command on a host, not to `nsenter`, which passes no signals on and ends with the command."""
    with suppress(OSError):
        if server.poll() is None and (pid := child(server.pid)) is not None:
            os.kill(pid, signal.SIGTERM)


def on_host(number: int, command: list[str]) -> list[str]:
    first = first_processes[HOSTS[number]]
    return ["nsenter", f"--target={first}", "--net", "--uts", "--pid", "--mount", f"--wd={Path.cwd()}", *command]


@contextmanager
def serving(what: Plan, directory: Path) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    path = directory / "plan.json"
    path.write_text(dump_json(what))
    servers: list[subprocess.Popen[str]] = []
    nodes: list[subprocess.Popen[str]] = []
    try:
        nodes += [start_node(number, directory) for number in range(2)]
        while not any(line.startswith(f"*:{RAY_PORT} ") for line in listening(0)):
            if nodes[0].poll() is not None:
                raise MachineError("Ray's head did not start; its reason is above")
            time.sleep(0.5)
        servers.append(start(path))
        yield _url(servers[0], directory), [*servers, *nodes]
    finally:
        # The front ends first, and Ray's head last, because other nodes wait 30 s for a head that has ended.
        for server in [*servers[:1], *reversed(nodes)]:
            terminate(server)
            with suppress(subprocess.TimeoutExpired):
                server.wait(60)
        for server in [*servers, *nodes]:
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                if (pid := child(server.pid)) is not None:
                    os.kill(pid, signal.SIGKILL)
                server.wait()


def start(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "xgpt", "serve", str(path), "--port", "0", "--no-replan"]
    command += ["--ray", f"{ADDRESSES[0]}:{RAY_PORT}"]
    with (path.parent / "0.log").open("w") as log:
        return subprocess.Popen(on_host(0, command), stderr=log, text=True, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


def start_node(number: int, directory: Path) -> subprocess.Popen[str]:
    head = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    command += [f"--node-ip-address={ADDRESSES[number]}", f"--temp-dir={directory / str(number)}"]
    command += head if number == 0 else [f"--address={ADDRESSES[0]}:{RAY_PORT}"]
    return subprocess.Popen(on_host(number, command), stdout=subprocess.DEVNULL, text=True, env=environment())


def listening(number: int) -> list[str]:
    lines = subprocess.check_output(on_host(number, ["ss", "-ltnpH"]), text=True).splitlines()
    return sorted(f"{line.split()[3]} {', '.join(re.findall(PROGRAM, line))}" for line in lines)


def _url(server: subprocess.Popen[str], directory: Path) -> str:
    while server.poll() is None:
        for line in _said(directory):
            if "listening on " in line:
                return line.rpartition("listening on ")[2].strip()
        time.sleep(0.2)
    raise MachineError("the server did not start: " + " / ".join(_said(directory)[-3:]))


def _said(directory: Path) -> list[str]:
    return (directory / "0.log").read_text().splitlines()
