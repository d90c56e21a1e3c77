"""Run CTranslate2 in float32. The model is converted once, beside the checkpoint, and batches are formed by tokens."""

from collections.abc import Callable
from pathlib import Path

import ctranslate2
from answer import Request, answer

MAX_BATCH_TOKENS = 4096


def load(checkpoint: str, precision: str, budget: int) -> Callable[[list[Request]], int]:
    converted = Path(checkpoint) / "ctranslate2"
    if not converted.exists():
        ctranslate2.converters.TransformersConverter(checkpoint).convert(str(converted))
    generator = ctranslate2.Generator(str(converted), device="cpu", compute_type="float32", intra_threads=2)

    def run(requests: list[Request]) -> int:
        # All outputs of a call have one length, so a call gets requests with equal output lengths.
        by_length: dict[int, list[list[str]]] = {}
        for request in requests:
            by_length.setdefault(request["num_output"], []).append([f"<{token}>" for token in request["prompt"]])
        num_tokens = 0
        for num_output, prompts in by_length.items():
            results = generator.generate_batch(
                prompts,
                max_length=num_output,
                min_length=num_output,
                max_batch_size=MAX_BATCH_TOKENS,
                batch_type="tokens",
                include_prompt_in_result=False,
                sampling_topk=1,
            )
            num_tokens += sum(len(result.sequences_ids[0]) for result in results)
        return num_tokens

    return run


answer(load, "ctranslate2")
