"""Files of each format, checked in: every later version must read them, and give the same rows and checksums."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from stele.model.block import RowOp, decode_block
from stele.model.ids import OpId
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import DICTIONARY, FIXED, NARROW, PART_BOUNDS, PLAIN
from stele.tablet.decoding import LZ4, ZSTD
from stele.tablet.keyspace import KeySpace
from stele.tablet.store import TabletStore
from tests.tablet.golden import (
    HOME,
    HOME_2,
    MERGED_2,
    ROWS_2,
    SCHEMA,
    SCHEMA_2,
    build,
    build_2,
    row,
    row_2,
)
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


def test_files_of_format_2_are_read(tmp_path: Path) -> None:
    """Each layout, and each codec, is in one of them."""
    shutil.copytree(HOME_2, tmp_path / "g")
    expected = json.loads((HOME_2 / "expected.json").read_text())
    store = TabletStore.open(tmp_path / "g" / "table")
    flushed, merged = (ColumnFile(store.directory / name) for name in store.files)
    assert all((PART_BOUNDS, 0) in file._parts for file in (flushed, merged))
    assert set(flushed.forms.values()) == {DICTIONARY, FIXED, NARROW}
    assert {form & 0xFF for form in merged.forms.values()} == {PLAIN, DICTIONARY, FIXED, NARROW}
    assert {form >> 8 for form in merged.forms.values()} == {0, LZ4, ZSTD}
    store.verify()
    with store.view() as view:
        found = view.checksum()
        rows = sorted(rows_of(view.scan()), key=lambda r: r["id"])
    assert (found.rows, found.checksum) == (expected["rows"], expected["checksum"])
    assert rows == [row_2(n) for n in range(ROWS_2) if n % 10]
    assert merged.rows == MERGED_2 and store.schema == SCHEMA_2


def test_the_same_entries_make_the_same_rows_of_format_2_today(tmp_path: Path) -> None:
    assert build_2(tmp_path) == json.loads((HOME_2 / "expected.json").read_text())
