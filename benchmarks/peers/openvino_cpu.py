"""OpenVINO GenAI's continuous batching, float32 throughout; the model is converted once, beside the checkpoint."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino_genai
from answer import Request, answer
from openvino import Tensor

CACHE_GB = 2


def load(checkpoint: str) -> Callable[[list[Request]], int]:
    converted = Path(checkpoint) / "openvino"
    if not converted.exists():
        export = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", checkpoint]
        options = ["--task", "text-generation-with-past", "--weight-format", "fp32", str(converted)]
        subprocess.run([sys.executable, *export, *options], check=True)
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GB
    precise = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(converted), scheduling, "CPU", precise)

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


answer(load)
