"""Scans known to be right and wrong, and what errors say."""

from __future__ import annotations

import asyncio

import pytest

from stele.model.clock import from_physical_us
from stele.model.errors import Code, error_for
from tests.linear import cuts, report
from tests.linear.checker import contradiction, linearizable
from tests.linear.cuts import Scan
from tests.linear.history import Kind, NotDone, Operation, State, Surprise, Told, told_by

WALL_US = 1_700_000_000_000_000.0


def at(second: float) -> int:
    return int(from_physical_us(int(WALL_US + second * 1e6)))


def put(value: int, begun: float, ended: float, stamp: int, key: str = "row") -> Operation:
    return Operation(key, Kind.PUT, (value, value), begun, ended, Told.DONE, "c", stamp)


def scan(snapshot: int, taken: float, value: int | None, key: str = "row") -> Scan:
    rows: dict[str, State] = {} if value is None else {key: (value, value)}
    return Scan(snapshot, taken, taken + 0.1, rows, "s")


def right(operations: list[Operation], *scans: Scan) -> bool:
    histories = cuts.in_hybrid_time(operations, scans, WALL_US)
    return all(linearizable(history) for history in histories.values())


WRITES = [put(1, 1.0, 1.1, at(1.05)), put(2, 2.0, 2.1, at(2.05))]


@pytest.mark.parametrize(
    ("snapshot", "shows"), [(at(1.0), None), (at(1.05) - 1, None), (at(1.05), 1), (at(2.0), 1), (at(2.05), 2)]
)
def test_a_scan_shows_what_was_written_at_or_below_its_snapshot(snapshot: int, shows: int | None) -> None:
    assert [value for value in (None, 1, 2) if right(WRITES, scan(snapshot, 9.0, value))] == [shows]


def test_a_write_without_an_answer_may_be_shown_or_not_but_not_before_it_began() -> None:
    unknown = Operation("row", Kind.PUT, (3, 3), 3.0)
    assert right([*WRITES, unknown], scan(at(4.0), 4.0, 2), scan(at(5.0), 5.0, 3))
    assert right([*WRITES, unknown], scan(at(4.0), 4.0, 2))
    assert not right([*WRITES, unknown], scan(at(4.0), 4.0, 3), scan(at(5.0), 5.0, 2))
    assert not right([*WRITES, unknown], scan(at(2.5), 2.5, 3))


def test_one_of_many_is_written_at_some_time_up_to_the_highest() -> None:
    many = Operation(
        "row", Kind.PUT, (3, 3), 3.0, 3.5, Told.DONE, "c", at(3.4), one_of_many=True, note="with others"
    )
    assert right([*WRITES, many], scan(at(3.2), 9.0, 3))
    assert right([*WRITES, many], scan(at(3.2), 9.0, 2))
    assert not right([*WRITES, many], scan(at(3.4), 9.0, 2))
    assert not right([*WRITES, many], scan(at(2.6), 9.0, 3))


def test_scans_at_one_snapshot_that_differ_rows_nobody_wrote_and_times_behind_a_snapshot() -> None:
    one, other = scan(at(3.0), 3.0, 2), scan(at(3.0), 3.0, 1)
    assert cuts.unlike([one, scan(at(4.0), 3.0, 1), other]) == [(one, other)]
    assert cuts.strangers(WRITES, [one, scan(at(3.0), 3.0, 2, "rwo")]) == ["rwo"]
    late = put(3, 2.2, 2.3, at(3.5))
    assert cuts.behind([*WRITES, late], [one]) == [(late, one)]


def test_a_report_shows_the_culprit_and_what_the_row_could_have_been() -> None:
    read = Operation("row", Kind.READ, (1, 1), 3.0, 3.1, Told.DONE, "c")
    found = contradiction([*WRITES, read])
    assert found is not None
    text = report.told(found, "the beginning", "s")
    assert "by the end of the marked one the row was (2, 2)" in text
    assert [line for line in text.splitlines() if line.startswith(">") and line.endswith("read (1, 1)")]


@pytest.mark.parametrize("kind", [k for k in Kind if k is not Kind.READ])
def test_what_an_error_says_of_a_write(kind: Kind) -> None:
    for code in (Code.UNKNOWN_OUTCOME, Code.TOO_OLD):
        assert told_by(error_for(code, ""), kind) is Told.UNKNOWN
    assert told_by(TimeoutError(), kind) is Told.UNKNOWN
    assert told_by(asyncio.CancelledError(), kind) is Told.UNKNOWN
    for code in (Code.NO_QUORUM, Code.TIMED_OUT, Code.UNAVAILABLE, Code.THROTTLED, Code.CHANGE_IN_PROGRESS):
        with pytest.raises(NotDone):
            told_by(error_for(code, ""), kind)
    for error in (error_for(Code.INTERNAL, ""), error_for(Code.CORRUPT, ""), ValueError("")):
        with pytest.raises(Surprise):
            told_by(error, kind)


def test_a_refusal_is_an_observation_of_the_operation_that_can_be_refused() -> None:
    told = {(Kind.INSERT, Code.ALREADY_PRESENT): Told.PRESENT}
    told |= {(kind, Code.NOT_FOUND): Told.ABSENT for kind in (Kind.UPDATE, Kind.DELETE)}
    told |= {(Kind.SWAP, Code.CAS_FAILED): Told.DIFFERENT}
    for kind in Kind:
        for code in (Code.ALREADY_PRESENT, Code.NOT_FOUND, Code.CAS_FAILED):
            if (kind, code) in told:
                assert told_by(error_for(code, ""), kind) is told[kind, code]
            else:
                with pytest.raises(Surprise):
                    told_by(error_for(code, ""), kind)
