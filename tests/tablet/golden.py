"""Makes golden files, once for each format: `python -m tests.tablet.golden 2`. Later versions must read them.

Format 1: a table and a key space. Format 2: column files with parts in every form."""

from __future__ import annotations

import datetime
import decimal
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stele.model.block import RowOp, encode_block
from stele.model.errors import Code
from stele.model.kvop import KeyOp, KeyOperation
from stele.model.rows import batch_from_rows
from stele.model.schema import Schema
from stele.tablet.keyspace import KeySpace
from stele.tablet.store import TabletStore
from tests.tablet.test_keyspace import entry_of
from tests.tablet.twin import FOREVER, compact, flush, write_entry

HOME = Path(__file__).parent / "golden"
HOME_2 = Path(__file__).parent / "golden_2"
SCHEMA = Schema.make(
    [
        ("b", "bool"),
        ("i8", "int8"),
        ("i16", "int16"),
        ("dec", "decimal(12,2)"),
        ("day", "date"),
        ("at", "timestamp"),
        ("raw", "binary"),
        ("text", "string"),
        ("i32", "int32", True),
        ("i64", "int64", False, "-7"),
        ("f", "float", True),
        ("d", "double", True),
        ("note", "string", True, '"none"'),
    ],
    ["b", "i8", "i16", "dec", "day", "at", "raw", "text"],
)


def row(n: int) -> dict[str, Any]:
    """Row number n."""
    return {
        "b": n % 2 == 0,
        "i8": n - 3,
        "i16": -300 * n,
        "dec": decimal.Decimal(n * 1234) / 100,
        "day": datetime.date(1969, 12, 30) + datetime.timedelta(n),
        "at": datetime.datetime(1999, 12, 31, 23, 59, 59, n, tzinfo=datetime.UTC),
        "raw": bytes(range(n)),
        "text": "é\x00x"[:n],
        "i32": None if n % 3 == 0 else n,
        "f": n / 4,
        "d": None if n == 2 else -n / 3,
    }


def block(numbers: list[int], op: RowOp) -> bytes:
    """A block of these rows."""
    batch, ids, _, errors = batch_from_rows([row(n) for n in numbers], SCHEMA, op)
    assert not errors
    return encode_block(op, ids, batch, SCHEMA.version)


def build(home: Path) -> dict[str, Any]:
    """A store with two files, a delete and exactly-once state, and a key space; what they hold."""
    options = replace(FOREVER, file_version=lambda: 1)
    store = TabletStore.create(home / "table", SCHEMA, options)
    store.apply(
        write_entry(1, block(list(range(6)), RowOp.UPSERT), client_id=b"golden-client-id", sequence=1)
    )
    store.apply(write_entry(2, block([4], RowOp.DELETE)))
    flush(store)
    store.apply(write_entry(3, block([1, 7], RowOp.UPSERT)))
    refused = store.apply(write_entry(4, block([1], RowOp.INSERT), client_id=b"golden-client-id", sequence=2))
    assert refused.row_errors[0].code is Code.ALREADY_PRESENT
    flush(store)
    space = KeySpace.create(home / "keyspace")
    space.apply(
        entry_of(1, [KeyOperation(KeyOp.INSERT, b"a/1", b"one"), KeyOperation(KeyOp.INSERT, b"b", b"")])
    )
    job = space.begin_flush()
    assert job is not None
    job.write()
    with store.view() as view:
        found = view.checksum()
    return {
        "rows": found.rows,
        "checksum": found.checksum,
        "exactly_once": store.exactly_once_checksum(),
        "keyspace": space.checksum(),
    }


# --- format 2

ROWS_2, MERGED_2 = 1_500, 1_200
SCHEMA_2 = Schema.make(
    [
        ("id", "int64"),
        ("year", "int64"),
        ("carrier", "string"),
        ("city", "string", True),
        ("delay", "double", True),
        ("price", "decimal(9,2)"),
        ("day", "date"),
        ("code", "binary"),
        ("line", "string"),
        ("letters", "string"),
        ("ratio", "double"),
        ("ok", "bool"),
    ],
    ["id"],
)


def row_2(n: int) -> dict[str, Any]:
    """Row number n of the table of format 2."""
    mixed = n * 2_654_435_761 % 2**32
    return {
        "id": n * 3,
        "year": 2013,
        "carrier": ("UA", "DL", "B6")[mixed % 3],
        "city": None if mixed % 7 == 0 else ("Paris", "Rome", "München")[mixed % 3],
        "delay": None if mixed % 11 == 0 else (-0.0, 0.0, 2.5, 99.0)[mixed % 4],
        "price": decimal.Decimal(mixed % 50) / 4,
        "day": datetime.date(2013, 1, 1) + datetime.timedelta(n % 300),
        "code": mixed.to_bytes(8, "big"),
        "line": f"GET /api/v1/customers/{n:07d}/orders?page=1",
        "letters": "".join(
            "acgtn"[(mixed >> 3 * at) * (at + 7) * (n + 11) % 97 % 5] for at in range(20 + n % 5)
        ),
        "ratio": n / 7,
        "ok": mixed % 2 == 0,
    }


def block_2(numbers: Sequence[int], op: RowOp) -> bytes:
    """A block of these rows."""
    batch, ids, _, errors = batch_from_rows([row_2(n) for n in numbers], SCHEMA_2, op)
    assert not errors
    return encode_block(op, ids, batch, SCHEMA_2.version)


def build_2(home: Path) -> dict[str, Any]:
    """A store with a merged file, whose parts are compressed, and a flushed one with deletes; what it holds."""
    store = TabletStore.create(home / "table", SCHEMA_2, FOREVER)
    half = MERGED_2 // 2
    for index, numbers in enumerate((range(half), range(half, MERGED_2)), 1):
        store.apply(write_entry(index, block_2(numbers, RowOp.UPSERT)))
        flush(store)
    compact(store)
    store.apply(write_entry(3, block_2(range(MERGED_2, ROWS_2), RowOp.UPSERT)))
    store.apply(write_entry(4, block_2(range(0, ROWS_2, 10), RowOp.DELETE)))
    flush(store)
    with store.view() as view:
        found = view.checksum()
    return {"rows": found.rows, "checksum": found.checksum}


def main() -> None:
    """Make the files of the format that the command line names."""
    home, make = {"1": (HOME, build), "2": (HOME_2, build_2)}[sys.argv[1]]
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    (home / "expected.json").write_text(json.dumps(make(home), indent=1) + "\n")
    if make is build:
        (HOME / "block").write_bytes(block([0, 1, 2], RowOp.INSERT))


if __name__ == "__main__":
    main()
