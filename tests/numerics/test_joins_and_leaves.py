"""Random joins, leaves and preemptions, drawn by hypothesis: tokens are always those of a solitary run."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numerics.steps import run_again
from tests.rings import examples, few
from xgpt.checkpoints.files import read_spec
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xrunner.ahead import AheadWorker
from xrunner.build import WorkerSettings, build_worker
from xrunner.engine import Engine
from xrunner.generation import Generation
from xrunner.gpu.graphs import GraphedModel
from xrunner.kv_cache import KvCache
from xrunner.worker import Worker
from xsimulator.events import replay

BLOCK_SIZE = 4
NUM_BLOCKS = 12
LANES = {
    "rra": LaneSettings(mix=False, encode_every=3, encode_tokens=14.0, carried_batch=3.0, decode_batch=5.0),
    "orca": LaneSettings(mix=True, max_batch=5),
    "chunked": LaneSettings(mix=True, token_budget=7, max_batch=5),
    "static": LaneSettings(mix=False, max_batch=3, refill_when_empty=True),
}
NUM_REQUESTS = 8
RNG = np.random.default_rng(3)
FIRST_PROMPTS = [tuple(RNG.integers(0, 211, int(n)).tolist()) for n in RNG.integers(1, 16, NUM_REQUESTS // 2)]
OUTPUTS = [int(n) for n in RNG.integers(1, 20, NUM_REQUESTS // 2)] + [9, 3, 6, 1]


@pytest.fixture(scope="module")
def worker(small_opt):
    return build_worker(
        WorkerSettings(spec=read_spec(small_opt[0]), dtype="float32", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    )


def fresh(worker, kind="plain"):
    """The same weights with an empty cache; "ahead" as on a GPU: decodes captured, and run ahead of the loop."""
    model, backend = worker.model, worker.backend
    cache = KvCache(model.spec, NUM_BLOCKS + (kind == "ahead"), BLOCK_SIZE, torch.float32, torch.device("cpu"))
    if kind == "plain":
        return Worker(model, cache, backend)
    run = GraphedModel(
        model,
        cache,
        backend,
        most_tokens=NUM_BLOCKS * BLOCK_SIZE,
        capture=run_again,
        sizes=(1, 2, 4, 8),
        mixed_sizes=(4, 16, 64),
    )
    return AheadWorker(model, cache, backend, run=run)


@pytest.fixture(scope="module")
def solitary(worker):
    """Prompts, and the tokens of each on its own; the second half goes on from the first, as conversations do."""
    prompts, tokens = list(FIRST_PROMPTS), []
    worker = fresh(worker)
    for number, output in enumerate(OUTPUTS):
        if number >= len(FIRST_PROMPTS):
            first = number - len(FIRST_PROMPTS)
            prompts.append((*prompts[first], *tokens[first], 7, number))
        engine = Engine(OneLane(LANES["orca"], Pool(NUM_BLOCKS, BLOCK_SIZE)), worker)
        engine.submit(Generation(0, prompts[number], output))
        tokens.append([token.token for step in iter(engine.step, None) for token in step])
    return prompts, tokens


def check_blocks(worker, pool):
    """Each block is free, kept, or in use; the worker's tables are the pool's, less what is yet to be told."""
    used = {block for request in pool.running.values() for block in request.table.blocks}
    assert len(used) == pool.memory.decodes.num_used <= pool.reserved_blocks <= NUM_BLOCKS
    rows = worker._rows
    for id_ in rows:
        if id_ in pool.running:
            count = rows.num_blocks[rows[id_]]
            assert rows.tables[rows[id_], :count].tolist() == pool.running[id_].table.blocks[:count]


@settings(max_examples=examples(25, 2))
@given(data=st.data())
@pytest.mark.parametrize(
    ("kind", "reuse"), few([("ahead", True), ("plain", False), ("ahead", False), ("plain", True)], 2)
)
@pytest.mark.parametrize(
    ("policy", "kv"),
    [(policy, kv) for policy in LANES for kv in ("reserve", "quantile") if (policy, kv) != ("static", "quantile")],
)
def test_tokens_and_blocks_whatever_joins_leaves_or_is_preempted(worker, solitary, policy, kv, kind, reuse, data):
    prompts, alone = solitary
    worker = fresh(worker, kind)
    pool = Pool(NUM_BLOCKS, BLOCK_SIZE, kv=kv, holds_finished=policy == "static")
    log = []
    engine = Engine(OneLane(LANES[policy], pool), worker, on_step=log.append, reuse=reuse)
    waiting = data.draw(st.permutations(range(NUM_REQUESTS)))
    leavers = data.draw(st.sets(st.integers(0, NUM_REQUESTS - 1), max_size=3))
    tokens = {id_: [] for id_ in waiting}
    ended = set()
    while waiting or not pool.is_idle:
        for _ in range(data.draw(st.integers(0 if not pool.is_idle else 1, 3))):
            if waiting:
                id_ = waiting.pop()
                engine.submit(Generation(id_, prompts[id_], OUTPUTS[id_]))
        for token in engine.step() or ():
            tokens[token.id].append(token.token)
            if token.finish:
                ended.add(token.id)
        check_blocks(worker, pool)
        for id_ in leavers & tokens.keys():
            if id_ not in waiting and len(tokens[id_]) >= OUTPUTS[id_] // 2:
                engine.cancel(id_)
    engine.step()  # takes in the last cancellations
    assert pool.reserved_blocks == 0
    for id_, solo in enumerate(alone):
        assert tokens[id_] == solo[: len(tokens[id_])]
        assert id_ in leavers or (id_ in ended and tokens[id_] == solo)

    again = Pool(NUM_BLOCKS, BLOCK_SIZE, kv=kv, holds_finished=policy == "static")
    replayed = replay(OneLane(LANES[policy], again), log)
    assert [(r.encode, r.decode, r.preempted) for r in replayed] == [(r.encode, r.decode, r.preempted) for r in log]


def test_what_happens_here(worker, solitary):
    """Requests are preempted, and share blocks with others that run and with those that have ended."""
    pool = Pool(NUM_BLOCKS, BLOCK_SIZE, kv="quantile")
    log = []
    engine = Engine(OneLane(LANES["orca"], pool), fresh(worker), on_step=log.append, reuse=True)
    for id_, prompt in enumerate(solitary[0]):
        engine.submit(Generation(id_, prompt, OUTPUTS[id_]))
    while engine.step() is not None:
        pass
    assert pool.num_preemptions > 0
    starts = [start for record in log for _, start, _ in record.encode]
    assert sum(map(bool, starts)) >= 3
