"""Rows whose range is not known yet, or was dropped on their way: each leaves once, and none before an earlier one of its key.

The batcher alone: the test answers in place of the tablets and of the masters.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stele.client.batcher import Batcher
from stele.client.ranges import Ranges
from stele.model.block import RowOp
from stele.model.errors import Code, Rejected
from stele.rpc.proto.tserver_pb2 import WriteResponse
from tests.client.dealt import ADD, DROP, LATER, SCHEMA, Places, Sent, turns


def made() -> tuple[Batcher, Places, Sent]:
    places, sent = Places(), Sent()
    known: Any = places
    batcher = Batcher(
        "t", SCHEMA, places.info.partition_schema, sent.tablet, timeout_s=5, ranges=Ranges(known)
    )
    return batcher, places, sent


def put(batcher: Batcher, n: int, text: str) -> asyncio.Future[int]:
    """As a table does for each row."""
    batcher.adopt_ranges()
    return batcher.put(RowOp.UPSERT, {"n": n, "text": text})


async def test_a_row_for_which_a_range_was_found_meanwhile_is_sent_once() -> None:
    """Another row of the table meets the news before the question about this one is answered."""
    batcher, places, sent = made()
    stray = put(batcher, 25, "stray")
    await turns()
    assert places.asked == 1 and not sent.blocks
    places.tell(LATER)
    batcher.adopt_ranges()
    await turns()
    places.answered.set()
    await turns()
    assert sent.blocks == [(2, [(25, "stray")])]
    sent.end[0](WriteResponse(timestamp=7))
    await turns()
    assert await stray == 7 and len(sent.blocks) == 1
    await batcher.close()


async def test_a_row_whose_range_is_made_anew_stays_ahead_of_a_later_one_of_its_key() -> None:
    batcher, places, sent = made()
    first, other = put(batcher, 5, "first"), put(batcher, 15, "other")
    await turns()
    assert sorted(sent.blocks) == [(0, [(5, "first")]), (1, [(15, "other")])]
    places.tell(DROP, ADD)
    later = put(batcher, 5, "later")
    await asyncio.sleep(0.2)
    assert len(sent.blocks) == 2, "it waits until it is known what became of the first one"
    where = [ordinal for ordinal, _ in sent.blocks]
    sent.end[where.index(0)](Rejected("its range was dropped", code=Code.TABLET_DELETED))
    await asyncio.sleep(0.2)
    assert sent.blocks[2:] == [(2, [(5, "first"), (5, "later")])]
    sent.end[2](WriteResponse(timestamp=9))
    sent.end[where.index(1)](WriteResponse(timestamp=8))
    assert await asyncio.gather(first, other, later) == [9, 8, 9]
    await batcher.close()


async def test_rows_of_a_new_range_wait_while_a_block_for_a_dropped_one_is_in_flight() -> None:
    """The masters know their range, so they are not refused."""
    batcher, places, sent = made()
    dropped = put(batcher, 5, "dropped")
    await turns()
    places.tell(DROP, LATER)
    places.answered.set()
    new = put(batcher, 25, "new")
    await asyncio.sleep(0.2)
    assert len(sent.blocks) == 1 and not new.done()
    sent.end[0](WriteResponse(timestamp=3))
    await asyncio.sleep(0.2)
    assert await dropped == 3 and sent.blocks[1:] == [(2, [(25, "new")])]
    sent.end[1](WriteResponse(timestamp=4))
    assert await new == 4
    none = put(batcher, 5, "again")
    with pytest.raises(Rejected, match="no range of the table covers this row"):
        await none
    await batcher.close()
