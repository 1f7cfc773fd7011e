"""Attempts at parts of jobs, against a model that remembers for ever who wrote each key: all replicas end alike."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stele.model.block import DELETES, UPDATES, RowOp
from stele.model.errors import Code
from stele.model.job import Attempt
from stele.tablet.jobs import IDLE_US
from stele.tablet.machine import Lookup
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.twin import (
    START_US,
    Key,
    Row,
    Twin,
    all_rows,
    block_of,
    codes,
    compact,
    flush,
    new_store,
    write_entry,
)

WHOLE = {"v": None, "w": 7, "d": None}


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
            outcome = store.begin(entry, begun.run()) if isinstance(begun, Lookup) else begun
            assert not isinstance(outcome, Lookup)
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
