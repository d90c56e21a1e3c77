"""Throughput and latencies off a log that is short enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest

from xgpt.core.errors import InputError
from xgpt.core.schema import Constraint
from xgpt.core.schema.step_log import Arrival, StepRecord
from xsimulator.measures import Measured, RequestTimes, mean_gaps, measure, request_times

S = 10**9


def log() -> list[StepRecord]:
    """RRA with two decode iterations of 1 s a phase; encoding takes 3 s. All prompts have 10 tokens.

    Requests 0, 2, 4, .. of phase k end after 2 tokens, 1, 3, 5, .. after 4 (so they stay for two phases).
    """
    records = []
    now = 0
    for phase in range(6):
        short, long = 2 * phase, 2 * phase + 1
        arrivals = tuple(Arrival(id_, 10, 8, now * S) for id_ in (short, long))
        encode = ((short, 0, 10), (long, 0, 10))
        records.append(StepRecord(now * S, (now + 3) * S, encode, (), (), arrivals, ()))
        before = (long - 2,) if phase else ()
        records.append(StepRecord((now + 3) * S, (now + 4) * S, (), (*before, short, long), (*before, short), (), ()))
        records.append(StepRecord((now + 4) * S, (now + 5) * S, (), (long,), (), (), ()))
        now += 5
    return records


def measured(**changes: int) -> Measured:
    arguments = {"quantile_output": 4, "skip_requests": 2, "num_requests": 6, **changes}
    return measure(log(), quantile=0.5, **arguments)  # type: ignore[arg-type]


def test_the_window_holds_whole_cycles() -> None:
    """Endings up to the start of each phase: 0, 1, 3, 5, 7, ..; the window goes from 3 to 9."""
    result = measured()
    assert result.num_requests == 6
    assert result.window_s == 15.0
    assert result.throughput_rps == pytest.approx(6 / 15)
    assert result.output_tokens_per_s == pytest.approx((3 * 2 + 3 * 4) / 15)


def test_latencies_count_from_admission() -> None:
    result = measured()
    assert result.ttft_s == 3.0
    # Four tokens: 3 s for the first, two decode steps, the next phase's encoding, a decode step.
    assert result.latency_s == 3 + 2 + 3 + 1
    assert sorted(result.latencies_s) == [4.0] * 3 + [9.0] * 3
    assert result.request_latency_s == pytest.approx(6.5)
    assert result.share_within(5.0) == 0.5


def test_virtual_latency_does_not_depend_on_the_requests_own_lengths() -> None:
    assert measured(quantile_output=1).latency_s == 3.0
    assert measured(quantile_output=2).latency_s == 4.0
    assert measured(quantile_output=6).latency_s == 3 + 2 + 3 + 2 + 3 + 1


def test_gaps_span_the_phases_in_between() -> None:
    """Of four tokens' gaps (1, 1, 4 s) and two tokens' gap (1 s), the pause is a quarter."""
    assert measured().itl_p99_s == pytest.approx(np.quantile([1.0] * 9 + [4.0] * 3, 0.99))


def test_batches() -> None:
    result = measured()
    assert result.encode_batch == 2.0
    assert result.decode_batch == pytest.approx((3 + 1) / 2)


def test_where_phases_run_empty_the_gaps_of_those_that_were_there_count() -> None:
    """A request that outlasts all others would have held the next batch back: the steps that follow do not show it."""
    batches = []
    for batch in range(6):
        now, ids = 4 * batch, (2 * batch, 2 * batch + 1)
        arrivals = tuple(Arrival(id_, 10, 8, now * S) for id_ in ids)
        encode = tuple((id_, 0, 10) for id_ in ids)
        batches.append(StepRecord(now * S, (now + 3) * S, encode, (), (), arrivals, ()))
        batches.append(StepRecord((now + 3) * S, (now + 4) * S, (), ids, ids, (), ()))
    result = measure(batches, quantile=0.5, quantile_output=6, skip_requests=2, num_requests=6)
    assert result.request_latency_s == 4.0
    assert result.latency_s == 3 + 5 * 1.0


def test_a_batch_that_ends_with_its_prompts_shows_nothing_of_longer_outputs() -> None:
    """Every second batch decodes; between the prompts of the others and the next decode step lies another batch's."""
    records, now = [], 0
    for batch in range(12):
        arrivals = (Arrival(batch, 10, 8, now * S),)
        ends = (batch,) if batch % 2 else ()
        records.append(StepRecord(now * S, (now + 3) * S, ((batch, 0, 10),), (), ends, arrivals, ()))
        if not ends:
            records.append(StepRecord((now + 3) * S, (now + 4) * S, (), (batch,), (batch,), (), ()))
        now += 3 if ends else 4
    result = measure(records, quantile=0.9, quantile_output=2, skip_requests=2, num_requests=6)
    assert result.latency_s == 3 + 1


def test_the_mean_gap_behind_each_token() -> None:
    found = mean_gaps(np.array([1.0, 2.0, 6.0, 9.0]), np.array([1, 1, 3, 7]), 5)
    assert found.tolist() == [1.5, 4.5, 6.0, 4.5]


def test_where_steps_mix_the_mean_gap_counts() -> None:
    """One slot, whose next prompt comes in the step that ends the last output: none waits for another's prompt."""
    records = []
    for id_ in range(12):
        now = 4 * id_
        arrivals = (Arrival(id_, 10, 8, now * S),)
        before = (id_ - 1,) if id_ else ()
        # The first step ends the slot before; its holder has 3 tokens, gaps of 1 s and, with the prompt, 3 s.
        records.append(StepRecord(now * S, (now + 3) * S, ((id_, 0, 10),), before, before, arrivals, ()))
        records.append(StepRecord((now + 3) * S, (now + 4) * S, (), (id_,), (), (), ()))
    result = measure(records, quantile=0.5, quantile_output=5, skip_requests=2, num_requests=6)
    assert result.latency_s == pytest.approx(3 + 4 * (1 + 3) / 2)


def test_a_log_too_short_is_refused() -> None:
    with pytest.raises(InputError, match="more than 14 requests must finish before its last prompt"):
        measured(skip_requests=4, num_requests=10)


def test_a_log_without_steps_is_refused() -> None:
    with pytest.raises(InputError, match="requests: 0 is not accepted"):
        measure([], quantile=0.5, quantile_output=5, skip_requests=0, num_requests=1)


def test_times_count_from_arrival() -> None:
    log = [
        StepRecord(100, 200, ((0, 0, 5),), (), (), (Arrival(0, 5, 9, 30), Arrival(1, 5, 9, 90)), ()),
        StepRecord(200, 400, ((1, 0, 5),), (0,), (), (Arrival(2, 5, 9, 150),), ()),
        StepRecord(400, 500, (), (0, 1), (0, 1), (), ()),
    ]
    found = request_times(log, encode_emits=True)
    assert found.ttft_s == pytest.approx([170e-9, 310e-9])
    assert found.whole_s == pytest.approx([470e-9, 410e-9])
    assert found.tpot_s == pytest.approx([150e-9, 100e-9])
    assert found.num_lost == 1
    assert len(request_times(log, 1, encode_emits=True).whole_s) == 1


def test_goodput_counts_requests_that_keep_every_bound() -> None:
    seconds = np.asarray([1.0, 2.0, 3.0, 4.0])
    times = RequestTimes(seconds, seconds / 10, 2 * seconds, num_lost=1)
    assert times.goodput(Constraint(latency_bound_s=6.0, ttft_s=2.0)) == 2 / 5
    apart = Constraint(objective="arrivals", quantile=0.6, latency_bound_s=6.0, ttft_s=2.0, ttft_quantile=0.4)
    assert times.keeps(apart)
    assert not times.keeps(apart.model_copy(update={"ttft_quantile": None}))  # together only two of five keep them
    assert times.figures["ttft_p50_s"] == 2.0, "the smallest time that at most half of them exceed"
    assert times.figures["whole_mean_s"] == 5.0
