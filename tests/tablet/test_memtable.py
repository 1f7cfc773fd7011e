"""Small blocks that are decoded together are what they are one by one, also to those who ask for a key's versions."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from stele.model.block import RowOp, encode_block
from stele.model.keys import encode_tuple
from stele.model.schema import Schema
from stele.tablet.memtable import _CHUNK_OVERHEAD_BYTES, MemTable
from stele.tablet.sorted_runs import concat

SCHEMA = Schema.make([("k", "int64"), ("v", "string"), ("b", "bool")], ["k"])


def _batch(rng: random.Random, rows: int) -> pa.RecordBatch:
    values = [
        [rng.randrange(50) for _ in range(rows)],
        ["é" * rng.randrange(4) for _ in range(rows)],
        [rng.random() < 0.5 for _ in range(rows)],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(values, SCHEMA.to_arrow())]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA.to_arrow())


@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_the_same_together_and_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    together, one_by_one = MemTable(SCHEMA), MemTable(SCHEMA)
    one_by_one.layout = None
    snapshots = []
    for time in range(1, 900):
        batch, tables = _batch(rng, rng.choice((1, 2, 5, 9))), (together, one_by_one)
        keys = [encode_tuple((key,), [pa.int64()]) for key in batch.column(0).to_pylist()]
        for table in tables:
            if time % 251 == 0:  # others between them: some rows are deletes
                table.append(batch, time, pa.array(keys).to_numpy(False) > keys[0], 100, keys)
            elif time % 401 == 0:
                table.append(batch, time, None, 100, None)
            else:
                block = encode_block(RowOp.UPSERT, SCHEMA.column_ids, batch, SCHEMA.version)
                table.append_plain(memoryview(block), time, len(block))
        if time % 300 == 0:
            snapshots.append((time, [table.view() for table in tables]))
    snapshots.append((900, [together.view(), one_by_one.view()]))
    # One by one they wait for less, so that they make more chunks.
    counted = [table.bytes - len(table.chunks) * _CHUNK_OVERHEAD_BYTES for table in (together, one_by_one)]
    assert counted[0] == counted[1]
    for time, (left, right) in snapshots:
        whole = concat(left.runs())
        assert whole.batch.equals(concat(right.runs()).batch)
        assert whole.times.tolist() == concat(right.runs()).times.tolist()
        for number in range(50):
            key = encode_tuple((number,), [pa.int64()])
            at = [row for row, found in enumerate(whole.keys.to_pylist()) if found == key]
            gone = [whole.deleted is not None and bool(whole.deleted[row]) for row in at]
            expected = [(row, int(whole.times[row]), deleted) for row, deleted in zip(at, gone)][::-1]
            assert list(together.versions(key, left.rows)) == expected
            assert left.find(key, time) == right.find(key, time)
            if time == 900:
                assert together.newest_small(key) == (expected[0][0], expected[0][2])


def test_blocks_that_are_read_one_by_one_wait_for_fewer() -> None:
    """Whoever decodes them does so in one step of a node's loop, of 5 ms at most; together they take a fraction."""
    decimals = Schema.make([("k", "int64"), ("d", "decimal(9,2)", True)], ["k"])
    arrays = [pa.array([1], pa.int64()), pa.nulls(1, pa.decimal128(9, 2))]
    of_decimals = pa.RecordBatch.from_arrays(arrays, schema=decimals.to_arrow())
    batch = _batch(random.Random(1), 1)
    ours = encode_block(RowOp.UPSERT, SCHEMA.column_ids, batch, SCHEMA.version)
    front = ours[: -len(batch.serialize())]
    told = pa.BufferOutputStream()
    with pa.ipc.new_stream(told, batch.schema) as stream:
        stream.write_batch(batch, custom_metadata={"made": "by another"})
    messages = pa.ipc.MessageReader.open_stream(told.getvalue())
    messages.read_next_message()
    others = front + messages.read_next_message().serialize().to_pybytes()
    unlike = encode_block(RowOp.UPSERT, decimals.column_ids, of_decimals, decimals.version)
    highest = []
    for schema, block in ((SCHEMA, ours), (decimals, unlike), (SCHEMA, others)):
        table, waiting = MemTable(schema), []
        for time in range(1, 1_000):
            table.append_plain(memoryview(block), time, len(block))
            waiting.append(len(table._waiting))
        assert table.view().rows == 999
        highest.append(max(waiting[500:]))
    assert highest[0] > 300 and highest[1] < 120 and highest[2] < 120
