"""This engine: the rule with a token budget, the longest outputs first, one worker, no server."""

from collections.abc import Callable
from math import ceil
from pathlib import Path

from answer import Request, answer

from xgpt.checkpoint import read_spec
from xgpt.policies import LaneSettings, OneLane, Pool
from xgpt.policies.admission import make_queue
from xgpt.schema import DType
from xprofiler.measure import fastest_layouts
from xrunner.build import WorkerSettings, build_worker
from xrunner.engine import Engine
from xrunner.generation import Generation

NUM_BLOCKS, BLOCK_SIZE = 4096, 16
FEWEST = 128
"""Tokens of a step that mixes prompts and decodes: products of fewer rows take longer a row."""
ROOM = 1.15
"""Over a level load: a request let in late must still be done when the longest output is."""


def load(checkpoint: str, precision: DType) -> Callable[[list[Request]], int]:
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
            LaneSettings(mix=True, token_budget=level_budget(requests)),
            Pool(NUM_BLOCKS, BLOCK_SIZE, waiting=make_queue("lpt")),
        )
        engine = Engine(rule, worker)
        for id_, request in enumerate(requests):
            engine.submit(Generation(id_, tuple(request["prompt"]), request["num_output"]))
        num_tokens = 0
        while (tokens := engine.step()) is not None:
            num_tokens += len(tokens)
        return num_tokens

    return run


def level_budget(requests: list[Request]) -> int:
    """Tokens a step where all steps have as many: prompts fill up what decodes leave, and no step is small.

    With few requests such a step would be too small for products to be fast: prompts then come in larger pieces.
    """
    num_tokens = sum(len(request["prompt"]) + request["num_output"] for request in requests)
    return max(FEWEST, ceil(ROOM * num_tokens / max(request["num_output"] for request in requests)))


answer(load)
