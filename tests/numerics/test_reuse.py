"""Tokens with reuse are those without, in every family and under every policy, whatever is cancelled, preempted or lost
in between."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.numerics.checkpoints import CHECKPOINTS, FAMILIES
from tests.rings import few
from xgpt.checkpoints.files import read_spec
from xgpt.core.policies import LaneSettings, OneLane, Pool, Step
from xrunner.build import WorkerSettings, build_worker
from xrunner.engine import Engine
from xrunner.executor import WorkerLost
from xrunner.generation import Generation
from xrunner.kv_cache import KvCache
from xrunner.worker import Worker

BLOCK_SIZE, NUM_BLOCKS = 4, 16
LANES = {
    "rra": LaneSettings(mix=False, encode_every=3, encode_tokens=14.0, carried_batch=3.0, decode_batch=5.0),
    "orca": LaneSettings(mix=True, max_batch=6),
    "chunked": LaneSettings(mix=True, token_budget=7, max_batch=6),
    "static": LaneSettings(mix=False, max_batch=3, refill_when_empty=True),
}
DECODERS = [next(n for n in CHECKPOINTS if n.startswith(family)) for family in FAMILIES if not family.endswith("t5")]
NUM_REQUESTS = 14


class Fragile(Worker):
    """Is lost at these steps, and has forgotten everything then."""

    def __init__(self, worker: Worker, cache: KvCache, lost_at: set[int]) -> None:
        super().__init__(worker.model, cache, worker.backend)
        self._lost_at, self._count = lost_at, 0

    def execute(self, step: Step) -> dict[int, int]:
        self._count += 1
        if self._count in self._lost_at:
            raise WorkerLost("a worker has died")
        return super().execute(step)


@pytest.fixture(scope="module")
def worker_of(checkpoint):
    workers = {}

    def make(name: str) -> Worker:
        if name not in workers:
            directory = checkpoint(name)[0]
            settings = WorkerSettings(
                spec=read_spec(directory),
                dtype="float32",
                checkpoint=directory,
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
            )
            workers[name] = build_worker(settings)
        return workers[name]

    return make


def prompts() -> list[tuple[int, ...]]:
    """Requests that begin with one of three prompts, or with all of another's."""
    rng = np.random.default_rng(5)
    begins = [tuple(rng.integers(4, 200, n).tolist()) for n in (4, 9, 17)]
    texts = [(*begins[n % 3], *rng.integers(4, 200, 1 + n % 5).tolist()) for n in range(NUM_REQUESTS - 2)]
    return [*texts, texts[2], (*texts[5], 7, 8)]


def run(
    worker: Worker, policy: str, kv: str, seed: int, *, reuse: bool, alone: bool = False
) -> tuple[list[list[int]], int, int, int]:
    """Return each request's tokens, and how many preemptions, losses and blocks that were found there were."""
    rng = np.random.default_rng(seed)
    cache = KvCache(worker.model.spec, NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    lost_at = set() if alone else set(rng.integers(3, 60, 3).tolist())
    executor = Fragile(worker, cache, lost_at)
    pool = Pool(NUM_BLOCKS, BLOCK_SIZE, kv=kv, holds_finished=policy == "static")
    log = []
    engine = Engine(OneLane(LANES[policy], pool), executor, on_step=log.append, reuse=reuse)
    tokens: list[list[int]] = [[] for _ in range(NUM_REQUESTS)]
    waiting = list(enumerate(prompts()))
    if not alone:
        rng.shuffle(waiting)
    preempted = 0
    while waiting or not engine.pool.is_idle:
        for _ in range(1 if alone else int(rng.integers(3))):
            if waiting and (not alone or engine.pool.is_idle):
                id_, prompt = waiting.pop()
                engine.submit(Generation(id_, tuple(prompt), 3 + id_))
        for token in engine.step() or ():
            assert token.finish != "error", token.error
            tokens[token.id].append(token.token)
        if not alone and rng.random() < 0.06:
            engine.cancel(int(rng.integers(NUM_REQUESTS)))
        preempted = max(preempted, engine.pool.num_preemptions)
    engine.step()
    assert engine.pool.reserved_blocks == engine.pool.memory.decodes.num_used == 0
    found = sum(start for record in log for _, start, _ in record.encode)
    return tokens, preempted, executor._count and len([n for n in lost_at if n <= executor._count]), found


@pytest.mark.parametrize("name", few(DECODERS))
def test_tokens_are_the_same(worker_of, name: str) -> None:
    worker = worker_of(name)
    alone, *_ = run(worker, "orca", "reserve", 0, reuse=False, alone=True)
    assert [len(tokens) for tokens in alone] == [3 + id_ for id_ in range(NUM_REQUESTS)]
    preempted = lost = found = cut = 0
    for seed, (policy, kv) in enumerate(
        (policy, kv) for policy in LANES for kv in ("reserve", "quantile") if (policy, kv) != ("static", "quantile")
    ):
        tokens, *seen = run(worker, policy, kv, seed, reuse=True)
        for one, of_alone in zip(tokens, alone, strict=True):
            assert one == of_alone[: len(one)], (policy, kv)
            cut += len(one) < len(of_alone)
        preempted, lost, found = preempted + seen[0], lost + seen[1], found + seen[2]
    assert min(preempted, lost, found, cut) > 0, (preempted, lost, found, cut)
