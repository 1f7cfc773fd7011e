"""Blocks: round trip, every fault of a header, no byte cut or changed goes into a batch unseen."""

from __future__ import annotations

import datetime
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.model.block import HEADER, Block, RowOp, decode_block, encode_block
from stele.model.errors import Code, Rejected
from stele.model.rows import batch_from_rows, null_faults
from stele.model.schema import Schema
from stele.model.writeop import NO_CLIENT, BodyKind, WriteHeader, decode, digest, encode
from tests.model.packed import compressed

SCHEMA = Schema.make(
    [
        ("k", "int64"),
        ("s", "string", True),
        ("w", "int32", False, "3"),
        ("t", "timestamp", True),
        ("must", "bool"),
    ],
    ["k"],
)


def _block(rows: int = 3, ops: Any = RowOp.UPSERT) -> bytes:
    batch = pa.record_batch(
        [pa.array(range(rows), pa.int64()), pa.array([None, "x", "yy", "zzz"][:rows], pa.string())],
        schema=SCHEMA.to_arrow((0, 1)),
    )
    return encode_block(ops, (0, 1), batch, 1)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_round_trip(rows: int) -> None:
    block = decode_block(_block(rows), SCHEMA)
    assert (block.rows, block.op, block.column_ids) == (rows, RowOp.UPSERT, (0, 1))
    assert block.batch.to_pydict() == {"k": list(range(rows)), "s": [None, "x", "yy", "zzz"][:rows]}
    each = np.array([1, 6, 3, 4][:rows], np.uint8)
    block = decode_block(_block(rows, each), SCHEMA)
    assert block.op is None
    assert block.row_ops is not None
    assert block.row_ops.tolist() == each.tolist()


def test_rows_are_read_in_place() -> None:
    data = _block()
    block = decode_block(data, SCHEMA)
    address = block.batch.column(0).buffers()[1].address
    start = pa.py_buffer(data).address
    assert start <= address < start + len(data)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_compressed_block_is_refused_but_read_where_a_log_has_it(codec: str) -> None:
    """34 kB of it may be a gigabyte."""
    good = _block(4)
    packed = compressed(good, SCHEMA, codec)
    with pytest.raises(Rejected, match="compressed"):
        decode_block(packed, SCHEMA)
    assert decode_block(packed, SCHEMA, trusted=True).batch == decode_block(good, SCHEMA).batch


def test_messages_of_other_kinds_and_versions_are_refused() -> None:
    """In V4 another field may tell of compression, and a schema has other fields than a batch."""
    head = HEADER.size + 8
    rows = decode_block(_block(4), SCHEMA).batch
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_batch(rows)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()
    old = messages.read_next_message().serialize()
    for body, words in (
        (old, "message of V4"),
        (pa.schema([("a", pa.int64())] * 9).serialize(), "Arrow schema"),
    ):
        with pytest.raises(Rejected, match=words):
            decode_block(_block(4)[:head] + body.to_pybytes(), SCHEMA)


def test_columns_that_share_their_memory_are_refused() -> None:
    """Copied, as the store does with small blocks, they would take more than was sent."""
    ids, rows = (0, 2), 256
    batch = pa.RecordBatch.from_arrays(
        [pa.array(range(rows)), pa.array(range(rows), pa.int32())], schema=SCHEMA.to_arrow(ids)
    )
    good = encode_block(RowOp.UPDATE, ids, batch, 1)
    buffer = struct.Struct("<qq")  # where in the body it begins, and its bytes
    second = good.index(buffer.pack(2048, 1024))
    bad = bytearray(good[:-1024])
    bad[second : second + 16] = buffer.pack(0, 1024)
    length = good.index(struct.pack("<q", 3072))
    bad[length : length + 8] = struct.pack("<q", 2048)
    assert decode_block(good, SCHEMA).rows == rows
    assert decode_block(bytes(bad), SCHEMA, trusted=True).rows == rows
    with pytest.raises(Rejected, match="share"):
        decode_block(bytes(bad), SCHEMA)


def _changed(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


def test_bad_headers_are_refused_with_their_code() -> None:
    good = _block()
    for bad, code in [
        (_changed(good, 0, 9), Code.UNSUPPORTED_VERSION),
        (_changed(good, 1, 4), Code.UNSUPPORTED_VERSION),
        (_changed(good, 4, 2), Code.SCHEMA_MISMATCH),
        (_changed(good, HEADER.size, 77), Code.SCHEMA_MISMATCH),
        (_changed(good, 2, 99), Code.INVALID_ARGUMENT),
        (_changed(good, 8, 2), Code.INVALID_ARGUMENT),
        (_changed(good, HEADER.size + 4, 0), Code.INVALID_ARGUMENT),
        (_block(3, np.array([1, 2, 8], np.uint8)), Code.INVALID_ARGUMENT),
    ]:
        with pytest.raises(Rejected) as caught:
            decode_block(bad, SCHEMA)
        assert caught.value.code is code
    without_key = encode_block(RowOp.UPSERT, (1,), pa.record_batch([pa.array(["x"])], ["s"]), 1)
    with pytest.raises(Rejected, match=r"key columns \['k'\]"):
        decode_block(without_key, SCHEMA)


def test_a_block_cut_anywhere_is_refused() -> None:
    good = _block(4, np.array([1, 1, 1, 1], np.uint8))
    for end in range(len(good)):
        with pytest.raises(Rejected):
            decode_block(good[:end], SCHEMA)


@given(st.integers(0, 2000), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_harmless(at: int, change: int) -> None:
    """The digest finds changes; decoding untrusted bytes must only never read outside of them."""
    good = _block(4)
    at %= len(good)
    try:
        block = decode_block(_changed(good, at, good[at] ^ change), SCHEMA)
    except Rejected:
        return
    assert len(block.batch.to_pylist()) == block.rows


def test_rows_at_fault_are_told_one_by_one() -> None:
    at = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    rows: list[dict[str, Any]] = [
        {"k": 1, "s": "a", "t": at, "must": True},
        {"k": None, "must": True},
        {"k": 3, "must": True, "nope": 1},
        {"k": "x", "must": True},
        {"k": 5},
        {"k": 6, "must": False, "s": 7},
        {"k": 7, "must": False, "w": True},
        {"k": 8, "must": False, "w": 9},
    ]
    batch, ids, kept, errors = batch_from_rows(rows, SCHEMA, RowOp.INSERT)
    assert ids == (0, 1, 2, 3, 4)
    assert kept.tolist() == [0, 7]
    assert batch.to_pylist() == [
        {"k": 1, "s": "a", "w": 3, "t": at, "must": True},
        {"k": 8, "s": None, "w": 9, "t": None, "must": False},
    ]
    found = {e.row: e.message for e in errors}
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    for row, part in [
        (1, "k is null"),
        (2, "nope"),
        (3, "k: 'x'"),
        (4, "must is missing"),
        (5, "s: 7"),
        (6, "w: True"),
    ]:
        assert part in found[row]


def test_updates_and_deletes_name_what_they_need() -> None:
    batch, ids, _, errors = batch_from_rows([{"k": 1, "s": "x"}, {"k": 2, "s": None}], SCHEMA, RowOp.UPDATE)
    assert (ids, errors, batch.num_rows) == ((0, 1), [], 2)
    batch, ids, _, errors = batch_from_rows([{"k": 1, "s": "x"}, {"k": 2}], SCHEMA, RowOp.DELETE)
    assert (ids, errors, batch.num_rows) == ((0,), [], 2)
    with pytest.raises(Rejected, match="different columns"):
        batch_from_rows([{"k": 1, "s": "x"}, {"k": 2}], SCHEMA, RowOp.UPDATE)
    assert batch_from_rows([], SCHEMA, RowOp.UPSERT)[0].num_rows == 0


def _decoded(columns: dict[str, list[Any]], ops: Any) -> Block:
    ids = [int(SCHEMA.by_name[name].id) for name in columns]
    arrays = [pa.array(values, SCHEMA.by_name[name].arrow) for name, values in columns.items()]
    return decode_block(
        encode_block(ops, ids, pa.RecordBatch.from_arrays(arrays, schema=SCHEMA.to_arrow(ids)), 1), SCHEMA
    )


def test_null_and_missing_columns_are_faults_of_rows() -> None:
    whole = {"k": [1, None], "s": [None, None], "w": [None, 1], "t": [None, None], "must": [True, True]}
    assert [(e.row, "is null" in e.message) for e in null_faults(_decoded(whole, RowOp.UPSERT), SCHEMA)] == [
        (0, True),
        (1, True),
    ]
    lacking = _decoded(
        {"k": [1, 2, 3], "s": [None] * 3}, np.array([RowOp.INSERT, RowOp.UPDATE, RowOp.DELETE], np.uint8)
    )
    assert [(e.row, e.message) for e in null_faults(lacking, SCHEMA)] == [
        (0, "column must is missing and has no default; expected a bool")
    ]
    deletes = _decoded({"k": [1, None], "must": [None, None]}, RowOp.DELETE)
    assert [e.row for e in null_faults(deletes, SCHEMA)] == [1]
    mixed = _decoded({"k": [1, 2], "must": [None, None]}, np.array([RowOp.UPDATE, RowOp.DELETE], np.uint8))
    assert [e.row for e in null_faults(mixed, SCHEMA)] == [0]


def test_a_write_payload_codes_whole() -> None:
    body = _block()
    header = WriteHeader(b"0123456789abcdef", 5, 3, 17, digest(body), 1)
    payload = encode(header, body)
    found, rest = decode(payload)
    assert (found, bytes(rest)) == (header, body)
    assert digest(rest) == header.digest
    assert WriteHeader(NO_CLIENT, 0, 0, 0, 0).kind is BodyKind.BLOCK
    with pytest.raises(Rejected) as caught:
        decode(b"\x02" + payload[1:])
    assert caught.value.code is Code.UNSUPPORTED_VERSION
