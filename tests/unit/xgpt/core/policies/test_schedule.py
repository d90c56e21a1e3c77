"""The order of steps on pipelines and on two lanes, on cases small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from xgpt.core.policies import LaneSettings, OneLane, Pool, Request, Schedule, Step, TwoLane, TwoLaneSettings
from xsimulator.events import SimulatedEngine, SimulatedRequest

WAA = TwoLaneSettings(encode_tokens=20.0, encode_stages=2, encode_blocks=100, max_decode_batch=6)


def submit(schedule: Schedule, *input_lengths: int, max_output: int = 100) -> None:
    for id_, length in enumerate(input_lengths):
        schedule.submit(Request(id_, length, max_output))


def submit_more(schedule: Schedule, count: int) -> None:
    for id_ in range(1000, 1000 + count):
        schedule.submit(Request(id_, 10, 100))


def begin(schedule: Schedule, lane: str = "both") -> list[Step]:
    """Every step that the lane gives now."""
    return list(iter(lambda: schedule.next_step(lane), None))  # type: ignore[arg-type]


def encoded(step: Step) -> list[int]:
    return [chunk.id for chunk in step.encode]


def test_micro_batches_share_one_queue_and_take_turns() -> None:
    schedule = OneLane(LaneSettings(mix=True, max_batch=5, microbatches=2), Pool(1000, 16))
    submit(schedule, *[10] * 6)
    first, second = begin(schedule)
    assert (encoded(first), encoded(second)) == ([0, 1, 2], [3, 4])
    # Nothing more before the one whose turn it is has come back.
    schedule.settle(first, [0])
    (third,) = begin(schedule)
    assert (third.microbatch, encoded(third), third.decode) == (0, [5], (1, 2))
    schedule.settle(second, [])
    (fourth,) = begin(schedule)
    assert (fourth.microbatch, fourth.decode) == (1, (3, 4))


def test_one_with_nothing_to_do_is_passed_over() -> None:
    schedule = OneLane(LaneSettings(mix=True, max_batch=4, microbatches=4), Pool(1000, 16))
    submit(schedule, 10)
    (first,) = begin(schedule)
    schedule.settle(first, [])
    (again,) = begin(schedule)
    assert (again.microbatch, again.decode) == (0, (0,))


def test_rra_on_a_pipeline_divides_its_prompts() -> None:
    lane = LaneSettings(
        mix=False, encode_every=2, encode_tokens=40.0, carried_batch=4.0, decode_batch=8.0, microbatches=2
    )
    schedule = OneLane(lane, Pool(1000, 16))
    submit(schedule, *[10] * 8)
    log = []
    under_way: list[Step] = []
    for _ in range(10):
        under_way += begin(schedule)
        step = under_way.pop(0)
        log.append((step.microbatch, encoded(step), list(step.decode)))
        schedule.settle(step, [])
    assert log[:6] == [
        (0, [0, 1], []),
        (1, [2, 3], []),
        (0, [], [0, 1]),
        (1, [], [2, 3]),
        (0, [], [0, 1]),
        (1, [], [2, 3]),
    ]
    assert log[6:8] == [(0, [4, 5], []), (1, [6, 7], [])]


def test_static_batches_are_encoded_in_parts_and_end_together() -> None:
    """DeepSpeed Inference's hybrid: four encode micro-batches, two decode micro-batches."""
    lane = LaneSettings(mix=False, max_batch=8, refill_when_empty=True, microbatches=2, encode_parts=2)
    schedule = OneLane(lane, Pool(1000, 16, holds_finished=True))
    submit(schedule, *[10] * 9)
    parts = begin(schedule)
    assert [(p.microbatch, encoded(p)) for p in parts] == [(0, [0, 1]), (0, [2, 3]), (1, [4, 5]), (1, [6, 7])]
    for part in parts[:2]:
        schedule.settle(part, [])
    (decode,) = begin(schedule)
    assert (decode.microbatch, decode.decode) == (0, (0, 1, 2, 3))
    for part in parts[2:]:
        schedule.settle(part, [4, 5, 6, 7] if part is parts[3] else [])
    assert begin(schedule) == []
    assert schedule.settle(decode, [0, 1, 2, 3]) == [0, 1, 2, 3, 4, 5, 6, 7]
    (part,) = begin(schedule)
    assert encoded(part) == [8]


def test_who_is_under_way_is_not_preempted() -> None:
    """Blocks run out for request 0, the newest, 2, is under way: 1 must go."""
    schedule = OneLane(LaneSettings(mix=True, max_batch=3, microbatches=2), Pool(4, 4, kv="quantile"))
    submit(schedule, 4, 4, 4)
    first, second = begin(schedule)
    assert (encoded(first), encoded(second)) == ([0, 1], [2])
    schedule.settle(first, [])
    (third,) = begin(schedule)
    assert (third.decode, third.preempted) == ((0,), (1,))
    assert [request.id for request in schedule.pool.waiting] == [1]


def test_a_request_cancelled_under_way_leaves_with_its_step() -> None:
    schedule = OneLane(LaneSettings(mix=True, max_batch=2), Pool(1000, 16))
    submit(schedule, 10, 10)
    (step,) = begin(schedule)
    assert schedule.cancel(1) == []
    assert schedule.pool.is_silent(1)
    assert schedule.settle(step, []) == [1]
    assert list(schedule.pool.running) == [0]


def test_waa_passes_requests_from_lane_to_lane() -> None:
    schedule = TwoLane(WAA, Pool(1000, 16))
    submit(schedule, *[10] * 8)
    first, second = begin(schedule, "encode")
    assert [encoded(first), encoded(second)] == [[0, 1], [2, 3]]
    assert begin(schedule, "decode") == begin(schedule, "transfer") == []
    # A request that its first token ends needs no transfer.
    assert schedule.settle(first, [1]) == [1]
    (transfer,) = begin(schedule, "transfer")
    assert transfer.transfer == (0,)
    assert begin(schedule, "decode") == []
    schedule.settle(transfer, [])
    (decode,) = begin(schedule, "decode")
    assert decode.decode == (0,)
    # Three inside, and room for three more: the next batch of two.
    (third,) = begin(schedule, "encode")
    assert encoded(third) == [4, 5]
    schedule.settle(second, [])
    # Five inside: the next batch waits until all of it fits.
    assert begin(schedule, "encode") == []
    schedule.settle(decode, [0])
    (fourth,) = begin(schedule, "encode")
    assert encoded(fourth) == [6, 7]


@pytest.mark.parametrize("ends_in", ["encode", "decode"])
def test_waa_shares_no_blocks_that_nothing_has_been_written_into(ends_in: str) -> None:
    """A request that its first token ends never comes to the decode lane: its blocks there hold nothing."""
    schedule = TwoLane(WAA, Pool(1000, 4))
    chain = tuple(bytes([number]) for number in range(4))
    schedule.submit(Request(0, 16, 100, chain=chain))
    for lane in ("encode", "transfer", "decode"):
        (step,) = begin(schedule, lane)
        schedule.settle(step, [0] if lane == ends_in else [], {0: ()})
        if lane == ends_in:
            break
    schedule.submit(Request(1, 20, 100, chain=(*chain, b"more")))
    (step,) = begin(schedule, "encode")
    assert step.encode[0].start == 16, "the encode lane has the prompt"
    assert schedule.pool.memory.tokens_to_move(schedule.pool.running[1]) == (20 if ends_in == "encode" else 4)


def test_waa_lets_a_batch_join_after_its_buffer_time() -> None:
    settings = TwoLaneSettings(
        encode_tokens=20.0, encode_stages=1, encode_blocks=100, max_decode_batch=6, buffer_iterations=3
    )
    schedule = TwoLane(settings, Pool(1000, 16))
    submit(schedule, *[10] * 4)
    sizes = []
    for _ in range(7):
        for lane in ("encode", "transfer"):
            for step in begin(schedule, lane):
                schedule.settle(step, [])
        (decode,) = begin(schedule, "decode")
        sizes.append(len(decode.decode))
        schedule.settle(decode, [])
    # The first batch waits for no iterations, as none would come; the second began with the second of them.
    assert sizes == [2, 2, 2, 2, 4, 4, 4]


@pytest.mark.parametrize(("adjustment", "expected"), [(0.0, [10, 10, 10]), (0.2, [12, 10, 8])])
def test_waa_encodes_more_when_few_decode(adjustment: float, expected: list[int]) -> None:
    """2, 20 and 80 requests in decode, where 20 are the mean: source: ExeGPT sec. 5.2."""
    sizes = []
    for count in (2, 20, 80):
        settings = TwoLaneSettings(100.0, 1, 1000, 200, decode_batch=20.0, adjustment=adjustment)
        schedule = TwoLane(replace(settings, encode_tokens=10.0 * count), Pool(2000, 16))
        submit(schedule, *[10] * count)
        for lane in ("encode", "transfer", "decode"):
            (step,) = begin(schedule, lane)
            schedule.settle(step, [])
        assert len(step.decode) >= count - 1
        schedule.apply(TwoLane(settings, Pool(2000, 16)))
        submit_more(schedule, 30)
        sizes.append(len(begin(schedule, "encode")[0].encode))
    assert sizes == expected


def test_waa_spreads_arrivals_over_the_micro_batches() -> None:
    settings = TwoLaneSettings(
        encode_tokens=60.0, encode_stages=1, encode_blocks=100, max_decode_batch=6, decode_microbatches=2
    )
    schedule = TwoLane(settings, Pool(1000, 16))
    submit(schedule, *[10] * 6)
    for lane in ("encode", "transfer"):
        (step,) = begin(schedule, lane)
        schedule.settle(step, [])
    first, second = begin(schedule, "decode")
    assert (first.decode, second.decode) == ((0, 1, 2), (3, 4, 5))


def test_waa_encodes_no_more_prompts_than_its_memory_holds() -> None:
    settings = TwoLaneSettings(encode_tokens=64.0, encode_stages=2, encode_blocks=4, max_decode_batch=100)
    schedule = TwoLane(settings, Pool(1000, 16))
    submit(schedule, *[16] * 8)
    (first,) = begin(schedule, "encode")
    assert encoded(first) == [0, 1, 2, 3]
    schedule.settle(first, [])
    (transfer,) = begin(schedule, "transfer")
    assert begin(schedule, "encode") == []
    schedule.settle(transfer, [])
    assert [encoded(step) for step in begin(schedule, "encode")] == [[4, 5, 6, 7]]
    assert schedule.pool.can_ever_fit(Request(9, 64, 100))
    assert not schedule.pool.can_ever_fit(Request(9, 65, 100))


@pytest.mark.parametrize("encoder_only", [False, True])
def test_all_requests_end_whichever_lane_makes_the_first_token(encoder_only: bool) -> None:
    settings = TwoLaneSettings(
        encode_tokens=30.0,
        encode_stages=2,
        encode_blocks=100,
        max_decode_batch=10,
        decode_microbatches=3,
        encoder_only=encoder_only,
    )
    schedule = TwoLane(settings, Pool(1000, 16))
    requests = [SimulatedRequest(i, 5 + i % 7, 20, 1 + i % 9, i * 3) for i in range(50)]
    durations = {"encode": 70, "transfer": 20, "decode": 30}
    log = SimulatedEngine(schedule, lambda start, step: start + durations[step.lane], requests).run()
    tokens = dict.fromkeys(range(50), 0)
    for record in log:
        for id_ in record.decode:
            tokens[id_] += 1
    assert tokens == {r.id: r.output_length - (not encoder_only) for r in requests}
    assert schedule.pool.is_idle and schedule.pool.reserved_blocks == 0


def test_phases_begin_together_where_a_micro_batch_has_run_dry() -> None:
    """No request is left in the first micro-batch: it waits for the second's phase to end, and both encode."""
    lane = LaneSettings(
        mix=False, encode_every=3, encode_tokens=20.0, carried_batch=0.0, decode_batch=2.0, microbatches=2
    )
    schedule = OneLane(lane, Pool(1000, 16))
    submit(schedule, *[10] * 4)
    first, second = begin(schedule)
    schedule.settle(first, [0])
    assert begin(schedule) == []
    schedule.settle(second, [])
    for _ in range(2):
        (decode,) = begin(schedule)
        assert (decode.microbatch, decode.decode) == (1, (1,))
        schedule.settle(decode, [])
    decode, encode = begin(schedule)
    assert (decode.decode, encode.microbatch, encoded(encode)) == ((1,), 0, [2])
    schedule.settle(decode, [])
    assert [encoded(step) for step in begin(schedule)] == [[3]]


def test_a_lower_limit_that_is_adopted_holds() -> None:
    """Only a number of requests equal to the limit once counted as full: beyond it, nothing limited admission."""
    settings = LaneSettings(mix=True)
    schedule = OneLane(settings, Pool(1000, 16, max_running=5))
    submit(schedule, *[10] * 5)
    (step,) = begin(schedule)
    schedule.settle(step, [])
    assert schedule.apply(OneLane(settings, Pool(1000, 16, max_running=3)))
    submit_more(schedule, 4)
    (step,) = begin(schedule)
    assert not step.encode and len(step.decode) == 5
    schedule.settle(step, [0, 1, 2])
    (step,) = begin(schedule)
    assert len(step.encode) == 1
