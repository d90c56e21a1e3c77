"""Two exported replicas of vLLM behind their front: one is killed, one rolled, and Prometheus reads them.

The shell's export needs the programs of vLLM, of vllm-router and of Prometheus on the PATH; Compose's needs Docker,
root (to kill what runs in a container) and the images. With XGPT_RECORD=FILE, what Prometheus has read is kept there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

import xgpt
from tests.attack.target import save_checkpoint
from tests.exports import expressions
from tests.fakes import eventually
from tests.planned import cpus

PROGRAMS = {"shell": ("vllm", "vllm-router", "prometheus"), "compose": ("docker", "curl")}
URL, READER = "http://127.0.0.1:8000", "http://127.0.0.1:9090"
RATE_PER_S = 4.0
FIXED = {"tp": 1, "pp": 1, "replicas": 2, "max_batch": 24, "token_budget": 256}
SMALLER = ["--kv-cache-memory-bytes", "200000000"]
"""The machine has other work, too."""
COMPOSE = ["docker", "compose", "--profile", "monitoring"]


def output(*words: str, where: Path | None = None) -> str:
    return subprocess.run(words, cwd=where, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


class Replica(Protocol):
    """A replica that its supervisor (systemd, Docker) starts again whenever it ends."""

    @property
    def address(self) -> str: ...

    def kill(self) -> None: ...

    def roll(self) -> None:
        """Restart it as the export says: the front is told before and after."""


@dataclass
class Service:
    words: list[str]
    log: Path
    address: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.words, stdout=log, stderr=log, start_new_session=True)

    def end(self, by: signal.Signals = signal.SIGKILL, within_s: float = 5) -> None:
        assert self.process is not None
        self.process.send_signal(by)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # systemd leaves nothing of it
        self.process.wait()

    def kill(self) -> None:
        self.end()
        time.sleep(5)
        self.start()

    def roll(self) -> None:
        script, number = self.words[1:3]
        output("sh", script, "leave", number)
        self.end(signal.SIGTERM, 105)
        self.start()
        output("sh", script, "join", number)


@dataclass
class Container:
    name: str
    directory: Path

    def seen(self, what: str) -> str:
        return output("docker", "inspect", "-f", what, output(*COMPOSE, "ps", "-aq", self.name, where=self.directory))

    @property
    def address(self) -> str:
        return f"http://{self.seen('{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}')}:8000"

    def kill(self) -> None:
        os.kill(int(self.seen("{{.State.Pid}}")), signal.SIGKILL)
        time.sleep(2)

    def roll(self) -> None:
        for order in ("remove", "add"):
            output("curl", "-sS", "-X", "POST", f"{URL}/{order}_worker?url=http://{self.name}:8000")
            if order == "remove":
                output(*COMPOSE, "restart", self.name, where=self.directory)


@contextmanager
def of_shell(directory: Path, steps: tuple[str, ...]) -> Iterator[list[Replica]]:
    """The printed steps, as systemd runs them."""
    begun = f"cd {directory}/monitoring; exec prometheus --config.file=prometheus.yml --storage.tsdb.path=../kept"
    services = [Service(["sh", "-c", begun], directory / "prometheus.log")]
    for step in steps:
        _, script, what = shlex.split(step.removesuffix("&"))
        words = ["sh", str(directory / script), what, *(SMALLER if what != "front" else [])]
        address = "" if what == "front" else f"http://127.0.0.1:{8001 + int(what)}"
        services.append(Service(words, directory / f"{what}.log", address))
    with ExitStack() as at_end:
        for service in services:
            service.start()
            at_end.callback(service.end)
        yield [service for service in services if service.address]


@contextmanager
def of_compose(directory: Path, steps: tuple[str, ...]) -> Iterator[list[Replica]]:
    names = ("replica-0", "replica-1")
    smaller = {"services": {name: {"command": SMALLER} for name in names}}
    (directory / "compose.override.yaml").write_text(json.dumps(smaller))
    assert steps == ("docker compose up",)
    try:
        output(*COMPOSE, "up", "-d", where=directory)
        yield [Container(name, directory) for name in names]
    finally:
        (directory / "logs.txt").write_text(output(*COMPOSE, "logs", "--no-color", where=directory))
        output(*COMPOSE, "down", "-t", "5", where=directory)


def save_llama(directory: Path) -> Path:
    """A small Llama of seeded weights, in place of the model that the tokenizer came with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    save_checkpoint(directory)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=2048, bos_token_id=2, eos_token_id=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


async def ask(client: httpx.AsyncClient, number: int) -> str:
    """Send a request, every second one as a stream. Return `answered`, or how it was lost."""
    body = {"model": client.headers["x-model"], "prompt": [5 + number % 50] * 20, "max_tokens": 40, "ignore_eos": True}
    begun = False
    try:
        if number % 2:
            answer = await client.post("/v1/completions", json=body)
            return "answered" if answer.status_code == 200 else f"status {answer.status_code}"
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}"
            async for line in answer.aiter_lines():
                begun = begun or line.startswith("data: ")
                if line == "data: [DONE]":
                    return "answered"
            return "begun, then cut"
    except httpx.HTTPError as error:
        return "begun, then cut" if begun else type(error).__name__


async def load(client: httpx.AsyncClient, is_over: asyncio.Event, count: Iterator[int]) -> Counter[str]:
    tasks = []
    while not is_over.is_set():
        tasks.append(asyncio.create_task(ask(client, next(count))))
        await asyncio.sleep(1 / RATE_PER_S)
    return Counter(await asyncio.gather(*tasks))


async def until_ready(client: httpx.AsyncClient, replica: Replica) -> None:
    while True:
        with suppress(httpx.HTTPError):
            if (await client.get(f"{await asyncio.to_thread(lambda: replica.address)}/health")).status_code == 200:
                return
        await asyncio.sleep(1)


async def drive(replicas: list[Replica], model: str) -> dict[str, Counter[str]]:
    """Return what became of the requests while nothing happened, from a kill or the beginning of a restart until the
    replica is back, and at the end.
    """
    found, count = {}, itertools.count()
    headers = key() | {"x-model": model}
    first, second = replicas
    phases = (("steady", first, None), ("killed", first, first.kill), ("rolled", second, second.roll))
    async with httpx.AsyncClient(base_url=URL, headers=headers, timeout=60, trust_env=False) as client:
        for what, replica, act in (*phases, ("again", second, None)):
            is_over = asyncio.Event()
            running = asyncio.create_task(load(client, is_over, count))
            await asyncio.sleep(3.1)
            if act is not None:
                await asyncio.to_thread(act)
            await until_ready(client, replica)
            await asyncio.sleep(10)
            is_over.set()
            found[what] = await running
            print(what, dict(found[what]), (await client.get("/list_workers")).text, flush=True)
    return found


def key() -> dict[str, str]:
    given = os.environ.get("API_KEY")
    return {"Authorization": f"Bearer {given}"} if given else {}


def served_name() -> str | None:
    """Return the model's name, or None as long as the front does not answer."""
    with suppress(httpx.HTTPError):
        answer = httpx.get(f"{URL}/v1/models", headers=key(), trust_env=False)
        return str(answer.json()["data"][0]["id"]) if answer.status_code == 200 else None
    return None


def check_monitoring(files: dict[str, str]) -> None:
    """Prometheus has evaluated all rules without an error, and finds figures for each query of the dashboard."""
    groups = httpx.get(f"{READER}/api/v1/rules", trust_env=False).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [(rule["health"], rule.get("lastError", "")) for rule in rules] == [("ok", "")] * len(rules)
    _, shown = expressions(files)
    figures = {query: queried(query) for query in shown}
    print(json.dumps({query: [each["value"][1] for each in found] for query, found in figures.items()}, indent=1))
    print(json.dumps({rule["name"]: rule.get("state", rule["type"]) for rule in rules}))
    assert not [query for query, found in figures.items() if not found or found[0]["value"][1] == "NaN"]


def keep(files: dict[str, str], path: Path) -> None:
    """Write the series that rules and dashboard read, as `promtool test rules` takes them."""
    names = sorted(set(re.findall(r"vllm:\w+|\bup\b", " ".join(itertools.chain(*expressions(files))))))
    ends: dict[str, Any] = {"start": time.time() - 300, "end": time.time(), "step": "15s"}
    series = []
    for name in names:
        answer = httpx.get(f"{READER}/api/v1/query_range", params={"query": name, **ends}, trust_env=False).json()
        for each in answer["data"]["result"]:
            values = {round((at - ends["start"]) / 15): value for at, value in each["values"]}
            kept = {
                key: each["metric"][key]
                for key in ("job", "instance", "le", "finished_reason")
                if key in each["metric"]
            }
            labels = ", ".join(f'{key}="{value}"' for key, value in kept.items())
            series.append({"series": f"{name}{{{labels}}}", "values": " ".join(values.get(i, "_") for i in range(21))})
    path.write_text("[\n" + ",\n".join(map(json.dumps, series)) + "\n]\n")


def queried(query: str) -> list[Any]:
    answer = httpx.get(f"{READER}/api/v1/query", params={"query": query}, trust_env=False).json()
    found: list[Any] = answer["data"]["result"]
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["shell", "compose"])
def test_a_replica_killed_and_one_rolled_lose_no_request(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = [program for program in PROGRAMS[target] if shutil.which(program) is None]
    if target == "compose" and not absent and (os.geteuid() or subprocess.call(["docker", "info"])):
        absent.append("Docker for root")
    if absent:
        pytest.skip(f"no {absent[0]}")
    two = cpus(2)
    two = two.model_copy(update={"device": two.device.model_copy(update={"memory_bytes": 2**33})})
    (tmp_path / "cpus.yaml").write_text(two.model_dump_json())
    asked: dict[str, Any] = {"engine": "vllm", "policy": "chunked", "fix": FIXED}
    asked |= {"model": str(save_llama(tmp_path / "model")), "latency_bound_s": None, "ttft_s": 3, "tpot_s": 0.3}
    plan = xgpt.plan(**asked, cluster=str(tmp_path / "cpus.yaml"), workload="translation")
    exported = xgpt.export(plan, target)
    for name, text in exported.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    if target == "compose":
        monkeypatch.setenv("API_KEY", "0123456789abcdef")
    with {"shell": of_shell, "compose": of_compose}[target](tmp_path, exported.starts) as replicas:
        assert eventually(lambda: served_name() is not None, 600)
        found = asyncio.run(drive(replicas, str(served_name())))
        check_monitoring(exported.files)
        if os.environ.get("XGPT_RECORD"):
            keep(exported.files, Path(os.environ["XGPT_RECORD"]))
    for what, answers in found.items():
        lost = {how: count for how, count in answers.items() if how != "answered"}
        assert lost.keys() <= ({"begun, then cut"} if what == "killed" else set()), found
