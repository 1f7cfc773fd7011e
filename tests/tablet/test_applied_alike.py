"""A block is applied alike whether its leader found it plain or not, and found plain at a glance only if it is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from stele.model.block import RowOp, encode_block
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Rejected
from stele.model.layout import layout_of
from stele.model.predicate import ScanSpec
from stele.model.rows import batch_from_rows
from stele.model.schema import Schema
from stele.model.writeop import WriteHeader, digest, encode
from stele.tablet import block_checks
from stele.tablet.memtable import SMALL_ROWS
from stele.tablet.store import TabletStore
from tests.model.drawn import row, schemas
from tests.tablet.twin import FOREVER, START_US

CLIENT = b"c" * 16


@st.composite
def blocks_of(draw: Callable[..., Any], schema: Schema) -> list[bytes]:
    """Blocks of one to some dozens of rows, most of them upserts; more blocks of one row than wait to be decoded together."""
    distinct = [row(draw, schema) for _ in range(draw(st.integers(1, 5)))]
    found = []
    for _ in range(draw(st.integers(1, 6))):
        size = draw(st.sampled_from([1, 2, 8, SMALL_ROWS, SMALL_ROWS + 1]))
        rows = [draw(st.sampled_from(distinct)) for _ in range(min(size, 8))] * (size // 8 or 1)
        op = draw(st.sampled_from([RowOp.UPSERT] * 4 + [RowOp.INSERT, RowOp.DELETE_IGNORE]))
        batch, column_ids, _, errors = batch_from_rows(rows, schema, op)
        assert not errors
        block = encode_block(op, column_ids, batch, schema.version)
        found += [block] * draw(st.sampled_from([1, 1, 40]))
    return found


def _entry(index: int, block: bytes, schema: Schema, *, plain: bool) -> Entry:
    header = WriteHeader(CLIENT, index, 1, START_US, digest(block), schema.version, plain=plain)
    return Entry(1, index, EntryKind.WRITE, START_US + index << 12, encode(header, block))


def _found(store: TabletStore) -> tuple[list[pa.RecordBatch], object, int]:
    view = store.view()
    rows = pa.Table.from_batches(view.scan(ScanSpec(ordered=True)), store.schema.to_arrow())
    return [b.serialize() for b in rows.combine_chunks().to_batches()], view.checksum(), store.rows_estimate


@settings(max_examples=30)
@given(st.data())
def test_both_ways_make_the_same_rows_and_outcomes(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    blocks = data.draw(blocks_of(schema))
    with tempfile.TemporaryDirectory() as directory:
        one = TabletStore.create(Path(directory) / "plain", schema, FOREVER)
        other = TabletStore.create(Path(directory) / "general", schema, FOREVER)
        for index, block in enumerate(blocks, start=1):
            try:
                plain = one.check_block(block)
            except Rejected:
                continue
            outcome = one.apply(_entry(index, block, schema, plain=plain))
            assert outcome == other.apply(_entry(index, block, schema, plain=False))
        assert _found(one) == _found(other)
        assert one.exactly_once_checksum() == other.exactly_once_checksum()


@settings(max_examples=30)
@given(st.data())
def test_what_is_plain_at_a_glance_is_plain_when_it_is_read(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    layout = layout_of(schema)
    for block in set(data.draw(blocks_of(schema))):
        if layout is not None and layout.is_plain(block):
            assert block_checks.check_block(block, schema)
