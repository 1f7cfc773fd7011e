"""Rows of any table are dealt out alike as plain values and as Arrow batches: to the same tablets, as the same blocks, the same refused."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stele.client.dealing import PLAIN_ROWS_MAX, Dealer
from stele.client.waiting_rows import Item, Part, groups_of
from stele.model.block import RowError, RowOp, decode_block
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from tests.model.drawn import row, schemas

PARTITIONINGS = (PartitionSchema(), PartitionSchema((HashPartition((0,), 3, 0),)))
ODD = st.sampled_from([None, "odd", "\ud800", 3, True, 1 << 63, object()])
"""Values that most columns refuse."""


@st.composite
def rows_of(draw: Callable[..., Any], schema: Schema) -> list[tuple[RowOp, dict[str, Any], int]]:
    """(operation, row, turn of the loop); whole rows more often than parts of rows, nulls and rows at fault."""
    op = draw(st.sampled_from([RowOp.UPSERT, RowOp.UPSERT, RowOp.INSERT, RowOp.UPDATE, RowOp.DELETE]))
    whole = draw(st.booleans())
    found = []
    for turn in range(draw(st.integers(1, 9))):
        names = [c.name for c in schema.columns if whole or schema.is_key(c.id) or draw(st.booleans())]
        drawn = row(draw, schema)
        chosen = {name: drawn[name] for name in names}
        if draw(st.integers(0, 9)) == 0:
            chosen[draw(st.sampled_from(names))] = draw(ODD)
        found.append((op if whole else draw(st.sampled_from(list(RowOp))), chosen, turn // 3))
    return found


def dealt(dealer: Dealer, given_rows: Sequence[tuple[RowOp, dict[str, Any], int]]) -> tuple[Any, ...]:
    """(blocks by tablet with their callers, errors by row): what the batcher sends, and whom it refuses."""
    loop = asyncio.new_event_loop()
    try:
        items: list[Item] = [(op, row, loop.create_future(), turn) for op, row, turn in given_rows]
        callers = [item[2] for item in items]
        blocks: dict[int, list[tuple[bytes, list[int]]]] = defaultdict(list)
        refused: dict[int, str] = {}

        def send(group: Sequence[Item]) -> None:
            for ordinal, part in _parts(dealer, group, refused, callers):
                blocks[ordinal].append((dealer.block(part), [callers.index(f) for f in part.futures]))

        for group in groups_of(items):
            send(group)
        failed = {n: repr(f.exception()) for n, f in enumerate(callers) if f.done()}
        return dict(blocks), refused | failed
    finally:
        loop.close()


def _parts(
    dealer: Dealer, group: Sequence[Item], refused: dict[int, str], callers: list[Any]
) -> Iterator[tuple[int, Part]]:
    """As the batcher does: what fails together is dealt out row by row."""
    errors: list[RowError] = []
    try:
        parts, errors = dealer.deal(group)
    except Exception as exc:  # noqa: BLE001 - as there
        if len(group) == 1:
            refused[callers.index(group[0][2])] = repr(exc)
            return
        for item in group:
            yield from _parts(dealer, [item], refused, callers)
        return
    refused |= {callers.index(group[e.row][2]): f"{e.code} {e.message}" for e in errors}
    yield from parts


@settings(max_examples=60)
@given(st.data())
def test_both_ways_send_the_same_blocks_and_refuse_the_same_rows(data: st.DataObject) -> None:
    schema, partitioning = data.draw(schemas()), data.draw(st.sampled_from(PARTITIONINGS))
    rows = data.draw(rows_of(schema))
    blocks, refused = dealt(Dealer(schema, partitioning), rows)
    wanted, wanted_refused = dealt(Dealer(schema, partitioning, plain=False), rows)
    assert refused == wanted_refused
    assert blocks.keys() == wanted.keys()
    for ordinal, of_tablet in blocks.items():
        assert [callers for _, callers in of_tablet] == [callers for _, callers in wanted[ordinal]]
        for (block, _), (other, _) in zip(of_tablet, wanted[ordinal], strict=True):
            one, two = decode_block(block, schema), decode_block(other, schema)
            assert (one.op, one.column_ids) == (two.op, two.column_ids)
            assert (
                one.batch.serialize() == two.batch.serialize()
                or one.batch.to_pydict() == two.batch.to_pydict()
            )


def test_rows_that_waited_are_joined_alike() -> None:
    schema = Schema.make([("id", "int64"), ("name", "string")], ["id"])
    loop = asyncio.new_event_loop()
    try:
        items = [[(RowOp.UPSERT, {"id": n, "name": f"n{n}"}, loop.create_future(), n)] for n in range(3)]
        found = []
        for dealer in (Dealer(schema, PartitionSchema()), Dealer(schema, PartitionSchema(), plain=False)):
            parts = [part for group in items for _, part in dealer.deal(group)[0]]
            futures = [f for part in parts for f in part.futures]
            whole = Part(dealer, RowOp.UPSERT, schema.column_ids, [], futures)
            dealer.join(whole, parts)
            found.append(dealer.block(whole))
        assert found[0] == found[1]
    finally:
        loop.close()


@pytest.mark.parametrize("rows", [1, PLAIN_ROWS_MAX, PLAIN_ROWS_MAX + 1])
def test_many_rows_go_as_arrow(rows: int) -> None:
    schema = Schema.make([("id", "int64"), ("name", "string")], ["id"])
    loop = asyncio.new_event_loop()
    try:
        items = [(RowOp.UPSERT, {"id": n, "name": ""}, loop.create_future(), 0) for n in range(rows)]
        ((_, part),), errors = Dealer(schema, PartitionSchema()).deal(items)
        assert isinstance(part.rows, list) is (rows <= PLAIN_ROWS_MAX) and not errors
    finally:
        loop.close()
