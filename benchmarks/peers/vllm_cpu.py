"""vLLM on a CPU, in process."""

from collections.abc import Callable

from answer import Request, answer
from vllm import LLM, SamplingParams


def load(checkpoint: str, precision: str, budget: int) -> Callable[[list[Request]], int]:
    llm = LLM(
        checkpoint,
        dtype=precision,
        skip_tokenizer_init=True,
        max_model_len=1088,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )

    def run(requests: list[Request]) -> int:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        settings = [
            SamplingParams(temperature=0.0, max_tokens=request["num_output"], ignore_eos=True, detokenize=False)
            for request in requests
        ]
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


if __name__ == "__main__":
    answer(load)
