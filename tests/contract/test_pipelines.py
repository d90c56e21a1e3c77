"""On several devices: the closed forms agree with the simulated engine, and with the recursion that it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.agreement import KINDS, errors, random_case, simulate
from tests.contract.scenarios import problem
from tests.rings import examples, few
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.policies import OneLane, Pool, lane_settings
from xgpt.core.policies.rule import PromptBudget
from xgpt.core.schema import Constant, Curve, Histogram, Precision, Profile, RraSettings, Workload
from xgpt.core.workload import histogram
from xscheduler.schedule import Scheduler
from xsimulator.clock import LaneClock
from xsimulator.costs.step_cost import LaneCost, TransferCost
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.forecast import FORECASTS, OneLaneModel, TwoLaneModel, estimate
from xsimulator.forecast.pipeline import RandomSteps
from xsimulator.forecast.waa_lanes import EncodeLane
from xsimulator.lengths import Lengths
from xsimulator.memory import LaneMemory
from xsimulator.run import simulate as simulate_plan
from xsimulator.stages import degrees, lane, spread, whole

NUM_CASES = examples(4, 1)


@pytest.mark.parametrize("kind", few(KINDS, 3))
def test_closed_form_agrees_with_the_simulated_engine(kind: str) -> None:
    rng = np.random.default_rng(5)
    found = []
    while len(found) < NUM_CASES:
        case = random_case(rng, (kind,))
        if case.is_known_to_differ is None and case.predicted["peak_requests"] <= 100:
            found.append((*errors(case, simulate(case, rng)), case.text))
    throughput, latency = np.abs([row[:2] for row in found]).T
    assert throughput.max() <= 0.05, found[int(throughput.argmax())]
    assert latency.max() <= 0.08, found[int(latency.argmax())]


def test_cores_that_move_keys_and_values_do_nothing_else_meanwhile() -> None:
    """As on CPUs: both clocks charge both lanes for it."""
    subject = problem("opt-13b", "a40x4", "summarization", 15.0)
    slow = subject.profile.kv_transfer
    assert slow is not None
    slow = slow.model_copy(update={"seconds": tuple(4 * seconds for seconds in slow.seconds)})
    found = {}
    for threads in (None, 1):
        profile = subject.profile.model_copy(update={"kv_transfer": slow, "num_threads": threads})
        one = Scheduler(replace(subject, profile=profile, max_devices=2)).best(("waa",))
        measured, _ = simulate_plan(one, profile, one.workload, 300, np.random.default_rng(0))
        assert one.estimate.throughput_rps == pytest.approx(measured.throughput_rps, rel=0.05)
        assert one.estimate.latency_s == pytest.approx(measured.latency_s, rel=0.08)
        found[threads] = measured.throughput_rps
    assert found[1] < 0.97 * found[None]


@pytest.mark.parametrize("kind", few(KINDS, 2))
@pytest.mark.parametrize(("model", "cluster"), few([("t5-11b", "a40x8"), ("opt-13b", "a40x4")]))
def test_plans_do_in_simulation_what_they_claim(model: str, cluster: str, kind: str) -> None:
    """On the stages, blocks and settings that the plan itself names, with K/V memory as it binds."""
    subject = problem(model, cluster, "translation", 12.0)
    plan = Scheduler(subject).best((kind,))
    assert all(stage.kv_blocks > 100 for stage in plan.stages)
    measured, _ = simulate_plan(plan, subject.profile, subject.workload, 1500, np.random.default_rng(3))
    assert measured.throughput_rps == pytest.approx(plan.estimate.throughput_rps, rel=0.05)
    assert measured.latency_s == pytest.approx(plan.estimate.latency_s, rel=0.08)


@pytest.mark.parametrize("workload", ["summarization", "azure-conv"])
def test_waas_encode_lane_is_as_slow_as_batches_of_unequal_prompts_make_it(workload: str) -> None:
    """As the rule packs prompts into batches, and as the stages pass them on, with as many batches as stages."""
    lengths, rng = Lengths(problem("llama-3.1-70b", "h100x8", workload).workload), np.random.default_rng(0)
    cost = equal_stages(4)
    found = EncodeLane(cost, lengths, TransferCost(cost, cost), 1.0)(np.asarray([2.0, 5.0, 10.0]))
    prompts = rng.choice(lengths.inputs, 60_000, p=lengths.input_probabilities)
    for i, size in enumerate((2, 5, 10)):
        budget, tokens, next_ = PromptBudget(size * lengths.mean_input), [], 0
        for _ in range(4000):
            budget.open()
            first = next_
            while next_ == first or budget.covers(prompts[next_]):
                budget.spend(prompts[next_])
                next_ += 1
            tokens.append(prompts[first:next_].sum())
        share = np.asarray(tokens) / np.mean(tokens) / 4
        finish = np.zeros((4, len(share)))
        for n in range(4, len(share)):
            for j in range(4):
                before = finish[j - 1, n] if j else finish[-1, n - 4]
                finish[j, n] = max(before, finish[j, n - 1]) + share[n]
        pace = (finish[-1, -1] - finish[-1, 999]) / 3000
        assert found.interval[i] / found.through[i] == pytest.approx(pace, rel=0.04)


def equal_stages(num_stages: int) -> LaneCost:
    """Stages that cost the same: no embedding, no head."""
    subject = problem("gpt3-175b", "a40x32", "summarization")
    free = Curve(points=(1, 2), seconds=(0.0, 0.0))
    profile: Profile = subject.profile.model_copy(update={"embedding": free, "head": free})
    each = subject.model.num_layers // num_stages
    return LaneCost(
        subject.model, profile, lane((1,) * num_stages, (each,) * num_stages, heads=False, cluster=subject.cluster)
    )


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (4, 4), (4, 2), (4, 8), (8, 8), (8, 3)])
@pytest.mark.parametrize(("each", "iterations"), [(1, 7), (4, 2), (8, 20)])
def test_closed_form_is_the_recursion_where_nothing_varies(
    stages: int, microbatches: int, each: int, iterations: int
) -> None:
    """All requests alike: every phase encodes as many, and a request decodes for whole phases."""
    decodes = 2 * iterations
    workload = Workload(name="alike", input=histogram(Constant(value=256)), output=_one(decodes + 1))
    lengths, cost = Lengths(workload), equal_stages(stages)
    settings = RraSettings(encode_batch=each * microbatches, decode_iterations=iterations, microbatches=microbatches)
    predicted = estimate(OneLaneModel(cost, lengths), settings)
    num_phases = 12
    count = settings.encode_batch * num_phases
    requests = [SimulatedRequest(i, 256, decodes + 1, decodes + 1) for i in range(count)]
    rule = lane_settings(settings, predicted["encode_tokens"], predicted["decode_batch"])
    schedule = OneLane(rule, Pool(10**6, 16))
    log = SimulatedEngine(schedule, LaneClock(cost, schedule), requests).run()
    starts = [record.start_ns for record in log if record.encode and record.microbatch == 0]
    cycle_s = (starts[9] - starts[4]) / 5e9
    assert predicted["cycle"] == pytest.approx(cycle_s, rel=0.01)
    assert predicted["throughput"] == pytest.approx(settings.encode_batch / cycle_s, rel=0.01)


def _one(value: int) -> Histogram:
    return Histogram(lengths=(value,), probabilities=(1.0,))


@pytest.mark.parametrize("seed", few(range(20), 5))
def test_layers_are_spread_so_that_the_slowest_stage_is_as_fast_as_can_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages, layers = int(rng.integers(1, 5)), int(rng.integers(5, 12))
    seconds, fixed = rng.uniform(0.5, 3.0, stages).tolist(), rng.uniform(0.0, 3.0, stages).tolist()
    counts = spread(layers, seconds, fixed)
    assert sum(counts) == layers and min(counts) >= 1

    def slowest(stages: tuple[int, ...]) -> float:
        return max(f + n * s for f, n, s in zip(fixed, stages, seconds, strict=True))

    grids = np.meshgrid(*[np.arange(1, layers + 1)] * stages)
    every = np.stack([grid.ravel() for grid in grids], axis=1)
    best = min(slowest(tuple(row)) for row in every[every.sum(axis=1) == layers])
    assert slowest(counts) == pytest.approx(best)


def test_partial_tensor_parallelism() -> None:
    assert degrees(8, 4, 4) == (4, 1, 1, 1, 1)
    assert degrees(8, 2, 8) == (2, 2, 2, 2)
    assert degrees(3, 1, 0) == (1, 1, 1)
    assert [
        stage.far for stage in lane((4, 4, 4), (1, 1, 1), cluster=problem("gpt3-39b", "a40x16", "orca").cluster)
    ] == [False, False, True]


def test_memory_is_shared_out() -> None:
    subject = problem("gpt3-39b", "a40x16", "summarization")
    dtype = subject.profile.dtype
    precision = Precision.of(dtype, "gpu")
    one = LaneMemory(subject.model, subject.cluster, precision, whole(subject.model, 8), 16)
    four = LaneMemory(subject.model, subject.cluster, precision, lane((2,) * 4, (12,) * 4), 16)
    assert one.weight_bytes.sum() * 8 == pytest.approx(subject.model.weight_bytes(dtype))
    # A tied embedding stands on the first and on the last stage.
    embedding = subject.model.vocab_size * subject.model.hidden_size * 2
    assert four.weight_bytes.sum() * 2 == pytest.approx(subject.model.weight_bytes(dtype) + embedding)
    assert len(four.device_bytes(100, 1000)) == 8
    blocks = int(four.blocks_beside(1000)[0])
    usable = subject.cluster.device.memory_bytes * subject.cluster.device.usable_memory
    assert max(four.device_bytes(blocks, 1000)) <= usable < max(four.device_bytes(blocks + 1, 1000))
    with pytest.raises(InfeasibleError, match=r"needs 7\d\.\d GiB in float16 on a device of stage 0 before any K/V"):
        LaneMemory(subject.model, subject.cluster, precision, whole(subject.model), 16)


def test_a_profile_without_what_a_placement_needs_is_refused() -> None:
    subject = problem("opt-13b", "a40x4", "summarization")
    lonely = subject.profile.model_copy(update={"hop": None, "kv_transfer": None})
    stages = lane((1, 1), (20, 20), cluster=subject.cluster)
    with pytest.raises(InputError, match="a pipeline needs times of transfers"):
        LaneCost(subject.model, lonely, stages)
    with pytest.raises(InputError, match=r"tp_degree: 16 is not accepted; the profile of opt-13b on .* covers"):
        LaneCost(subject.model, subject.profile, whole(subject.model, 16))
    half = LaneCost(subject.model, lonely, whole(subject.model))
    with pytest.raises(InputError, match=r"cluster\.host is missing"):
        TwoLaneModel(half, half, Lengths(subject.workload))
    measured = LaneCost(subject.model, lonely.model_copy(update={"source": "measured"}), whole(subject.model))
    with pytest.raises(InputError, match="waa needs times of K/V transfers"):
        TwoLaneModel(measured, measured, Lengths(subject.workload))


@pytest.mark.parametrize("kind", ["rra", "orca", "chunked", "static"])
def test_one_token_outputs_and_one_layer(kind: str) -> None:
    """Nothing decodes; a model of one layer on one stage."""
    subject = problem("opt-13b", "a40x4", "summarization")
    spec = subject.model.model_copy(update={"num_layers": 1})
    lengths = Lengths(Workload(name="short", input=histogram(Constant(value=7)), output=_one(1)))
    model = OneLaneModel(LaneCost(spec, subject.profile, whole(spec)), lengths)
    columns = {"encode_batch": 4, "decode_iterations": 3, "max_batch": 4, "token_budget": 64, "batch": 4}
    performance = FORECASTS[kind].evaluate(model, **columns)
    figures = performance.at(0)
    assert np.isfinite(list(figures.values())).all()
    assert figures["throughput"] > 0 and figures["latency"] == pytest.approx(figures["ttft"])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match=r"stages: 3 is not accepted; the model has 2 layers"):
        spread(2, [1.0] * 3)


def recursion(cost: np.ndarray, stages: int, microbatches: int) -> np.ndarray:
    """Return the seconds of a round. # [lanes, steps] -> [lanes]"""
    count = cost.shape[1]
    free, ends = np.zeros((stages, len(cost))), np.zeros((count, len(cost)))
    for step in range(count):
        now = ends[step - microbatches].copy() if step >= microbatches else np.zeros(len(cost))
        for stage in range(stages):
            np.maximum(now, free[stage], out=now)
            now += cost[:, step]
            free[stage] = now
        ends[step] = now
    first = count // 6
    return microbatches * (ends[-1] - ends[first]) / (count - 1 - first)


def draw(rng: np.random.Generator, num_lanes: int) -> Iterator[tuple[RandomSteps, np.ndarray]]:
    """Yield lanes, and the seconds of a round by the recursion."""
    size, num_values = 24, 8  # lanes of a shape, and different times of steps that encode
    for _ in range(-(-num_lanes // size)):
        stages = int(np.exp(rng.uniform(np.log(2), np.log(20.9))))
        m = int(np.clip(round(stages * rng.choice([0.5, 1, 1, 1, 2, rng.uniform(0.3, 3)])), 2, 40))
        long = 0.97 * np.exp(rng.uniform(np.log(0.02), 0, size))
        ratio = np.exp(rng.uniform(np.log(1.15), np.log(12), size))
        shape = 1 / np.maximum(rng.uniform(0, 0.9, size), 0.01) ** 2
        beyond = np.sort(rng.gamma(shape[:, None], 1 / shape[:, None], (size, 500 * num_values)), axis=1)
        beyond = beyond.reshape(size, num_values, -1).mean(axis=2)
        seconds = np.concatenate([np.ones((size, 1)), 1 + (ratio - 1)[:, None] * beyond], axis=1)
        probability = np.column_stack([1 - long, *[long / num_values] * num_values])
        count = 4000 + 20 * m
        # Each kind of step occurs as often as its probability says, in random order.
        uniform = (np.argsort(rng.random((size, count)), axis=1) + 0.5) / count
        index = (uniform[:, :, None] > np.cumsum(probability, axis=1)[:, None, :-1]).sum(axis=2)
        cost = np.take_along_axis(seconds, index, axis=1)
        steps = RandomSteps(stages * seconds.T, seconds.T, probability.T[None], np.full(size, float(m)))
        yield steps, recursion(cost, stages, m)


def test_a_profile_with_a_hole_is_refused() -> None:
    with pytest.raises(ValueError, match="finite number"):
        Curve(points=(1, 2), seconds=(0.0, float("nan")))


def test_rounds_of_random_steps_lie_where_the_recursion_does() -> None:
    """Long steps hold up all others: half a dozen lanes of a few shapes."""
    lanes = list(draw(np.random.default_rng(3), 100))
    error = np.concatenate([steps.round()[0] / simulated - 1 for steps, simulated in lanes])
    assert np.median(np.abs(error)) < 0.025
    assert np.abs(error).max() < 0.12
    for steps, simulated in lanes:
        least, most = steps.bounds()
        assert (least[0] <= 1.02 * simulated).all()
        assert (most >= least).all()
