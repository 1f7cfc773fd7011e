"""Files of format 1, checked in: every later version must read them, and give the same rows and checksums."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from stele.model.block import RowOp, decode_block
from stele.model.ids import OpId
from stele.tablet.keyspace import KeySpace
from stele.tablet.store import TabletStore
from tests.tablet.golden import HOME, SCHEMA, build, row
from tests.tablet.twin import rows_of


def test_files_of_format_1_are_read(tmp_path: Path) -> None:
    shutil.copytree(HOME, tmp_path / "g")
    expected = json.loads((HOME / "expected.json").read_text())
    store = TabletStore.open(tmp_path / "g" / "table")
    assert store.schema == SCHEMA
    assert store.applied == OpId(1, 4)
    assert len(store.files) == 2
    store.verify()
    with store.view() as view:
        found = view.checksum()
        rows = sorted(rows_of(view.scan()), key=lambda r: r["i8"])
    assert (found.rows, found.checksum) == (expected["rows"], expected["checksum"])
    assert store.exactly_once_checksum() == expected["exactly_once"]
    assert rows == [{**row(n), "i64": -7, "note": "none"} for n in (0, 1, 2, 3, 5, 7)]
    space = KeySpace.open(tmp_path / "g" / "keyspace")
    assert space.list() == [(b"a/1", b"one"), (b"b", b"")]
    assert space.checksum() == expected["keyspace"]


def test_a_block_of_format_1_is_read() -> None:
    found = decode_block((HOME / "block").read_bytes(), SCHEMA)
    assert (found.op, found.rows, found.schema_version) == (RowOp.INSERT, 3, 1)
    assert found.batch.to_pylist() == [{**row(n), "i64": -7, "note": "none"} for n in range(3)]


def test_the_same_entries_make_the_same_state_today(tmp_path: Path) -> None:
    assert build(tmp_path) == json.loads((HOME / "expected.json").read_text())
