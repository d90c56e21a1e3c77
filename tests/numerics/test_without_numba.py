"""The engine on torch only: numba and llvmlite cannot be imported, and tokens are those of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.numerics.served import MAX_OUTPUT, PROMPTS, greedy
from tests.rings import few

SERVED = """
import json, sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
from pathlib import Path
from xgpt.checkpoints.files import read_spec
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xrunner import cpu
from xrunner.build import WorkerSettings, build_worker
from xrunner.engine import Engine
from xrunner.generation import Generation

directory, dtype, prompts, max_output = json.loads(sys.argv[1])
settings = WorkerSettings(
    spec=read_spec(Path(directory)), dtype=dtype, checkpoint=Path(directory), num_blocks=200, block_size=8
)
assert not cpu.LAYOUTS and not cpu.BACKENDS
worker = build_worker(settings)
engine = Engine(OneLane(LaneSettings(mix=True, token_budget=16, max_batch=5), Pool(200, 8)), worker)
outputs = [[] for _ in prompts]
for id_, prompt in enumerate(prompts):
    engine.submit(Generation(id_, tuple(prompt), max_output))
while (tokens := engine.step()) is not None:
    for token in tokens:
        outputs[token.id].append(token.token)
print(json.dumps(outputs))
"""


def served(directory: Path, dtype: str) -> list[list[int]]:
    arguments = json.dumps([str(directory), dtype, PROMPTS, MAX_OUTPUT])
    done = subprocess.run([sys.executable, "-c", SERVED, arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", few(["qwen2-grouped", "opt-tied", "t5-tied"]))
def test_tokens_in_float32_are_those_of_transformers(checkpoint, name):
    directory, model = checkpoint(name)
    assert served(directory, "float32") == greedy(model)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_tokens_in_fewer_bits_are_mostly_those_of_float32(checkpoint, dtype):
    """Random weights have many tokens that are nearly as likely; once one differs, so do those after it."""
    directory, model = checkpoint("opt-tied")
    pairs = zip(served(directory, dtype), greedy(model), strict=True)
    first = [found[0] == expected[0] for found, expected in pairs]
    assert sum(first) >= 0.75 * len(first)
