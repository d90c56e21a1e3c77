"""This engine: the rule with a token budget, one worker, no server."""

from collections.abc import Callable
from pathlib import Path

from answer import Request, answer

from xgpt.checkpoint import read_spec
from xgpt.policies import LaneSettings, OneLane, Pool
from xrunner.engine import Engine
from xrunner.generation import Generation
from xrunner.worker import build_worker

NUM_BLOCKS, BLOCK_SIZE, TOKEN_BUDGET = 2048, 16, 512


def load(checkpoint: str) -> Callable[[list[Request]], int]:
    spec = read_spec(Path(checkpoint))
    worker = build_worker(spec, "float32", checkpoint=Path(checkpoint), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)

    def run(requests: list[Request]) -> int:
        rule = OneLane(LaneSettings(mix=True, token_budget=TOKEN_BUDGET), Pool(NUM_BLOCKS, BLOCK_SIZE))
        engine = Engine(rule, worker)
        for id_, request in enumerate(requests):
            engine.submit(Generation(id_, tuple(request["prompt"]), request["num_output"]))
        num_tokens = 0
        while (tokens := engine.step()) is not None:
            num_tokens += len(tokens)
        return num_tokens

    return run


answer(load)
