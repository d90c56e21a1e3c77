"""vLLM's offline interface, as the tests start it."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from xgpt.core.io import dump_json
from xgpt.core.schema import Plan
from xrunner.channel.messages import Follow, Ready, Up
from xrunner.vllm.channel import Lanes
from xrunner.vllm.lane import VllmRoom

NUM_REQUESTS = 60
ROOM = VllmRoom(num_blocks=400, block_size=32, max_running=64)
MOST_TOKENS = 512
"""That vLLM takes at once."""


class Requests(NamedTuple):
    """Prompts of 8 to 119 tokens, outputs of 1 to 39."""

    prompts: list[list[int]]
    outputs: list[int]


class Front:
    """The front's end of an engine core's channel, read in a thread: a core waits where nobody reads what it tells."""

    def __init__(self, directory: Path) -> None:
        self._lanes = Lanes(str(directory), [], 1)
        self._lock = threading.Lock()
        self._told: queue.SimpleQueue[Up] = queue.SimpleQueue()
        self._over = threading.Event()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.is_set():
            self._lanes.wait(0.05)
            with self._lock:
                message = self._lanes.receive()
            if isinstance(message, Ready):
                self._is_ready.set()
            elif message is not None and self._is_ready.is_set():
                self._told.put(message)

    def wait_for_core(self) -> None:
        assert self._is_ready.wait(60)

    def send_plan(self, plan: Plan) -> None:
        with self._lock:
            self._lanes.send(Follow(dump_json(plan)))

    def told(self, within_s: float) -> Up | None:
        """Return what has come next; None: nothing within the time."""
        try:
            return self._told.get(timeout=within_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._lanes.close()


def draw_requests() -> Requests:
    rng = np.random.default_rng(0)
    inputs, outputs = rng.integers(8, 120, NUM_REQUESTS), rng.integers(1, 40, NUM_REQUESTS)
    return Requests([rng.integers(5, 50000, n).tolist() for n in inputs], outputs.tolist())


def start(checkpoint: Path, scheduler: str, config: dict[str, Any], *, reuse: bool = False) -> LLM:
    """vLLM in this process: its engine and worker in processes of their own would each import all of it anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return _start(checkpoint, scheduler, config, reuse=reuse)


def _start(checkpoint: Path, scheduler: str, config: dict[str, Any], *, reuse: bool) -> LLM:
    return LLM(
        str(checkpoint),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=reuse,
        async_scheduling=False,
        max_model_len=200,
        block_size=ROOM.block_size,
        num_gpu_blocks_override=ROOM.num_blocks + 1,
        max_num_seqs=ROOM.max_running,
        max_num_batched_tokens=MOST_TOKENS,
        scheduler_cls=scheduler,
        additional_config={"xgpt": config},
    )


def generate(llm: LLM, requests: Requests) -> list[list[int]]:
    """Each request's tokens."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in requests.prompts],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in requests.outputs],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]
