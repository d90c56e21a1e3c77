"""WAA under a cap: requests in encode and in transfer count, and left out the throughput is far too high.

docs/results/formulas.md derives it and has these cases; the simulated engine runs the rule itself.
"""

from __future__ import annotations

import numpy as np

from benchmarks.papers.settings import problem, workload_of
from benchmarks.papers.steps import opt_on_four_a40, waa_placement
from tests.rings import examples
from xgpt.core.schema import WaaSettings
from xscheduler.schedule import Scheduler
from xsimulator.costs.step_cost import StepCounts
from xsimulator.forecast import FORECASTS, TwoLaneModel
from xsimulator.run import simulate

CAPS = ((10, 20), (20, 80), (4, 16), (10, 40), (20, 40), (40, 80))[: examples(6, 2)]
"""Encode batch, and the most requests inside."""


def test_the_cap_counts_what_is_encoded_and_moved() -> None:
    scheduler = Scheduler(problem("opt-13b", "a40x4", workload_of("summarization", "opt-13b")))
    subject, placement, (_, model, _) = scheduler.problem, waa_placement(scheduler, [[2], [1, 1]], 2), opt_on_four_a40()
    left_out = {}
    for batch, cap in CAPS:
        settings = {"encode_batch": batch, "max_decode_batch": cap}
        counted = FORECASTS["waa"].evaluate(model, **settings, decode_microbatches=2).at(0)["throughput"]
        plan = scheduler.score(WaaSettings(**settings, decode_microbatches=2), placement)
        measured, _ = simulate(plan, subject.profile, subject.workload, 1500, np.random.default_rng(0))
        assert abs(counted / measured.throughput_rps - 1) < 0.09
        without = min(batch / _encode_s(model, batch), _decoding_rps(model, cap))
        left_out[batch, cap] = without / measured.throughput_rps - 1
    assert all(off > 0.15 for (batch, cap), off in left_out.items() if cap <= 2 * batch)
    assert max(left_out.values()) > 0.5


def _encode_s(model: TwoLaneModel, batch: int) -> float:
    prompt = round(model.lengths.mean_input)
    return max(model.encode.step(StepCounts.of([(0, prompt, 1)] * batch, [])))


def _decoding_rps(model: TwoLaneModel, cap: int) -> float:
    """What the decode lane serves with `cap` requests in decode, in two micro-batches."""
    context = round(model.lengths.mean_input + model.lengths.mean_decodes / 2)
    stages = model.decode.step(StepCounts.of([], [context] * max(1, cap // 2)))
    iteration_s = max(2 * max(stages), sum(stages) + sum(model.decode.hops(cap / 2)))
    return cap / (model.mean_decodes * iteration_s)
