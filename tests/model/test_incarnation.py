"""The number of a tablet's history: never given twice, ordered by the recoveries that led to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stele.model.bounds import INCARNATION_MAX
from stele.model.incarnation import (
    MARK_BITS,
    RECOVERIES_AHEAD_MAX,
    is_given_up,
    is_newer,
    raised,
    recoveries,
    shown,
    within_reach,
)

MARKS = st.integers(0, (1 << MARK_BITS) - 1)
HISTORIES = st.lists(MARKS, max_size=4)


def history(marks: list[int]) -> int:
    found = 0
    for mark in marks:
        found = raised(found, mark)
    return found


def test_two_recoveries_from_one_volume_and_one_from_the_catalog_have_three_numbers() -> None:
    assert len({raised(0) for _ in range(3)}) == 3
    assert {recoveries(raised(raised(0))) for _ in range(3)} == {2}


@given(HISTORIES, MARKS)
def test_a_recovery_gives_up_what_was_before(marks: list[int], mark: int) -> None:
    before = history(marks)
    after = raised(before, mark)
    assert is_given_up(before, after) and not is_given_up(after, before) and after > before
    assert recoveries(after) == len(marks) + 1 and after <= INCARNATION_MAX
    assert is_newer((after, 0), (before, 900)) and not is_newer((before, 900), (after, 0))


@given(HISTORIES, HISTORIES, st.integers(-1, 99), st.integers(-1, 99))
def test_of_two_histories_of_as_many_recoveries_neither_replaces_the_other(
    some: list[int], others: list[int], index: int, other_index: int
) -> None:
    one, two = history(some), history(others)
    if one == two:
        assert not is_given_up(one, two) and is_newer((one, index), (two, other_index)) == (
            index > other_index
        )
    elif len(some) == len(others):
        assert is_given_up(one, two) and is_given_up(two, one)
        assert not is_newer((one, index), (two, other_index))
    else:
        assert is_given_up(one, two) == (len(some) < len(others)) != is_given_up(two, one)


def test_what_is_far_ahead_is_not_believed() -> None:
    far = (RECOVERIES_AHEAD_MAX + 1) << MARK_BITS
    assert within_reach(far - 1, 0) and not within_reach(far, 0) and within_reach(far, 1 << MARK_BITS)


def test_as_text() -> None:
    assert (shown(0), shown(raised(0, 255)), shown(raised(raised(0), 1))) == (
        "0",
        "1-00000000ff",
        "2-0000000001",
    )
