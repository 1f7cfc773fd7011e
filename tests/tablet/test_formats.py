"""Both formats of column files: stores that write either give the same rows to everybody, and one may hold files of both."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest

from stele.model import keys
from stele.model.block import RowOp
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import HybridTime
from stele.model.predicate import Changes, Predicate, ScanSpec
from stele.tablet import colfile, manifest
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import (
    DICTIONARY,
    FIXED,
    NARROW,
    PART_BLOOM,
    PART_BOUNDS,
    PART_DELETED,
    PART_KEYS,
    PART_TIMES,
    FileMeta,
)
from stele.tablet.decoding import LZ4
from stele.tablet.machine import WouldBlock
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.twin import SCHEMA, Row, Twin, all_rows, compact, flush, new_store, rows_of

CODEC = 0xFF00


def options(version: int) -> StoreOptions:
    return StoreOptions(history_us=1 << 50, file_version=lambda: version)


def rows(start: int, count: int) -> list[Row]:
    """Rows whose columns repeat, rise, are one value, are null, and are long text."""
    return [
        {
            "k": f"key-{n % 7}",
            "n": n,
            "v": None if n % 5 == 0 else f"GET /api/v1/customers/{n:07d}/orders?page={n % 3}&size=100",
            "w": 10**12 * (n % 9),
            "d": None if n % 11 == 0 else n % 50 / 2,
        }
        for n in range(start, start + count)
    ]


def lived(home: Path, *versions: int, count: int = 3_000) -> tuple[TabletStore, Twin]:
    """A store with a file for each version: overlapping rows and deletes. The oldest file first."""
    written = [1]
    store = new_store(home, StoreOptions(history_us=1 << 50, file_version=lambda: written[0]))
    twin = Twin()
    for place, version in enumerate(versions):
        written[0] = version
        for start in (0, count):
            entry, _ = twin.write(rows(place * count + start, count), RowOp.UPSERT)
            store.apply(entry)
        gone = [{"k": r["k"], "n": r["n"]} for r in rows(place * count, count)[::7]]
        store.apply(twin.write(gone, RowOp.DELETE)[0])
        flush(store)
    return store, twin


def versions_of(store: TabletStore) -> list[int]:
    """The formats of a store's files, newest first."""
    return [(store.directory / name).read_bytes()[8] for name in store.files]


def files_of(store: TabletStore) -> Iterator[ColumnFile]:
    for name in store.files:
        yield ColumnFile(store.directory / name)


def forms_of(store: TabletStore) -> set[int]:
    return {form for file in files_of(store) for form in file.forms.values()}


def test_both_formats_give_the_same_to_everybody(tmp_path: Path) -> None:
    one, twin = lived(tmp_path / "1", 1, 1, 1)
    two, _ = lived(tmp_path / "2", 2, 2, 2)
    mixed, _ = lived(tmp_path / "mixed", 1, 2, 1)
    assert (versions_of(one), versions_of(two), versions_of(mixed)) == ([1] * 3, [2] * 3, [1, 2, 1])
    stores = {"format 2": two, "both": mixed}
    for merged in (False, True):
        if merged:
            for store in (one, two, mixed):
                assert compact(store)
            assert (versions_of(one), versions_of(two), versions_of(mixed)) == ([1], [2], [1])
        for at in (None, *{entry.timestamp for entry in twin.entries[::2]}):
            wanted = all_rows(one, at)
            assert wanted == twin.at(at if at is not None else one.last_timestamp)
            for name, store in stores.items():
                assert all_rows(store, at) == wanted, (name, at, merged)
        for spec in (
            ScanSpec((1,), (Predicate(4, "is_null"),)),
            ScanSpec((), (Predicate(0, "=", "key-3"), Predicate(1, ">", 4_000)), ordered=True),
            ScanSpec(changes=Changes(twin.entries[2].timestamp, every=True)),
        ):
            with one.view() as wanted_view:
                wanted_rows = rows_of(wanted_view.scan(spec))
            for name, store in stores.items():
                with store.view() as view:
                    found = rows_of(view.scan(spec))
                assert sorted(map(str, found)) == sorted(map(str, wanted_rows)), (name, merged)
        for store in stores.values():
            store.verify()
            with one.view() as left, store.view() as right:
                assert left.checksum() == right.checksum()
    assert {DICTIONARY, NARROW} <= {form & ~CODEC for form in forms_of(two)}
    assert any(form & CODEC for form in forms_of(two))
    assert not any(form & CODEC for form in forms_of(lived(tmp_path / "flushed", 2)[0]))


@pytest.mark.parametrize("count", [3, 200])
def test_point_reads_find_the_same_rows(tmp_path: Path, count: int) -> None:
    """One by one, many at once, and briefly where no thread is needed."""
    one, _ = lived(tmp_path / "1", 1, 1)
    two, _ = lived(tmp_path / "2", 2, 2)
    compact(two)
    asked = pa.RecordBatch.from_pylist(
        [{"k": f"key-{n % 7}", "n": n} for n in np.linspace(-1, 9_100, count).astype(int).tolist()],
        schema=SCHEMA.to_arrow(SCHEMA.key_column_ids),
    )
    encoded = keys.encode_keys(asked, SCHEMA)
    with one.view() as left, two.view() as right:
        wanted, found = left.get(encoded), right.get(encoded)
        assert found[0].to_pylist() == wanted[0].to_pylist() and found[1] == wanted[1]
        if count == 3:
            assert right.get(encoded, brief=True)[0].to_pylist() == wanted[0].to_pylist()


def test_a_brief_read_decompresses_nothing(tmp_path: Path) -> None:
    store, _ = lived(tmp_path / "t", 2, 2)
    compact(store)
    store = TabletStore.open(tmp_path / "t", options(2))
    encoded = keys.encode_keys(
        pa.RecordBatch.from_pylist([{"k": "key-1", "n": 1}], schema=SCHEMA.to_arrow(SCHEMA.key_column_ids)),
        SCHEMA,
    )
    store.verify()
    with store.view() as view:
        view.get(encoded, (0, 1))
        list(view.scan())  # all was read once, but a scan keeps nothing that takes memory
        with pytest.raises(WouldBlock):
            view.get(encoded, brief=True)
        wanted = view.get(encoded)
        assert view.get(encoded, brief=True)[0].equals(wanted[0])


def test_updates_take_the_rest_of_a_row_from_either_format(tmp_path: Path) -> None:
    store, twin = lived(tmp_path / "t", 1, 2)
    changed = [{"k": r["k"], "n": r["n"], "w": -1} for r in rows(1, 5_900)[::59]]
    entry, wanted = twin.write(changed, RowOp.UPDATE_IGNORE)
    outcome = store.apply(entry)
    assert {e.row: e.code for e in outcome.row_errors} == wanted
    assert all_rows(store) == twin.at(store.last_timestamp)


def test_what_was_decompressed_for_reads_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = colfile._Kept(100, 600_000)
    monkeypatch.setattr(colfile, "_inflated", kept)
    store, _ = lived(tmp_path / "t", 2, 2, 2, 2, count=20_000)
    compact(store)
    (file,) = files_of(store)
    text, arrow = SCHEMA.columns[2], SCHEMA.to_arrow((2,))
    assert file.forms[int(text.id), 0] & CODEC and len(file.groups) > 2
    for _ in range(2):
        for group in range(len(file.groups)):
            file.row(group, 5, (text,), arrow)
            held = [a for (part, _), a in file._arrays.items() if part == int(text.id)]
            assert sum(a.nbytes for a in held) <= kept.bytes <= 600_000
    list(file.batch(group, (text,), arrow) for group in range(len(file.groups)))
    assert kept.bytes <= 600_000


def test_a_file_of_format_1_is_as_the_release_before_wrote_it(tmp_path: Path) -> None:
    """That release takes eight values of a file in a manifest, and looks at no form."""
    store, _ = lived(tmp_path / "t", 1)
    (file,) = files_of(store)
    assert file.forms == {}
    (listed,) = manifest.read(store.directory).files
    assert len(listed.to_json()) == 8 and FileMeta.from_json(listed.to_json()) == listed
    raw = (store.directory / store.files[0]).read_bytes()
    length, _, _ = struct.unpack("<QI8s", raw[-20:])
    (text,) = struct.unpack_from("<I", raw, len(raw) - 20 - length)
    table = raw[len(raw) - 20 - length + 4 + text : -20]
    assert len(table) % 32 == 0 and not any(table[28::32] + table[29::32] + table[30::32] + table[31::32])


def test_a_file_of_format_2_says_what_it_would_take_in_format_1(tmp_path: Path) -> None:
    """So a merge begins only if there is room for a result that is compressed less."""
    sizes = {}
    for version in (1, 2):
        store, _ = lived(tmp_path / str(version), version, version)
        compact(store)
        (sizes[version],) = manifest.read(store.directory).files
    assert sizes[2].size < 0.5 * sizes[1].size
    assert 0.9 * sizes[1].size < sizes[2].plain_bytes < 1.1 * sizes[1].size
    assert sizes[2].merge_bytes > 0.9 * sizes[1].merge_bytes
    assert FileMeta.from_json(sizes[2].to_json()) == sizes[2]
    assert sizes[1].plain_bytes == sizes[1].size


def test_keys_and_times_are_encoded_but_never_compressed(tmp_path: Path) -> None:
    store, _ = lived(tmp_path / "t", 2, 2)
    compact(store)
    (file,) = files_of(store)
    assert {form for (part, _), form in file.forms.items() if part == PART_KEYS} <= {FIXED}
    assert {form for (part, _), form in file.forms.items() if part == PART_TIMES} == {DICTIONARY}


def _with_version(raw: bytes, version: int) -> bytes:
    head = raw[:8] + struct.pack("<I", version) + raw[12:60]
    return head + struct.pack("<I", google_crc32c.value(head)) + raw[64:]


def test_a_format_of_a_later_release_is_refused(tmp_path: Path) -> None:
    store, _ = lived(tmp_path / "t", 2)
    path = store.directory / store.files[0]
    raw = path.read_bytes()
    path.unlink()  # the open store still maps it
    path.write_bytes(_with_version(raw, 3))
    with pytest.raises(Rejected, match="version 3; this program reads 2; upgrade it") as told:
        TabletStore.open(store.directory)
    assert told.value.code is Code.UNSUPPORTED_VERSION


def test_no_damaged_byte_of_a_compressed_part_goes_unseen(tmp_path: Path) -> None:
    store, _ = lived(tmp_path / "t", 2, 2, count=600)
    compact(store)
    (path,) = (store.directory / name for name in store.files)
    raw = path.read_bytes()
    assert any(form & CODEC for form in forms_of(store))
    for at in range(64, len(raw), 61):
        path.unlink()
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        with pytest.raises(Corrupt):
            opened = TabletStore.open(store.directory)
            with opened.view() as view:
                list(view.scan(ScanSpec(ordered=True)))
            opened.verify()


def test_a_form_that_is_made_up_is_damage(tmp_path: Path) -> None:
    """With a right checksum: an index behind the values, times that are compressed, and a codec that nobody knows."""
    store, _ = lived(tmp_path / "t", 2)
    path = store.directory / store.files[0]
    raw = path.read_bytes()
    length, _, _ = struct.unpack("<QI8s", raw[-20:])
    begin = len(raw) - 20 - length
    body = bytearray(raw[begin:-20])
    (text,) = struct.unpack_from("<I", body)
    for place in range(4 + text, len(body), 32):
        part, _ = struct.unpack_from("<II", body, place)
        made_up = bytearray(body)
        form = (LZ4 << 8 | DICTIONARY if part == PART_TIMES else 0x0909).to_bytes(4, "little")
        made_up[place + 28 : place + 32] = form
        crc = google_crc32c.value(bytes(made_up))
        path.unlink()
        path.write_bytes(raw[:begin] + bytes(made_up) + struct.pack("<QI8s", length, crc, raw[-8:]))
        if part in (PART_DELETED, PART_BLOOM, PART_BOUNDS):
            continue  # these have no form
        if part == PART_TIMES:  # otherwise a group of a few bytes could have any number of rows
            with pytest.raises(Corrupt, match="bytes of timestamps"):
                ColumnFile(path)
            continue
        with pytest.raises(Corrupt, match=r"form|codec"):
            file = ColumnFile(path)
            for group in range(len(file.groups)):
                file.run(group, SCHEMA.columns, SCHEMA.to_arrow())


def test_a_snapshot_is_served_from_either_format(tmp_path: Path) -> None:
    store, twin = lived(tmp_path / "t", 1, 2)
    assert compact(store)
    for entry in twin.entries:
        with store.view(HybridTime(entry.timestamp)) as view:
            assert view.checksum().rows == len(twin.at(entry.timestamp))
