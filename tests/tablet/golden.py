"""Makes the golden files of format 1: `python -m tests.tablet.golden`. Done once; later versions must read them."""

from __future__ import annotations

import datetime
import decimal
import json
import shutil
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
from tests.tablet.twin import FOREVER, flush, write_entry

HOME = Path(__file__).parent / "golden"
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
    store = TabletStore.create(home / "table", SCHEMA, FOREVER)
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


if __name__ == "__main__":
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    (HOME / "expected.json").write_text(json.dumps(build(HOME), indent=1) + "\n")
    (HOME / "block").write_bytes(block([0, 1, 2], RowOp.INSERT))
