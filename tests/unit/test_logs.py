"""Log lines whose number others decide are bounded."""

from __future__ import annotations

from refitd.logs import Throttle


def test_subject_is_written_once_a_period():
    throttle = Throttle(period_s=30)
    assert [throttle.allows("a", now) for now in (5.0, 6.0, 34.9, 35.0)] == [True, False, False, True]
    assert throttle.allows("b", 35.0)


def test_more_subjects_than_a_reader_wants_are_left_out():
    throttle = Throttle(period_s=30, most=3)
    assert sum(throttle.allows(str(i), 1.0) for i in range(1000)) == 3
    assert throttle.allows("another", 31.0)
