"""Run xgpt's engine with a token budget, the longest outputs first, one worker and no server."""

from collections.abc import Callable
from pathlib import Path

from answer import Request, answer

from xgpt.checkpoints.files import read_spec
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xgpt.core.policies.admission import make_queue
from xgpt.core.schema import DType
from xprofiler.measure import fastest_layouts
from xrunner.build import WorkerSettings, build_worker
from xrunner.cores import take_cores
from xrunner.engine import Engine
from xrunner.generation import Generation

NUM_BLOCKS, BLOCK_SIZE = 4096, 16


def load(checkpoint: str, precision: DType, budget: int) -> Callable[[list[Request]], int]:
    take_cores()
    spec = read_spec(Path(checkpoint))
    layouts = fastest_layouts(spec, precision, (1,))
    print("NOTE", precision, "layouts:", ", ".join(f"{shape} {name}" for shape, name in layouts.items()) or "one alone")
    worker = build_worker(
        WorkerSettings(
            spec=spec,
            dtype=precision,
            checkpoint=Path(checkpoint),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            layouts=layouts,
        )
    )

    def run(requests: list[Request]) -> int:
        rule = OneLane(
            LaneSettings(mix=True, token_budget=budget), Pool(NUM_BLOCKS, BLOCK_SIZE, waiting=make_queue("lpt"))
        )
        engine = Engine(rule, worker)
        for id_, request in enumerate(requests):
            engine.submit(Generation(id_, tuple(request["prompt"]), request["num_output"]))
        num_tokens = 0
        while (tokens := engine.step()) is not None:
            num_tokens += len(tokens)
        return num_tokens

    return run


answer(load, "torch")
