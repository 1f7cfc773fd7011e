"""Rows whose range is not known yet, or was dropped on their way: each leaves once, and none before an earlier one of its key.

The batcher alone: the test answers in place of the tablets and of the masters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stele.client.batcher import Batcher
from stele.client.ranges import Ranges
from stele.model.block import RowOp, decode_block
from stele.model.errors import Code, Rejected
from stele.model.keys import encode_tuple
from stele.model.partition import PartitionSchema
from stele.model.ranges import AddRange, DropRange, of_ranges, with_steps
from stele.model.schema import Schema
from stele.rpc.proto.tserver_pb2 import WriteResponse

SCHEMA = Schema.make([("n", "int64"), ("text", "string")], ["n"])


def at(n: int) -> bytes:
    return encode_tuple([n], [pa.int64()])


FIRST = of_ranges((0,), [(at(0), at(10)), (at(10), at(20))])
DROP, ADD, LATER = DropRange(at(0), at(10)), AddRange(at(0), at(10)), AddRange(at(20), at(30))


class Places:
    """At the port to the masters: what they told last, and a question that waits until the test answers it."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(partition_schema=PartitionSchema((), FIRST))
        self.asked = 0
        self.answered = asyncio.Event()

    async def ask_anew(self, *, timeout_s: float) -> None:
        self.asked += 1
        await self.answered.wait()

    def tell(self, *steps: Any) -> None:
        told = with_steps(self.info.partition_schema.range, steps)
        self.info = SimpleNamespace(partition_schema=PartitionSchema((), told))


class Sent:
    """At the port to the tablets: the blocks that were sent, and who ends each."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, list[tuple[int, str]]]] = []
        self.end: list[Callable[[Any], None]] = []

    def tablet(self, ordinal: int) -> Any:
        def start_write(block: bytes, timeout_s: float, ended: Callable[[Any], None]) -> Any:
            batch = decode_block(block, SCHEMA).batch
            self.blocks.append((ordinal, [tuple(row.values()) for row in batch.to_pylist()]))
            self.end.append(ended)
            return SimpleNamespace(cancel=lambda: None)

        return SimpleNamespace(start_write=start_write)


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


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


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
