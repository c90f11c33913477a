"""Log lines whose number others decide are bounded."""

from __future__ import annotations

from refitd.logs import Throttle


def test_subject_is_written_once_a_period():
    throttle = Throttle(period_s=30)
    assert [throttle.lets("a", now) for now in (5.0, 6.0, 34.9, 35.0)] == [True, False, False, True]
    assert throttle.lets("b", 35.0)


def test_more_subjects_than_a_reader_wants_are_left_out():
    throttle = Throttle(period_s=30, most=3)
    assert sum(throttle.lets(str(i), 1.0) for i in range(1000)) == 3
    assert throttle.lets("another", 31.0)
