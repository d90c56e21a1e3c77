"""The rate at which those who wait are taken up."""

import pytest

from xrunner.server.backlog import Backlog


def test_it_is_told_by_steps_that_leave_somebody_waiting() -> None:
    backlog = Backlog(memory_s=20.0)
    for i in range(100):  # all who come begin at once, however few: that is no limit
        backlog.note(float(i), 1, is_left=False)
    assert backlog.rate_per_s(99.0) is None
    told = []
    for i in range(1, 161):  # eight begin every two seconds
        backlog.note(100 + i / 4, 8 * (i % 8 == 0), is_left=True)
        told.append(backlog.rate_per_s(100 + i / 4))
    assert told[15] is None
    assert told[-1] == pytest.approx(4.0)
    # Phases that take up all who wait, two each, do not lower it.
    for i in range(161, 300):
        backlog.note(100 + i / 4, 2 * (i % 8 == 0), is_left=i % 8 != 0)
    assert backlog.rate_per_s(175.0) == pytest.approx(4.0)
    assert backlog.rate_per_s(190.0) is None


def test_it_follows_a_change_of_pace() -> None:
    backlog = Backlog(memory_s=10.0)
    for i in range(400):
        backlog.note(i / 10, 1, is_left=True)
    assert backlog.rate_per_s(40.0) == pytest.approx(10.0, rel=0.01)
    for i in range(400, 1200):
        backlog.note(i / 10, int(i % 2 == 0), is_left=True)
    assert backlog.rate_per_s(120.0) == pytest.approx(5.0, rel=0.02)
