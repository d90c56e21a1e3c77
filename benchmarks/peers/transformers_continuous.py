"""Run transformers' continuous batching: paged attention through SDPA, greedy, with exactly the requested tokens."""

from collections.abc import Callable

import torch
from answer import Request, answer
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE_SIZE, NUM_BLOCKS, MAX_BATCH_TOKENS = 32, 1024, 512
"""Sizes with which all requests of the workload fit at the same time."""


def load(checkpoint: str, precision: str, budget: int) -> Callable[[list[Request]], int]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa").eval()
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, num_blocks=NUM_BLOCKS, max_batch_tokens=MAX_BATCH_TOKENS, allow_block_sharing=False
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(requests: list[Request]) -> int:
        num_tokens = num_finished = 0
        with model.continuous_batching_context_manager(greedy, continuous_batching_config=batching) as manager:
            for request in requests:
                manager.add_request(request["prompt"], max_new_tokens=request["num_output"])
            while num_finished < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    assert result.error is None, result.error
                    num_tokens += len(result.generated_tokens)
                    num_finished += 1
        return num_tokens

    return run


answer(load, "transformers")
