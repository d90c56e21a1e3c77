"""A log's load: the whole log, its windows in the log's own clock, and the load that has grown."""

from __future__ import annotations

import numpy as np
import pytest

from xgpt.core.errors import InputError
from xgpt.core.load import Growth, KeptByWindow, LogLoad
from xgpt.core.workload import TraceLengths
from xgpt.deciding.load import of_log
from xgpt.deciding.phrases import kept_in_words, late_in_words, when_lost


def a_day(count: int = 20_000, begin_s: float | None = 1_772_582_400.0) -> TraceLengths:
    """A log that begins at midnight, with most requests at noon."""
    rng = np.random.default_rng(0)
    times = np.sort(np.clip(rng.normal(43_200, 14_000, count), 0, 86_399))
    times -= times[0]
    return TraceLengths(rng.integers(1, 4000, count), rng.integers(1, 900, count), times, None, begin_s)


def test_windows_cover_the_whole_log_on_its_clock() -> None:
    load = LogLoad.of("day", a_day())
    assert len(load.windows) == 96 and {round(window.seconds) for window in load.windows[1:-1]} == {900}
    assert [window.first for window in load.windows[1:]] == [window.end for window in load.windows[:-1]]
    assert load.windows[0].first == 0 and load.windows[-1].end == 20_000
    assert load.windows[0].name == "00:00 to 00:15"
    assert load.busiest is not None and "11:00" < load.busiest.name < "13:00"
    assert load.busiest.rate_per_s > 2 * (load.rate_per_s or 0)
    assert LogLoad.of("day", a_day(begin_s=None)).windows[0].name == "+0:00 to +0:15"


def test_a_verdict_is_on_the_worst_window() -> None:
    """The night of a log that begins at midnight kept every bound, and noon did not."""
    load = LogLoad.of("day", a_day())
    assert load.requests.timestamp_s is not None and load.busiest is not None
    is_kept = np.ones(20_000, bool)
    is_kept[load.busiest.first : load.busiest.first + 100] = False
    kept = load.kept(is_kept)
    assert kept.share == 0.995 and kept.worst == load.busiest
    assert kept.worst_share == pytest.approx(1 - 100 / load.busiest.num_requests)
    assert not kept.holds(0.99) and kept.holds(0.5)
    first, last = load.busiest.first, load.busiest.end
    longer = load.requests.input.copy()
    longer[first:last] *= 2
    ratios = LogLoad.of("day", load.requests._replace(input=longer)).longer_in(load.busiest)
    assert ratios[0] == pytest.approx(longer[first:last].mean() / longer.mean()) and 0.9 < ratios[1] < 1.1
    is_kept = np.random.default_rng(0).random(20_000) < 0.992
    assert (load.kept(is_kept).worst_share or 1) < 0.985 and load.kept(is_kept).holds(0.99), "chance is no verdict"
    told, fewer = (of_log(load, load.kept(is_kept), share) for share in (0.99, 0.5))
    assert told.holds and kept_in_words(told).endswith(", which may be chance)"), "98.2% looked like a broken bound"
    assert fewer.holds and "chance" not in kept_in_words(fewer)
    assert sum(share is not None for share in kept.by_window) >= 90
    assert load.kept(np.zeros(20_000, bool)).worst == load.busiest, "of equal windows, the night was worst"


def test_the_busiest_minute_is_one_of_the_clock_and_named() -> None:
    """A log that begins a second after midnight had 655 requests in its busiest minute, where the clock's has 660; the
    minute was said beside a quarter in which it is not.
    """
    times = np.concatenate([np.arange(0.0, 86_400, 20), 51_300 - 1.5 + np.arange(60)])
    times = np.sort(times)
    log = TraceLengths(np.full(len(times), 100), np.full(len(times), 10), times, None, 1_772_582_400.0 + 1.5)
    minute = LogLoad.of("day", log).busiest_minute
    assert minute is not None and minute[0] == pytest.approx((60 + 3) / 60) and minute[1] == "14:15"
    relative = LogLoad.of("day", log._replace(begin_s=None)).busiest_minute
    assert relative is not None and relative[1] == "+14:15" and relative[0] <= minute[0]


def test_it_is_said_when_a_log_is_lost() -> None:
    load = LogLoad.of("day", a_day())
    is_kept = np.ones(20_000, bool)
    for first, last, late in ((40, 42, 200), (48, 49, 150), (60, 61, 130), (70, 71, 110)):
        for window in load.windows[first:last]:
            is_kept[window.first : window.first + late] = False
    told = of_log(load, load.kept(is_kept), 0.9)
    assert told.num_late == 790 and not told.holds
    assert [(each.window, each.num_late) for each in told.lost] == [
        ("10:00 to 10:30", 400),
        ("12:00 to 12:15", 150),
        ("15:00 to 15:15", 130),
        ("17:30 to 17:45", 110),
    ]
    assert told.lost[0].num_requests == load.windows[41].end - load.windows[40].first
    number = told.lost[0].num_requests
    text = late_in_words(told)
    assert text.startswith(f"790 requests are late: 400 of {number:,} from 10:00 to 10:30, 150 of ")
    assert text.endswith(" and 1 more time") and "17:30" in late_in_words(told, None)
    assert when_lost(told) == " from 10:00 to 10:30, 12:00 to 12:15 and 2 more times"
    held = of_log(load, load.kept(np.ones(20_000, bool)), 0.9)
    assert late_in_words(held) == when_lost(held) == ""


def test_one_late_request_of_a_quiet_window_is_chance() -> None:
    """One late request of five at night was a verdict on the day, whose answer named another window."""
    for count, late, holds in ((5, 1, True), (5, 2, False), (100, 4, True), (100, 6, False), (7000, 96, False)):
        assert KeptByWindow(0.995, None, None, (1.0, 1 - late / count), (7000, count)).holds(0.99) == holds


def test_the_worst_window_may_be_one_that_the_log_covers_in_part() -> None:
    """96.47% in the worst window stood beside 96.17% of all requests: a short window at the end kept less."""
    load = LogLoad.of("day", a_day()).part(40_000, 2500)
    last = load.windows[-1]
    assert last.num_requests > 20 and last.seconds < 450
    is_kept = np.arange(2500) < last.first
    assert load.kept(is_kept).worst == last and load.busiest != last


@pytest.mark.parametrize(("rate", "outputs"), [(2.0, 1.0), (1.3, 1.6), (0.5, 1.0)])
def test_a_load_grows_at_the_same_time_of_day(rate: float, outputs: float) -> None:
    log = LogLoad.of("day", a_day())
    grown = LogLoad.of("day", a_day(), Growth(rate, outputs))
    assert grown.rate_per_s == pytest.approx(rate * (log.rate_per_s or 0), rel=0.02)
    assert grown.requests.output.mean() == pytest.approx(outputs * log.requests.output.mean(), rel=0.03)
    for before, after in zip(log.windows, grown.windows, strict=True):
        assert after.num_requests == pytest.approx(rate * before.num_requests, abs=6 * (before.num_requests + 4) ** 0.5)
    assert grown.busiest_minute is not None and log.busiest_minute is not None
    assert grown.busiest_minute[0] == pytest.approx(rate * log.busiest_minute[0]), "9.183 a second doubled was 18"
    assert grown.busiest_minute[1] == log.busiest_minute[1]
    times = grown.requests.timestamp_s
    assert times is not None and (np.diff(times) >= 0).all()
    if rate == 2:  # a copy is another user's request: it does not come at the same moment
        assert (np.diff(times) == 0).mean() < 0.05


def test_what_has_no_times_has_no_windows_and_no_rate() -> None:
    lengths = a_day(100)._replace(timestamp_s=None)
    load = LogLoad.of("lengths", lengths, Growth(outputs=2.0))
    assert (load.windows, load.busiest, load.rate_per_s) == ((), None, None)
    assert load.kept(np.ones(100, bool)).holds(1.0)
    with pytest.raises(InputError, match="it has no rate"):
        LogLoad.of("lengths", lengths, Growth(rate=2.0))


def test_a_later_part_of_a_log_keeps_its_time_of_day() -> None:
    """Windows of `simulate --since 43200` began at 00:00 for a log that begins at midnight."""
    afternoon = LogLoad.of("day", a_day()).part(43_200)
    first, last = afternoon.windows[0].name, afternoon.windows[-1].name
    assert first == "12:00 to 12:15" and last.endswith(("23:45", "00:00"))


@pytest.mark.parametrize("begin_s", [None, 1_772_582_400.0])
def test_a_part_of_a_log_is_judged_by_the_windows_of_the_whole(begin_s: float | None) -> None:
    """A plan held a quarter of an hour of a day but, if only this was replayed, not each 15 s of it."""
    day = LogLoad.of("day", a_day(begin_s=begin_s))
    hour = {window.name: window for window in day.windows[48:52]}
    first, last = day.windows[48], day.windows[51]
    part = day.part(first.start_s).part(count=last.end - first.first)
    assert [window.name for window in part.windows] == list(hour)
    is_kept = np.random.default_rng(0).random(20_000) < 0.9
    shares = dict(zip((window.name for window in day.windows), day.kept(is_kept).by_window, strict=True))
    assert part.kept(is_kept[first.first : last.end]).by_window == tuple(shares[name] for name in hour)
    for window in part.windows:
        assert part.longer_in(window) == day.longer_in(hour[window.name])
    assert part.busiest_minute is not None and part.busiest_minute[0] < 1.5 * (part.busiest or first).rate_per_s, (
        "a minute of another hour"
    )
    within = part.part(part.seconds / 8, 100)
    assert [window.name for window in within.windows] == [first.name], "too few requests for shorter windows"
    grown = LogLoad.of("day", a_day(begin_s=begin_s), Growth(2.0)).part(first.start_s)
    apart = day.part(first.start_s)
    assert grown.busiest_minute is not None and apart.busiest_minute is not None
    assert grown.busiest_minute[0] == 2 * apart.busiest_minute[0]
