"""Small blocks read by their front words: what is said of them is what is said of any block, however damaged."""

from __future__ import annotations

import datetime
import pickle
import random
import struct
from typing import Any

import pyarrow as pa
import pytest

from stele.model.block import RowOp, checked_rows, encode_block
from stele.model.errors import Rejected
from stele.model.layout import ROWS_MAX, layout_of
from stele.model.schema import Schema
from stele.tablet.block_checks import check_block

_TYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "float",
    "double",
    "string",
    "binary",
    "date",
    "timestamp",
)
EVERY = Schema.make(
    [(f"c_{name}", name) for name in _TYPES],
    ["c_string", "c_bool", "c_int16", "c_date", "c_binary"],
)
TEXTS = Schema.make([("a", "string"), ("b", "string")], ["a"], version=7)
NUMBERS = Schema.make(
    [("k", "int64"), ("n", "int32", True), ("v", "string", True), ("b", "bool", True)], ["k"]
)
SCHEMAS = (EVERY, TEXTS, NUMBERS)


def _value(rng: random.Random, name: str) -> Any:
    match name:
        case "bool":
            return rng.random() < 0.5
        case "string":
            return "".join(rng.choice("aé€😀") for _ in range(rng.randrange(4)))
        case "binary":
            return rng.randbytes(rng.randrange(6))
        case "float" | "double":
            return rng.randrange(1000) / 4
        case "date":
            return datetime.date(2000, 1, 1) + datetime.timedelta(days=rng.randrange(9000))
        case "timestamp":
            return datetime.datetime.fromtimestamp(rng.randrange(1 << 31), datetime.UTC)
        case _:
            return rng.randrange(-100, 100)


def block(rng: random.Random, schema: Schema, rows: int) -> bytes:
    """Rows of chance, as a client sends them."""
    arrays = [
        pa.array(
            [None if c.nullable and rng.random() < 0.2 else _value(rng, c.type) for _ in range(rows)], c.arrow
        )
        for c in schema.columns
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow())
    return encode_block(RowOp.UPSERT, schema.column_ids, batch, schema.version)


def _vetted(data: bytes, schema: Schema) -> bool:
    try:
        return check_block(data, schema)
    except Rejected:
        return False


def _damaged(rng: random.Random, whole: bytes) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2))):
        match rng.randrange(4):
            case 0:
                data[rng.randrange(len(data))] = rng.randrange(256)
            case 1:  # a word of the front, or an offset
                value = rng.choice(
                    (-1, 0, 1, 8, 16, len(data), 1 << 31, (1 << 63) - 1, rng.randrange(64) * 8)
                )
                struct.pack_into("<q", data, rng.randrange(len(data) // 8) * 8, value)
            case 2:
                value = rng.choice((-1, 0, 1, 5, 1 << 30))
                struct.pack_into("<i", data, rng.randrange(len(data) // 4) * 4, value)
            case 3:
                at = rng.randrange(0, len(data), 8)
                data[at : at + rng.choice((0, 8))] = rng.randbytes(rng.choice((0, 8)))
    return bytes(data)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_blocks_as_clients_make_them_are_known_at_a_glance(schema: Schema) -> None:
    rng, layout = random.Random(1), layout_of(schema)
    assert layout is not None
    for rows in (1, 2, 7, 8, 9, ROWS_MAX):
        data = block(rng, schema, rows)
        assert layout.is_plain(data) and check_block(data, schema)
    for rows in (0, ROWS_MAX + 1):
        assert not layout.is_plain(block(rng, schema, rows))


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_block_is_plain_only_if_it_is_found_so_by_reading_it(schema: Schema, seed: int) -> None:
    rng, layout = random.Random(seed), layout_of(schema)
    assert layout is not None
    plain = 0
    for _ in range(600):
        data = _damaged(rng, block(rng, schema, rng.randrange(1, 5)))
        if layout.is_plain(data):
            plain += 1
            assert _vetted(data, schema), data.hex()
    assert 0 < plain < 600


def test_what_is_plain_no_more_is_left_to_others() -> None:
    """Values that are no text, nulls, other operations, keys that are long, and what follows a message."""
    layout = layout_of(TEXTS)
    assert layout is not None

    def made(a: list[Any], op: RowOp = RowOp.UPSERT) -> bytes:
        arrays = [pa.array(a, pa.binary()).view(pa.string()), pa.array(["x"] * len(a))]
        batch = pa.RecordBatch.from_arrays(arrays, schema=TEXTS.to_arrow())
        return encode_block(op, TEXTS.column_ids, batch, TEXTS.version)

    good = made(["é".encode(), b"b"])
    assert layout.is_plain(good) and check_block(good, TEXTS)
    cut = made(["é".encode()[:1], "é".encode()[1:]])  # together they would be a text
    for data in (
        cut,
        made([b"\xed\xa0\x80"]),
        made([b"a", None]),
        made([b"a"], RowOp.INSERT),
        good + bytes(8),
    ):
        assert not layout.is_plain(data)
    for length in (4_000, 4_096, 9_000):
        assert layout.is_plain(made([b"k" * length])) is _vetted(made([b"k" * length]), TEXTS)
    assert not layout.is_plain(good[:-8]) and not layout.is_plain(b"") and not layout.is_plain(good[:40])


@pytest.mark.parametrize("schema", SCHEMAS)
def test_rows_of_many_blocks_are_those_of_each(schema: Schema) -> None:
    rng, layout = random.Random(2), layout_of(schema)
    assert layout is not None
    joined = 0
    for _ in range(150):
        blocks = [block(rng, schema, rng.randrange(1, 10)) for _ in range(rng.randrange(1, 6))]
        if rng.random() < 0.7:
            at = rng.randrange(len(blocks))
            blocks[at] = _damaged(rng, blocks[at])
            if not _vetted(blocks[at], schema):
                layout.rows_of([memoryview(data) for data in blocks])  # whatever it is, it is safe
                continue
        found = layout.rows_of([memoryview(data) for data in blocks])
        if found is not None:
            joined += 1
            found.validate(full=True)
            wanted = pa.concat_batches([checked_rows(data, schema) for data in blocks])
            for column, other in zip(found, wanted, strict=True):
                as_bits = {pa.float32(): pa.int32(), pa.float64(): pa.int64()}.get(column.type, column.type)
                assert column.view(as_bits).equals(other.view(as_bits))  # a NaN equals none
    assert joined > 50


def test_a_layout_is_made_once_and_does_not_travel_with_its_schema() -> None:
    assert layout_of(EVERY) is layout_of(EVERY)
    assert pickle.loads(pickle.dumps(EVERY)) == EVERY


def test_a_table_with_decimals_has_no_layout() -> None:
    assert layout_of(Schema.make([("k", "int64"), ("d", "decimal(5,2)")], ["k"])) is None


def test_a_buffer_that_ends_within_a_value_is_read_as_far_as_it_is_used() -> None:
    layout = layout_of(TEXTS)
    assert layout is not None
    data = bytearray(block(random.Random(1), TEXTS, 3))
    length = 8 * (layout._columns[0].word + 3)  # of the offsets of a key column
    assert struct.unpack_from("<q", data, length) == (16,)
    struct.pack_into("<q", data, length, 17)
    assert not layout.is_plain(bytes(data)) and check_block(data, TEXTS)
