"""Run OpenVINO GenAI's continuous batching. The model is converted once for each weight format, beside the checkpoint.

In float32 and in bfloat16, everything has this type, K/V included. In int8, weights have eight bits, activations are
quantised dynamically, and K/V has OpenVINO's default.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino_genai
from answer import Request, answer
from openvino import Tensor

CACHE_GB = 2


OPTIONS: dict[str, dict[str, str]] = {
    "float32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "int8": {},
}


def load(checkpoint: str, precision: str, budget: int) -> Callable[[list[Request]], int]:
    stored = "int8" if precision == "int8" else "fp32"
    converted = Path(checkpoint) / f"openvino-{stored}"
    if not converted.exists():
        export = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", checkpoint]
        options = ["--task", "text-generation-with-past", "--weight-format", stored, str(converted)]
        subprocess.run([sys.executable, *export, *options], check=True)
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GB
    scheduling.max_num_batched_tokens = budget
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(converted), scheduling, "CPU", OPTIONS[precision])

    def run(requests: list[Request]) -> int:
        handles = []
        for id_, request in enumerate(requests):
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = request["num_output"]
            config.ignore_eos = True
            config.do_sample = False
            handles.append(pipeline.add_request(id_, Tensor(np.array([request["prompt"]], dtype=np.int64)), config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return sum(len(handle.read_all()[0].generated_ids) for handle in handles)

    return run


answer(load, "openvino-genai")
