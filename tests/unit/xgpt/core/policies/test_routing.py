"""Requests go where their prompts' beginnings lie, unless that replica has much more to do."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fakes import fake_plan
from tools.structured import conversations, shared_prompts
from xgpt.core.policies import routing
from xgpt.core.policies.routing import BLOCKS_A_KEY, ReplicaRouter
from xgpt.core.reuse_distances import ReuseCurve
from xgpt.core.workload import TraceLengths
from xsimulator.counts import homes
from xsimulator.shares import routed, share_of_replica

A, B = (b"a1", b"a2", b"a3"), (b"b1", b"b2")


def test_where_the_longest_beginning_lies_or_else_the_fewest_are() -> None:
    router = ReplicaRouter(3, slack=2)
    assert [router.route(A), router.route(B), router.route(())] == [0, 1, 2]
    assert router.route((*A[:2], b"other")) == 0
    assert router.route(B) == 1
    assert router.route(A) == 0
    assert router.load == [3, 2, 1]
    assert router.route(A) == 0, "two more than the least is not too many"
    assert router.route(A) == 2, "three are"
    assert router.route(A) == 2, "where its beginning lies now"
    for number in (0, 0, 0, 0):
        router.leave(number)
    assert router.route(B) == 1 and router.load == [0, 3, 3]


def test_of_half_a_prompt_a_quarter_of_the_slack_is_left() -> None:
    """The requests that are waited for have the other half to encode themselves."""
    router = ReplicaRouter(2, slack=8)
    assert [router.route((b"a1", b"a2"))] + [router.route((b"a1", b"%d" % n)) for n in range(3)] == [0, 0, 0, 1]


def found(trace: TraceLengths, tokens: float) -> float:
    return ReuseCurve(trace, 16).share(tokens)


@pytest.mark.long
def test_a_replica_finds_nearly_as_much_as_one_that_has_all_requests() -> None:
    """With half of the requests and a quarter of the memory; routed one by one in turns it finds much less."""
    plan = fake_plan(replicas=4, block_size=16)
    plan = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"decode_batch": 16.0})})
    for make, kept in ((shared_prompts, 20_000), (conversations, 12_000)):
        trace = make(6000, np.random.default_rng(0))
        mine = share_of_replica(trace, plan)
        assert 0.2 < len(mine.input) / 6000 < 0.3
        in_turns = trace.take(np.arange(0, 6000, 4))
        assert found(mine, kept) > found(in_turns, kept) + 0.1
        assert found(mine, kept) > found(trace, 4 * kept) - 0.15


@pytest.mark.parametrize("most_keys", [100, 131_072])
def test_a_trace_is_routed_as_requests_are(most_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "MOST_KEYS", most_keys)
    monkeypatch.setattr(routing, "MOST_KEYS", most_keys)
    plan = fake_plan(replicas=3, block_size=16)
    plan = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"decode_batch": 4.5})})
    for make in (shared_prompts, conversations):
        trace = make(400, np.random.default_rng(1))
        assert trace.prefixes is not None
        router, chosen = ReplicaRouter.of(plan), list[int]()
        for number, length in enumerate(trace.input.tolist()):
            if number > 13:  # as many as the plan's run
                router.leave(chosen[number - 14])
            chosen.append(router.route(trace.prefixes.chain(number, length, BLOCKS_A_KEY * plan.block_size)))
        found = routed(trace, plan)
        assert [own.tolist() for own in found] == [[i for i, at in enumerate(chosen) if at == r] for r in range(3)]
        assert len(set(chosen)) == 3


def test_one_replica_has_all_requests() -> None:
    trace = shared_prompts(50, np.random.default_rng(0))
    assert share_of_replica(trace, fake_plan()) is trace
    assert BLOCKS_A_KEY > 1
