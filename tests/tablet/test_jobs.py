"""Attempts at a part of a job: a row counts once, whoever wrote to its key since, on every replica and in every replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from stele.model.block import RowOp
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code
from stele.model.ids import OpId
from stele.model.job import Attempt
from stele.tablet import jobs
from stele.tablet.jobs import IDLE_US, Jobs
from stele.tablet.machine import Lookup, Outcome
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.twin import (
    FIRST,
    FOREVER,
    JOB,
    SCHEMA,
    SECOND,
    START_US,
    Row,
    all_rows,
    block_of,
    codes,
    compact,
    flush,
    new_store,
    write_entry,
)


def row(n: int, v: str = "ours") -> Row:
    return {"k": "a", "n": n, "v": v, "w": 1, "d": None}


def values(store: TabletStore) -> dict[int, str]:
    return {r["n"]: r["v"] for r in all_rows(store)}


class Tablet:
    """A store that gets its writes one after the other, and is flushed or merged or reopened behind each if asked."""

    def __init__(self, path: Path, options: StoreOptions = FOREVER) -> None:
        self.path = path
        self.options = options
        self.store = new_store(path, options)
        self.entries: list[Entry] = []

    def write(
        self, attempt: Attempt | None, op: RowOp, *rows: Row, at_us: int | None = None, threads: bool = False
    ) -> Outcome:
        index = len(self.entries) + 1
        entry = write_entry(index, block_of(rows, op), attempt=attempt, at_us=at_us)
        self.entries.append(entry)
        begun = self.store.begin(entry) if threads else self.store.apply(entry)
        outcome = self.store.begin(entry, begun.run()) if isinstance(begun, Lookup) else begun
        assert not isinstance(outcome, Lookup)
        return outcome

    def settle(self, how: str) -> None:
        if how in ("flushed", "merged", "reopened"):
            flush(self.store)
        if how == "merged":
            compact(self.store)
        if how in ("reopened", "replayed"):
            self.store.close()
            self.store = TabletStore.open(self.path, self.options)
            for entry in self.entries[self.store.applied.index :]:
                self.store.apply(entry)


HOW = pytest.mark.parametrize("how", ["in memory", "flushed", "merged", "reopened", "replayed"])
MANY = pytest.mark.parametrize("rows", [3, 40], ids=["small", "big"])


@HOW
@MANY
@pytest.mark.parametrize("op", list(RowOp))
@pytest.mark.parametrize("theirs", [RowOp.UPSERT, RowOp.DELETE_IGNORE], ids=["written", "deleted"])
def test_a_second_attempt_changes_nothing_that_others_wrote_since(
    tmp_path: Path, how: str, rows: int, op: RowOp, theirs: RowOp
) -> None:
    """Whatever the operation. Old versions are history at once, so only the job keeps them."""
    tablet = Tablet(tmp_path / "t", StoreOptions(history_us=0))
    ours = [row(n) for n in range(rows)]
    if op not in (RowOp.INSERT, RowOp.INSERT_IGNORE):
        tablet.write(None, RowOp.UPSERT, *(row(n, "old") for n in range(rows)))
    assert codes(tablet.write(FIRST, op, *ours)) == {}
    tablet.settle(how)
    tablet.write(None, theirs, *(row(n, "theirs") for n in range(0, rows, 2)))
    tablet.settle(how)
    before = values(tablet.store)
    assert codes(tablet.write(SECOND, op, *ours)) == {}
    assert values(tablet.store) == before
    tablet.settle(how)
    assert values(tablet.store) == before


@HOW
@MANY
def test_what_the_first_attempt_did_not_reach_is_written_by_the_second(
    tmp_path: Path, how: str, rows: int
) -> None:
    """Also where another wrote since the job began: the row of the job comes after it."""
    tablet = Tablet(tmp_path / "t")
    tablet.write(FIRST, RowOp.UPSERT, row(0))
    tablet.write(None, RowOp.UPSERT, *(row(n, "theirs") for n in range(rows)))
    tablet.settle(how)
    assert codes(tablet.write(SECOND, RowOp.UPSERT, *map(row, range(rows)))) == {}
    assert values(tablet.store) == {n: "ours" if n else "theirs" for n in range(rows)}


@MANY
def test_an_insert_finds_its_own_row_done_and_another_row_refused(tmp_path: Path, rows: int) -> None:
    """Even if the other row has the same values: rows are told apart by who wrote them."""
    tablet = Tablet(tmp_path / "t")
    tablet.write(None, RowOp.INSERT, row(rows))
    outcome = tablet.write(FIRST, RowOp.INSERT, *map(row, range(rows + 1)))
    assert codes(outcome) == {rows: Code.ALREADY_PRESENT}
    outcome = tablet.write(SECOND, RowOp.INSERT, *map(row, range(rows + 1)))
    assert codes(outcome) == {rows: Code.ALREADY_PRESENT}


def test_an_update_of_one_column_keeps_what_another_changed_in_a_second_one(tmp_path: Path) -> None:
    tablet = Tablet(tmp_path / "t")
    tablet.write(None, RowOp.UPSERT, row(0, "old"), row(1, "old"))
    tablet.write(FIRST, RowOp.UPDATE, {"k": "a", "n": 0, "v": "ours"})
    tablet.write(None, RowOp.UPDATE, {"k": "a", "n": 0, "w": 5}, {"k": "a", "n": 1, "w": 5})
    tablet.write(None, RowOp.UPDATE, {"k": "a", "n": 0, "v": "theirs"})
    tablet.write(SECOND, RowOp.UPDATE, {"k": "a", "n": 0, "v": "ours"}, {"k": "a", "n": 1, "v": "ours"})
    assert [(r["v"], r["w"]) for r in all_rows(tablet.store)] == [("theirs", 5), ("ours", 5)]


def test_two_attempts_at_once_write_each_row_once(tmp_path: Path) -> None:
    """As speculation runs them: each finds done what the other was first with."""
    tablet = Tablet(tmp_path / "t")
    tablet.write(FIRST, RowOp.INSERT, row(0, "first"))
    tablet.write(SECOND, RowOp.INSERT, row(0, "second"), row(1, "second"))
    assert codes(tablet.write(FIRST, RowOp.INSERT, row(1, "first"), row(2, "first"))) == {}
    assert codes(tablet.write(SECOND, RowOp.INSERT, row(2, "second"))) == {}
    assert values(tablet.store) == {0: "first", 1: "second", 2: "first"}


def test_other_parts_and_other_jobs_write_as_they_always_did(tmp_path: Path) -> None:
    tablet = Tablet(tmp_path / "t")
    tablet.write(FIRST, RowOp.UPSERT, row(0))
    tablet.write(Attempt(JOB, START_US, 1, 3), RowOp.UPSERT, row(0, "part"))
    assert values(tablet.store) == {0: "part"}
    tablet.write(Attempt(b"k" * 16, START_US, 0, 2), RowOp.UPSERT, row(0, "job"))
    assert values(tablet.store) == {0: "job"}
    tablet.write(FIRST, RowOp.UPSERT, row(0, "again"))  # a later row of the same attempt
    assert values(tablet.store) == {0: "again"}


def test_a_first_attempt_is_looked_up_no_more_than_other_writes(tmp_path: Path) -> None:
    """A load pays nothing. Only what is tried again is looked up, in a thread."""
    tablet = Tablet(tmp_path / "t")
    for index in (1, 2):
        entry = write_entry(index, block_of([row(n) for n in range(100)], RowOp.UPSERT), attempt=FIRST)
        assert isinstance(tablet.store.begin(entry), Outcome)
    entry = write_entry(3, block_of([row(0)], RowOp.UPSERT), attempt=SECOND)
    begun = tablet.store.begin(entry)
    assert isinstance(begun, Lookup)
    outcome = tablet.store.begin(entry, begun.run())
    assert isinstance(outcome, Outcome) and codes(outcome) == {}


@HOW
def test_a_job_that_was_forgotten_is_refused_for_ever(tmp_path: Path, how: str) -> None:
    tablet = Tablet(tmp_path / "t", StoreOptions(history_us=0))
    tablet.write(FIRST, RowOp.UPSERT, row(0), at_us=START_US + 1)
    tablet.write(None, RowOp.DELETE, row(0), at_us=START_US + 2)
    tablet.settle(how)
    still = tablet.write(SECOND, RowOp.UPSERT, row(0), at_us=START_US + 1 + IDLE_US)
    assert still.code is Code.OK and values(tablet.store) == {}
    late = START_US + 2 + 2 * IDLE_US
    tablet.write(None, RowOp.UPSERT, row(1), at_us=late)
    tablet.settle(how)
    for attempt in (SECOND, Attempt(b"k" * 16, START_US - 1, 0, 1)):
        refused = tablet.write(attempt, RowOp.UPSERT, row(0), at_us=late + 1)
        assert refused.code is Code.JOB_TOO_OLD and "run the job again" in refused.message
    tablet.settle(how)
    assert tablet.write(FIRST, RowOp.UPSERT, row(0), at_us=late + 2).code is Code.JOB_TOO_OLD
    assert values(tablet.store) == {1: "ours"}
    assert (
        tablet.write(Attempt(JOB[:-1] + b"2", late, 0, 1), RowOp.UPSERT, row(0), at_us=late + 3).code
        is Code.OK
    )


@pytest.mark.parametrize("begun", [False, True], ids=["no flush", "a flush has begun"])
def test_an_idle_tablet_forgets_its_jobs_by_a_ceiling_and_then_its_history(
    tmp_path: Path, begun: bool
) -> None:
    """What a replay would look up stays until the next flush is durable."""
    tablet = Tablet(tmp_path / "t", StoreOptions(history_us=0))
    store = tablet.store
    tablet.write(None, RowOp.UPSERT, row(0, "old"))
    flush(store)
    tablet.write(FIRST, RowOp.UPSERT, row(0))
    flush(store)
    tablet.write(None, RowOp.DELETE, row(0))
    flush(store)
    tablet.write(SECOND, RowOp.UPSERT, row(0))
    idle_us = store.clients_idle_us
    assert idle_us == START_US + 4 + IDLE_US
    ceiling = Entry(1, 5, EntryKind.CEILING, (idle_us + 1) << 12, bytes(8))
    store.apply(ceiling)
    tablet.entries.append(ceiling)
    assert store.clients_idle_us is None
    if begun:
        assert store.begin_flush() is not None
    assert compact(store)
    tablet.settle("replayed")
    store = tablet.store
    assert values(store) == {}
    flush(store)
    compact(store)
    assert store.rows_estimate == 0 and store.bytes_on_disk < 2000


def test_a_longer_history_of_the_table_remembers_a_job_for_longer(tmp_path: Path) -> None:
    from dataclasses import replace

    hour_us = 3_600_000_000
    store = new_store(tmp_path / "t", FOREVER, replace(SCHEMA, history_ms=3_600_000))
    store.apply(write_entry(1, block_of([row(0)], RowOp.UPSERT), attempt=FIRST))
    assert store.clients_idle_us == START_US + 1 + hour_us
    entry = write_entry(2, block_of([row(1)], RowOp.UPSERT), attempt=SECOND, at_us=START_US + 1 + hour_us)
    assert store.apply(entry).code is Code.OK


def test_a_copy_knows_what_the_attempts_wrote(tmp_path: Path) -> None:
    tablet = Tablet(tmp_path / "t")
    tablet.write(FIRST, RowOp.UPSERT, row(0))
    flush(tablet.store)
    tablet.store.checkpoint(tmp_path / "copy")
    tablet.write(None, RowOp.DELETE, row(0))
    tablet.write(SECOND, RowOp.INSERT, row(0))
    copy = TabletStore.open(tmp_path / "copy", FOREVER)
    assert copy.applied == OpId(1, 1)
    for entry in tablet.entries[1:]:
        copy.apply(entry)
    assert values(copy) == {} and copy.exactly_once_checksum() == tablet.store.exactly_once_checksum()


def test_a_retry_of_one_write_gets_its_outcome_and_not_that_of_an_attempt(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t")
    body = block_of([row(0)], RowOp.INSERT)
    first = store.apply(write_entry(1, body, attempt=FIRST, client_id=b"c" * 16))
    again = store.apply(write_entry(2, body, attempt=FIRST, client_id=b"c" * 16))
    assert again.duplicate and again.timestamp == first.timestamp and again.row_errors == ()
    assert len(jobs.encode(store._jobs.frozen())) == len(Jobs.decode(store._jobs.encoded()).encoded())
