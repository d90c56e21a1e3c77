"""A running `xgpt serve` that is attacked, and what its other clients feel meanwhile.

Traffic goes to the loopback interface alone.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.lib.served_plans import SPEC, Served, one_lane, plan, served, two_lanes
from tests import fake_vllm
from tests.attack.client import ADMIN_KEY, MIB
from tests.fakes import eventually
from xgpt.core.schema import ModelSpec, Plan
from xrunner.vllm.process import PYTHON_VARIABLE

FELT_S, TIMES_CALM = 3.0, 10
"""What a stream and a probe may feel: seconds, or a multiple of what they feel before, where cores are busy. What the
event loop does in one go is held to less where no other process counts: `test_loop.py`."""
HEALTH_S, GAP_S, LEFT_MIB = 0.1, 0.25, 64
"""What they should feel at most, and MiB that may be left after an attack. The report says whether they did."""


PROBE = {"prompt": [3, 50, 61, 72, 83], "max_tokens": 12, "temperature": 0}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

FLAVOURS: dict[str, Callable[[ModelSpec], Plan]] = {
    "one": lambda model: plan(one_lane([1]), model=model),
    "tp": lambda model: plan(one_lane([2]), model=model),
    "waa": lambda model: plan(two_lanes([1], [1]), model=model),
    "replicas": lambda model: plan(one_lane([1]), replicas=2, model=model),
}
"""Placements that are attacked, each on at most two cores."""

FAKE_VLLM, VLLM = "fake-vllm", "vllm"
"""One device, with `--engine vllm`: `tests.fake_vllm` in its place, or vLLM itself."""

REAL_VLLM = pytest.param(
    VLLM,
    marks=[
        pytest.mark.long,
        pytest.mark.timeout(900),
        pytest.mark.skipif(
            PYTHON_VARIABLE not in os.environ and find_spec("vllm") is None,
            reason=f"needs vLLM: name its python in {PYTHON_VARIABLE}",
        ),
    ],
)
EVERYWHERE = [
    "one",
    *(pytest.param(name, marks=pytest.mark.long) for name in (*FLAVOURS, FAKE_VLLM) if name != "one"),
    REAL_VLLM,
]
"""All flavours, as parameters of a test of which one device is the short form."""
OURS = EVERYWHERE[:-1]
"""The same without vLLM itself: for requests that never reach an engine, or that it answers in its own way."""


@dataclass
class Felt:
    """What another client felt during an attack: seconds."""

    gaps_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        """Between two tokens of a stream that ran throughout."""
        return max(self.gaps_s, default=0.0)

    @property
    def slowest_health_s(self) -> float:
        return max(self.health_s, default=0.0)


@dataclass
class Target:
    """A server under attack."""

    served: Served
    model: str
    headers: dict[str, str]
    flavour: str
    _is_filled: bool = False

    @property
    def url(self) -> str:
        return self.served.url

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname and parts.port
        return parts.hostname, parts.port

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 60.0
    ) -> tuple[int, bytes]:
        """Status and body of one request; a body that is no bytes is sent as JSON. `headers` replace the key's."""
        connection = HTTPConnection(*self.address, timeout=timeout_s)
        try:
            content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, content, self.headers if headers is None else headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, timeout_s: float = 60.0, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer of a completion."""
        status, body = self.ask("POST", "/v1/completions", {"model": self.model, **fields}, timeout_s=timeout_s)
        return status, json.loads(body)

    def probe(self) -> list[int]:
        """Greedy tokens of a fixed prompt: the same before, during and after every attack."""
        status, answer = self.complete(**PROBE)
        assert status == 200, answer
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def fill_memory(self) -> None:
        """Use all K/V memory once: the system counts its pages from then on, whoever uses them."""
        if not self._is_filled:
            prompts = [[100 + number, *[5] * 470] for number in range(40)]  # none that makes the stand-in of vLLM fail
            status, answer = self.complete(prompt=prompts, max_tokens=8, ignore_eos=True)
            assert status in (200, 400, 429), answer  # a server that takes fewer at once has less memory to count
            self._is_filled = True

    def metric(self, name: str, label: str = "") -> float:
        """The sum of what /metrics shows under a name, of all labels or of those that hold this text."""
        status, text = self.ask("GET", "/metrics")
        assert status == 200
        lines = [line for line in text.decode().splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)

    def is_idle(self) -> bool:
        """Whether no request runs, waits or holds memory."""
        names = ["xgpt_requests_running", "xgpt_requests_waiting"]
        names += [] if self.flavour == VLLM else ["xgpt_kv_blocks_used"]
        return not any(map(self.metric, names))

    @contextmanager
    def left_as_it_was(self, *, memory: bool = True) -> Iterator[None]:
        """Check that the block leaves the server as it was.

        A fixed prompt has the same tokens; nothing runs; each request that was accepted has ended once, not lost nor
        twice: prompt tokens are counted as a request is accepted, and for its key as it ends.

        Args:
            memory: whether no process may be left with over `LEFT_MIB` more, too: each keeps what it compiled last.
        """
        if memory:
            self.fill_memory()
        before, rss = self.probe(), self.rss_of_each()
        yield
        assert eventually(self.is_idle, 60)
        assert self.probe() == before
        accepted, ended = "xgpt_prompt_tokens_total", "xgpt_key_tokens_total"
        assert self.metric(accepted) == self.metric(ended, 'kind="prompt"')

        def left() -> int:
            after = self.rss_of_each()
            gone, new = (
                sorted((one[process] for process in one.keys() - other.keys()), reverse=True)
                for one, other in ((rss, after), (after, rss))
            )  # an engine that takes over may be as large as the one that died
            grown = [found - rss[process] for process, found in after.items() if process in rss]
            grown += [now - before for now, before in zip_longest(new, gone[: len(new)], fillvalue=0)]
            return max(grown, default=0)

        assert not memory or eventually(lambda: left() < LEFT_MIB * MIB, 5), left()

    def rss_of_each(self) -> dict[int, int]:
        """Return the resident memory of the server's processes in bytes. Linux only."""
        pid = self.served.process.pid
        return {process: _rss_bytes(process) for process in (pid, *children_of(pid))}

    def rss_bytes(self) -> int:
        return sum(self.rss_of_each().values())

    def cpu_s(self) -> float:
        """Return the processor time that the answering process has used. Linux only."""
        fields = Path(f"/proc/{self.served.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def felt(self) -> Iterator[Felt]:
        """Run another client during the block: one stream after the other, and /health every 20 ms."""
        felt, stop = Felt(), threading.Event()
        threads = [threading.Thread(target=work, args=(felt, stop)) for work in (self._stream, self._health)]
        for thread in threads:
            thread.start()
        try:
            yield felt
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)

    def _stream(self, felt: Felt, stop: threading.Event) -> None:
        body = {"model": self.model, "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not stop.is_set():
            connection = HTTPConnection(*self.address, timeout=60)
            try:
                connection.request("POST", "/v1/completions", json.dumps(body).encode(), self.headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    felt.failures.append(f"stream: {answer.status}")
                    time.sleep(0.05)
                    continue
                last_s: float | None = None
                num_tokens = 0
                while not stop.is_set() and (line := answer.readline()):
                    if line.startswith(b"data: {"):
                        now_s = time.perf_counter()
                        if last_s is not None:
                            felt.gaps_s.append(now_s - last_s)
                        last_s = now_s
                        event = json.loads(line[6:])
                        if "error" in event:
                            felt.failures.append(f"stream: {event['error']['message']}")
                        num_tokens += sum(len(choice["token_ids"]) for choice in event.get("choices", ()))
                if not stop.is_set() and num_tokens != body["max_tokens"]:
                    felt.failures.append(f"stream: {num_tokens} tokens of {body['max_tokens']}")
            except OSError as error:
                felt.failures.append(f"stream: {error!r}")
                time.sleep(0.05)
            finally:
                connection.close()

    def _health(self, felt: Felt, stop: threading.Event) -> None:
        while not stop.is_set():
            started_s = time.perf_counter()
            try:
                status, _ = self.ask("GET", "/health")
                if status != 200:
                    felt.failures.append(f"/health: {status}")
            except OSError as error:
                felt.failures.append(f"/health: {error!r}")
            felt.health_s.append(time.perf_counter() - started_s)
            stop.wait(0.02)


def _rss_bytes(process: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0  # it has ended


def children_of(pid: int) -> list[int]:
    """Return all processes that a process has started, and that these have."""
    started: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            started += map(int, (thread / "children").read_text().split())
    return [found for child in started for found in (child, *children_of(child))]


Unharmed = Callable[[float], AbstractContextManager[Felt]]


@contextmanager
def attacked(
    flavour: str,
    checkpoint: Path,
    directory: Path,
    *options: str,
    key: bool = True,
    keys: str = "",
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> Iterator[Target]:
    """Serve one of FLAVOURS, or in vLLM, with these options until the end of the block.

    Args:
        checkpoint: as the fixture of that name gives it.
        directory: for the plan and the keys.
        key: whether the server demands one; `Target` sends it.
        keys: further lines of the key file.
        change: what is to be another in the plan.
    """
    from xgpt.checkpoints.files import read_spec

    model = read_spec(checkpoint)
    placement = "one" if flavour in (FAKE_VLLM, VLLM) else flavour
    what = change(FLAVOURS[placement](model).model_copy(update={"checkpoint": str(checkpoint)}))
    headers = {"Content-Type": "application/json"}
    if key:
        key_file = directory / "keys"
        key_file.write_text(f"{ADMIN_KEY}\n{keys}")
        key_file.chmod(0o600)
        options += ("--api-key-file", str(key_file))
        headers["Authorization"] = f"Bearer {ADMIN_KEY}"
    with pytest.MonkeyPatch.context() as patch:
        if flavour == FAKE_VLLM:
            patch.setenv(PYTHON_VARIABLE, str(fake_vllm.program(directory)))
            patch.setenv("FAKE_VLLM_STEP_S", "0.005")
        if placement != flavour:
            options += ("--engine", "vllm")
        with served(what, directory, *options) as running:
            yield Target(running, model.name, headers, flavour)


def roomy(flavour: str, checkpoint: Path, directory: Path) -> AbstractContextManager[Target]:
    """Serve a flavour with so many places that memory ends first, and with a long token.

    So a text of 300 times the context is not refused by its length.
    """
    from tokenizers import Tokenizer

    small = shutil.copytree(checkpoint, directory / "small")
    tokenizer = Tokenizer.from_file(str(small / "tokenizer.json"))
    tokenizer.add_tokens(["y" * 300])
    tokenizer.save(str(small / "tokenizer.json"))
    return attacked(flavour, small, directory, change=of_many_places)


def of_many_places(plan: Plan) -> Plan:
    """Return the plan with 64 places."""
    name = "max_decode_batch" if plan.policy.kind == "waa" else "max_batch"
    return plan.model_copy(update={"policy": plan.policy.model_copy(update={name: 64})})


def save_checkpoint(directory: Path) -> Path:
    """Seeded weights of `SPEC`'s shape with one token a byte and a chat template."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=SPEC.vocab_size,
        hidden_size=SPEC.hidden_size,
        word_embed_proj_dim=SPEC.hidden_size,
        num_hidden_layers=SPEC.num_layers,
        num_attention_heads=SPEC.num_heads,
        ffn_dim=SPEC.ffn_size,
        max_position_embeddings=SPEC.max_context,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=2,
    )
    transformers.OPTForCausalLM(config).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
