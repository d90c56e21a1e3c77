"""The curve of reuse, put to the engine's own blocks at each size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.fakes import FakeExecutor
from tools.make_workload import main
from tools.structured import conversations, shared_prompts
from xgpt.core.policies import Blocks, LaneSettings, OneLane, Pool
from xgpt.core.reuse_distances import ReuseCurve, _greater_before
from xgpt.core.schema import KvPromise
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.workload import TraceLengths
from xrunner.engine import Engine
from xrunner.generation import Generation
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.run import reused_share

BLOCK = 16


def exact_share(trace: TraceLengths, capacity: int, block_size: int) -> float:
    """Return the share of cached prompt tokens if requests run one after the other on the engine's own blocks.

    Args:
        capacity: number of K/V blocks. The longest request must fit.
    """
    prefixes = trace.prefixes
    assert prefixes is not None
    blocks, found = Blocks(capacity), 0
    for number, (length, output) in enumerate(zip(trace.input.tolist(), trace.output.tolist(), strict=True)):
        chain = prefixes.chain(number, length, block_size)
        table = blocks.share(blocks.find(chain, (length - 1) // block_size).blocks)
        found += table.found * block_size
        for _ in range(-(-(length + output - 1) // block_size) - table.found):
            blocks.grow(table)
        chain += prefixes.output_chain(number, length, output, block_size)
        blocks.name(table, chain, len(chain))
        blocks.release(table)
    return float(found / trace.input.sum())


def test_greater_values_before_each() -> None:
    values = np.random.default_rng(0).integers(-1, 50, 137)
    assert _greater_before(values).tolist() == [int((values[:i] > v).sum()) for i, v in enumerate(values)]


@pytest.mark.long
@pytest.mark.parametrize("make", [conversations, shared_prompts])
@pytest.mark.parametrize("seed", range(2))
def test_the_curve_at_eight_sizes(make, seed: int) -> None:
    """Within 3 points of what blocks that are shared, kept and given up one by one find."""
    trace: TraceLengths = make(1500, np.random.default_rng(seed))
    curve = ReuseCurve(trace, BLOCK)
    longest = int((trace.input + trace.output).max())
    sizes = np.geomspace(1.2 * longest, max(curve.sizes(8)[-1], 3 * longest), 8)
    predicted = [curve.share(size) for size in sizes]
    exact = [exact_share(trace, int(size) // BLOCK, BLOCK) for size in sizes]
    assert np.abs(np.subtract(predicted, exact)).max() < 0.03
    assert np.ptp(exact) > 0.1 and sorted(predicted) == predicted
    assert predicted[-1] == pytest.approx(curve.most, abs=0.01)


@pytest.mark.parametrize("kv", ["reserve", "quantile"])
def test_the_engine_runs_the_steps_that_are_simulated(kv: KvPromise) -> None:
    """Answers that no request goes on from are kept by an engine, which does not know: so they are in simulation."""
    trace = shared_prompts(300, np.random.default_rng(0), prompts=12, prompt_tokens=200, mean_input=60, mean_output=90)
    assert trace.prefixes is not None and not any(trace.prefixes.outputs)
    lengths, longest = list(zip(trace.input.tolist(), trace.output.tolist(), strict=True)), int(trace.output.max())

    def schedule() -> OneLane:
        return OneLane(LaneSettings(mix=True, max_batch=6, token_budget=96), Pool(250, BLOCK, kv=kv))

    requests = [
        SimulatedRequest(
            number,
            input_,
            longest,
            output,
            0,
            chain=trace.prefixes.chain(number, input_, BLOCK),
            output_chain=trace.prefixes.output_chain(number, input_, output, BLOCK),
        )
        for number, (input_, output) in enumerate(lengths)
    ]
    simulated = SimulatedEngine(schedule(), lambda now_ns, step: now_ns + 1, requests).run()
    log: list[StepRecord] = []
    engine = Engine(schedule(), FakeExecutor(), on_step=log.append, reuse=True)
    for number, (input_, output) in enumerate(lengths):
        tokens = [token for id_ in trace.prefixes.prompts[number] for token in [id_] * BLOCK][:input_]
        engine.submit(Generation(number, tuple(tokens), longest, output_length=output))
    while engine.step() is not None:
        pass
    assert [(r.encode, r.decode, r.preempted) for r in log] == [(r.encode, r.decode, r.preempted) for r in simulated]
    assert 0.2 < reused_share(log) < 0.95 * ReuseCurve(trace, BLOCK).most, "memory has to give prompts up"


def test_requests_with_nothing_in_common() -> None:
    trace = shared_prompts(100, np.random.default_rng(0))
    assert trace.prefixes is not None
    alone = tuple(tuple(range(1000 * i, 1000 * i + len(p))) for i, p in enumerate(trace.prefixes.prompts))
    lengths = trace._replace(prefixes=replace(trace.prefixes, prompts=alone))
    assert ReuseCurve(lengths, BLOCK).most == 0.0


def test_a_trace_says_how_much_of_it_is_reusable_and_at_which_distances(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "trace.jsonl"
    for words in (("conversations", "--requests", "300", "-o", str(path)), ("reuse", str(path))):
        monkeypatch.setattr("sys.argv", ["make_workload", *words])
        assert main() == 0
    out, said = capsys.readouterr()
    assert out == said, "made, or read again: the same"
    most = float(out.split("reusable at most: ")[1].split("%")[0])
    assert 50 < most < 90 and f"{most}%" in out.splitlines()[-1]
    distances = [float(part.split()[0].rstrip(",")) for part in out.split("within ")[1:]]
    assert len(distances) == 4 and distances == sorted(distances)
