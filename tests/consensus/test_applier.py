"""Applying: what ends it is told to everyone who waits, whenever he began."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stele.consensus.applier import Applier
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Retryable
from stele.tablet.keyspace import KeySpace
from tests.consensus.cluster import WAIT_S

END = Retryable("the replica is FAILED", code=Code.NOT_LEADER)


def applier() -> Applier:
    return Applier(
        slice_ms=4.0,
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
    work = Applier(slice_ms=4.0, applied=lambda entry, _: told.append(entry.index), failed=failed.append)
    work.committed_index = 3

    async def read(first_index: int, bytes_max: int) -> tuple[Entry, ...]:
        raise AssertionError("it lacks nothing")

    await work.catch_up(store, read)
    await asyncio.wait_for(work.wait(5), WAIT_S)
    work.add(entries(4, 4))
    work.add(entries(5, 6))
    await asyncio.wait_for(work.wait(6), WAIT_S)
    assert store.applied.index == 6 and told == [6] and not failed
