"""Serve one plan on two hosts, measure the traffic between them, and compare the tokens with those of one host.

    python -m benchmarks.two_hosts [--engine vllm] [--requests 60] [--plan "PP 2"] [--kill 0 [--kind KIND]]
        [--json two_hosts.json]

The hosts are namespaces of this machine, each with its own host name, network and processes. A pair of virtual
interfaces joins them. They connect as `xgpt serve --engine vllm --nnodes 2` or `xgpt serve --ray` does on real
machines. Each has one device. Bytes are counted twice: by xgpt's own processes, which distinguish control messages from
tensors, and by the network interface. `--kill` kills each kind of process of either host while requests run, and
restarts what a service manager would restart. Listening sockets are listed. Namespaces need root. Without it, the
benchmark prints what is missing and runs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lib.served_plans import SPEC, parser, report, served
from xgpt.checkpoints.files import read_spec
from xgpt.client import ClientRequest, replay
from xgpt.core.errors import MachineError
from xgpt.core.io import dump_json
from xgpt.core.processes import children_of
from xgpt.core.schema import OrcaSettings, Plan
from xrunner.cluster.workers import PERIOD_S

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
LAUNCHER, WORKER = "xrunner.cluster.launcher", "worker"
KINDS = ("VLLM::EngineCore", "VLLM::Worker", "xrunner.vllm.supervised", "xrunner.vllm.host", LAUNCHER, "ray::_Machine",
         "xgpt.serving.engine_process", "xgpt serve", "gcs/gcs_server", "raylet/raylet ")  # fmt: skip
"""Texts that identify a process's kind by its command line, tried in this order. Each child of a launcher is a
`WORKER`."""
FRONT = "xgpt serve"
NODE = ("gcs/gcs_server", "raylet/raylet ")
"""Processes of a Ray node. If one of them is killed, `ray start` ends."""
RAY_PORT = 6379
CONCURRENCY = 16
KILL_REQUESTS, KILL_AFTER_S, PARTITION_S = 40, 1.5, 30.0
BEGUN = "begun"
"""The text that the client prints when it sends the first requests. A process is killed `KILL_AFTER_S` later."""
NODE_END_S = 150.0
"""Longest time until a Ray node has ended after it or its head was killed."""
PROGRAM = r'"(.*?)"'
"""The names of programs in the output of `ss`."""


@dataclass
class Row:
    """The result of one plan.

    Attributes:
        changed: requests whose tokens differ from one host's.
        control_bytes, tensor_bytes: bytes sent while requests ran, by process.
        wire_bytes: bytes that the first host's interface sent and received in this time.
        exit_codes: exit codes of both hosts' servers, after SIGTERM to the first.
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
    listening: list[list[str]] = field(default_factory=list)
    kills: list[dict[str, object]] = field(default_factory=list)

    def __str__(self) -> str:
        control, tensors = sum(self.control_bytes.values()), sum(self.tensor_bytes.values())
        return (
            f"{self.plan}: {self.lost} of {self.requests} requests lost, {self.changed} changed, started in "
            f"{self.start_s} s, {self.output_tokens} tokens in {self.seconds} s; bytes a token: "
            f"control {control / self.output_tokens:.0f}, tensors {tensors / self.output_tokens:.0f}, on the "
            f"wire {self.wire_bytes / self.output_tokens:.0f}; exit codes {self.exit_codes}; listening "
            f"{self.listening}" + "".join(f"; {kill}" for kill in self.kills)
        )


def requests(count: int) -> list[ClientRequest]:
    rng = np.random.default_rng(11)
    lengths, outputs = rng.integers(8, 64, count).tolist(), rng.integers(64, 192, count).tolist()
    prompts = [rng.integers(3, SPEC.vocab_size, length).tolist() for length in lengths]
    return [ClientRequest(prompt, None, output) for prompt, output in zip(prompts, outputs, strict=True)]


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


def wire_bytes() -> int:
    (link,) = json.loads(ip("-n", HOSTS[0], "-j", "-s", "link", "show", INTERFACE))
    return int(link["stats64"]["rx"]["bytes"]) + int(link["stats64"]["tx"]["bytes"])


@contextmanager
def serving(what: Plan, directory: Path, engine: str) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    path = directory / "plan.json"
    path.write_text(dump_json(what))
    servers: list[subprocess.Popen[str]] = []
    nodes: list[subprocess.Popen[str]] = []
    try:
        if engine == "vllm":
            servers += [start(number, path, engine) for number in range(2)]
        else:
            nodes += [start_node(number, directory) for number in range(2)]
            while not any(line.startswith(f"*:{RAY_PORT} ") for line in listening(0)):
                if nodes[0].poll() is not None:
                    raise MachineError("Ray's head did not start; its reason is above")
                time.sleep(0.5)
            servers.append(start(0, path, engine))
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


def start(number: int, path: Path, engine: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "xgpt", "serve", str(path), "--port", "0", "--no-replan", "--engine", engine]
    if engine == "vllm":
        command += ["--nnodes", "2", "--node-rank", str(number), "--master-addr", ADDRESSES[0]]
    else:
        command += ["--ray", f"{ADDRESSES[0]}:{RAY_PORT}"]
    with (path.parent / f"{number}.log").open("w") as log:
        return subprocess.Popen(on_host(number, command), stderr=log, text=True, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


def start_node(number: int, directory: Path) -> subprocess.Popen[str]:
    head = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    command += [f"--node-ip-address={ADDRESSES[number]}", f"--temp-dir={directory / str(number)}"]
    command += head if number == 0 else [f"--address={ADDRESSES[0]}:{RAY_PORT}"]
    return subprocess.Popen(on_host(number, command), stdout=subprocess.DEVNULL, text=True, env=environment())


def processes(number: int) -> dict[str, int]:
    kinds = {pid: kind for pid in map(int, ip("netns", "pids", HOSTS[number]).split()) if (kind := _kind(pid))}
    for launcher in [pid for pid, kind in kinds.items() if kind == LAUNCHER]:
        with suppress(OSError):
            kinds |= dict.fromkeys(children_of(launcher), WORKER)
    return {kind: pid for pid, kind in kinds.items()}


def _kind(pid: int) -> str | None:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return None
    return None if line.startswith("nsenter") else next((kind for kind in KINDS if kind in line), None)


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


def sent(metrics: str) -> dict[str, dict[str, int]]:
    names = {"xgpt_control_bytes": "control", "xgpt_tensor_bytes": "tensor"}
    return {
        names[family.name]: {
            sample.labels["process"]: int(sample.value) for sample in family.samples if sample.name.endswith("_total")
        }
        for family in text_string_to_metric_families(metrics)
        if family.name in names
    }


def ask(url: str, count: int) -> dict[str, object]:
    """Replay requests in the caller's namespace. Return their tokens, the lost requests, and the bytes sent for
    them."""

    def account() -> dict[str, dict[str, int]]:
        time.sleep(1.2)  # workers report twice a second
        with suppress(httpx.TransportError):  # the front has been killed
            return sent(httpx.get(f"{url}/metrics", trust_env=False).text)
        return {}

    before = account()
    print(BEGUN, flush=True)
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
        "lost": [number for number, result in enumerate(results) if result.error is not None],
        "seconds": seconds,
        **difference,
    }


def ask_on_first(url: str, count: int) -> subprocess.Popen[str]:
    """Replay requests on the first host, in the background. Return once the client sends them."""
    command = [sys.executable, "-m", "benchmarks.two_hosts", "--ask", url, "--requests", str(count)]
    asking = subprocess.Popen(on_host(0, command), stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None and asking.stdout.readline().strip() == BEGUN
    return asking


def answered(asking: subprocess.Popen[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(asking.communicate(timeout=600)[0])
    return answer


def kill_each(
    url: str, servers: list[subprocess.Popen[str]], path: Path, options: argparse.Namespace, expected: list[list[int]]
) -> Iterator[dict[str, object]]:
    """Kill each kind of process while 40 requests run, and yield the outcomes.

    If the first host's front is killed, all connections end. Then 40 more requests are sent to the restarted front.
    """
    engine = options.engine
    for number in (number for number in range(2) if str(number) in options.kill):
        for kind in processes(number):
            if kind == NODE[1] and NODE[0] in processes(number):
                continue
            if options.kind and not any(part in kind for part in options.kind):
                continue
            if engine == "xgpt":
                time.sleep(PERIOD_S)  # more than three restarts within this time would end the server
            asking = ask_on_first(url, KILL_REQUESTS)
            time.sleep(KILL_AFTER_S)
            running = processes(number)
            for killed in NODE if kind in NODE else [kind]:  # the whole node is restarted
                if killed in running:
                    os.kill(running[killed], signal.SIGKILL)
            if kind == FRONT:
                servers[number].wait(60)
                servers[number] = start(number, path, engine)
            if (number, kind) == (0, FRONT):
                yield {"host": 0, "killed": kind} | outcome(asking, expected, path.parent)
                url = _url(servers[0], path.parent)
                asking, kind = ask_on_first(url, KILL_REQUESTS), f"{FRONT}, and then started again"
            for node in range(number, 2 if number == 0 else number + 1) if kind in NODE else ():
                servers[1 + node].wait(NODE_END_S)  # a restarted head creates another cluster, so all nodes end
                servers[1 + node] = start_node(node, path.parent)
            yield {"host": number, "killed": kind} | outcome(asking, expected, path.parent)
    if "link" not in options.kill:
        return
    if engine == "xgpt":
        time.sleep(PERIOD_S)
    asking = ask_on_first(url, KILL_REQUESTS)
    time.sleep(KILL_AFTER_S)
    ip("-n", HOSTS[1], "link", "set", INTERFACE, "down")
    time.sleep(PARTITION_S)
    ip("-n", HOSTS[1], "link", "set", INTERFACE, "up")
    yield {"host": 1, "cut off for s": PARTITION_S} | outcome(asking, expected, path.parent)


def outcome(asking: subprocess.Popen[str], expected: list[list[int]], directory: Path) -> dict[str, object]:
    """Return how many requests were lost, how many have other tokens than expected, and how long they took.

    Raises:
        MachineError: the server has ended.
    """
    try:
        answer = answered(asking)
    except json.JSONDecodeError:
        said = [line for line in _said(directory) if '"xrunner.server.access"' not in line]
        raise MachineError("the server has ended: " + "\n".join(said[-12:])) from None
    return {**compare(answer, expected[:KILL_REQUESTS]), "s": round(answer["seconds"], 1)}


def compare(answer: dict[str, Any], expected: list[list[int]]) -> dict[str, int]:
    """Return how many requests were lost, and how many have other tokens. Tokens of a lost request must begin as
    expected."""
    lost = set(answer["lost"])
    pairs = enumerate(zip(answer["tokens"], expected, strict=True))
    changed = sum(tokens != (want[: len(tokens)] if number in lost else want) for number, (tokens, want) in pairs)
    return {"lost": len(lost), "changed": changed}


def measure(name: str, what: Plan, options: argparse.Namespace) -> Row:
    count, engine = options.requests, options.engine
    with tempfile.TemporaryDirectory() as directory:
        alone_options: tuple[str, ...] = ()
        alone_plan = what
        if engine == "xgpt":
            cluster = what.cluster.model_copy(update={"num_nodes": 2, "devices_per_node": 1})
            what = what.model_copy(update={"cluster": cluster})
        else:
            what = in_vllm(what, Path(directory) / "weights")
            stage = what.stages[0].model_copy(update={"decode_layers": (0, SPEC.num_layers), "tp": 1, "devices": (0,)})
            alone_plan = what.model_copy(update={"stages": (stage,), "policy": OrcaSettings(max_batch=16)})
            alone_options = ("--engine", "vllm")
        with served(alone_plan, Path(directory), *alone_options) as alone:
            expected = [r.token_ids for r in asyncio.run(replay(alone.url, requests(count), concurrency=CONCURRENCY))]
        started = time.perf_counter()
        with serving(what, Path(directory), engine) as (url, servers):
            start_s = time.perf_counter() - started
            wire = wire_bytes()
            answer = answered(ask_on_first(url, count))
            wire = wire_bytes() - wire
            sockets = [listening(number) for number in range(2)]
            found = compare(answer, expected)
            print(f"{name}: {found}; listening {sockets}", file=sys.stderr, flush=True)
            path = Path(directory) / "plan.json"
            kills = []
            for kill in kill_each(url, servers, path, options, expected):
                print(kill, file=sys.stderr, flush=True)
                kills.append(kill)
    return Row(
        name,
        count,
        found["lost"],
        found["changed"],
        round(start_s, 1),
        round(answer["seconds"], 2),
        sum(map(len, answer["tokens"])),
        answer.get("control", {}),
        answer.get("tensor", {}),
        wire,
        [server.returncode for server in servers],
        sockets,
        kills,
    )


def in_vllm(what: Plan, directory: Path) -> Plan:
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=SPEC.vocab_size, hidden_size=SPEC.hidden_size, word_embed_proj_dim=SPEC.hidden_size,
        num_hidden_layers=SPEC.num_layers, num_attention_heads=SPEC.num_heads, ffn_dim=SPEC.ffn_size,
        max_position_embeddings=SPEC.max_context, tie_word_embeddings=False,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(directory)
    cluster = what.cluster.model_copy(update={"name": "two hosts", "num_nodes": 2, "devices_per_node": 1})
    model, policy = read_spec(directory), what.policy.model_copy(update={"microbatches": 1})
    return what.model_copy(update={"checkpoint": str(directory), "cluster": cluster, "model": model, "policy": policy})


def main() -> None:
    accepted = parser(__doc__ or "", 60)
    accepted.add_argument("--engine", choices=("xgpt", "vllm"), default="xgpt")
    what = "kill each kind of process of this host while requests run, or cut the link for 30 s; repeatable"
    accepted.add_argument("--kill", action="append", choices=("0", "1", "link"), default=[], help=what)
    what = "kill only processes whose command lines contain this; repeatable"
    accepted.add_argument("--kind", action="append", choices=(*KINDS, WORKER), default=[], help=what)
    accepted.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)  # what runs on the first host
    options = accepted.parse_args()
    if options.ask:
        print(json.dumps(ask(options.ask, options.requests)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts end, too
    try:
        with two_hosts():
            report(lambda name, what: measure(name, what, options), options.plan, options.json)
    except MachineError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
