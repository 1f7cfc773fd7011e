"""Applying: what ends it is told to everyone who waits, whenever he began."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stele.consensus.applier import Applier
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Retryable
from stele.tablet.keyspace import KeySpace

END = Retryable("the replica is FAILED", code=Code.NOT_LEADER)


def applier() -> Applier:
    return Applier(
        slice_ms=4.0,
        applied=lambda entry, outcome: None,
        slice_done=lambda index: None,
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
        await asyncio.wait_for(work.catch_up(KeySpace.create(tmp_path / "k"), read), 5)


async def test_whoever_comes_after_the_end_does_not_wait() -> None:
    work = applier()
    work.stop(END)
    with pytest.raises(Retryable, match="FAILED"):
        await asyncio.wait_for(work.wait(1), 5)
