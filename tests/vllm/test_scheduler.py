"""Our rule inside vLLM: the same tokens as vLLM's own scheduler, the steps that the rule decides."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm import LLM

from tests.vllm.offline import MOST_TOKENS, ROOM, Front, Requests, generate, start
from tests.vllm.plans import plan_with
from xgpt.core.io import dump_json, read_step_log
from xgpt.core.schema import (
    AdmissionOrder,
    ChunkedSettings,
    OrcaSettings,
    Plan,
    RraSettings,
    SingleLaneSettings,
    SlackBudget,
    StepTimes,
)
from xgpt.core.schema.step_log import StepRecord
from xrunner.channel.messages import Followed, Stepped
from xrunner.vllm.lane import build_lane
from xsimulator.events import replay

RRA = RraSettings(encode_batch=6, decode_iterations=5)


def ordered(order: AdmissionOrder) -> Plan:
    """A plan whose requests enter in another order than they come in."""
    plan = plan_with(OrcaSettings(max_batch=10))
    row_tokens = 200 if order == "das" else None
    admission = plan.admission.model_copy(update={"order": order, "row_tokens": row_tokens})
    return plan.model_copy(update={"admission": admission})


TIMES = StepTimes(
    tokens=(0, 512),
    tokens_s=(0.002, 0.3),
    prompts=(0, 512),
    prompts_s=(0, 0.02),
    decode_s=1e-4,
    context_s=1e-7,
    error=0,
)
"""About what a core takes for the checkpoint's steps."""


def by_the_clock(policy: SingleLaneSettings) -> Plan:
    """A plan whose steps are decided by times, and whose requests enter in time."""
    plan = plan_with(policy)
    update = {
        "constraint": plan.constraint.model_copy(update={"ttft_s": 2.0, "tpot_s": 0.1}),
        "estimate": plan.estimate.model_copy(update={"step_times": TIMES}),
        "admission": plan.admission.model_copy(update={"order": "in-time"}),
    }
    return plan.model_copy(update=update)


SLACK = ChunkedSettings(token_budget=96, max_batch=12, slack=SlackBudget(least_tokens=4, most_tokens=256))


class Running(NamedTuple):
    llm: LLM
    front: Front
    log: Path

    def run(self, plan: Plan, requests: Requests) -> tuple[list[list[int]], list[StepRecord]]:
        """Change to the plan, and run the requests: their tokens, and the steps that made them."""
        before = len(read_step_log(self.log))
        self.front.send_plan(plan)
        tokens = generate(self.llm, requests)
        log = read_step_log(self.log)[before:]
        return tokens, [r._replace(number=r.number - before, settled=r.settled - before) for r in log]


@pytest.fixture(scope="module")
def running(checkpoint: Path, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("running")
    plan, log = directory / "plan.json", directory / "steps.jsonl"
    plan.write_text(dump_json(plan_with(RRA)))
    front = Front(directory)
    config = {"plan": str(plan), "step_log": str(log), "front": str(directory), "lane": "both"}
    llm = start(checkpoint, "xrunner.vllm.scheduler.XgptScheduler", config)
    front.wait_for_core()
    yield Running(llm, front, log)
    llm.llm_engine.engine_core.shutdown()
    front.close()


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
        pytest.param(by_the_clock(SLACK), id="slack"),
        pytest.param(ordered("edf"), id="edf"),
        pytest.param(ordered("das"), id="das"),
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
            message = running.front.told(60)
            assert message is not None
            if isinstance(message, Stepped):
                num_ended += sum(len(record.finished) for record in message.records)
        running.front.send_plan(after)

    while running.front.told(0.1) is not None:
        pass
    changing = threading.Thread(target=change_in_mid_run)
    changing.start()
    tokens, log = running.run(before, requests)
    changing.join()
    messages = list(iter(lambda: running.front.told(1), None))
    assert Followed() in messages
    assert tokens == expected
    assert sorted(id_ for record in log for id_ in record.finished) == sorted(a.id for r in log for a in r.arrivals)
    assert any(record.encode and record.decode for record in log[:20])
    assert not any(record.encode and record.decode for record in log[-20:])
