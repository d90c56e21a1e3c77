"""Greedy tokens of worker processes are those of one process: whatever the stages, lanes and policy.

Requests join and leave; the step logs replay on the simulated engine. One group of worker processes serves all tests
here; a few cases stand for all others, which take minutes.
"""

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.attack.target import save_checkpoint
from tests.fakes import eventually
from tests.planned import placements_of, problem_of, scored
from tests.rings import examples, few
from xgpt.core import policies
from xgpt.core.policies import BlockTable, Chunk, Step
from xrunner.build import WorkerSettings, build_worker
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.executor import RemoteExecutor
from xrunner.cluster.workers import Workers
from xrunner.engine import Engine
from xrunner.generation import Generation, SamplingParams
from xscheduler.schedule import Scheduler
from xscheduler.space import POLICIES
from xsimulator.events import replay

NUM_REQUESTS = examples(60, 24)
RNG = np.random.default_rng(5)
BEGINNING = tuple(RNG.integers(0, 211, 29).tolist())
PROMPTS = [
    (BEGINNING if i % 2 else ())[: n - 1] + tuple(RNG.integers(0, 211, n).tolist())
    for i, n in enumerate(RNG.integers(1, 30, NUM_REQUESTS).tolist())
]
OUTPUTS = [int(n) for n in RNG.integers(1, 16, NUM_REQUESTS)]
CANCELLED = frozenset(range(7, NUM_REQUESTS, 11))

ONE_LANE = {
    "rra": {"encode_batch": 3, "decode_iterations": 3},
    "orca": {"max_batch": 10},
    "chunked": {"token_budget": 24, "max_batch": 10},
    "static": {"batch": 8},
}
TWO_LANES = {"encode_batch": 2, "max_decode_batch": 14}
# Tensor-parallel degrees of the stages of a lane.
PLACEMENTS = {"tp2": [2], "pp2": [1, 1], "tp2+1": [2, 1], "pp3": [1, 1, 1]}
# Lanes of WAA, each as above.
LANES = {"1+1": ([1], [1]), "1+2": ([1], [1, 1]), "2+1": ([1, 1], [1]), "tp2+1": ([2], [1]), "1+tp2": ([1], [2])}
LANES_OF_FOUR = {"1+tp2+1": ([1], [2, 1]), "tp2+1+1": ([2, 1], [1])}
NAMES = {
    "experts": "mixtral-grouped",
    "opt": "opt-tied",
    "llama": "llama-grouped",
    "t5": "t5-tied",
    "deep": "opt-untied-odd",
    "windows": "gemma2-grouped",
    "fused": "phi3-grouped",
    "latent": "deepseek_v3-grouped",
}
SHALLOW = ("opt", "llama", "t5")


def one_lane(directory, placement, kind, microbatches):
    """The planner's plan of a policy's settings on such stages."""
    degrees = PLACEMENTS[placement]
    return scored(problem_of(directory, sum(degrees)), kind, [degrees], microbatches, **ONE_LANE[kind])


def two_lanes(directory, lanes):
    """The planner's plan of WAA on such lanes, with a micro-batch for each decode stage."""
    encode, decode = (LANES | LANES_OF_FOUR)[lanes]
    return scored(problem_of(directory, sum(encode + decode)), "waa", (encode, decode), len(decode), **TWO_LANES)


def run(schedule, executor, sampling=None, after_step=lambda number: None):
    """Submit requests a few at a time, cancel some; returns tokens by request and the log."""
    log = []
    engine = Engine(schedule, executor, on_step=log.append, reuse=executor.resumes)
    tokens = {id_: [] for id_ in range(NUM_REQUESTS)}
    ended, submitted, steps = set(), 0, 0
    while submitted < NUM_REQUESTS or not engine.pool.is_idle:
        for id_ in range(submitted, min(NUM_REQUESTS, submitted + 3)):
            extra = {} if sampling is None else {"sampling": sampling}
            engine.submit(Generation(id_, PROMPTS[id_], OUTPUTS[id_], **extra))
            submitted = id_ + 1
        steps += 1
        after_step(steps)
        for token in engine.step() or ():
            tokens[token.id].append(token.token)
            if token.finish:
                ended.add(token.id)
            elif token.id in CANCELLED and len(tokens[token.id]) == 2:
                engine.cancel(token.id)
    assert ended | CANCELLED == set(range(NUM_REQUESTS))
    shared = [start for record in log for _, start, _ in record.encode if start]
    assert shared or not executor.resumes
    return tokens, log


@pytest.fixture(scope="module")
def workers():
    with Workers(3) as started:
        yield started


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Tokens of one process."""
    tokens = {}

    def make(family, sampling=None):
        key = (family, sampling)
        if key not in tokens:
            plan = scored(problem_of(checkpoint(NAMES[family])[0], 1), "orca", [[1]], 1, **ONE_LANE["orca"])
            worker = build_worker(
                WorkerSettings(
                    spec=plan.model,
                    dtype="float32",
                    checkpoint=Path(plan.checkpoint),
                    num_blocks=plan.stages[0].kv_blocks,
                    block_size=plan.block_size,
                )
            )
            worker.resumes = False  # alone, nothing is shared
            tokens[key], _ = run(policies.build(plan), worker, sampling)
        return tokens[key]

    return make


def deploy(workers, plan):
    executor = RemoteExecutor(workers, Deployment.of(plan))
    executor.deploy()
    return executor


def check(workers, plan, expected, sampling=None, after_step=lambda number: None):
    executor = deploy(workers, plan)
    try:
        tokens, log = run(policies.build(plan), executor, sampling, after_step)
    finally:
        executor.disconnect()
    for id_ in range(NUM_REQUESTS):
        count = len(tokens[id_])
        assert tokens[id_] == expected[id_][:count], id_
        assert id_ in CANCELLED or count == OUTPUTS[id_]
    begins = [i for i, record in enumerate(log) if record.number == 0]
    for begin, end in pairwise([*begins, len(log)]):  # one log, and another after each loss, which cuts the first short
        replayed = replay(policies.build(plan), log[begin:end])
        assert end < len(log) or len(replayed) == end - begin
        assert [record[2:] for record in replayed] == [record[2:] for record in log[begin:end]][: len(replayed)]
    return len(begins)


@pytest.mark.parametrize(("ep", "kind"), few([(2, "rra"), (1, "orca")]))
def test_experts_in_parts_and_in_slices(workers, checkpoint, alone, ep, kind):
    problem = problem_of(checkpoint(NAMES["experts"])[0], 2)
    placement = next(
        placement
        for placement in placements_of(problem, kind)
        if [stage.group for stage in placement.decode_lane] == [(2, ep)] and placement.microbatches == 1
    )
    plan = Scheduler(problem).score(POLICIES[kind](**placement.fixed, **ONE_LANE[kind]), placement)
    assert [stage.ep for stage in plan.stages] == [ep]
    check(workers, plan, alone("experts"))


def test_who_comes_while_a_step_is_waited_for_need_not_wait_for_it(workers, checkpoint):
    plan = one_lane(checkpoint(NAMES["opt"])[0], "pp2", "orca", 2)
    executor = deploy(workers, plan)
    log, later = [], [Generation(1, PROMPTS[1], 8)]
    engine = Engine(policies.build(plan), executor, on_step=log.append)
    collect = executor.collect

    def collect_while_a_request_arrives():
        if later:
            engine.submit(later.pop())
        return collect()

    executor.collect = collect_while_a_request_arrives
    try:
        engine.submit(Generation(0, PROMPTS[0], 8))
        while engine.step() is not None:
            pass
    finally:
        executor.disconnect()
    first, second = (next(record for record in log if record.encode and record.encode[0].id == id_) for id_ in (0, 1))
    assert (second.number, second.settled) == (1, 0)
    assert second.start_ns < first.end_ns


def tokens_of_next(executor, count):
    """The tokens of the next steps to end."""
    tokens = []
    while len(tokens) < count:
        ended = executor.collect()
        if ended is not None:
            tokens.append(ended[1])
    return tokens


def test_blocks_of_a_request_released_or_begun_anew_while_the_encoder_runs(workers, checkpoint):
    """A step that encodes gives blocks to requests that it does not decode: no step under way touches these, so they
    may leave, and return with other blocks, before its prompts pass the pipeline for the second time."""
    plan = one_lane(checkpoint(NAMES["t5"])[0], "pp2", "rra", 2)
    executor = deploy(workers, plan)
    prompts = [tuple(RNG.integers(0, 211, plan.block_size - 1).tolist()) for _ in range(4)]
    tables = [BlockTable([2 * i + 1]) for i in range(4)]
    encode = [Step((Chunk(i, 0, len(prompts[i])),), ()) for i in range(4)]
    try:
        for i in (0, 1):
            executor.start(Generation(i, prompts[i], 8), tables[i])
            executor.begin(encode[i])
        _, before = tokens_of_next(executor, 2)
        executor.start(Generation(2, prompts[2], 8), tables[2])
        executor.begin(encode[2]._replace(grown=((0, 2), (1, 4))))
        executor.release([0, 1])
        executor.start(Generation(1, prompts[1], 8), BlockTable([6, 8]))
        executor.start(Generation(3, prompts[3], 8), tables[3])
        executor.begin(Step((*encode[1].encode, *encode[3].encode), (), microbatch=1))
        begun_before, begun_after = tokens_of_next(executor, 2)
    finally:
        executor.disconnect()
    assert (list(begun_before), list(begun_after)) == ([2], [1, 3])
    assert begun_after[1] == before[1]


def check_changing(workers, plans, expected):
    """Some steps after a plan's placement has taken over, the next one does, on the same workers: no token is lost or
    wrong."""
    now, left = [deploy(workers, plans[0])], [*plans[1:]]

    def redeploy(schedule):
        now.append(now[-1].redeployed(schedule.stages))
        return now[-1]

    engine = Engine(policies.build(plans[0]), now[0], deploy=redeploy)
    tokens = {id_: [] for id_ in range(NUM_REQUESTS)}
    try:
        for id_ in range(NUM_REQUESTS):
            engine.submit(Generation(id_, PROMPTS[id_], OUTPUTS[id_]))
        steps = 0
        while (step := engine.step()) is not None:
            for token in step:
                tokens[token.id].append(token.token)
            steps += 1
            if left and len(now) == len(plans) - len(left) and steps >= 5 * len(now):
                engine.apply(policies.build(left.pop(0)))
    finally:
        now[-1].disconnect()
    assert len(now) == len(plans)
    for id_, output in enumerate(OUTPUTS):
        assert len(tokens[id_]) == output
        assert tokens[id_][: len(expected[id_])] == expected[id_], id_


@pytest.mark.parametrize(("before", "then"), few([(("tp2", 1), ("tp2+1", 2)), (("pp2", 2), ("tp2", 1))]))
def test_another_placement_on_the_same_workers(workers, checkpoint, alone, before, then):
    directory, _ = checkpoint(NAMES["opt"])
    plans = [one_lane(directory, placement, "orca", microbatches) for placement, microbatches in (before, then)]
    check_changing(workers, plans, alone("opt"))


@pytest.mark.long
def test_two_shifts_in_a_row_of_an_encoder_decoder_under_waa_with_partial_tensor_parallelism(checkpoint, alone):
    directory, _ = checkpoint(NAMES["t5"])
    plans = [two_lanes(directory, lanes) for lanes in ("1+tp2+1", "tp2+1+1", "1+tp2+1")]
    assert {tuple(sorted(stage.tp for stage in plan.stages)) for plan in plans} == {(1, 1, 2)}
    with Workers(4) as four:
        check_changing(four, plans, alone("t5"))


def test_a_plan_that_memory_does_not_hold_is_gone_back_from(workers, checkpoint, alone):
    directory, _ = checkpoint(NAMES["opt"])
    plan = one_lane(directory, "pp2", "orca", 2)
    stages = tuple(stage.model_copy(update={"kv_blocks": 10**12}) for stage in plan.stages)
    now, refused = [deploy(workers, plan)], []

    def redeploy(schedule):
        now.append(now[-1].redeployed(schedule.stages))
        return now[-1]

    engine = Engine(policies.build(plan), now[0], deploy=redeploy)
    engine.on_refused = refused.append
    tokens = {id_: [] for id_ in range(8)}
    try:
        for id_ in tokens:
            engine.submit(Generation(id_, PROMPTS[id_], OUTPUTS[id_]))
        engine.step()
        engine.apply(policies.build(plan.model_copy(update={"stages": stages})))
        engine.submit(Generation(8, PROMPTS[8], OUTPUTS[8]))
        ended = set()
        while (step := engine.step()) is not None:
            ended |= {token.id for token in step if token.finish in ("stop", "length")}
            for token in step:
                tokens.setdefault(token.id, []).append(token.token)
    finally:
        now[-1].disconnect()
    (reason,) = refused
    assert "the other plan cannot be deployed: worker" in reason
    assert len(now) == 2 and 8 in ended
    assert tokens[8] == alone("opt")[8]


@pytest.mark.parametrize("placement", few(["tp2", "pp2"]))
def test_workers_compile_a_grammar_before_its_request_begins(workers, tmp_path, placement):
    directory = save_checkpoint(tmp_path / "small")
    plan = one_lane(directory, placement, "orca", 1)
    executor, answers = deploy(workers, plan), {}
    asked = []

    def prepare(grammar):
        assert engine.pool.is_idle
        asked.append(grammar)
        return RemoteExecutor.prepare(executor, grammar)

    executor.prepare = prepare
    engine = Engine(policies.build(plan), executor)
    grammar = 'start: "yes"'
    alphabet = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    try:
        for id_ in range(3):
            engine.submit(Generation(id_, (5, 6, 7), 9, frozenset({2}), sampling=SamplingParams(grammar=grammar)))

        def have_ended():
            for token in engine.step() or ():
                answers.setdefault(token.id, []).append(token.token)
            return sorted(map(len, answers.values())) == [4] * 3

        assert eventually(have_ended, 30)
    finally:
        executor.disconnect()
    assert asked == [grammar]
    assert list(answers.values()) == [[*(alphabet[letter] for letter in "yes"), 2]] * 3


def test_a_grammar_that_workers_cannot_compile_ends_its_request_only(workers, tmp_path):
    directory = save_checkpoint(tmp_path / "small")
    (directory / "tokenizer.json").write_text("{}")
    plan = one_lane(directory, "tp2", "orca", 1)
    executor, answers = deploy(workers, plan), {}
    epoch_pids = {member.hello.pid for member in workers.members.values()}
    engine = Engine(policies.build(plan), executor)
    try:
        engine.submit(Generation(0, (5, 6, 7), 3, sampling=SamplingParams(grammar='start: "yes"')))
        engine.submit(Generation(1, (5, 6, 7), 3))

        def have_ended():
            for token in engine.step() or ():
                answers.setdefault(token.id, []).append(token)
            return [len(answers.get(id_, ())) for id_ in range(2)] == [1, 3]

        assert eventually(have_ended, 30)
    finally:
        executor.disconnect()
    assert answers[0][0].finish == "error" and "cannot be used for grammars" in answers[0][0].error
    assert {member.hello.pid for member in workers.members.values()} == epoch_pids


@pytest.mark.parametrize(
    ("family", "placement", "kind"),
    few(
        [
            ("windows", "tp2", "orca"),
            ("latent", "pp2", "rra"),
            ("windows", "pp2", "chunked"),
            ("fused", "tp2", "rra"),
            ("latent", "tp2", "orca"),
        ],
        2,
    ),
)
def test_families_that_cut_in_other_ways(workers, checkpoint, alone, family, placement, kind):
    microbatches = len(PLACEMENTS[placement])
    check(workers, one_lane(checkpoint(NAMES[family])[0], placement, kind, microbatches), alone(family))


SINGLE = [
    pytest.param(family, placement, kind, microbatches, id=f"{family}-{placement}-{kind}-{microbatches}", marks=marks)
    for placement, degrees in PLACEMENTS.items()
    for family in (("deep",) if placement == "pp3" else SHALLOW)
    for kind in ONE_LANE
    for microbatches in sorted({1, len(degrees)})
    for marks in [
        ()
        if (family, placement, kind, microbatches) in {("llama", "pp2", "chunked", 2), ("t5", "tp2+1", "orca", 2)}
        else pytest.mark.long
    ]
]


@pytest.mark.parametrize(("family", "placement", "kind", "microbatches"), SINGLE)
def test_one_lane(workers, checkpoint, alone, family, placement, kind, microbatches):
    check(workers, one_lane(checkpoint(NAMES[family])[0], placement, kind, microbatches), alone(family))


@pytest.mark.parametrize(
    ("family", "lanes"),
    [
        pytest.param(
            family,
            lanes,
            id=f"{family}-{lanes}",
            marks=() if (family, lanes) == ("llama", "1+tp2") else pytest.mark.long,
        )
        for family in SHALLOW
        for lanes in LANES
    ]
    + [pytest.param("latent", "1+tp2", marks=pytest.mark.long)],
)
def test_two_lanes(workers, checkpoint, alone, family, lanes):
    check(workers, two_lanes(checkpoint(NAMES[family])[0], lanes), alone(family))


@pytest.mark.long
@pytest.mark.parametrize("lanes", [None, "1+tp2"])
def test_drawn_tokens(workers, checkpoint, alone, lanes):
    sampling = SamplingParams(temperature=0.9, top_k=50, seed=3, frequency_penalty=0.4, logprobs=1)
    directory, _ = checkpoint(NAMES["llama"])
    plan = one_lane(directory, "tp2+1", "orca", 2) if lanes is None else two_lanes(directory, lanes)
    check(workers, plan, alone("llama", sampling), sampling)


@pytest.mark.long
@pytest.mark.parametrize(("family", "lanes"), [("llama", "1+tp2"), ("t5", "2+1"), ("opt", None)])
@pytest.mark.parametrize("how", ["KILL", "STOP"])
@pytest.mark.parametrize("worker", range(3))
def test_a_worker_that_dies_or_hangs_loses_no_token(workers, checkpoint, alone, family, lanes, how, worker):
    directory, _ = checkpoint(NAMES[family])
    plan = one_lane(directory, "tp2+1", "rra", 2) if lanes is None else two_lanes(directory, lanes)

    def strike(step):
        if step == 25:
            os.kill(workers.members[worker].hello.pid, getattr(signal, f"SIG{how}"))

    workers._budget._restarts.clear()
    assert check(workers, plan, alone(family), after_step=strike) == 2
