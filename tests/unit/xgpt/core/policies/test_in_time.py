"""The order in time: as few requests as possible are late, and those that are wait for the others."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rings import examples
from xgpt.core.policies.admission import Queue, make_queue
from xgpt.core.policies.in_time import FirstTokens, Job, Pace, that_give_way
from xgpt.core.policies.lane_settings import LaneSettings
from xgpt.core.policies.pool import Pool
from xgpt.core.policies.request import Request
from xgpt.core.policies.schedule import OneLane
from xgpt.core.policies.slack import StepClock
from xgpt.core.schema import StepTimes

PACE = Pace(token_ns=1.0)


def nanosecond_a_token(ttft_ns: int) -> FirstTokens:
    times = StepTimes(
        tokens=(0, 1000),
        tokens_s=(0.0, 1e-6),
        prompts=(0, 1000),
        prompts_s=(0.0, 0.0),
        decode_s=0,
        context_s=0,
        error=0,
    )
    return FirstTokens(StepClock(times), ttft_ns)


def queue_of(ttft_ns: int, *requests: tuple[int, int, int]) -> Queue:
    """A queue of (id, length, arrival) in time."""
    queue = make_queue("in-time", first_tokens=nanosecond_a_token(ttft_ns))
    for id_, length, arrival_ns in requests:
        queue.push(Request(id_, length, 10, arrival_ns))
    return queue


def ids(queue: Queue) -> list[int]:
    return [request.id for request in queue.ahead(len(queue))]


@settings(max_examples=examples(200, 50))
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 80)), max_size=7))
def test_no_other_choice_has_fewer_late(prompts: list[tuple[int, int]]) -> None:
    jobs = sorted(Job(due, i, i, tokens, 0.0) for i, (tokens, due) in enumerate(prompts))
    late = that_give_way(jobs, 0, PACE)
    assert is_in_time([job for job in jobs if job.id not in late])
    kept = len(jobs) - len(late)
    assert not any(is_in_time(chosen) for chosen in combinations(jobs, kept + 1))


def is_in_time(jobs: list[Job] | tuple[Job, ...]) -> bool:
    """Whether all are, one after the other, the first that is due first."""
    ends = [sum(job.tokens for job in jobs[: i + 1]) for i in range(len(jobs))]
    return all(end <= job.due_ns for end, job in zip(ends, jobs, strict=True))


def test_the_longest_gives_way_where_not_all_can_be_in_time() -> None:
    queue = queue_of(100, (0, 20, 0), (1, 70, 0), (2, 30, 0))
    assert ids(queue) == [0, 1, 2]
    queue.plan((), PACE)
    assert ids(queue) == [0, 2, 1]
    queue.plan((), Pace(0.5))  # twice as fast all are in time
    assert ids(queue) == [0, 1, 2]


def test_looking_changes_nothing_and_the_too_late_stay_last() -> None:
    queue = queue_of(100, (0, 60, 0), (1, 60, 10), (2, 60, 70))
    queue.expire(45)
    queue.plan((), PACE)
    assert ids(queue) == ids(queue) == [1, 2, 0]  # the first had to begin by 40
    assert queue.head_gives_way() is False
    assert [queue.pop().id for _ in range(2)] == [1, 2]
    assert queue.head_gives_way()


def test_a_prompt_that_is_begun_gives_way_and_goes_on_later() -> None:
    """A long prompt once held up all that came after it, its own bound long broken."""
    times = nanosecond_a_token(100)
    settings_ = LaneSettings(mix=True, token_budget=40, first_tokens=times)
    pool = Pool(1000, 16, waiting=make_queue("in-time", first_tokens=times))
    lane = OneLane(settings_, pool)
    lane.submit(Request(0, 90, 1, 0))
    lane.expire(0)
    step = lane.next_step("both")
    assert step is not None and [chunk.id for chunk in step.encode] == [0]
    lane.settle(step, ())
    for id_ in (1, 2):
        lane.submit(Request(id_, 20, 1, 45))
    lane.expire(60)  # 50 tokens are left, and due at 100
    step = lane.next_step("both")
    assert step is not None and [(chunk.id, chunk.length) for chunk in step.encode] == [(1, 20), (2, 20)]
    lane.settle(step, (1, 2))
    step = lane.next_step("both")
    assert step is not None and [(chunk.id, chunk.start) for chunk in step.encode] == [(0, 40)]
