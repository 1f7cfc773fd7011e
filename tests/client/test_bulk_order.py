"""Arrow data whose ranges change on the way: of two rows with one key the later one wins, and each row leaves once.

The bulk writer alone: the test answers in place of the tablets and of the masters.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stele.client import bulk
from stele.client.bulk import BulkWriter
from stele.client.ranges import Ranges
from stele.model.block import RowOp
from stele.model.errors import Code, Rejected, Retryable
from stele.model.partition import numbered
from stele.rpc.proto.tserver_pb2 import WriteResponse
from tests.client.dealt import ADD, DROP, LATER, SCHEMA, Places, Sent, at, turns

ROWS = 2
"""The rows of a block here."""
GONE = Rejected("its range was dropped", code=Code.TABLET_DELETED)


@pytest.fixture(autouse=True)
def small_blocks() -> Any:
    with mock.patch.object(bulk, "BLOCK_ROWS", ROWS):
        yield


def made() -> tuple[BulkWriter, Places, Sent]:
    places, sent = Places(), Sent()
    known: Any = places
    partitioning = places.info.partition_schema
    writer = BulkWriter(
        "t",
        SCHEMA,
        partitioning,
        sent.tablet,
        RowOp.UPSERT,
        timeout_s=5,
        bytes_max=1 << 20,
        ranges=Ranges(known),
    )
    return writer, places, sent


async def feed(writer: BulkWriter, *rows: tuple[int, str]) -> None:
    """Rows of one batch. Returns once they were dealt out."""
    ns, texts = zip(*rows)
    await writer.feed(pa.record_batch({"n": pa.array(ns, pa.int64()), "text": list(texts)}))
    await turns()


def block(text: str) -> list[tuple[int, str]]:
    return [(5, text)] * ROWS


async def test_rows_behind_a_block_whose_range_was_made_anew_stay_ahead_of_later_ones() -> None:
    writer, places, sent = made()
    await feed(writer, *block("first"))
    await feed(writer, *block("second"))
    assert sent.blocks == [(0, block("first"))]
    places.tell(DROP, ADD)
    sent.end[0](GONE)
    await turns()
    await feed(writer, *block("third"))
    finish = asyncio.create_task(writer.finish())
    for number, text in enumerate(("first", "second", "third"), 1):
        await turns()
        assert sent.blocks[number:] == [(2, block(text))]
        sent.end[number](WriteResponse(timestamp=number))
    assert (await finish).rows_written == 3 * ROWS


async def test_rows_of_a_range_made_anew_wait_for_the_block_of_the_dropped_one() -> None:
    """The masters are asked for the sake of another row, while that block is in flight."""
    writer, places, sent = made()
    places.answered.set()
    await feed(writer, *block("first"))
    places.tell(DROP, ADD, LATER)
    await feed(writer, (25, "other"), (25, "other"))
    await feed(writer, *block("later"))
    assert sent.blocks == [(0, block("first"))]
    sent.end[0](GONE)
    await turns()
    assert sent.blocks[1:] == [(2, block("first")), (3, [(25, "other")] * ROWS)]
    sent.end[1](WriteResponse(timestamp=1))
    await turns()
    assert sent.blocks[3:] == [(2, block("later"))]
    sent.end[2](WriteResponse(timestamp=2))
    sent.end[3](WriteResponse(timestamp=3))
    result = await writer.finish()
    assert result.rows_written == 3 * ROWS and not result.row_errors


async def test_a_row_without_a_range_is_refused_after_the_masters_were_asked_about_it() -> None:
    """Its place is that in the whole input. The rows of other ranges do not wait for it."""
    writer, places, sent = made()
    await feed(writer, (15, "a"), (99, "none"), (15, "b"))
    assert sent.blocks == [(1, [(15, "a"), (15, "b")])] and places.asked == 1
    sent.end[0](WriteResponse(timestamp=1))
    await feed(writer, (25, "late"))
    finish = asyncio.create_task(writer.finish())
    places.answered.set()
    await turns()
    result = await finish
    assert [(e.row, e.code) for e in result.row_errors] == [(1, Code.NOT_FOUND), (3, Code.NOT_FOUND)]
    assert result.rows_written == 2 and places.asked == 2, "the last row came while they were asked"


async def test_rows_of_a_dropped_range_are_refused_and_those_that_never_left_are_told_apart() -> None:
    writer, places, sent = made()
    places.answered.set()
    await feed(writer, *block("first"), *block("second"), (15, "a"), (15, "b"))
    places.tell(DROP)
    sent.end[0](GONE)
    await turns()
    assert sorted(e.row for e in writer.result.row_errors) == [0, 1, 2, 3]
    sent.end[1](Retryable("no answer", code=Code.UNKNOWN_OUTCOME))
    with pytest.raises(Retryable):
        await writer.finish()
    await writer.abandon()
    assert [(where.tolist(), type(error)) for where, error in writer.unsettled(6) if len(where)] == [
        ([4, 5], Retryable)
    ]


async def test_masters_that_do_not_answer_about_a_row_end_the_write() -> None:
    writer, places, _ = made()

    async def silent(*, timeout_s: float) -> None:
        raise Retryable("no master answers", code=Code.TIMED_OUT)

    places.ask_anew = silent  # type: ignore[method-assign]
    await feed(writer, (99, "none"))
    with pytest.raises(Retryable, match="no master answers"):
        await writer.finish()
    await writer.abandon()
    assert [(where.tolist(), error) for where, error in writer.unsettled(1) if len(where)] == [([0], None)]


class Cluster:
    """Applies the blocks in the order in which the test ends them: the dumb twin. A dropped range loses its rows."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.writer, self.places, self.sent = made()
        self.ended = 0
        self.open: list[int] = []
        self.tablets: dict[int, dict[int, int]] = {}
        self.applied: set[tuple[int, int]] = set()
        self.given = 0

    @property
    def there(self) -> set[int]:
        return {ordinal for ordinal, _ in numbered(self.places.info.partition_schema)}

    def note(self) -> None:
        self.open += range(self.ended, len(self.sent.blocks))
        self.ended = len(self.sent.blocks)

    def answer(self) -> None:
        """End one block: at a tablet that is there it is applied."""
        self.note()
        if not self.open:
            return
        number = self.open.pop(self.rng.randrange(len(self.open)))
        ordinal, rows = self.sent.blocks[number]
        if ordinal not in self.there:
            self.sent.end[number](GONE)
            return
        held = self.tablets.setdefault(ordinal, {})
        for n, text in rows:
            assert held.get(n, -1) < int(text), f"row {n}: {text} is written over {held[n]}"
            assert (ordinal, int(text)) not in self.applied
            self.applied.add((ordinal, int(text)))
            held[n] = int(text)
        self.sent.end[number](WriteResponse(timestamp=self.given + 1))

    def change(self) -> None:
        """Another program drops ranges, makes them anew, or both."""
        bounds = {part.range_start for _, part in numbered(self.places.info.partition_schema)}
        steps = []
        for add, drop in ((ADD, DROP), (LATER, type(DROP)(at(20), at(30)))):
            if self.rng.random() < 0.5:
                steps += [drop, add] if add.start in bounds else [add]
            elif add.start in bounds and self.rng.random() < 0.5:
                steps.append(drop)
        if steps:
            self.places.tell(*steps)

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            chance = self.rng.random()
            if chance < 0.4:
                rows = []
                for _ in range(self.rng.randint(1, 5)):
                    rows.append((self.rng.choice([1, 2, 15, 21, 22]), str(self.given)))
                    self.given += 1
                await feed(self.writer, *rows)
            elif chance < 0.75:
                self.answer()
            elif chance < 0.9:
                self.change()
            elif self.places.answered.is_set():
                self.places.answered.clear()
            else:
                self.places.answered.set()
            for _ in range(self.rng.randint(0, 3)):
                await asyncio.sleep(0)
        self.places.answered.set()
        finish = asyncio.create_task(self.writer.finish())
        for _ in range(20 * steps):
            self.answer()
            await asyncio.sleep(0)
            if finish.done():
                break
        result = await finish
        assert result.rows_written + len(result.row_errors) == self.given
        assert len({error.row for error in result.row_errors}) == len(result.row_errors)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 25))
def test_whatever_happens_to_the_ranges_the_later_row_wins(seed: int, steps: int) -> None:
    async def run() -> None:
        await Cluster(seed).run(steps)

    asyncio.run(run())
