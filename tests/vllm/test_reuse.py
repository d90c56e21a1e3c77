"""vLLM's prefix caching under our rule: the same tokens, the hits that the rule has counted, block for block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from tests.vllm.offline import ROOM, Front, Requests, generate, start
from tests.vllm.plans import plan_with
from xgpt.core.io import dump_json, read_step_log
from xgpt.core.schema import ChunkedSettings, OrcaSettings, RraSettings
from xgpt.core.schema.step_log import StepRecord
from xrunner.vllm.lane import build_lane
from xrunner.vllm.scheduler import XgptScheduler
from xsimulator.events import replay

RRA = plan_with(RraSettings(encode_batch=6, decode_iterations=5))
TIGHT = plan_with(OrcaSettings(max_batch=40), kv="quantile", kv_tokens=1280)
NUM_REQUESTS = 50


def alike() -> Requests:
    """Requests that begin with one of four prompts, or with all that an earlier one said."""
    rng = np.random.default_rng(1)
    begins = [rng.integers(5, 50000, n).tolist() for n in (20, 64, 70, 130)]
    prompts = [
        [*begins[int(rng.integers(4))], *rng.integers(5, 50000, int(rng.integers(1, 30))).tolist()] for _ in range(40)
    ]
    prompts += [prompt[: int(rng.integers(33, 40))] for prompt in prompts if len(prompt) > 64][: NUM_REQUESTS - 40]
    return Requests(prompts, rng.integers(1, 30, len(prompts)).tolist())


@pytest.fixture(scope="module")
def sharing() -> Requests:
    return alike()


@pytest.fixture(scope="module")
def computed(checkpoint: Path, sharing: Requests) -> list[list[int]]:
    """The tokens of vLLM's own scheduler, every prompt computed whole."""
    llm = start(checkpoint, "vllm.v1.core.sched.scheduler.Scheduler", {})
    try:
        return generate(llm, sharing)
    finally:
        llm.llm_engine.engine_core.shutdown()


class Sharing:
    """vLLM in this process, its scheduler, and the log of its steps."""

    def __init__(self, llm: LLM, front: Front, path: Path) -> None:
        self.llm, self.front, self._path = llm, front, path
        self.scheduler: XgptScheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]

    def steps(self) -> list[StepRecord]:
        return read_step_log(self._path)

    def check(self) -> None:
        """Whether vLLM has each request's blocks where the rule has them, and counts their uses alike."""
        pool, manager = self.scheduler._lane.pool, self.scheduler.kv_cache_manager
        vllms = manager.block_pool
        uses: dict[int, int] = {}
        for number, request in pool.running.items():
            table = request.table
            assert table is not None
            (ids,) = manager.get_block_ids(self.scheduler._name[number])
            assert ids == [block + 1 for block in table.blocks[: len(ids)]]
            assert len(ids) * ROOM.block_size >= request.encoded
            for id_ in ids:
                uses[id_] = uses.get(id_, 0) + 1
        assert {block.block_id: block.ref_cnt for block in vllms.blocks if block.ref_cnt and not block.is_null} == uses
        assert len(uses) <= pool.memory.decodes.num_used <= pool.kv_blocks
        assert pool.kv_blocks - pool.memory.decodes.num_used <= vllms.get_num_free_blocks()


@pytest.fixture(scope="module")
def inside(checkpoint: Path, computed: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharing]:
    directory = tmp_path_factory.mktemp("sharing")
    plan, log = directory / "plan.json", directory / "steps.jsonl"
    plan.write_text(dump_json(RRA))
    front = Front(directory)
    config = {"plan": str(plan), "step_log": str(log), "front": str(directory), "lane": "both"}
    llm = start(checkpoint, "xrunner.vllm.scheduler.XgptScheduler", config, reuse=True)
    front.wait_for_core()
    yield Sharing(llm, front, log)
    llm.llm_engine.engine_core.shutdown()
    front.close()


def decided(log: list[StepRecord]) -> list[tuple[object, ...]]:
    return [(record.encode, record.decode, record.finished, record.preempted) for record in log]


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(RRA, id="rra"),
        pytest.param(plan_with(ChunkedSettings(token_budget=48, max_batch=12)), id="chunked"),
        pytest.param(plan_with(OrcaSettings(max_batch=10), kv="quantile"), id="orca-quantile"),
        pytest.param(TIGHT, id="preempting"),
    ],
)
def test_tokens_are_the_same_and_hits_the_rules(
    plan, inside: Sharing, sharing: Requests, computed: list[list[int]]
) -> None:
    before = len(inside.steps())
    inside.front.send_plan(plan)
    assert generate(inside.llm, sharing) == computed
    log = [r._replace(number=r.number - before, settled=r.settled - before) for r in inside.steps()[before:]]
    # The simulated engine, given keys in place of tokens, finds the same blocks at the same steps.
    assert decided(replay(build_lane(plan, ROOM), log)) == decided(log)
    first = {}
    for record in log:
        for id_, start_token, _ in record.encode:
            first.setdefault(id_, start_token)
    assert sum(first.values()) > 0.2 * sum(map(len, sharing.prompts))


@pytest.mark.parametrize("plan", [RRA, TIGHT], ids=["rra", "preempting"])
def test_no_block_is_lost_where_requests_are_cancelled_and_preempted(plan, inside: Sharing) -> None:
    rng = np.random.default_rng(2)
    begins = [rng.integers(5, 50000, n).tolist() for n in (33, 70, 96)]
    inside.front.send_plan(plan)
    engine, before, alive = inside.llm.llm_engine, len(inside.steps()), []
    submitted = 0
    while submitted < 250 or engine.has_unfinished_requests():
        for _ in range(int(rng.integers(4)) if submitted < 250 and len(alive) < 30 else 0):
            prompt = [*begins[int(rng.integers(3))], *rng.integers(5, 9, int(rng.integers(1, 40))).tolist()]
            most = int(rng.integers(1, 50))
            params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
            alive.append(f"{plan.policy.kind}-{submitted}")
            engine.add_request(alive[-1], {"prompt_token_ids": prompt}, params)
            submitted += 1
        if alive and rng.random() < 0.1:
            engine.abort_request([alive.pop(int(rng.integers(len(alive))))])
        for output in engine.step():
            if output.finished and output.request_id in alive:
                alive.remove(output.request_id)
        inside.check()
    log, pool = inside.steps()[before:], inside.scheduler._lane.pool
    assert pool.is_idle and pool.memory.decodes.num_used == pool.reserved_blocks == 0
    assert inside.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == ROOM.num_blocks
    assert any(record.cancelled for record in log) and any(start > 0 for r in log for _, start, _ in r.encode)
    assert any(record.preempted for record in log) == (plan is TIGHT)
