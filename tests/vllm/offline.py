"""vLLM's offline interface, as the tests start it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from xrunner.vllm.lane import VllmRoom

NUM_REQUESTS = 60
ROOM = VllmRoom(num_blocks=400, block_size=32, max_running=64)
MOST_TOKENS = 512
"""That vLLM takes at once."""


class Requests(NamedTuple):
    """Prompts of 8 to 119 tokens, outputs of 1 to 39."""

    prompts: list[list[int]]
    outputs: list[int]


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
