"""The checker itself: histories known to be good and bad, and a twin that tries every order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.linear import checker
from tests.linear.checker import contradiction, linearizable, unended
from tests.linear.history import NEVER, Kind, Operation, State, Told


def op(kind: str, value: int | None, begun: float, ended: float = NEVER, told: str = "DONE") -> Operation:
    """One on a single row, whose two values are the same; without an end it is of unknown outcome."""
    outcome = Told.UNKNOWN if ended == NEVER else Told[told]
    state = None if value is None else (value, value)
    return Operation("k", Kind(kind), state, begun, ended, outcome)


GOOD = {
    "nothing happened": [],
    "one after the other": [op("put", 1, 0, 1), op("read", 1, 2, 3), op("delete", None, 4, 5)],
    "two writes at once, in either order": [op("put", 1, 0, 9), op("put", 2, 0, 9), op("read", 1, 10, 11)],
    "reads at once see the new and then the old value begin before it": [
        op("put", 1, 0, 10),
        op("read", 1, 1, 5),
        op("read", None, 0, 6),
    ],
    "a write without an answer is seen late": [
        op("put", 1, 0, 1),
        op("put", 2, 2),
        op("read", 1, 3, 4),
        op("read", 2, 5, 6),
    ],
    "a write without an answer is never seen": [op("put", 1, 0, 1), op("put", 2, 2), op("read", 1, 8, 9)],
    "an insert refused by one without an answer": [op("insert", 1, 0), op("insert", 2, 1, 2, "PRESENT")],
    "an insert without an answer of what was there": [
        op("put", 1, 0, 1),
        op("insert", 2, 2),
        op("read", 1, 3, 4),
    ],
    "a delete of what is gone": [
        op("put", 1, 0, 1),
        op("delete", None, 2),
        op("delete", None, 3, 4, "ABSENT"),
    ],
    "ignored ones": [
        op("update_ignore", 1, 0, 1),
        op("delete_ignore", None, 2, 3),
        op("insert_ignore", 4, 4, 5),
        op("insert_ignore", 5, 6, 7),
        op("read", 4, 8, 9),
    ],
}

BAD = {
    "a stale read": [op("put", 1, 0, 1), op("put", 2, 2, 3), op("read", 1, 4, 5)],
    "a lost write": [op("put", 1, 0, 1), op("read", None, 2, 3)],
    "a lost update": [op("put", 1, 0, 1), op("update", 2, 2, 3), op("read", 1, 4, 5)],
    "a write seen, then unseen": [op("put", 1, 0, 9), op("read", 1, 1, 2), op("read", None, 3, 4)],
    "a write without an answer seen, then unseen": [
        op("put", 1, 0, 1),
        op("put", 2, 2),
        op("read", 2, 3, 4),
        op("read", 1, 5, 6),
    ],
    "a write seen before it began": [op("read", 1, 0, 1), op("put", 1, 2, 3)],
    "a read of what nobody wrote": [op("put", 1, 0, 1), op("read", 3, 2, 3)],
    "an insert applied again after a delete": [
        op("insert", 1, 0, 1),
        op("delete", None, 2, 3),
        op("read", 1, 4, 5),
    ],
    "an insert without an answer applied twice": [
        op("insert", 1, 0),
        op("read", 1, 1, 2),
        op("delete", None, 3, 4),
        op("read", 1, 5, 6),
    ],
    "a write without an answer applied twice": [
        op("put", 1, 0),
        op("read", 1, 1, 2),
        op("put", 2, 3, 4),
        op("read", 2, 5, 6),
        op("read", 1, 7, 8),
    ],
    "a dirty read of a refused insert": [
        op("put", 1, 0, 1),
        op("insert", 2, 2, 3, "PRESENT"),
        op("read", 2, 4, 5),
    ],
    "two inserts that both succeed": [op("insert", 1, 0, 3), op("insert", 2, 1, 4)],
    "two deletes of one row that both succeed": [
        op("put", 1, 0, 1),
        op("delete", None, 2, 5),
        op("delete", None, 3, 6),
    ],
    "an insert refused where nothing was": [op("insert", 1, 0, 1, "PRESENT")],
    "an update refused where something was": [op("put", 1, 0, 1), op("update", 2, 2, 3, "ABSENT")],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_is_called_good(name: str) -> None:
    assert contradiction(GOOD[name]) is None
    assert tried(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_called_bad(name: str) -> None:
    found = contradiction(BAD[name])
    assert found is not None and not tried(BAD[name])
    assert tried(unended(found.history, [found.culprit]))


def test_an_update_keeps_the_column_that_it_does_not_name() -> None:
    both = [
        Operation("k", Kind.PUT, (1, 1), 0, 1, Told.DONE),
        Operation("k", Kind.UPDATE, (7, 2), 2, 3, Told.DONE),
    ]
    read = Operation("k", Kind.READ, (1, 2), 4, 5, Told.DONE)
    torn = Operation("k", Kind.READ, (7, 2), 4, 5, Told.DONE)
    assert linearizable([*both, read])
    found = contradiction([*both, torn])
    assert found is not None and found.culprit is torn and found.states == ((1, 2),)


def test_a_tangle_is_not_called_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "CONFIGURATIONS_MAX", 100)
    tangle = [op("put", n, 0) for n in range(20)]
    with pytest.raises(checker.Undecided, match="more than 100 configurations"):
        linearizable([*tangle, op("read", 99, 1, 2)])


def test_a_long_history_of_many_clients_is_judged_at_once() -> None:
    """Eight clients that overlap all the time, a tenth of their writes without an answer."""
    history = []
    for n in range(2_000):
        unknown = n % 20 == 1
        history.append(op("put", n, 2 * n, NEVER if unknown else 2 * n + 15))
    history.append(op("read", 1_999, 5_000, 5_001))
    assert linearizable(history)


def tried(history: Sequence[Operation]) -> bool:
    """The twin: every order of every choice among those without an answer."""
    known = [o for o in history if o.complete]
    maybe = [o for o in history if not o.complete]
    chosen = (c for size in range(len(maybe) + 1) for c in combinations(maybe, size))
    return any(_explains(order) for some in chosen for order in permutations([*known, *some]))


def _explains(order: Sequence[Operation]) -> bool:
    state: State = None
    for n, operation in enumerate(order):
        if any(later.ended < operation.begun for later in order[n + 1 :]):
            return False
        possible, state = operation.apply(state)
        if not possible:
            return False
    return True


_REFUSALS = {
    Kind.INSERT: Told.PRESENT,
    Kind.UPDATE: Told.ABSENT,
    Kind.DELETE: Told.ABSENT,
    Kind.SWAP: Told.DIFFERENT,
}


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    kind = draw(st.sampled_from(Kind))
    rows = st.tuples(st.integers(0, 1), st.integers(0, 1))
    states: st.SearchStrategy[State] = st.one_of(rows, st.none())
    values = states if kind in (Kind.READ, Kind.SWAP) else rows
    begun = draw(st.integers(0, 8))
    told = draw(st.sampled_from([Told.DONE, _REFUSALS.get(kind, Told.DONE), Told.UNKNOWN]))
    if kind is Kind.READ:
        told = Told.DONE
    value = None if kind in (Kind.DELETE, Kind.DELETE_IGNORE) else draw(values)
    ended = NEVER if told is Told.UNKNOWN else begun + draw(st.integers(0, 5))
    expected = draw(states) if kind is Kind.SWAP else None
    return Operation("k", kind, value, begun, ended, told, expected=expected)


@given(st.lists(operations(), max_size=5))
def test_it_agrees_with_the_twin_that_tries_every_order(history: list[Operation]) -> None:
    found = contradiction(history)
    assert (found is None) == tried(history)
    if found is not None:
        assert tried(unended(found.history, [found.culprit]))
