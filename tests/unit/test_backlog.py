"""The rate at which a queue gets shorter."""

import pytest

from xrunner.server.backlog import Backlog


def test_only_time_in_which_somebody_waits_counts() -> None:
    backlog = Backlog(memory_s=20.0)
    for i in range(100):  # nobody waits: whoever comes begins at once, however few
        backlog.note(float(i), 1, is_left=False)
    assert backlog.rate_per_s is None
    backlog.note(100.0, 0, is_left=True)
    told = []
    for i in range(1, 161):  # eight begin every two seconds
        backlog.note(100 + i / 4, 8 * (i % 8 == 0), is_left=True)
        told.append(backlog.rate_per_s)
    assert told[15] is None
    assert told[-1] == pytest.approx(4.0, rel=0.1)


def test_it_follows_a_change_of_pace() -> None:
    backlog = Backlog(memory_s=10.0)
    for i in range(400):
        backlog.note(i / 10, 1, is_left=True)
    assert backlog.rate_per_s == pytest.approx(10.0, rel=0.01)
    for i in range(400, 1200):
        backlog.note(i / 10, int(i % 2 == 0), is_left=True)
    assert backlog.rate_per_s == pytest.approx(5.0, rel=0.02)
