"""What a plan promises of its K/V memory, and what a saturated simulated engine keeps in it."""

from __future__ import annotations

import numpy as np
import pytest

import xgpt
from tests.contract.scenarios import problem
from tests.rings import examples, few
from xgpt.core.errors import InputError
from xgpt.core.policies import OneLane, Pool, Schedule, TwoLane, TwoLaneSettings, lane_settings
from xgpt.core.schema import Histogram, OrcaSettings, RraSettings, WaaSettings, Workload
from xgpt.core.workload import sample
from xsimulator.clock import LaneClock, TwoLaneClock
from xsimulator.costs.step_cost import LaneCost
from xsimulator.events import SimulatedClock, SimulatedEngine, SimulatedRequest
from xsimulator.forecast import OneLaneModel, TwoLaneModel, estimate
from xsimulator.lengths import Lengths
from xsimulator.memory import RequestBlocks
from xsimulator.run import check_fits
from xsimulator.stages import lane, whole

BLOCK_SIZE = 16
PLENTY = 10**6
INSIDE = 60


def engine_of(kind: str, pool: Pool) -> tuple[Schedule, SimulatedClock, Lengths]:
    """One that would let in more than the pool does."""
    subject = problem("opt-13b", "a40x4", "translation")
    lengths = Lengths(subject.workload)
    if kind == "waa":
        encode, decode = (
            LaneCost(subject.model, subject.profile, lane((2,), (40,), first_device=first, cluster=subject.cluster))
            for first in (0, 2)
        )
        settings = WaaSettings(encode_batch=4, max_decode_batch=INSIDE)
        predicted = estimate(TwoLaneModel(encode, decode, lengths), settings)
        rule = TwoLaneSettings(predicted["encode_tokens"], 1, PLENTY, INSIDE)
        schedule: Schedule = TwoLane(rule, pool)
        return schedule, TwoLaneClock(encode, decode, schedule), lengths
    cost = LaneCost(subject.model, subject.profile, whole(subject.model, 4))
    one = RraSettings(encode_batch=25, decode_iterations=12) if kind == "rra" else OrcaSettings(max_batch=INSIDE)
    predicted = estimate(OneLaneModel(cost, lengths), one)
    schedule = OneLane(lane_settings(one, predicted["encode_tokens"], predicted["decode_batch"]), pool)
    return schedule, LaneClock(cost, schedule), lengths


@pytest.mark.parametrize("kind", few(["waa", "rra", "orca"]))
def test_999_of_1000_moments_fit(kind: str) -> None:
    """As many requests as `RequestBlocks.most` says of a memory do not outgrow it, nor leave much of it unused."""
    lengths = Lengths(problem("opt-13b", "a40x4", "translation").workload)
    grid = np.arange(100.0, 4000.0)
    blocks = grid[np.searchsorted(RequestBlocks.of(lengths, BLOCK_SIZE, "quantile").most(grid), INSIDE)]
    pool = Pool(PLENTY, BLOCK_SIZE, kv="quantile", max_running=INSIDE)
    schedule, clock, _ = engine_of(kind, pool)
    count = 3000
    columns = sample(problem("opt-13b", "a40x4", "translation").workload, count, np.random.default_rng(1))
    pairs = zip(*(column.tolist() for column in columns), strict=True)
    requests = [SimulatedRequest(i, n, lengths.max_output, out) for i, (n, out) in enumerate(pairs)]
    kept: list[tuple[int, int]] = []

    def watched(now_ns: int, step: object) -> int:
        kept.append((now_ns, sum(-(-request.context // BLOCK_SIZE) for request in pool.running.values())))
        return clock(now_ns, step)  # type: ignore[arg-type]

    SimulatedEngine(schedule, watched, requests).run()
    times, used = np.asarray(kept[len(kept) // 8 : -len(kept) // 8], float).T
    order = np.argsort(used[:-1])
    share = np.cumsum(np.diff(times)[order]) / (times[-1] - times[0])
    exceeded = used[order][np.searchsorted(share, 0.999)]
    assert 0.9 * blocks <= exceeded <= 1.02 * blocks


def test_waas_encode_lane_holds_the_longest_prompt() -> None:
    """A longer one would wait forever, and those behind it: a saturated simulation ended after a few requests."""
    prompts = Histogram(lengths=(500, 60000), probabilities=(0.99, 0.01))
    workload = Workload(name="long", input=prompts, output=Histogram(lengths=(100, 200), probabilities=(0.5, 0.5)))
    asked = {"model": "llama-3.1-8b", "cluster": "l4x8", "devices": 4, "objective": "saturated", "policy": "waa"}
    plan = xgpt.plan(**asked, workload=workload, latency_bound_s=None)  # type: ignore[arg-type]
    held = [stage.kv_blocks * plan.block_size for stage in plan.stages if stage.lane == "encode"]
    assert min(held) >= 60000
    small = [stage.model_copy(update={"kv_blocks": 3000} if stage.lane == "encode" else {}) for stage in plan.stages]
    with pytest.raises(InputError, match="its longest prompt has 60000 tokens, but the plan's encode lane holds at"):
        check_fits(plan.model_copy(update={"stages": tuple(small)}), workload)


@pytest.mark.parametrize("kind", few(["rra", "waa", "static"]))
def test_999_of_1000_phases_of_a_plan_fit(kind: str) -> None:
    """A plan that memory limits hardly ever preempts a request. With a fifth less memory, rra does."""
    asked = {"model": "opt-13b", "cluster": "a40x4", "workload": "summarization", "objective": "saturated"}
    plan = xgpt.plan(**asked, policy=kind, kv="quantile", latency_bound_s=60)  # type: ignore[arg-type]

    def preempting(share: float) -> float:
        stages = [stage.model_copy(update={"kv_blocks": int(share * stage.kv_blocks)}) for stage in plan.stages]
        less = plan.model_copy(update={"stages": tuple(stages)})
        run = xgpt.simulate(less, num_requests=examples(6000, 2000), keep_steps=True)
        return sum(bool(step.preempted) for step in run.steps) / sum(bool(step.encode) for step in run.steps)

    assert preempting(1.0) <= 0.001
    if kind == "rra":
        assert preempting(0.8) > 0.001
