"""Run a server in a separate process with a model of three million parameters, for `benchmarks.fuzz`.

    python -m benchmarks.lib.tiny_server [MAX_BATCH NUM_BLOCKS]

SIGTERM ends it with one line of JSON that states how many K/V blocks are free again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.lib.engine_threads import in_threads
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xgpt.core.schema import ModelSpec
from xrunner.build import WorkerSettings, build_worker, warm_up
from xrunner.engine import Engine
from xrunner.server.api.chat import ChatTemplate
from xrunner.server.api.text import ServedModel, TextCodec
from xrunner.server.engine_client import EngineClient
from xrunner.server.http.app import create_app
from xrunner.server.http.process import serve

SPEC = ModelSpec(
    name="tiny",
    family="opt",
    num_layers=3,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=1024,
    vocab_size=2048,
    max_context=512,
)
NUM_BLOCKS = 256
BLOCK_SIZE = 16
MAX_BATCH = 16
TOKEN_BUDGET = 64
"""Token budget, so small that every shape of a batch occurs soon, since libraries keep memory for each shape."""
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def codec() -> TextCodec:
    """Return a codec with one token for each byte. The other tokens of the vocabulary have no text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(tokenizer, ChatTemplate(TEMPLATE))


def main(max_batch: int = MAX_BATCH, num_blocks: int = NUM_BLOCKS) -> None:
    worker = build_worker(
        WorkerSettings(spec=SPEC, dtype="float32", num_blocks=num_blocks, block_size=BLOCK_SIZE, threads=1)
    )
    warm_up(worker)
    lane = LaneSettings(mix=True, max_batch=max_batch, token_budget=TOKEN_BUDGET)
    pool = Pool(num_blocks, BLOCK_SIZE)
    engine = Engine(OneLane(lane, pool), worker)
    app = create_app(EngineClient(in_threads(engine)), ServedModel((SPEC.name,), SPEC, codec(), frozenset({2})))
    serve(app, "127.0.0.1", 0)
    while engine.step() is not None:  # requests that were removed while the server stopped
        pass
    print(json.dumps({"free_blocks": num_blocks - pool.memory.decodes.num_used, "num_blocks": num_blocks}))


@dataclass(slots=True)
class Running:
    port: int
    pid: int
    last_words: dict[str, int] = field(default_factory=dict)

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(max_batch: int = MAX_BATCH, num_blocks: int = NUM_BLOCKS) -> Iterator[Running]:
    """Run the server in a separate process until the block ends.

    Raises:
        RuntimeError: it did not start, or logged errors other than those about requests that are not HTTP.
    """
    # Freed memory that the allocator keeps would hide lost memory. With few arenas it keeps less, and this depends less
    # on its threads. Large pieces are returned to the system.
    allocator = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    environment = os.environ | allocator | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.lib.tiny_server", str(max_batch), str(num_blocks)]
    with (
        tempfile.TemporaryFile("w+") as errors,  # a full pipe would block the server
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        server = Running(_port(process, errors), process.pid)
        try:
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
        complaints = _lines(errors)[1:]
    if complaints := [line for line in complaints if "Invalid HTTP request" not in line]:
        raise RuntimeError("the server said: " + "\n".join(complaints))
    server.last_words = json.loads(out)


def _port(process: subprocess.Popen[str], errors: IO[str]) -> int:
    while not (lines := _lines(errors)) and process.poll() is None:
        time.sleep(0.05)
    if not lines or not lines[0].startswith("listening on"):
        raise RuntimeError("\n".join(lines))
    return int(lines[0].rsplit(":", 1)[1])


def _lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().split("\n")[:-1]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
