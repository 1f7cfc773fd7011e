"""Applying: what ends it is told to everyone who waits, whenever he began."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from stele.consensus.applier import Applier
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Retryable
from stele.model.ids import OpId
from stele.tablet.keyspace import KeySpace
from stele.tablet.machine import Lookup, Outcome
from tests.consensus.cluster import WAIT_S

END = Retryable("the replica is FAILED", code=Code.NOT_LEADER)


def applier() -> Applier:
    return Applier(
        slice_ms=4.0,
        in_thread=asyncio.to_thread,
        applied=lambda entry, outcome: None,
        failed=lambda exc: None,
    )


def entries(first: int, last: int) -> tuple[Entry, ...]:
    return tuple(Entry(1, index, EntryKind.NOOP, 0, b"") for index in range(first, last + 1))


@pytest.mark.parametrize("when", ["reading", "applying", "ending"])
async def test_a_late_store_is_not_brought_up_to_a_log_that_ended(tmp_path: Path, when: str) -> None:
    """A young witness failed while its rows caught up: the same entries were read again and again, for ever."""
    work = applier()
    work.committed_index = 5

    async def read(first_index: int, bytes_max: int) -> tuple[Entry, ...]:
        if when == "reading":
            work.stop(END)
        elif when == "applying" or first_index == 5:
            asyncio.get_running_loop().call_soon(work.stop, END)
        return entries(first_index, 4 if first_index < 5 else 5)

    with pytest.raises(Retryable, match="FAILED"):
        await asyncio.wait_for(work.catch_up(KeySpace.create(tmp_path / "k"), read), WAIT_S)


async def test_whoever_comes_after_the_end_does_not_wait() -> None:
    work = applier()
    work.stop(END)
    with pytest.raises(Retryable, match="FAILED"):
        await asyncio.wait_for(work.wait(1), WAIT_S)


async def test_a_late_store_gets_what_is_committed_and_no_more(tmp_path: Path) -> None:
    """The log holds more, which another leader may yet put something else in the place of."""
    work, store = applier(), KeySpace.create(tmp_path / "k")
    work.committed_index = 3
    waits = asyncio.ensure_future(work.wait(1))

    async def read(first_index: int, bytes_max: int) -> tuple[Entry, ...]:
        await asyncio.sleep(0)
        if work.applied_index >= 1:
            late = asyncio.ensure_future(work.wait(1))
            await asyncio.sleep(0)
            assert not late.done()
        assert not waits.done(), "nobody reads a store that is not up to date"
        return entries(first_index, min(first_index + 1, 9))

    await work.catch_up(store, read)
    await asyncio.wait_for(waits, WAIT_S)
    assert (store.applied.index, work.applied_index) == (3, 3)
    work.add(entries(4, 5))
    await asyncio.wait_for(work.wait(5), WAIT_S)
    assert store.applied.index == 5


async def test_what_a_late_store_holds_already_is_not_applied_again(tmp_path: Path) -> None:
    """It is of a replica that knew more to be committed than this one does."""
    store, told, failed = KeySpace.create(tmp_path / "k"), list[int](), list[Exception]()
    for entry in entries(1, 5):
        store.apply(entry)

    def ended(error: Exception) -> None:
        failed.append(error)
        work.stop(error)

    work = Applier(
        slice_ms=4.0,
        in_thread=asyncio.to_thread,
        applied=lambda entry, _: told.append(entry.index),
        failed=ended,
    )
    work.committed_index = 3

    async def read(first_index: int, bytes_max: int) -> tuple[Entry, ...]:
        raise AssertionError("it lacks nothing")

    await work.catch_up(store, read)
    await asyncio.wait_for(work.wait(5), WAIT_S)
    work.add(entries(4, 4))
    work.add(entries(5, 6))
    await asyncio.wait_for(work.wait(6), WAIT_S)
    assert store.applied.index == 6 and told == [6] and not failed


class Slow:
    """A machine whose even entries have to be looked up, which takes until `go` is set."""

    def __init__(self) -> None:
        self.go = Event()
        self.applied = OpId(0, 0)
        self.looked_up: list[int] = []
        self.fault: Exception | None = None

    def begin(self, entry: Entry, found: Any = None) -> Outcome | Lookup:
        """Apply the entry. A flush begins with the first lookup, so its result fits no more."""
        assert entry.index == self.applied.index + 1
        if entry.index % 2 == 0 and (found is None or len(self.looked_up) == 1):
            return Lookup(lambda: self._look_up(entry.index))
        assert found == (None if entry.index % 2 else entry.index)
        self.applied = entry.opid
        return Outcome()

    def _look_up(self, index: int) -> int:
        assert self.go.wait(WAIT_S)
        self.looked_up.append(index)
        if self.fault is not None:
            raise self.fault
        return index


def _slow() -> tuple[Applier, Slow, list[int], list[Exception]]:
    machine, told, failed = Slow(), list[int](), list[Exception]()

    def ended(error: Exception) -> None:
        failed.append(error)
        work.stop(error)

    work = Applier(
        slice_ms=4.0,
        in_thread=asyncio.to_thread,
        applied=lambda entry, _: told.append(entry.index),
        failed=ended,
    )
    work.attach(machine)
    return work, machine, told, failed


async def test_entries_behind_one_that_is_looked_up_wait_and_the_loop_goes_on() -> None:
    work, machine, told, failed = _slow()
    work.add(entries(1, 3))
    waits = asyncio.ensure_future(work.wait(6))
    for _ in range(20):
        await asyncio.sleep(0)
    work.add(entries(4, 6))
    for _ in range(20):
        await asyncio.sleep(0)
    assert told == [1] and work.applied_index == 1 and not waits.done()
    machine.go.set()
    await asyncio.wait_for(waits, WAIT_S)
    assert told == [1, 2, 3, 4, 5, 6] and machine.looked_up == [2, 2, 4, 6] and not failed


async def test_what_ends_while_an_entry_is_looked_up_applies_it_no_more() -> None:
    work, machine, told, failed = _slow()
    work.add(entries(1, 3))
    waits = asyncio.ensure_future(work.wait(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    work.stop(END)
    machine.go.set()
    with pytest.raises(Retryable, match="FAILED"):
        await waits
    assert work._lookup is not None
    await asyncio.wait_for(work._lookup, WAIT_S)
    assert told == [1] and machine.applied.index == 1 and not failed


@pytest.mark.parametrize("fault", [ValueError("a bug"), Corrupt("a bad file")])
async def test_a_lookup_that_fails_ends_applying(fault: Exception) -> None:
    work, machine, told, failed = _slow()
    machine.fault = fault
    machine.go.set()
    work.add(entries(1, 3))
    while not failed:
        await asyncio.sleep(0.001)
    assert told == [1] and machine.applied.index == 1
    assert str(fault) in str(failed[0])


async def test_a_late_store_looks_up_in_a_thread_as_well() -> None:
    work, machine = applier(), Slow()
    work.committed_index = 4
    machine.go.set()

    async def read(first_index: int, bytes_max: int) -> tuple[Entry, ...]:
        return entries(first_index, 4)

    await asyncio.wait_for(work.catch_up(machine, read), WAIT_S)
    assert machine.looked_up == [2, 2, 4] and machine.applied.index == 4
