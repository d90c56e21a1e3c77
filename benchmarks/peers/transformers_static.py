"""Run transformers' generate on batches in order of arrival, padded on the left, each to its longest output."""

from collections.abc import Callable

import torch
from answer import Request, answer
from transformers import AutoModelForCausalLM

BATCH = 16


def load(checkpoint: str, precision: str, budget: int) -> Callable[[list[Request]], int]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def run(requests: list[Request]) -> int:
        for first in range(0, len(requests), BATCH):
            batch = requests[first : first + BATCH]
            longest = max(len(request["prompt"]) for request in batch)
            num_output = max(request["num_output"] for request in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, request in enumerate(batch):
                ids[row, longest - len(request["prompt"]) :] = torch.tensor(request["prompt"])
                mask[row, longest - len(request["prompt"]) :] = 1
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=num_output, max_new_tokens=num_output
            )
            assert out.shape[1] == longest + num_output
        return sum(request["num_output"] for request in requests)  # further tokens are not used

    return run


answer(load, "transformers")
