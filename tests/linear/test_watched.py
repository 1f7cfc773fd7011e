"""The judge of watches sees each fault that a watch could have."""

from __future__ import annotations

import pytest

from tests.linear.watched import Pairs, Read, Write, faults_of

WRITES = [
    Write({b"a": b"1"}, 0.0, 1.0, 5),
    Write({b"a": b"2", b"b": b"2"}, 2.0, 3.0, 7),
    Write({b"a": b"3"}, 2.5),
    Write({b"a": None}, 4.0, 5.0, 9),
]
WATCHED: list[tuple[int, Pairs]] = [(5, {b"a": b"1"}), (7, {b"a": b"2", b"b": b"2"}), (9, {b"a": None})]
READS = [Read({b"a": b"2", b"b": b"2"}, 8, 3.5, 3.6), Read({b"b": b"2"}, 10, 6.0, 6.1)]


def test_a_right_watch_has_no_faults() -> None:
    assert faults_of(WRITES, READS, WATCHED) == []
    unknown: tuple[int, Pairs] = (8, {b"a": b"3"})
    assert faults_of(WRITES, READS[1:], [*WATCHED[:2], unknown, WATCHED[2]]) == []


@pytest.mark.parametrize(
    ("watched", "words"),
    [
        (WATCHED[:2], "missing"),
        ([*WATCHED, WATCHED[2]], "comes behind 9"),
        ([*WATCHED, (11, {b"a": None})], "comes twice"),
        ([WATCHED[0], (7, {b"a": b"2"}), WATCHED[2]], "nobody's write"),
        ([WATCHED[1], WATCHED[0], WATCHED[2]], "comes behind 7"),
        ([WATCHED[0], (8, WATCHED[1][1]), WATCHED[2]], "was told 7, and comes as 8"),
        ([(4, WATCHED[2][1]), *WATCHED[:2]], "ended before one of an earlier revision began"),
        ([*WATCHED[:2], (8, {b"a": b"3"}), WATCHED[2]], "the watch says"),
    ],
)
def test_each_fault_is_seen(watched: list[tuple[int, Pairs]], words: str) -> None:
    assert any(words in fault for fault in faults_of(WRITES, READS, watched))


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (Read({b"a": b"1"}, 6, 3.5, 3.6), "did not see 7"),
        (Read({b"a": b"2", b"b": b"2"}, 7, 0.0, 1.5), "which began later"),
        (Read({b"a": b"2"}, 7, 3.5, 3.6), "the watch says"),
    ],
)
def test_each_fault_of_a_read_is_seen(read: Read, words: str) -> None:
    assert any(words in fault for fault in faults_of(WRITES, [read], WATCHED))
