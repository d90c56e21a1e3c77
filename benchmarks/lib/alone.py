"""Run a load on xgpt's engine in this process, without an endpoint."""

from __future__ import annotations

import time

import numpy as np

from xgpt.benchmark import Load, draw
from xgpt.core import policies
from xgpt.core.schema import Plan
from xgpt.core.schema.step_log import StepRecord


def run_alone(plan: Plan, load: Load, seed: int) -> list[StepRecord]:
    """Return the steps of the requests that `bench_plan` draws by this seed, for a plan of one device."""
    import torch

    from xrunner.build import WorkerSettings, build_worker
    from xrunner.cores import own_cores
    from xrunner.engine import Engine
    from xrunner.generation import Generation

    drawn, rng = draw(plan, load, np.random.default_rng(seed)), np.random.default_rng(seed)
    if plan.profile.num_threads is not None:
        torch.set_num_threads(plan.profile.num_threads)
    worker = build_worker(
        WorkerSettings(
            spec=plan.model,
            dtype=plan.dtype,
            kv_dtype=plan.kv_dtype,
            checkpoint=None,
            num_blocks=plan.stages[0].kv_blocks,
            block_size=plan.block_size,
            device="cpu",
            layouts=plan.profile.layouts,
        )
    )
    log: list[StepRecord] = []
    engine = Engine(policies.build(plan), worker, on_step=log.append)
    prompts = [tuple(rng.integers(0, plan.model.vocab_size, int(length)).tolist()) for length in drawn.inputs]
    num_sent = num_ended = 0
    started_s = time.perf_counter()
    with own_cores():
        while num_ended < load.num_requests:
            now_s = time.perf_counter() - started_s
            while num_sent < len(prompts) and drawn.arrivals_s[num_sent] <= now_s:
                output = int(drawn.outputs[num_sent])
                engine.submit(Generation(num_sent, prompts[num_sent], drawn.max_output, output_length=output))
                num_sent += 1
            tokens = engine.step()
            if tokens is None:
                time.sleep(0.0005)
                continue
            num_ended += sum(token.finish is not None for token in tokens)
    return log
