"""Attempts at a part of a job: a row counts once, whoever wrote to its key since, on every replica and in every replay."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stele.model import writeop
from stele.model.block import DELETES, UPDATES, RowOp
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from stele.model.ids import OpId
from stele.model.job import Attempt
from stele.tablet import jobs
from stele.tablet.jobs import IDLE_US, Jobs
from stele.tablet.machine import Lookup, Outcome
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.twin import (
    FOREVER,
    SCHEMA,
    START_US,
    Key,
    Row,
    Twin,
    all_rows,
    block_of,
    codes,
    compact,
    flush,
    header,
    new_store,
    write_entry,
)

JOB = b"j" * 16
FIRST, SECOND = Attempt(JOB, START_US, 0, 1), Attempt(JOB, START_US, 0, 2)
WHOLE = {"v": None, "w": 7, "d": None}


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
        return self.store.apply(entry, begun.run()) if isinstance(begun, Lookup) else begun

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
    assert codes(tablet.store.apply(entry, begun.run())) == {}


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


def test_a_leader_bounds_jobs_and_their_writes() -> None:
    state = Jobs(jobs_max=2, writes_max=3)
    for number, job in enumerate((JOB, b"k" * 16), 1):
        attempt = Attempt(job, START_US, 0, 1)
        state.admit(attempt, START_US)
        assert state.enter(attempt, (START_US + number) << 12) is None
        state.wrote(attempt, (START_US + number) << 12)
    third = Attempt(b"l" * 16, START_US, 0, 1)
    with pytest.raises(Retryable) as caught:
        state.admit(third, START_US + 10)
    assert caught.value.code is Code.THROTTLED and caught.value.retry_after_ms == 60_000
    state.admit(FIRST, START_US + 10)
    state.admit(third, START_US + 60_000_001)
    state.enter(third, (START_US + 3) << 12)  # it pushes the oldest out, as the log says
    assert not state.knows(JOB) and state.enter(FIRST, (START_US + 4) << 12).code is Code.JOB_TOO_OLD  # type: ignore[union-attr]
    for number in (5, 6):
        state.wrote(third, (START_US + number) << 12)
    with pytest.raises(Rejected) as refused:
        state.admit(third, START_US)
    assert refused.value.code is Code.TOO_LARGE


def test_new_jobs_whose_writes_are_under_way_push_out_none_that_has_just_written() -> None:
    """Only applied ones were counted, so any number of them was admitted at once."""
    state = Jobs(jobs_max=3)
    state.enter(FIRST, START_US << 12)
    coming = [Attempt(bytes([number]) * 16, START_US, 0, 1) for number in (1, 2, 3)]
    for attempt in coming[:2]:
        state.admit(attempt, START_US)
        state.expect(attempt.job)
        state.admit(attempt, START_US)
    with pytest.raises(Retryable, match="3 jobs wrote"):
        state.admit(coming[2], START_US)
    state.stop_expecting(coming[1].job)  # its write was lost
    state.admit(coming[2], START_US)
    state.expect(coming[2].job)
    for attempt in (coming[0], coming[2]):
        assert state.enter(attempt, START_US << 12) is None
    assert state.knows(JOB)


def test_a_payload_without_a_job_is_what_it_was_and_one_with_it_comes_back() -> None:
    body = b"12345678"
    plain = writeop.encode(header(body), body)
    assert len(plain) == 56 + 8 and plain[2] == 0
    for attempt in (FIRST, Attempt(bytes(range(16)), 2**64 - 1, 2**32 - 1, 2**64 - 1)):
        payload = writeop.encode(header(body, attempt=attempt, plain=True), body)
        found, rest = writeop.decode(payload)
        assert (found.attempt, found.plain, bytes(rest)) == (attempt, True, body) and len(payload) == 96 + 8
        for cut in range(56, 96):
            with pytest.raises(Corrupt):
                writeop.decode(payload[:cut])
        with pytest.raises(Rejected) as caught:
            writeop.decode(payload[:92] + b"\1" + payload[93:])
        assert caught.value.code is Code.UNSUPPORTED_VERSION


def test_damaged_jobs_are_found() -> None:
    state = Jobs()
    state.enter(FIRST, START_US << 12)
    state.wrote(FIRST, START_US << 12)
    whole = state.encoded()
    assert Jobs.decode(whole).encoded() == whole
    for cut in range(len(whole)):
        with pytest.raises(Corrupt):
            Jobs.decode(whole[:cut])


# --- the model


class JobTwin(Twin):
    """What two replicas must be: who wrote each key is remembered for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote: dict[Key, set[Attempt]] = {}
        self.expected: list[tuple[Code, dict[int, Code]]] = []
        self.last: dict[bytes, int] = {}
        self.forgotten_us = 0
        self.us = START_US

    def write_as(self, attempt: Attempt | None, rows: list[Row], op: RowOp, after_us: int) -> None:
        """The next entry, and what comes of it."""
        self.us += after_us
        entry = write_entry(self.next_index(), block_of(rows, op), attempt=attempt, at_us=self.us)
        self.entries.append(entry)
        for job, last_us in list(self.last.items()):
            if last_us + IDLE_US < self.us:
                del self.last[job]
                self.forgotten_us = START_US  # all jobs here are as old
        if attempt is not None and attempt.job not in self.last and self.forgotten_us:
            self.expected.append((Code.JOB_TOO_OLD, {}))
            return
        if attempt is not None:
            self.last[attempt.job] = self.us
        done = [self.is_done(attempt, (each["k"], each["n"])) for each in rows]
        errors: dict[int, Code] = {}
        for at, each in enumerate(rows):
            if not done[at] and (code := self._write_row(attempt, each, op, entry.timestamp)):
                errors[at] = code
        self.expected.append((Code.OK, errors))

    def is_done(self, attempt: Attempt | None, key: Key) -> bool:
        if attempt is None:
            return False
        alike = {a for a in self.wrote.get(key, ()) if (a.job, a.part) == (attempt.job, attempt.part)}
        return bool(alike - {attempt})

    def _write_row(self, attempt: Attempt | None, given: Row, op: RowOp, time: int) -> Code | None:
        key = (given["k"], given["n"])
        present = self.now(key)
        if op is RowOp.INSERT and present is not None:
            return Code.ALREADY_PRESENT
        if op in (RowOp.UPDATE, RowOp.DELETE) and present is None:
            return Code.NOT_FOUND
        if (op is RowOp.INSERT_IGNORE and present) or (op is RowOp.UPDATE_IGNORE and not present):
            return None
        if attempt is not None:
            self.wrote.setdefault(key, set()).add(attempt)
        old = (present if op in UPDATES else None) or WHOLE
        self.versions.setdefault(key, []).append((time, None if op in DELETES else {**old, **given}))
        return None


ATTEMPTS = st.one_of(
    st.none(),
    st.builds(
        lambda job, part, number: Attempt(job * 16, START_US, part, number),
        *(st.sampled_from([b"j", b"j", b"k"]), st.integers(0, 1), st.integers(1, 3)),
    ),
)


class JobMachine(RuleBasedStateMachine):
    """One replica applies at once. Another lags, flushes and merges at times of its own, and drops history as it can."""

    @initialize(history_us=st.sampled_from([0, 0, 5]))
    def begin(self, history_us: int) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="stele-jobs-"))
        self.steady_us = 0
        self.options = StoreOptions(history_us=history_us, steady_us=lambda: self.steady_us)
        self.stores = [new_store(self.home / str(n), self.options) for n in range(2)]
        self.twin = JobTwin()

    def teardown(self) -> None:
        if hasattr(self, "home"):
            shutil.rmtree(self.home, ignore_errors=True)

    def catch_up(self, at: int) -> None:
        store = self.stores[at]
        for number in range(store.applied.index, len(self.twin.entries)):
            entry, (code, errors) = self.twin.entries[number], self.twin.expected[number]
            begun = store.begin(entry)
            outcome = store.apply(entry, begun.run()) if isinstance(begun, Lookup) else begun
            assert (outcome.code, codes(outcome)) == (code, errors), entry.opid

    @rule(
        attempt=ATTEMPTS,
        numbers=st.lists(st.integers(0, 7), min_size=1, max_size=5),
        many=st.booleans(),
        op=st.sampled_from(RowOp),
        partial=st.booleans(),
        after_us=st.sampled_from([1, 1, 1, 1, 1, IDLE_US // 2, IDLE_US + 1]),
    )
    def write(
        self, attempt: Attempt | None, numbers: list[int], many: bool, op: RowOp, partial: bool, after_us: int
    ) -> None:
        stamp = len(self.twin.entries)
        if many:
            numbers = [*numbers, *range(8, 41)]
        rows = [
            {"k": "a", "n": n, "v": f"{stamp}.{at}", "w": stamp, "d": 0.5} for at, n in enumerate(numbers)
        ]
        if partial and op in UPDATES:
            rows = [{name: each[name] for name in ("k", "n", "v")} for each in rows]
        self.twin.write_as(attempt, rows, op, after_us)
        self.catch_up(0)

    @rule()
    def second_catches_up(self) -> None:
        self.catch_up(1)

    @rule(us=st.sampled_from([5, IDLE_US, 3 * IDLE_US]))
    def rest(self, us: int) -> None:
        self.steady_us += us

    @rule(at=st.integers(0, 1))
    def flush(self, at: int) -> None:
        flush(self.stores[at])

    @rule(at=st.integers(0, 1))
    def merge(self, at: int) -> None:
        compact(self.stores[at])

    @rule(at=st.integers(0, 1))
    def restart(self, at: int) -> None:
        self.stores[at].close()
        self.stores[at] = TabletStore.open(self.home / str(at), self.options)
        if at == 0:
            self.catch_up(0)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "stores"):
            assert all_rows(self.stores[0]) == self.twin.at(self.twin.us << 12)

    @rule()
    def both_alike(self) -> None:
        self.catch_up(1)
        one, other = self.stores
        assert all_rows(one) == all_rows(other)
        assert one.exactly_once_checksum() == other.exactly_once_checksum()


JobMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestJobMachine = JobMachine.TestCase


def test_a_flush_copies_no_writes_of_jobs_on_the_loop() -> None:
    """65,536 writes of as many parts: what a flush takes of the owner's thread is a few numbers."""
    state = Jobs()
    for number in range(3_000):
        attempt = Attempt(JOB, START_US, number, 1)
        state.enter(attempt, (START_US + number) << 12)
        state.wrote(attempt, (START_US + number) << 12)
    frozen = state.frozen()
    before = jobs.encode(frozen)
    state.wrote(SECOND, (START_US + 5_000) << 12)
    assert jobs.encode(frozen) == before != state.encoded()
    found = Jobs.decode(before)
    assert np.array_equal(found.others(SECOND), [START_US << 12])


def test_a_job_holds_history_after_a_start_too() -> None:
    state = Jobs()
    first = Attempt(b"j" * 16, START_US, 3, 1)
    for at in (9 << 12, 12 << 12):
        assert state.enter(first, at) is None
        state.wrote(first, at)
    assert state.held == (9 << 12) - 1 == Jobs.decode(state.encoded()).held


def test_what_an_attempt_wrote_itself_is_not_of_others() -> None:
    state = Jobs()
    mine, other = (Attempt(b"j" * 16, START_US, 3, number) for number in (1, 2))
    for attempt, at in ((mine, 5), (other, 6), (mine, 7)):
        assert state.enter(attempt, at) is None
        state.wrote(attempt, at)
    assert [list(found) for a in (mine, other) if (found := state.others(a)) is not None] == [[6], [5, 7]]
