"""Greedy tokens of worker processes over Gloo are those of one process: whatever the stages, lanes and policy.

60 requests join and leave; the step logs replay on the simulated engine. One group of worker processes serves all tests
here; a few cases stand for all others, which take minutes.
"""

import os
import signal
from itertools import pairwise

import numpy as np
import pytest

from xgpt.checkpoint import read_spec
from xgpt.policies import LaneSettings, OneLane, Pool, TwoLane, TwoLaneSettings
from xgpt.schema import Stage
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.executor import RemoteExecutor
from xrunner.cluster.fleet import Fleet
from xrunner.engine import Engine
from xrunner.generation import Generation, SamplingParams
from xrunner.worker import build_worker
from xsimulator.events import replay

BLOCK_SIZE = 4
NUM_BLOCKS = 60
NUM_REQUESTS = 60
RNG = np.random.default_rng(5)
PROMPTS = [tuple(RNG.integers(0, 211, int(n)).tolist()) for n in RNG.integers(1, 30, NUM_REQUESTS)]
OUTPUTS = [int(n) for n in RNG.integers(1, 16, NUM_REQUESTS)]
CANCELLED = frozenset(range(7, NUM_REQUESTS, 11))

ONE_LANE = {
    "rra": {"mix": False, "encode_every": 3, "encode_tokens": 40.0, "carried_batch": 6.0, "decode_batch": 9.0},
    "orca": {"mix": True, "max_batch": 10},
    "chunked": {"mix": True, "token_budget": 24, "max_batch": 10},
    "static": {"mix": False, "max_batch": 8, "refill_when_empty": True},
}
# Stages as (devices, share of the layers that ends here).
PLACEMENTS = {
    "tp2": [(2, 1.0)],
    "pp2": [(1, 0.5), (1, 1.0)],
    "tp2+1": [(2, 0.5), (1, 1.0)],
    "1+tp2": [(1, 0.5), (2, 1.0)],
    "pp3": [(1, 0.34), (1, 0.67), (1, 1.0)],  # of two layers, the stage in the middle has none
}
# Lanes of WAA, each as above.
LANES = {
    "1+1": ([(1, 1.0)], [(1, 1.0)]),
    "1+2": ([(1, 1.0)], [(1, 0.5), (1, 1.0)]),
    "2+1": ([(1, 0.5), (1, 1.0)], [(1, 1.0)]),
    "tp2+1": ([(2, 1.0)], [(1, 1.0)]),
    "1+tp2": ([(1, 1.0)], [(2, 1.0)]),
}
NAMES = {"opt": "opt-untied-odd", "llama": "llama-grouped", "t5": "t5-gated-untied"}


def stages(spec, shares, lane="both", first_device=0):
    made, begun, device = [], 0.0, first_device
    for num_devices, end in shares:
        layers = [(round(n * begun), round(n * end)) for n in (spec.num_encoder_layers, spec.num_layers)]
        made.append(
            Stage(
                lane=lane,
                devices=tuple(range(device, device + num_devices)),
                encode_layers=layers[0] if spec.is_encoder_decoder and lane != "decode" else None,
                decode_layers=layers[1],
                tp=num_devices,
                kv_blocks=NUM_BLOCKS,
            )
        )
        begun, device = end, device + num_devices
    return made


def pool(**settings):
    return Pool(NUM_BLOCKS, BLOCK_SIZE, **settings)


def one_lane(kind, microbatches):
    settings = LaneSettings(**ONE_LANE[kind], microbatches=microbatches)
    return lambda: OneLane(settings, pool(hold_finished=kind == "static"))


def two_lanes(spec, lanes):
    settings = TwoLaneSettings(
        encode_tokens=40.0,
        encode_stages=len(lanes[0]),
        encode_blocks=NUM_BLOCKS,
        max_decode_batch=14,
        decode_batch=8.0,
        decode_microbatches=len(lanes[1]),
        encoder_only=spec.is_encoder_decoder,
    )
    return lambda: TwoLane(settings, pool())


def run(schedule, executor, sampling=None, after_step=lambda number: None):
    """Submit requests a few at a time, cancel some; returns tokens by request and the log."""
    log = []
    engine = Engine(schedule, executor, on_step=log.append)
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
    return tokens, log


@pytest.fixture(scope="module")
def fleet():
    with Fleet(3) as started:
        yield started


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Tokens of one process."""
    made = {}

    def make(family, sampling=None):
        key = (family, sampling)
        if key not in made:
            directory, _ = checkpoint(NAMES[family])
            worker = build_worker(
                read_spec(directory), "float32", checkpoint=directory, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
            )
            made[key], _ = run(one_lane("orca", 1)(), worker, sampling)
        return made[key]

    return make


def check(fleet, directory, placed, schedule, expected, sampling=None, after_step=lambda number: None):
    deployment = Deployment(
        model=read_spec(directory),
        dtype="float32",
        checkpoint=str(directory),
        block_size=BLOCK_SIZE,
        stages=tuple(placed),
    )
    executor = RemoteExecutor(fleet, deployment)
    executor.deploy()
    try:
        tokens, log = run(schedule(), executor, sampling, after_step)
    finally:
        executor.disconnect()
    for id_ in range(NUM_REQUESTS):
        count = len(tokens[id_])
        assert tokens[id_] == expected[id_][:count], id_
        assert id_ in CANCELLED or count == OUTPUTS[id_]
    begins = [i for i, record in enumerate(log) if record.number == 0]
    for begin, end in pairwise([*begins, len(log)]):  # one log, and another after each loss, which cuts the first short
        replayed = replay(schedule(), log[begin:end])
        assert end < len(log) or len(replayed) == end - begin
        assert [record[2:] for record in replayed] == [record[2:] for record in log[begin:end]][: len(replayed)]
    return len(begins)


def test_who_comes_while_a_step_is_waited_for_need_not_wait_for_it(fleet, checkpoint):
    directory, _ = checkpoint(NAMES["opt"])
    spec = read_spec(directory)
    placed = tuple(stages(spec, PLACEMENTS["pp2"]))
    deployment = Deployment(
        model=spec, dtype="float32", checkpoint=str(directory), block_size=BLOCK_SIZE, stages=placed
    )
    executor = RemoteExecutor(fleet, deployment)
    executor.deploy()
    log, later = [], [Generation(1, PROMPTS[1], 8)]
    engine = Engine(one_lane("orca", 2)(), executor, on_step=log.append)
    collect = executor.collect

    def collect_while_somebody_comes():
        if later:
            engine.submit(later.pop())
        return collect()

    executor.collect = collect_while_somebody_comes
    try:
        engine.submit(Generation(0, PROMPTS[0], 8))
        while engine.step() is not None:
            pass
    finally:
        executor.disconnect()
    first, second = (next(record for record in log if record.encode and record.encode[0].id == id_) for id_ in (0, 1))
    assert (second.number, second.settled) == (1, 0)
    assert second.start_ns < first.end_ns


@pytest.mark.parametrize(("before", "then"), [("pp2", "tp2"), ("tp2", "tp2+1")])
def test_another_placement_on_the_same_workers(fleet, checkpoint, alone, before, then):
    directory, _ = checkpoint(NAMES["opt"])
    spec = read_spec(directory)
    placed = [tuple(stages(spec, PLACEMENTS[name])) for name in (before, then)]
    deployment = Deployment(
        model=spec, dtype="float32", checkpoint=str(directory), block_size=BLOCK_SIZE, stages=placed[0]
    )
    executor = RemoteExecutor(fleet, deployment)
    executor.deploy()
    schedules = [OneLane(LaneSettings(**ONE_LANE["orca"], microbatches=2), pool(), where) for where in placed]
    now = [executor]

    def deploy(schedule):
        now.append(now[-1].redeployed(schedule.stages))
        return now[-1]

    engine = Engine(schedules[0], executor, deploy=deploy)
    tokens = {id_: [] for id_ in range(NUM_REQUESTS)}
    try:
        for id_ in range(NUM_REQUESTS):
            engine.submit(Generation(id_, PROMPTS[id_], OUTPUTS[id_]))
        steps = 0
        while (made := engine.step()) is not None:
            for token in made:
                tokens[token.id].append(token.token)
            steps += 1
            if steps == 20:
                engine.apply(schedules[1])
    finally:
        now[-1].disconnect()
    assert len(now) == 2
    expected = alone("opt")
    for id_ in set(tokens) - CANCELLED:
        assert tokens[id_] == expected[id_], id_


SINGLE = [
    pytest.param(family, placement, kind, microbatches, id=f"{family}-{placement}-{kind}-{microbatches}", marks=marks)
    for family in NAMES
    for placement, degrees in PLACEMENTS.items()
    for kind in ONE_LANE
    for microbatches in sorted({1, len(degrees)})
    for marks in [
        ()
        if (family, placement, kind, microbatches)
        in {("opt", "tp2+1", "rra", 2), ("llama", "pp2", "chunked", 2), ("t5", "1+tp2", "orca", 2)}
        else pytest.mark.long
    ]
]


@pytest.mark.parametrize(("family", "placement", "kind", "microbatches"), SINGLE)
def test_one_lane(fleet, checkpoint, alone, family, placement, kind, microbatches):
    directory, _ = checkpoint(NAMES[family])
    placed = stages(read_spec(directory), PLACEMENTS[placement])
    check(fleet, directory, placed, one_lane(kind, microbatches), alone(family))


@pytest.mark.parametrize(
    ("family", "lanes"),
    [
        pytest.param(
            family,
            lanes,
            id=f"{family}-{lanes}",
            marks=() if (family, lanes) in {("llama", "1+tp2"), ("t5", "2+1")} else pytest.mark.long,
        )
        for family in NAMES
        for lanes in LANES
    ],
)
def test_two_lanes(fleet, checkpoint, alone, family, lanes):
    directory, _ = checkpoint(NAMES[family])
    spec = read_spec(directory)
    encode, decode = LANES[lanes]
    num_encode = sum(devices for devices, _ in encode)
    placed = stages(spec, encode, "encode") + stages(spec, decode, "decode", num_encode)
    check(fleet, directory, placed, two_lanes(spec, LANES[lanes]), alone(family))


@pytest.mark.long
@pytest.mark.parametrize("lanes", [None, "1+tp2"])
def test_drawn_tokens(fleet, checkpoint, alone, lanes):
    sampling = SamplingParams(temperature=0.9, top_k=50, seed=3, frequency_penalty=0.4, logprobs=1)
    directory, _ = checkpoint(NAMES["llama"])
    spec = read_spec(directory)
    placed, schedule = stages(spec, PLACEMENTS["tp2+1"]), one_lane("orca", 2)
    if lanes is not None:
        placed = stages(spec, LANES[lanes][0], "encode") + stages(spec, LANES[lanes][1], "decode", 1)
        schedule = two_lanes(spec, LANES[lanes])
    check(fleet, directory, placed, schedule, alone("llama", sampling), sampling)


@pytest.mark.parametrize(
    ("family", "lanes", "how", "worker"),
    [
        ("llama", "1+tp2", "KILL", 0),
        *(
            pytest.param(family, lanes, how, worker, marks=pytest.mark.long)
            for family, lanes in (("llama", "1+tp2"), ("t5", "2+1"), ("opt", None))
            for how in ("KILL", "STOP")
            for worker in range(3)
        ),
    ],
)
def test_a_worker_that_dies_or_hangs_loses_no_token(fleet, checkpoint, alone, family, lanes, how, worker):
    directory, _ = checkpoint(NAMES[family])
    spec = read_spec(directory)
    placed, schedule = stages(spec, PLACEMENTS["tp2+1"]), one_lane("rra", 2)
    if lanes is not None:
        encode, decode = LANES[lanes]
        num_encode = sum(devices for devices, _ in encode)
        placed = stages(spec, encode, "encode") + stages(spec, decode, "decode", num_encode)
        schedule = two_lanes(spec, LANES[lanes])

    def strike(step):
        if step == 25:
            os.kill(fleet.members[worker].hello.pid, getattr(signal, f"SIG{how}"))

    fleet.forgive()
    assert check(fleet, directory, placed, schedule, alone(family), after_step=strike) == 2
