"""Run llama.cpp's server (in xllamacpp) with a slot for each request. Weights are written as GGUF once for each type,
beside the checkpoint: matrices in F32, BF16, Q8_0 or Q4_0, the rest in F32. K/V is in float32 with F32, else in
float16, the default.
"""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from answer import Request, answer
from safetensors.numpy import load_file

FAMILIES = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3, "llama": gguf.MODEL_ARCH.LLAMA}
TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
FLOAT32 = 0
"""The number of float32 among the types of K/V."""
SLOTS, SLOT_TOKENS = 16, 1088


def convert(checkpoint: Path, kind: gguf.GGMLQuantizationType, target: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in FAMILIES:
        raise SystemExit(f"llama.cpp has no model {config['model_type']}")
    family, num_layers = FAMILIES[config["model_type"]], config["num_hidden_layers"]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[family])
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{token}>" for token in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["< 0"])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(family, num_layers)
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if family == gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = in_turns(weight, head_dim)
        stored = kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), gguf.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_turns(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Return rows d and d + half of each head as neighbours, the order in which llama.cpp rotates a Llama's heads."""
    return weight.reshape(-1, 2, head_dim // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def load(checkpoint: str, precision: str, budget: int) -> Callable[[list[Request]], int]:
    kind = TYPES[precision]
    converted = Path(checkpoint) / f"{kind.name}.gguf"
    if not converted.exists():
        unfinished = converted.with_suffix(".part")
        convert(Path(checkpoint), kind, unfinished)
        unfinished.rename(converted)
    params = xllamacpp.CommonParams()
    params.model.path = str(converted)
    params.n_parallel, params.n_ctx = SLOTS, SLOTS * SLOT_TOKENS
    params.n_batch, params.n_ubatch = max(budget, 256), max(budget, 256)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.cache_ram_mib, params.warmup = 0, True
    if precision == "float32":
        params.cache_type_k = params.cache_type_v = FLOAT32
    server = xllamacpp.Server(params)

    def generate(request: Request) -> int:
        body: dict[str, Any] = {
            "prompt": request["prompt"],
            "n_predict": request["num_output"],
            "temperature": 0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "cache_prompt": False,
        }
        return int(server.handle_completions(body)["usage"]["completion_tokens"])

    def run(requests: list[Request]) -> int:
        with ThreadPoolExecutor(len(requests)) as pool:
            return sum(pool.map(generate, requests))

    return run


answer(load, "xllamacpp")
