"""Two hosts serve one plan: what goes over the wire between them, and whether tokens are those of one host.

    python -m benchmarks.two_hosts [--requests 60] [--plan "PP 2"] [--json two_hosts.json]

The hosts are network namespaces of this machine, each with a host name of its own, joined by a pair of virtual
interfaces; they meet as `xgpt serve --nnodes 2` does on real machines. Each has one device.
Bytes are counted twice: by the processes, which know control messages from tensors, and by the interface. Network
namespaces take root; without, this says what is missing and runs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lib.served_plans import SPEC, parser, report, served
from xgpt.client import ClientRequest, replay
from xgpt.core.errors import MachineError
from xgpt.core.io import dump_json
from xgpt.core.schema import Plan

HOSTS = ("xgpt-host-0", "xgpt-host-1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
INTERFACE = "xgpt-link"
"""Its name in both namespaces; each end is made under a name of its own, as both begin in the same namespace."""
RENDEZVOUS_PORT = 29400
SECRET = "of two namespaces alone"
CONCURRENCY = 16
START_S = 180


@dataclass
class Row:
    """What came of one plan.

    Attributes:
        changed: requests whose tokens differ from one host's.
        control_bytes, tensor_bytes: sent while requests ran, by process.
        wire_bytes: that the first host's interface has sent and received meanwhile.
        output_tokens: generated meanwhile.
        exit_codes: of both hosts' servers, after SIGTERM to the first.
    """

    plan: str
    requests: int
    lost: int
    changed: int
    start_s: float
    seconds: float
    output_tokens: int
    control_bytes: dict[str, int]
    tensor_bytes: dict[str, int]
    wire_bytes: int
    exit_codes: list[int | None]

    def __str__(self) -> str:
        control, tensors = sum(self.control_bytes.values()), sum(self.tensor_bytes.values())
        return (
            f"{self.plan}: {self.lost} of {self.requests} requests lost, {self.changed} changed, started in "
            f"{self.start_s} s, {self.output_tokens} tokens in {self.seconds} s; bytes a token: "
            f"control {control / self.output_tokens:.0f}, tensors {tensors / self.output_tokens:.0f}, on the "
            f"wire {self.wire_bytes / self.output_tokens:.0f}; exit codes {self.exit_codes}"
        )


def requests(count: int) -> list[ClientRequest]:
    rng = np.random.default_rng(11)
    lengths, outputs = rng.integers(8, 64, count).tolist(), rng.integers(8, 48, count).tolist()
    prompts = [rng.integers(3, SPEC.vocab_size, length).tolist() for length in lengths]
    return [ClientRequest(prompt, None, output) for prompt, output in zip(prompts, outputs, strict=True)]


def ip(*arguments: str) -> str:
    """Run iproute2.

    Raises:
        MachineError: it is not here, or may not do this.
    """
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MachineError("there is no `ip` command here; install iproute2") from None
    if done.returncode:
        raise MachineError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}; namespaces take root")
    return done.stdout


@contextmanager
def two_hosts() -> Iterator[None]:
    """Make two namespaces that reach each other and nothing else, until the end of the block."""
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
        yield


def on_host(number: int, command: list[str]) -> list[str]:
    """A command on one of the hosts, under the host's own name."""
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', HOSTS[number], *command]
    return ["ip", "netns", "exec", HOSTS[number], *named]


def wire_bytes() -> int:
    """Bytes that have passed the first host's interface, both ways."""
    (link,) = json.loads(ip("-n", HOSTS[0], "-j", "-s", "link", "show", INTERFACE))
    return int(link["stats64"]["rx"]["bytes"]) + int(link["stats64"]["tx"]["bytes"])


@contextmanager
def serving(what: Plan, directory: Path) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """One plan on both hosts. Yields where the first answers, within its namespace, and both servers."""
    path = directory / "plan.json"
    path.write_text(dump_json(what))
    servers: list[subprocess.Popen[str]] = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "XGPT_CLUSTER_SECRET": SECRET}
    try:
        for number in range(2):
            command = [sys.executable, "-m", "xgpt", "serve", str(path), "--port", "0", "--no-replan"]
            command += ["--nnodes", "2", "--node-rank", str(number)]
            command += ["--rdzv-endpoint", f"{ADDRESSES[0]}:{RENDEZVOUS_PORT}"]
            log = subprocess.PIPE if number == 0 else None
            servers.append(subprocess.Popen(on_host(number, command), stderr=log, text=True, env=environment))
        yield _url(servers[0]), servers
    finally:
        servers[0].send_signal(signal.SIGTERM)
        for server in servers:
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        if servers[0].stderr is not None:
            servers[0].stderr.close()


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    lines = []
    for line in server.stderr:
        lines.append(line.strip())
        if "listening on " in line:
            return line.rpartition("listening on ")[2].strip()
    raise MachineError("the server did not start: " + " / ".join(lines[-3:]))


def sent(metrics: str) -> dict[str, dict[str, int]]:
    """Bytes by kind and process, of the server's own account."""
    names = {"xgpt_control_bytes": "control", "xgpt_tensor_bytes": "tensor"}
    return {
        names[family.name]: {
            sample.labels["process"]: int(sample.value) for sample in family.samples if sample.name.endswith("_total")
        }
        for family in text_string_to_metric_families(metrics)
        if family.name in names
    }


def ask(url: str, count: int) -> dict[str, object]:
    """Replay requests in the caller's namespace; return what came of them, and what was sent for them."""

    def account() -> dict[str, dict[str, int]]:
        time.sleep(1.2)  # workers report twice a second
        return sent(httpx.get(f"{url}/metrics", trust_env=False).text)

    before = account()
    started = time.perf_counter()
    results = asyncio.run(replay(url, requests(count), concurrency=CONCURRENCY))
    seconds = time.perf_counter() - started
    after = account()
    difference = {
        kind: {process: total - before[kind].get(process, 0) for process, total in by_process.items()}
        for kind, by_process in after.items()
    }
    return {
        "tokens": [result.token_ids for result in results],
        "lost": sum(result.error is not None for result in results),
        "seconds": seconds,
        **difference,
    }


def measure(name: str, what: Plan, count: int) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        with served(what, Path(directory)) as alone:
            expected = [r.token_ids for r in asyncio.run(replay(alone.url, requests(count), concurrency=CONCURRENCY))]
        started = time.perf_counter()
        with serving(what, Path(directory)) as (url, servers):
            start_s = time.perf_counter() - started
            wire = wire_bytes()
            command = [sys.executable, "-m", "benchmarks.two_hosts", "--ask", url, "--requests", str(count)]
            answer = json.loads(subprocess.check_output(on_host(0, command), text=True))
            wire = wire_bytes() - wire
    return Row(
        name,
        count,
        answer["lost"],
        sum(a != b for a, b in zip(answer["tokens"], expected, strict=True)),
        round(start_s, 1),
        round(answer["seconds"], 2),
        sum(map(len, answer["tokens"])),
        answer["control"],
        answer["tensor"],
        wire,
        [server.returncode for server in servers],
    )


def main() -> None:
    accepted = parser(__doc__ or "", 60)
    accepted.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)  # what runs on the first host
    options = accepted.parse_args()
    if options.ask:
        print(json.dumps(ask(options.ask, options.requests)))
        return
    try:
        with two_hosts():
            report(lambda name, what: measure(name, what, options.requests), options.plan, options.json)
    except MachineError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
