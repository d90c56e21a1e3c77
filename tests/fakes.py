"""An executor without a model: tokens that a test can foresee, steps as slow as it likes; a server over it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.engine_threads import in_threads
from tests.fake_vllm import VOCAB_SIZE
from xgpt.core.policies import BlockTable, LaneSettings, OneLane, Pool, Step
from xgpt.core.schema import (
    ClusterSpec,
    Constraint,
    DeviceKind,
    Estimate,
    Histogram,
    ModelSpec,
    OrcaSettings,
    Plan,
    ProfileRef,
    SearchCertificate,
    Stage,
    Workload,
)
from xrunner.channel.remote import RemoteEngine
from xrunner.engine import Engine
from xrunner.executor import OneAtATime
from xrunner.generation import Generation, Logprobs
from xrunner.server.api.chat import ChatTemplate
from xrunner.server.api.text import ServedModel, TextCodec
from xrunner.server.engine_client import EngineClient
from xrunner.server.http.app import create_app
from xrunner.server.http.listener import Listener
from xrunner.server.http.process import Server
from xrunner.server.observe.watch import Watch

SPEC = ModelSpec(
    name="fake",
    family="opt",
    num_layers=1,
    hidden_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_size=8,
    vocab_size=VOCAB_SIZE,
    max_context=512,
)
STAGES = (Stage(devices=(0,), decode_layers=(0, 1), kv_blocks=1000),)


def expected_tokens(prompt: Collection[int], count: int) -> list[int]:
    """The first `count` tokens that FakeExecutor answers a prompt with."""
    return [(sum(prompt) + i) % VOCAB_SIZE for i in range(count)]


class FakeExecutor(OneAtATime):
    """Answers a prompt with its tokens' sum, and counts on from there, whatever sampling is asked for.

    A token is reported with the log probability -1, the next ones with -2, -3, ...

    Args:
        step_s: seconds that a step takes.
        fail_at: a token whose coming raises RuntimeError instead.
        comes_back: whether it can go on afterwards.
    """

    def __init__(self, step_s: float = 0.0, fail_at: int | None = None, comes_back: bool = False) -> None:
        super().__init__()
        self.running: dict[int, Generation] = {}
        self._step_s = step_s
        self._fail_at = fail_at
        self._comes_back = comes_back
        self._next: dict[int, int] = {}
        self.logprobs: dict[int, Logprobs] = {}

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        self.running[generation.id] = generation
        prompt = generation.prompt[: len(generation.prompt) - generation.num_resumed]
        self._next[generation.id] = (sum(prompt) + generation.num_resumed) % VOCAB_SIZE

    def execute(self, step: Step) -> dict[int, int]:
        time.sleep(self._step_s)
        ended = [c.id for c in step.encode if c.start + c.length == len(self.running[c.id].prompt)]
        tokens = {id_: self._next[id_] for id_ in [*ended, *step.decode]}
        if self._fail_at in tokens.values():
            raise RuntimeError("the device has gone")
        for id_, token in tokens.items():
            self._next[id_] = (token + 1) % VOCAB_SIZE
        asking = {id_: n for id_ in tokens if (n := self.running[id_].sampling.logprobs) is not None}
        self.logprobs = {
            id_: Logprobs(-1.0, tuple(((tokens[id_] + i) % VOCAB_SIZE, -1.0 - i) for i in range(n)))
            for id_, n in asking.items()
        }
        return tokens

    def restart(self) -> None:
        if not self._comes_back:
            raise RuntimeError("the device has gone")
        super().restart()

    def release(self, ids: Collection[int]) -> None:
        for id_ in ids:
            self.running.pop(id_, None)
            self._next.pop(id_, None)


SAY = re.compile(r"SAY\[(.*?)\]YAS", re.DOTALL)


class SayingExecutor(FakeExecutor):
    """Answers a prompt with the text between the last SAY[ and ]YAS in it, and then the token `end`."""

    def __init__(self, tokenizer: Tokenizer, end: int = VOCAB_SIZE - 1) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._end = end
        self._script: dict[int, list[int]] = {}

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        super().start(generation, table, moves_to)
        prompt = self._tokenizer.decode(list(generation.prompt), skip_special_tokens=False)
        ids = self._tokenizer.encode(self.says(prompt), add_special_tokens=False).ids
        self._script[generation.id] = [*ids, self._end][generation.num_resumed :]

    def says(self, prompt: str) -> str:
        """Return what it answers to a prompt."""
        return SAY.findall(prompt)[-1] if SAY.search(prompt) else ""

    def execute(self, step: Step) -> dict[int, int]:
        tokens = super().execute(step)
        return {id_: self._script[id_].pop(0) if self._script[id_] else self._end for id_ in tokens}


def fake_engine(
    executor: FakeExecutor, *, kv_blocks: int = 1000, max_batch: int = 16, token_budget: int | None = None
) -> Engine:
    """The real engine, pool and rule over a fake executor: ORCA's settings, or with a budget the chunked ones."""
    lane = LaneSettings(mix=True, max_batch=max_batch, token_budget=token_budget)
    return Engine(OneLane(lane, Pool(kv_blocks, block_size=16), STAGES), executor)


def fake_plan(**changes: Any) -> Plan:
    """A plan of model "fake", as far as a server reads it."""
    lengths = Histogram(lengths=(3, 8), probabilities=(0.5, 0.5))
    required = [name for name, field in Estimate.model_fields.items() if field.is_required()]
    estimate = dict.fromkeys(required, 1.0) | {"memory_bytes": (1,)}
    certificate = {"method": "given", "evaluations": 1, "space_size": 1, "seconds": 0, "gap": None, "bound": "none"}
    device = DeviceKind(name="fake", type="cpu", memory_bytes=1)
    return Plan(
        model=SPEC,
        dtype="float32",
        cluster=ClusterSpec(name="local", device=device),
        workload=Workload(name="fake", input=lengths, output=lengths),
        constraint=Constraint(latency_bound_s=1.0),
        policy=OrcaSettings(max_batch=16),
        stages=STAGES,
        estimate=Estimate.model_validate(estimate),
        search=SearchCertificate.model_validate(certificate),
        profile=ProfileRef(source="analytic", sha256="0" * 64),
    ).model_copy(update=changes)


def byte_tokenizer() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


CHAT_TEMPLATE = """
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("who is " + message.role) }}
    {%- endif %}
    {{- "<" + message.role + ">" + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<assistant>" }}{% endif %}
"""


def byte_codec(template: str | None = CHAT_TEMPLATE) -> TextCodec:
    return TextCodec(byte_tokenizer(), None if template is None else ChatTemplate(template, {"eos_token": "</s>"}))


def fake_app(engine: Engine | RemoteEngine, watch: Watch | None = None, **options: Any) -> Starlette:
    """The endpoint of model "fake"; `options` go to `ServedModel` or to create_app."""
    model = {field.name: options.pop(field.name) for field in fields(ServedModel) if field.name in options}
    return create_app(
        EngineClient(in_threads(engine) if isinstance(engine, Engine) else engine, watch or Watch(fake_plan())),
        ServedModel(**{"names": ("fake",), "spec": SPEC} | model),
        **options,
    )


@contextmanager
def running(app: Starlette, most: int | None = None) -> Iterator[str]:
    """A server for the app in a thread, with `most` connections; yields its URL."""
    with Listener(socket.create_server(("127.0.0.1", 0)), most) as listener:
        server = Server(app, listener, drain_s=1)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def eventually(holds: Callable[[], bool], within_s: float = 5.0) -> bool:
    """Whether it comes to hold in time."""
    deadline = time.monotonic() + within_s
    while not (is_so := holds()) and time.monotonic() < deadline:
        time.sleep(0.03)  # what is asked of a server takes time from its own process
    return is_so or holds()


def certificate_in(directory: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, signed with its own key, and that key."""
    if shutil.which("openssl") is None:
        import pytest  # the servers that tests start do without it

        pytest.skip("certificates are made with openssl")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return cert, key
