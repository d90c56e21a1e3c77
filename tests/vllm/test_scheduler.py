"""Our rule inside vLLM: the same tokens as vLLM's own scheduler, the steps that the rule decides."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm import LLM

from tests.vllm.offline import MOST_TOKENS, ROOM, Requests, generate, start
from tests.vllm.plans import plan_with
from xgpt.app.serving_vllm import follow
from xgpt.io import dump_json, read_step_log, sha256
from xgpt.schema import ChunkedSettings, Decision, Observation, OrcaSettings, Outcome, Plan, Proposal, RraSettings
from xgpt.schema.step_log import StepRecord
from xrunner.vllm.channel import Accepted, Ended, ServerSide
from xrunner.vllm.lane import build_lane
from xsimulator.events import replay

RRA = RraSettings(encode_batch=6, decode_iterations=5)


class Running(NamedTuple):
    llm: LLM
    control: ServerSide
    log: Path

    def run(self, plan: Plan, requests: Requests) -> tuple[list[list[int]], list[StepRecord]]:
        """Change to the plan, and run the requests: their tokens, and the steps that made them."""
        before = len(read_step_log(self.log))
        self.control.send(plan)
        tokens = generate(self.llm, requests)
        log = read_step_log(self.log)[before:]
        return tokens, [r._replace(number=r.number - before, settled=r.settled - before) for r in log]


@pytest.fixture(scope="module")
def running(checkpoint: Path, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("running")
    plan, log, address = directory / "plan.json", directory / "steps.jsonl", f"ipc://{directory}/control"
    plan.write_text(dump_json(plan_with(RRA)))
    control = ServerSide(address)
    config = {"plan": str(plan), "step_log": str(log), "control": address}
    llm = start(checkpoint, "xrunner.vllm.scheduler.XgptScheduler", config)
    hello = control.receive(10)
    assert hello is not None and isinstance(hello[1], Accepted)
    yield Running(llm, control, log)
    llm.llm_engine.engine_core.shutdown()
    control.close()


def steps(log: list[StepRecord]) -> list[tuple[Any, ...]]:
    return [(record.encode, record.decode, record.finished, record.preempted) for record in log]


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan_with(RRA), id="rra"),
        pytest.param(plan_with(RRA, kv="quantile"), id="rra-quantile"),
        pytest.param(plan_with(ChunkedSettings(token_budget=96, max_batch=12)), id="chunked"),
        pytest.param(plan_with(OrcaSettings(max_batch=10)), id="orca"),
        pytest.param(plan_with(OrcaSettings(max_batch=40), kv="quantile", kv_tokens=1280), id="preempting"),
    ],
)
def test_tokens_are_vllms_and_steps_the_rules(
    plan: Plan, running: Running, requests: Requests, expected: list[list[int]]
) -> None:
    tokens, log = running.run(plan, requests)
    assert tokens == expected
    # The simulated engine, fed with the log's arrivals, endings and times, decides every step alike.
    assert steps(replay(build_lane(plan, ROOM), log)) == steps(log)
    if plan.stages[0].kv_blocks * plan.block_size < 2000:
        assert any(record.preempted for record in log)


def test_rra_encodes_after_so_many_decode_iterations(running: Running, requests: Requests) -> None:
    _, log = running.run(plan_with(RRA), requests)
    encodes = [i for i, record in enumerate(log) if record.encode]
    assert len(encodes) > 5
    assert all(not record.decode for record in log if record.encode)
    assert np.all(np.diff(encodes) == 1 + RRA.decode_iterations)


def test_a_step_of_more_tokens_than_vllm_takes_is_executed_in_several(
    running: Running, requests: Requests, expected: list[list[int]]
) -> None:
    plan = plan_with(RRA)
    plan = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"encode_tokens": 1500.0})})
    tokens, log = running.run(plan, requests)
    assert tokens == expected
    # All of them are one step in the log, as they are one of the rule.
    assert max(sum(count for _, _, count in record.encode) for record in log) > 2 * MOST_TOKENS
    assert steps(replay(build_lane(plan, ROOM), log)) == steps(log)


def test_a_plan_changes_while_requests_run(running: Running, requests: Requests, expected: list[list[int]]) -> None:
    before, after = plan_with(ChunkedSettings(token_budget=48, max_batch=8)), plan_with(RRA)

    def change_in_mid_run() -> None:
        num_ended = 0
        while num_ended < 20:
            _, message = running.control.receive(60) or (0, None)
            num_ended += isinstance(message, Ended)
        running.control.send(after)

    while running.control.receive(0.1) is not None:
        pass
    changing = threading.Thread(target=change_in_mid_run)
    changing.start()
    tokens, log = running.run(before, requests)
    changing.join()
    messages = list(iter(lambda: running.control.receive(1), None))
    assert (0, Accepted(sha256(after))) in messages
    assert tokens == expected
    assert sorted(id_ for record in log for id_ in record.finished) == sorted(a.id for r in log for a in r.arrivals)
    assert any(record.encode and record.decode for record in log[:20])
    assert not any(record.encode and record.decode for record in log[-20:])


class _Swap:
    """A planner that has found a better plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.observed: list[Observation] = []

    def predict_s(self, plan: Plan, encode: list[tuple[int, int, int]], decode_contexts: list[int]) -> float:
        return 0.0

    async def propose(self, plan: Plan, observation: Observation) -> Proposal:
        self.observed.append(observation)
        outcome = Outcome(policy=self._plan.policy, throughput_rps=1.0, latency_s=1.0, keeps_bound=None)
        decision = Decision(
            at="2026-01-01T00:00:00+00:00",
            action="swap",
            reason="lengths are others",
            num_requests=observation.num_requests,
            input_mean=1.0,
            output_mean=1.0,
            running=outcome,
            best=outcome,
            gain=1.0,
            pause_s=0.0,
            plan_sha256=sha256(self._plan),
            planning_s=0.0,
        )
        return Proposal(decision, self._plan)

    async def close(self) -> None:
        pass


def test_a_length_shift_is_followed_without_a_restart(
    running: Running, requests: Requests, expected: list[list[int]]
) -> None:
    """The plans are for longer requests; what `xgpt serve` does when these come, on the channel of a running vLLM."""
    before, after = plan_with(ChunkedSettings(token_budget=48, max_batch=8)), plan_with(RRA)
    planner, stopping = _Swap(after), threading.Event()
    while running.control.receive(0.1) is not None:
        pass
    following = threading.Thread(
        target=lambda: asyncio.run(follow(before, running.control, planner, lambda: not stopping.is_set()))
    )
    running.control.send(before)
    following.start()
    first_step = len(read_step_log(running.log))
    for _ in range(3):
        assert generate(running.llm, requests) == expected
    stopping.set()
    following.join()
    log = read_step_log(running.log)[first_step:]
    assert planner.observed and planner.observed[0].num_finished >= 100
    assert sum(len(record.finished) for record in log) == 3 * len(expected)
    assert any(record.encode and record.decode for record in log[:20])
    assert not any(record.encode and record.decode for record in log[-20:])
