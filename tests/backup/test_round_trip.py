"""A backup holds what its tables held at its moment, and a restore brings exactly that back."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pytest

import stele
from stele import backup
from stele.backup.folder import Folder
from stele.model.errors import Code, Rejected
from tests.backup.conftest import There
from tests.backup.tables import EVERY_TYPE, NUMBERS, bits, every_type, numbered, rows


def test_every_type_comes_back_to_the_last_bit(there: There, tmp_path: Path) -> None:
    client = there.client
    table = client.create_table("all types", EVERY_TYPE, stele.hash("id", buckets=2))
    table.write_arrow(every_type())
    made = backup.create(client, tmp_path, "all types")
    assert [(t.name, t.rows) for t in made.tables] == [("all types", 3)]
    backup.restore(client, tmp_path, tables={"all types": "again"})
    again = client.open_table("again")
    assert rows(again) == rows(table) == bits(pa.Table.from_batches([every_type()]))
    assert [(c.name, c.type, c.nullable) for c in again.schema.columns] == [
        (c.name, c.type, c.nullable) for c in EVERY_TYPE.columns
    ]
    assert again.partitioning == table.partitioning
    report = backup.compare(client, tmp_path, tables={"all types": "again"})
    assert (report.faults, report.differences) == ([], [])


def test_empty_tables_empty_tablets_and_tables_of_keys_alone(there: There, tmp_path: Path) -> None:
    client = there.client
    client.create_table("empty", NUMBERS)
    keys = client.create_table(
        "keys",
        stele.Schema.make([("a", "string"), ("b", "int8")], key=["a", "b"]),
        [stele.hash("b", buckets=2), stele.range("a", split_at=["b", "x"])],
    )
    keys.write_arrow(pa.table({"a": ["", "b"], "b": pa.array([1, -1], pa.int8())}))
    gaps = client.create_table("gaps", NUMBERS, stele.range("id", ranges=[(0, 10), (20, None)]))
    gaps.write_arrow(pa.table({"id": [5, 25]}))
    gaps.alter(
        add_ranges=[(None, -5)], drop_ranges=[(0, 10)]
    )  # its ordinals are no longer those of a new table
    gaps.put({"id": -7})
    made = backup.create(client, tmp_path, ["empty", "keys", "gaps"])
    assert {t.name: (t.rows, len(t.tablets)) for t in made.tables} == {
        "empty": (0, 1),
        "keys": (2, 6),
        "gaps": (2, 2),
    }
    assert backup.verify(tmp_path).faults == []
    done = backup.restore(client, tmp_path, tables={n: f"{n}2" for n in ("empty", "keys", "gaps")})
    assert {d.name: d.rows for d in done} == {"empty2": 0, "keys2": 2, "gaps2": 2}
    for name in ("empty", "keys", "gaps"):
        old, new = client.open_table(name), client.open_table(f"{name}2")
        assert rows(new) == rows(old)
        assert new.partitioning == old.partitioning
    with pytest.raises(Rejected):
        client.open_table("gaps2").put({"id": 15})  # still in a gap


def test_all_tables_are_as_of_one_moment(there: There, tmp_path: Path) -> None:
    """While a program writes each number to one table, then to the other."""
    client = there.client
    first, second = numbered(client, "first", 0), numbered(client, "second", 0)
    stop = threading.Event()

    def write() -> None:
        with stele.connect(there.masters) as other:
            tables = [other.open_table(name) for name in ("first", "second")]
            for number in range(1_000_000):
                if stop.is_set():
                    return
                for table in tables:
                    table.put({"id": number})

    thread = threading.Thread(target=write)
    thread.start()
    try:
        while second.scan().count() < 20:
            pass
        made = backup.create(client, tmp_path, ["first", "second"])
    finally:
        stop.set()
        thread.join()
    ahead = {t.name: t.rows for t in made.tables}
    assert ahead["second"] >= 20
    assert ahead["first"] - ahead["second"] in (0, 1)
    assert first.scan(snapshot=made.snapshot).count() == ahead["first"]
    assert first.scan().count() > ahead["first"]
    report = backup.compare(client, tmp_path)
    assert (report.faults, report.differences) == ([], [])
    assert all("as of" in table.compared for table in report.tables)


def test_what_was_written_later_is_not_in_it_and_an_earlier_moment_can_be_asked_for(
    there: There, tmp_path: Path
) -> None:
    client = there.client
    table = numbered(client, "t", 100)
    before = client.now()
    table.write_arrow(pa.table({"id": np.arange(50)}), "delete")
    now = backup.create(client, tmp_path, "t")
    then = backup.create(client, tmp_path, "t", at=before)
    assert (now.rows, then.rows, then.snapshot) == (50, 100, before)
    backup.restore(client, tmp_path, then.backup_id, tables={"t": "then"})
    assert rows(client.open_table("then")) == bits(table.scan(ordered=True, snapshot=before).to_table())
    with pytest.raises(Rejected, match="does not keep all rows") as gone:
        backup.create(client, tmp_path, "t", at=1 << 52)
    assert gone.value.code is Code.SNAPSHOT_TOO_OLD
    assert [b.state for b in backup.list_backups(tmp_path)] == [backup.State.COMPLETE] * 2


def test_a_table_is_restored_with_other_partitions_and_another_factor(there: There, tmp_path: Path) -> None:
    client = there.client
    table = numbered(client, "t", 5_000)
    backup.create(client, tmp_path, "t")
    backup.restore(
        client,
        tmp_path,
        tables={"t": "ranged"},
        partitioning=stele.range("id", split_at=[1_000, 4_000]),
        replication_factor=1,
    )
    backup.restore(client, tmp_path, tables={"t": "one"}, partitioning=[])
    info = client.describe("ranged")
    assert (info.tablets, info.replication_factor, client.describe("one").tablets) == (3, 1, 1)
    for name in ("ranged", "one"):
        assert rows(client.open_table(name)) == rows(table)
        assert backup.compare(client, tmp_path, tables={"t": name}).differences == []
    with pytest.raises(Rejected, match="no column 'nope'"):
        backup.restore(client, tmp_path, tables={"t": "x"}, partitioning=stele.hash("nope", buckets=2))


def test_owner_comment_and_history_come_back(there: There, tmp_path: Path) -> None:
    client = there.client
    notes = {"owner": "ops", "comment": "since 2013", "history_s": 7_200.0}
    client.create_table("t", NUMBERS, **notes)
    client.create_table("plain", NUMBERS)
    backup.create(client, tmp_path, ["t", "plain"])
    backup.restore(client, tmp_path, tables={"t": "new", "plain": "plain2"})
    for name, wanted in (("new", notes), ("plain2", {"owner": "", "comment": "", "history_s": 900.0})):
        info = client.describe(name)
        assert {key: getattr(info, key) for key in wanted} == wanted


def test_nothing_is_seen_of_a_table_before_it_is_whole(there: There, tmp_path: Path) -> None:
    client = there.client
    numbered(client, "t", 30_000)
    backup.create(client, tmp_path, "t")
    seen = []

    def look(name: str, count: int) -> None:
        with stele.connect(there.masters) as other:
            seen.append(sorted(info.name for info in other.list_tables()))

    backup.restore(client, tmp_path, tables={"t": "new"}, on_rows=look)
    assert seen and all(names[0].startswith("new.restoring-") and names[1:] == ["t"] for names in seen)
    assert sorted(info.name for info in client.list_tables()) == ["new", "t"]


def test_an_existing_table_is_never_touched(there: There, tmp_path: Path) -> None:
    client = there.client
    table = numbered(client, "t", 10)
    numbered(client, "u", 10)
    client.create_keyspace("space")
    backup.create(client, tmp_path, ["t", "u"])
    table.put({"id": 99})
    for tables in ((), "t", {"u": "t"}, {"u": "space"}):
        with pytest.raises(Rejected, match=r"exists? already") as refused:
            backup.restore(client, tmp_path, tables=tables)
        assert refused.value.code is Code.ALREADY_PRESENT
    with pytest.raises(Rejected, match="two tables would be called x"):
        backup.restore(client, tmp_path, tables={"u": "x", "t": "x"})
    assert table.scan().count() == 11
    assert sorted(info.name for info in client.list_tables()) == ["space", "t", "u"]


def test_what_cannot_be_backed_up_is_refused(there: There, tmp_path: Path) -> None:
    client = there.client
    client.create_keyspace("space")
    with pytest.raises(Rejected, match="space is a key space"):
        backup.create(client, tmp_path / "a", "space")
    with pytest.raises(Rejected, match="no table x; no table y"):
        backup.create(client, tmp_path / "a", ["x", "y"])
    with pytest.raises(Rejected, match="no tables to back up"):
        backup.create(client, tmp_path / "a", [])
    assert not (tmp_path / "a").exists()
    numbered(client, "t", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(Rejected, match="expected a folder"):
        backup.create(client, tmp_path / "file", "t")
    with pytest.raises(Rejected, match="nope://x/y: Unrecognized filesystem"):
        backup.create(client, "nope://user:secret@x/y", "t")
    with pytest.raises(Rejected, match="parallel"):
        backup.create(client, tmp_path, "t", parallel=0)


def test_an_object_store_needs_no_folders_and_no_renames(there: There, tmp_path: Path) -> None:
    """A file system in memory that pyarrow has, used as an object store is."""
    client = there.client
    table = numbered(client, "t", 1_000)
    store = Folder(pafs._MockFileSystem(), "bucket/backups", "mock://bucket/backups")
    made = [backup.create(client, store, "t") for _ in range(2)]
    assert [b.backup_id for b in backup.list_backups(store)] == [m.backup_id for m in reversed(made)]
    assert backup.verify(store).faults == []
    backup.restore(client, store, tables={"t": "new"})
    assert rows(client.open_table("new")) == rows(table)
    assert len(backup.prune(store, keep=1).removed) == 1
    assert store.entries("writers") == []


def test_the_files_are_plain_parquet_for_everybody(there: There, tmp_path: Path) -> None:
    import pyarrow.dataset as dataset

    client = there.client
    table = numbered(client, "t", 1_000)
    made = backup.create(client, tmp_path, "t")
    (entry,) = made.tables
    read = dataset.dataset(tmp_path / made.backup_id / entry.folder).to_table().sort_by("id")
    assert bits(read) == rows(table)
