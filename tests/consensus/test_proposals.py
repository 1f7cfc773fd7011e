"""A write ends as what became of its own entry, and is waited for from the moment it has a timestamp."""

from __future__ import annotations

import asyncio

from stele.consensus.proposals import Pending, Proposals
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Retryable
from stele.model.ids import OpId
from stele.tablet.machine import Outcome


async def test_a_write_ends_as_its_own_entry_does() -> None:
    proposals = Proposals()
    write = Pending(b"w", asyncio.get_running_loop().create_future(), 7)
    proposals.posted(1, write)
    assert proposals.outstanding(7) == [write.future]
    assert not proposals.outstanding(6)
    proposals.proposed(1, OpId(2, 5))
    assert proposals.outstanding(7) == [write.future]
    proposals.lost(OpId(1, 5))  # another's, that stood there before
    assert not write.future.done()
    proposals.applied(Entry(3, 5, EntryKind.WRITE, 7, b"x"), Outcome(3))
    error = write.future.exception()
    assert isinstance(error, Retryable) and error.code is Code.UNKNOWN_OUTCOME
    assert not len(proposals)
