"""The judge of locks sees two holders at once."""

from __future__ import annotations

from tests.linear.held import Hold, faults_of


def test_one_after_the_other_is_right() -> None:
    assert faults_of([Hold("b", 2.0, 3.0), Hold("a", 0.0, 2.0), Hold("a", 3.0, 4.0)]) == []


def test_two_at_once_are_seen() -> None:
    assert len(faults_of([Hold("a", 0.0, 2.0), Hold("b", 1.9, 3.0)])) == 1
    long_ago = [Hold("a", 0.0, 9.0), Hold("a", 1.0, 2.0), Hold("b", 5.0, 6.0)]
    assert faults_of(long_ago) == ["b held it from 5.000 on, and a until 9.000"]
