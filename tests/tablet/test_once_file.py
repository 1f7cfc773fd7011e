"""The exactly-once state is the very file that the manifest means: an older one in its place is damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stele.model.block import RowOp
from stele.model.errors import Corrupt
from stele.tablet import manifest
from stele.tablet.checked import HEADER_BYTES, seal
from stele.tablet.store import TabletStore
from tests.tablet.twin import FOREVER, block_of, flush, new_store, rows_of, write_entry

CLIENT = b"1" * 16


def _row(value: int) -> bytes:
    return block_of([{"k": "k", "n": 1, "v": str(value), "w": value, "d": None}], RowOp.UPSERT)


def _store_with_an_older_once_file(home: Path) -> bytes:
    """Entries 1 to 3, a flush behind each. Returns the exactly-once file of the first flush."""
    store = new_store(home)
    store.apply(write_entry(1, _row(1)))
    assert flush(store)
    older = next(home.glob("once-*")).read_bytes()
    store.apply(write_entry(2, _row(2), client_id=CLIENT, sequence=1))
    assert flush(store)
    store.apply(write_entry(3, _row(3)))
    assert flush(store)
    store.close()
    return older


def test_an_older_file_in_its_place_is_refused(tmp_path: Path) -> None:
    """A retry of entry 2 was applied again, over the newer row of entry 3."""
    older = _store_with_an_older_once_file(tmp_path / "t")
    whole = TabletStore.open(tmp_path / "t", FOREVER)
    assert whole.apply(write_entry(4, _row(2), client_id=CLIENT, sequence=1)).duplicate
    with whole.view() as view:
        assert [r["w"] for r in rows_of(view.scan())] == [3]
    once = next((tmp_path / "t").glob("once-*"))
    once.write_bytes(older)
    with pytest.raises(Corrupt, match="not the one that the manifest lists"):
        whole.verify()
    with pytest.raises(Corrupt, match="not the one that the manifest lists"):
        TabletStore.open(tmp_path / "t", FOREVER)


def test_it_is_refused_in_a_copy(tmp_path: Path) -> None:
    """A copy opens what arrived before it takes it for its own."""
    older = _store_with_an_older_once_file(tmp_path / "t")
    store = TabletStore.open(tmp_path / "t", FOREVER)
    store.checkpoint(tmp_path / "copy")
    once = next((tmp_path / "copy").glob("once-*"))
    once.unlink()  # it is a link
    once.write_bytes(older)
    with pytest.raises(Corrupt, match="not the one that the manifest lists"):
        TabletStore.open(tmp_path / "copy", FOREVER)
    store.verify()


def test_one_of_the_same_size_is_refused(tmp_path: Path) -> None:
    """A whole file, with a checksum of its own."""
    _store_with_an_older_once_file(tmp_path / "t")
    once = next((tmp_path / "t").glob("once-*"))
    body = bytearray(once.read_bytes()[HEADER_BYTES:])
    at = body.index(b"31" * 16)
    body[at : at + 2] = b"32"
    once.write_bytes(seal(b"STLONCE1", 1, bytes(body)))
    with pytest.raises(Corrupt, match="not the one that the manifest lists"):
        TabletStore.open(tmp_path / "t", FOREVER)


def test_a_manifest_from_before_there_was_a_checksum_is_read_and_gets_one(tmp_path: Path) -> None:
    _store_with_an_older_once_file(tmp_path / "t")
    path = tmp_path / "t" / manifest.NAME
    fields = json.loads(path.read_bytes()[HEADER_BYTES:])
    assert fields.pop("once_size") and fields.pop("once_crc") is not None
    path.write_bytes(seal(b"STLMANIF", 1, json.dumps(fields).encode()))
    store = TabletStore.open(tmp_path / "t", FOREVER)
    store.verify()
    store.apply(write_entry(4, _row(4)))
    assert flush(store)
    assert manifest.read(tmp_path / "t").once_crc is not None
