"""A manifest may come from another node: the files that it names are a store's own, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stele.model.block import RowOp
from stele.model.errors import Corrupt
from stele.tablet import manifest
from stele.tablet.checked import HEADER_BYTES, seal
from stele.tablet.colformat import FileMeta
from stele.tablet.files import FILES
from stele.tablet.manifest import Manifest
from stele.tablet.store import TabletStore
from tests.tablet.twin import SCHEMA, block_of, flush, write_entry

META = FileMeta("rows-00000001", 9, 9, 1, 0, True, 1, 1)


def changed(directory: Path, **values: Any) -> None:
    """A whole manifest that says something else."""
    body = json.loads((directory / manifest.NAME).read_bytes()[HEADER_BYTES:])
    (directory / manifest.NAME).write_bytes(seal(b"STLMANIF", 1, json.dumps({**body, **values}).encode()))


@pytest.mark.parametrize(
    "name", ["../outside", "/outside", "rows-", "rows-00000001/../..", "rows-0000000\0", "MANIFEST", 7, ["x"]]
)
def test_names_that_no_store_gives_are_damage(tmp_path: Path, name: Any) -> None:
    manifest.write(FILES, tmp_path, Manifest((SCHEMA,), files=(META,)))
    assert manifest.read(tmp_path).files == (META,)
    changed(tmp_path, files=[[name, *META.to_json()[1:]]])
    with pytest.raises(Corrupt, match="file name"):
        manifest.read(tmp_path)
    changed(tmp_path, files=[], once=name)
    with pytest.raises(Corrupt, match="file name"):
        manifest.read(tmp_path)


def test_a_flush_removes_no_file_elsewhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"somebody's")
    store = TabletStore.create(tmp_path / "store", SCHEMA)
    store.apply(write_entry(1, block_of([{"k": "a", "n": 1, "v": None, "w": 1, "d": None}], RowOp.UPSERT)))
    assert flush(store)
    once = next((tmp_path / "store").glob("once-*"))
    victim.write_bytes(once.read_bytes())
    store.close()
    changed(tmp_path / "store", once="../victim")
    with pytest.raises(Corrupt, match="file name"):
        TabletStore.open(tmp_path / "store")
    assert victim.exists()


def test_a_manifest_without_a_schema_is_damage(tmp_path: Path) -> None:
    manifest.write(FILES, tmp_path, Manifest((SCHEMA,)))
    changed(tmp_path, schemas=[])
    with pytest.raises(Corrupt, match="no schema"):
        manifest.read(tmp_path)
