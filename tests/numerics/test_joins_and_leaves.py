"""Random joins, leaves and preemptions, drawn by hypothesis: tokens are always those of a solitary run."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.numerics.steps import run_again
from xgpt.checkpoint import read_spec
from xgpt.policies import LaneSettings, OneLane, Pool
from xrunner.ahead import AheadWorker
from xrunner.build import WorkerSettings, build_worker
from xrunner.engine import Engine
from xrunner.generation import Generation
from xrunner.graphs import FILLER, GraphedModel
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
PROMPTS = [tuple(RNG.integers(0, 211, int(n)).tolist()) for n in RNG.integers(1, 16, NUM_REQUESTS)]
OUTPUTS = [int(n) for n in RNG.integers(1, 20, NUM_REQUESTS)]


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
        model, cache, backend, most_tokens=NUM_BLOCKS * BLOCK_SIZE, capture=run_again, sizes=(1, 2, 4, 8)
    )
    return AheadWorker(model, cache, backend, run=run)


@pytest.fixture(scope="module")
def solitary(worker):
    """Tokens of each request on its own."""
    tokens = []
    worker = fresh(worker)
    for prompt, output in zip(PROMPTS, OUTPUTS, strict=True):
        engine = Engine(OneLane(LANES["orca"], Pool(NUM_BLOCKS, BLOCK_SIZE)), worker)
        engine.submit(Generation(0, prompt, output))
        tokens.append([token.token for step in iter(engine.step, None) for token in step])
    return tokens


def owners(worker):
    """Return how many blocks requests own, those taken early apart; each is free or of one request."""
    owned = [block for blocks in worker.cache._owned.values() for block in blocks]
    everything = sorted(owned + worker.cache._free)
    assert everything == list(range(worker.cache.num_blocks))
    ahead = getattr(worker, "_ahead", None)
    return len(owned) - (FILLER in worker.cache._owned) - (len(ahead.extended) if ahead else 0)


@settings(deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("kind", ["plain", "ahead"])
@pytest.mark.parametrize(
    ("policy", "kv"),
    [(policy, kv) for policy in LANES for kv in ("reserve", "quantile") if (policy, kv) != ("static", "quantile")],
)
def test_tokens_and_blocks_whatever_joins_leaves_or_is_preempted(worker, solitary, policy, kv, kind, data):
    worker = fresh(worker, kind)
    pool = Pool(NUM_BLOCKS, BLOCK_SIZE, kv=kv, hold_finished=policy == "static")
    log = []
    engine = Engine(OneLane(LANES[policy], pool), worker, on_step=log.append)
    waiting = data.draw(st.permutations(range(NUM_REQUESTS)))
    leavers = data.draw(st.sets(st.integers(0, NUM_REQUESTS - 1), max_size=3))
    tokens = {id_: [] for id_ in waiting}
    ended = set()
    while waiting or not pool.is_idle:
        for _ in range(data.draw(st.integers(0 if not pool.is_idle else 1, 3))):
            if waiting:
                id_ = waiting.pop()
                engine.submit(Generation(id_, PROMPTS[id_], OUTPUTS[id_]))
        for token in engine.step() or ():
            tokens[token.id].append(token.token)
            if token.finish:
                ended.add(token.id)
        assert owners(worker) <= pool.reserved_blocks <= NUM_BLOCKS
        for id_ in leavers & tokens.keys():
            if id_ not in waiting and len(tokens[id_]) >= OUTPUTS[id_] // 2:
                engine.cancel(id_)
    engine.step()  # takes in the last cancellations
    assert owners(worker) == 0 and pool.reserved_blocks == 0
    for id_, solo in enumerate(solitary):
        assert tokens[id_] == solo[: len(tokens[id_])]
        assert id_ in leavers or (id_ in ended and tokens[id_] == solo)

    again = Pool(NUM_BLOCKS, BLOCK_SIZE, kv=kv, hold_finished=policy == "static")
    replayed = replay(OneLane(LANES[policy], again), log)
    assert [(r.encode, r.decode, r.preempted) for r in replayed] == [(r.encode, r.decode, r.preempted) for r in log]


def test_preemption_happens_here(worker):
    pool = Pool(NUM_BLOCKS, BLOCK_SIZE, kv="quantile")
    engine = Engine(OneLane(LANES["orca"], pool), fresh(worker))
    for id_ in range(NUM_REQUESTS):
        engine.submit(Generation(id_, PROMPTS[id_], OUTPUTS[id_]))
    while engine.step() is not None:
        pass
    assert pool.num_preemptions > 0
