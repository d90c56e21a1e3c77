"""The profile of vLLM, from the log of a vLLM whose step times are known."""

from __future__ import annotations

import pytest

from xgpt.core.schema import ModelSpec, Profile
from xgpt.core.schema.step_log import StepRecord
from xgpt.resolve import load_cluster, load_model
from xprofiler import vllm
from xprofiler.measurement_order import PASSES, in_passes
from xprofiler.vllm import BEGIN_S, BESIDE_CONTEXT, CPU_SIZES, NUM_DECODES, REQUEST_S, SHORT, Probe, StepSizes
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.stages import whole

SLOW = 10.0
"""How much slower everything is in the first pass."""


@pytest.fixture
def spec() -> ModelSpec:
    return load_model("opt-125m")[0]


def seconds(encode: list[tuple[int, int]], contexts: list[int], captured_tokens: int = 0) -> float:
    """Of a step that encodes [start, end) of some prompts: tokens through the layers, a row of the head for each
    request, attention beyond short lengths. Steps that are not captured take longer, if others are."""
    attention = sum(1e-6 * (end * end - start * start) for start, end in encode if end > SHORT)
    attention += sum(2e-6 * (n - SHORT) for n in contexts)
    tokens = sum(end - start for start, end in encode) + len(contexts)
    launches = 0.1 if 0 < captured_tokens < tokens else 0.0
    return 0.03 + launches + 4e-4 * tokens + 5e-4 * (len(encode) + len(contexts)) + attention


def log_of(jobs: list[Probe], num_slow: int, mixing: float = 1.0, captured_tokens: int = 0) -> list[StepRecord]:
    """What vLLM writes down for these groups, the first of which it is slow at."""
    log: list[StepRecord] = []
    now_ns, number = 0, 0
    for index, job in enumerate(jobs):
        ids = tuple(range(number, number + job.num_requests))
        number += job.num_requests
        whole = [(0, job.length)] * job.batch
        if job.kind == "encode":
            steps = [(tuple((id_, 0, job.length) for id_ in ids), (), seconds(whole, [], captured_tokens))]
            steps.append(((), ids, seconds([], [job.length + 1] * job.batch, captured_tokens)))
        elif job.kind == "decode":
            steps = [((), ids, seconds([], [job.length] * job.batch, captured_tokens)) for _ in range(NUM_DECODES)]
        else:
            *beside, prompt = ids
            steps = []
            for start in range(0, job.length, job.piece):
                piece = ((prompt, start, job.piece),)
                taken = seconds([(start, start + job.piece)], [BESIDE_CONTEXT] * job.batch, captured_tokens)
                if start == 0 and beside:  # the last token of a prompt whose K/V is at hand is encoded
                    fresh = tuple((id_, BESIDE_CONTEXT - 1, 1) for id_ in beside)
                    steps.append((fresh + piece, (), 100.0))
                else:
                    steps.append((piece, tuple(beside), taken * (mixing if beside else 1)))
            steps.append(((), ids, 1.0))
        for encode, decode, taken in steps:
            taken_ns = round(1e9 * taken * (SLOW if index < num_slow else 1))
            log.append(StepRecord(now_ns, now_ns + taken_ns, encode, decode, (), (), ()))
            now_ns += taken_ns
        now_ns += 10**9  # the next group has yet to come
    return log


def profile_of(spec: ModelSpec, mixing: float = 1.0, sizes: StepSizes = CPU_SIZES) -> Profile:
    cluster = load_cluster("local")
    once = vllm.points(spec.max_context, sizes)
    jobs = in_passes(once, lambda point: point.step_tokens)
    assert len(jobs) < PASSES * len(once)  # long prompts are not in every pass
    log = log_of(jobs, num_slow=len(once), mixing=mixing, captured_tokens=sizes.captured_tokens)
    return vllm.fit(spec, cluster, "float32", sizes, vllm._times(log, jobs), "0.32.0")


def test_what_a_step_costs_is_read_off_the_log(spec: ModelSpec) -> None:
    profile = profile_of(spec)
    lane = LaneCost(spec, profile, whole(spec))

    def step_s(encode: list[tuple[int, int, int]], contexts: list[int]) -> float:
        return sum(lane.step(StepCounts.of(encode, contexts)))

    for batch, context in ((1, SHORT), (8, 1024), (32, 128), (128, SHORT), (1, 2048)):
        contexts = [context] * batch
        assert step_s([], contexts) == pytest.approx(seconds([], contexts), rel=0.01)
    for batch, length in ((1, SHORT), (64, SHORT), (1, 1024), (4, 256), (4, 512), (1, 2048)):
        prompts = [(0, length)] * batch
        predicted = step_s([(0, length, 1)] * batch, [])
        assert predicted == pytest.approx(seconds(prompts, []), rel=0.02)
    mixed = step_s([(256, 384, 0)], [512] * 6)
    assert mixed == pytest.approx(seconds([(256, 384)], [512] * 6), rel=0.01)
    assert profile.spread == pytest.approx(0.0, abs=1e-6)


def test_a_gpu_is_measured_at_the_batches_of_a_server_if_their_keys_and_values_fit(spec: ModelSpec) -> None:
    """Plans end at the profile's largest batch, and vLLM's own default is 256 requests or more."""
    h100, a30 = load_cluster("h100x1"), load_cluster("a30x8")
    assert StepSizes.of(load_model("llama-3.1-8b")[0], h100, "bfloat16") == vllm.GPU_SIZES
    large = vllm.points(4096, StepSizes.of(load_model("llama-2-7b")[0], a30, "float16"))
    at_once = max(p.batch * p.length for p in large if p.kind == "decode")
    assert 8192 <= at_once < vllm.GPU_SIZES.cached_tokens
    assert {p.batch for p in large if p.kind == "decode"} >= {1, 128}


def test_steps_just_above_the_largest_captured_graph_are_predicted(spec: ModelSpec) -> None:
    """On an H100, steps of 513 to 1,024 tokens took 1.17 times as long as the line from 512 to 1,024."""
    lane = LaneCost(spec, profile_of(spec, sizes=vllm.GPU_SIZES), whole(spec))
    for count in (8, 16, 17, 24, 32, 64):
        predicted = sum(lane.step(StepCounts.of([(0, SHORT, 1)] * count, [])))
        assert predicted == pytest.approx(seconds([(0, SHORT)] * count, [], 512), rel=0.02)


@pytest.mark.parametrize("sizes", [CPU_SIZES, vllm.GPU_SIZES])
def test_no_measured_request_is_longer_than_the_context(spec: ModelSpec, sizes: StepSizes) -> None:
    """vLLM did not start for a model with a context of 2,048: the largest decode had 2,049 tokens."""
    groups = [group for point in vllm.points(spec.max_context, sizes) for group in point.group[1]]
    assert max(length + output for length, output, _ in groups) <= spec.max_context == 2048


def test_a_profile_says_what_mixing_costs(spec: ModelSpec) -> None:
    def told(mixing: float) -> float:
        return float(profile_of(spec, mixing).provenance["mixed steps"].split()[0].rstrip("%"))

    assert told(1.0) == pytest.approx(0, abs=1)
    assert told(1.3) == pytest.approx(30, abs=1.5)


def test_the_scheduler_costs_time_for_each_request_and_each_prompt_that_begins(spec: ModelSpec) -> None:
    """The offline interface shows neither, and served steps on a GPU took 1.25 times as long as without them."""
    measured = profile_of(spec)
    before, after = (LaneCost(spec, each, whole(spec)) for each in (measured, vllm.with_scheduler(measured)))

    def added_s(encode: list[tuple[int, int, int]], contexts: list[int]) -> float:
        step = StepCounts.of(encode, contexts)
        return sum(after.step(step)) - sum(before.step(step))

    assert added_s([], [512] * 100) == pytest.approx(100 * REQUEST_S)
    assert added_s([(0, 256, 1)] * 8, [512] * 100) == pytest.approx(108 * REQUEST_S + 8 * BEGIN_S)
    assert added_s([(256, 512, 1)], [512] * 99) == pytest.approx(100 * REQUEST_S)


def test_sizes_that_met_a_fast_clock_are_taken_together() -> None:
    """Steps of 512 tokens were measured at a rate that no others met: larger ones would be dearer a token."""
    measured = {128: (0.35, 1.75), 256: (0.60, 3.0), 512: (1.00, 5.0), 1024: (2.40, 5.0), 2048: (4.80, 10.0)}
    found = vllm._ever_cheaper(measured)
    assert [found[128], found[256]] == [0.35, 0.60]
    each = {found[n] / n for n in (512, 1024, 2048)}
    assert max(each) == pytest.approx(min(each))
    large = [(weight, seconds / n) for n, (seconds, weight) in measured.items() if n >= 512]
    assert max(each) == pytest.approx(sum(w * t for w, t in large) / sum(w for w, _ in large))


def test_attention_of_prompts_is_read_off_all_pieces(spec: ModelSpec) -> None:
    """At a clock that flips between two rates, met in other places in each of six passes."""
    point = Probe("pieces", 0, 15 * 128, 128)
    rates = [1.0 if (i + j) % 3 == 0 else 1.5 for i in range(6) for j in range(15)]
    starts = [*range(0, point.length, 128)] * 6
    taken = [rate * seconds([(start, start + 128)], []) for rate, start in zip(rates, starts, strict=True)]
    rest = vllm._Line({n: seconds([(0, 0)], []) + 4e-4 * n for n in (32, 256)})
    table = vllm._encode_attention(spec, {point: taken}, rest)
    at_1024 = table.seconds[0][table.lengths.index(1024)] * spec.num_layers
    assert at_1024 == pytest.approx(1e-6 * 1024 * 1024, rel=0.05)


def test_the_number_of_threads_is_what_vllm_says_and_not_what_was_asked() -> None:
    said = "(EngineCore pid=7) INFO 11-28 20:04:41 [ompmultiprocessing.py:185] \tlocal_rank=0, core ids=[0, 1]\n"
    assert vllm.threads_in(["INFO start\n", said]) == 2
    assert vllm.threads_in(["INFO start\n"]) is None
