"""Incremental backups: with their bases they give exactly what the tables held, at each of their moments."""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import stele
from stele import backup
from stele.backup import creating, row_files
from stele.backup.chain import Chain
from stele.backup.finding import State
from stele.backup.folder import Folder
from stele.backup.increments import base_of
from stele.backup.manifest import MANIFEST, Manifest, TabletEntry, new_backup_id
from stele.backup.row_files import RowFile, file_columns
from stele.backup.unfinished import Done, Unfinished, remove
from stele.cli.errors import DISK, REFUSED
from stele.model import keys
from stele.model.alter import altered
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import new_id
from stele.model.partition import assign
from stele.model.schema import Schema
from stele.model.steps import AddColumn, DropColumn, RenameColumn
from tests.backup.conftest import Run, There
from tests.backup.tables import NUMBERS, data_files, made_by_hand, numbered, rows
from tests.tserver.history import settled, without_history
from tests.tserver.local import HASHED, SCHEMA, LocalCluster

SECOND = 1_000_000 << 12
Changes = dict[int, str | None]
"""New names by id; None for a deleted row."""


def changed_by_hand(
    folder: Path, base: Manifest, changes: Changes, *, schema: Schema = NUMBERS, whole: Iterable[int] = ()
) -> Manifest:
    """An incremental backup, as `create` writes one. `whole`: ordinals of tablets that are new. Needs no cluster."""
    place, at = Folder.at(folder), base.snapshot + SECOND
    before = base.tables[0]
    tablets = tuple(
        TabletEntry(f"{n:032x}" if n not in whole else new_id(), n, whole=n in whole) for n in range(4)
    )
    entry = dataclasses.replace(before, schema=schema, tablets=tablets)
    begun = datetime.datetime.now(datetime.UTC)
    backup_id = new_backup_id(at, new_id())
    plan = Manifest(backup_id, base.cluster_id, at, begun, None, "test", (entry,), base_of(base))
    work = Unfinished(place, plan, "0000bbbb")
    work.begin()
    ids = sorted(changes)
    names = [changes[i] for i in ids]
    given = {"id": pa.array(ids, pa.int64()), schema.columns[1].name: pa.array(names, pa.string())}
    for column in schema.columns[2:]:
        given[column.name] = pa.array([None if n is None else len(n) for n in names], column.arrow)
    table = pa.table(given)
    (batch,) = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
    ordinals = assign(batch, schema, before.partitioning)
    ops = pa.array(["delete" if n is None else "upsert" for n in names], pa.string())
    done = []
    for tablet in tablets:
        mine = pa.array(ordinals == tablet.ordinal)
        its, op = batch.filter(mine), ops.filter(mine)
        columns = file_columns(schema, whole=tablet.whole)
        added = [] if tablet.whole else [op, pa.array([at] * its.num_rows, pa.uint64())]
        its = pa.RecordBatch.from_arrays([*its.columns, *added], schema=columns)
        there = Done()
        if its.num_rows:
            file = RowFile(place, work.file_name(entry, tablet, 0), columns)
            file.write(its)
            last_key = keys.encode_keys(its.slice(its.num_rows - 1), schema)[0].as_py()
            there = work.record(tablet, there, file.finish(), last_key, whole=True)
        done.append(dataclasses.replace(tablet, files=there.files))
    whole_one = dataclasses.replace(
        plan, finished=begun, tables=(dataclasses.replace(entry, tablets=tuple(done)),)
    )
    work.publish(whole_one)
    return whole_one


def rows_at(folder: Path, manifest: Manifest) -> list[dict[str, object]]:
    """What a backup gives with its bases, tablet by tablet; the keys of each ascend."""
    place = Folder.at(folder)
    found, chain = [], Chain.of(place, manifest)
    (table,) = manifest.tables
    for tablet in table.tablets:
        its = [row for batch in chain.rows(place, table, tablet) for row in batch.to_pylist()]
        assert [row["id"] for row in its] == sorted({row["id"] for row in its})
        found += its
    return sorted(found, key=lambda row: row["id"])


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_gives_what_a_dict_holds(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(row_files, "_READ_ROWS", [7, 1, 50, 32_768][seed])
    made = made_by_hand(tmp_path, rows=120, snapshot=(1 << 60) + 1)
    model: Changes = {i: f"n{i}" for i in range(120)}
    states = [(made, dict(model))]
    for turn in range(4):
        ids = rng.sample(range(160), rng.choice([0, 1, 20, 100]))
        changes: Changes = {i: None if rng.random() < 0.4 else f"{turn} {i}" for i in ids}
        if rng.random() < 0.3:
            changes |= dict.fromkeys(range(0, 160, rng.choice([1, 2])))
        made = changed_by_hand(tmp_path, made, changes)
        model = {i: name for i, name in {**model, **changes}.items() if name is not None}
        states.append((made, dict(model)))
    for manifest, held in states:
        assert rows_at(tmp_path, manifest) == [{"id": i, "name": held[i]} for i in sorted(held)]
        report = backup.verify(tmp_path, manifest.backup_id)
        assert (report.faults, report.tables[0].rows, report.strays) == ([], len(held), [])
        assert report.bases == states.index((manifest, held))


def test_of_a_chain_each_backup_is_told_with_its_own_counts(run: Run, tmp_path: Path) -> None:
    """The rows of the whole chain were told with the files of the newest backup."""
    first = made_by_hand(tmp_path, rows=200, snapshot=1 << 60)
    second = changed_by_hand(tmp_path, first, {2: "two", 3: None})
    code, out, _ = run("verify", tmp_path)
    sizes = [f"{len(m.tables[0].files)} files, {m.file_bytes:,} bytes" for m in (first, second)]
    assert (code, out.splitlines()) == (
        0,
        [
            "t: 199 rows",
            f"  {first.backup_id}, full: 200 rows in {sizes[0]}",
            f"  {second.backup_id}, incremental: 2 changes in {sizes[1].replace('1 files', '1 file')}",
            f"backup {second.backup_id} is whole, with the 1 backup that it builds on",
        ],
    )
    told = json.loads(run("verify", tmp_path, "--json")[1])
    assert told["rowsRestored"] == {"t": 199}
    assert [(b["id"], b["rows"]) for b in told["chain"]] == [(first.backup_id, 200), (second.backup_id, 2)]
    code, out, _ = run("verify", tmp_path, first.backup_id)
    assert code == 0 and out.startswith(f"t: 200 rows in {sizes[0]}\n")


def test_rows_of_a_base_have_the_columns_of_now(tmp_path: Path) -> None:
    first = made_by_hand(tmp_path, rows=200, snapshot=1 << 60)
    schema = altered(NUMBERS, [RenameColumn("name", "called"), AddColumn("size", "int32", False, "7")])
    second = changed_by_hand(tmp_path, first, {2: "two", 3: None}, schema=schema)
    assert rows_at(tmp_path, second) == [
        {"id": i, "called": "two" if i == 2 else f"n{i}", "size": 3 if i == 2 else 7}
        for i in range(200)
        if i != 3
    ]
    shorter = altered(schema, [DropColumn("called")])
    third = dataclasses.replace(second, tables=(dataclasses.replace(second.tables[0], schema=shorter),))
    place, table = Folder.at(tmp_path), third.tables[0]
    with pytest.raises(Corrupt, match="its columns are not those of the manifest"):
        list(Chain((first, third)).rows(place, table, next(t for t in table.tablets if t.files)))


def test_a_tablet_that_is_new_is_read_alone(tmp_path: Path) -> None:
    """The range of its rows was dropped and added again, or a recovery has given up rows."""
    first = made_by_hand(tmp_path, rows=200, snapshot=1 << 60)
    ordinal_of = {
        int(i): int(o)
        for i, o in enumerate(
            assign(pa.record_batch({"id": pa.array(range(200))}), NUMBERS, first.tables[0].partitioning)
        )
    }
    second = changed_by_hand(tmp_path, first, {300: "new"} | {0: "again"}, whole=[ordinal_of[0]])
    found = {row["id"] for row in rows_at(tmp_path, second)}
    assert {i for i in range(1, 200) if ordinal_of[i] == ordinal_of[0]} & found == set() and 0 in found
    assert {i for i in range(200) if ordinal_of[i] != ordinal_of[0]} <= found


def test_pruning_keeps_what_others_build_on(tmp_path: Path) -> None:
    older = made_by_hand(tmp_path, snapshot=(1 << 60) - 100 * SECOND)
    full = made_by_hand(tmp_path, snapshot=1 << 60)
    first = changed_by_hand(tmp_path, full, {1: "one"})
    second = changed_by_hand(tmp_path, first, {2: None})
    pruned = backup.prune(tmp_path, keep=1)
    assert [b.backup_id for b in pruned.removed] == [older.backup_id]
    assert [b.backup_id for b in pruned.kept] == [m.backup_id for m in (second, first, full)]
    assert backup.verify(tmp_path).faults == [] and len(rows_at(tmp_path, second)) == 299
    new = made_by_hand(tmp_path, snapshot=(1 << 60) + 10 * SECOND)
    third = changed_by_hand(tmp_path, second, {3: None})
    backup.prune(tmp_path, keep=2)
    assert len(backup.list_backups(tmp_path)) == 5, "the newest but one is the end of the chain"
    remove(Folder.at(tmp_path), third.backup_id)
    backup.prune(tmp_path, keep=1)
    assert [b.backup_id for b in backup.list_backups(tmp_path)] == [new.backup_id]


def test_a_base_that_is_missing_or_another_one_is_told(tmp_path: Path) -> None:
    full = made_by_hand(tmp_path, snapshot=1 << 60)
    made = changed_by_hand(tmp_path, full, {1: "one"})
    path = tmp_path / full.backup_id / MANIFEST
    raw = path.read_bytes()
    other = dataclasses.replace(full, program="another")
    path.write_bytes(other.sealed())
    with pytest.raises(Corrupt, match="is not the one that it was built on"):
        backup.verify(tmp_path)
    path.write_bytes(raw[:-20])
    with pytest.raises(Corrupt, match="it is cut or damaged"):
        backup.verify(tmp_path)
    path.write_bytes(raw)
    (hurt, *_) = data_files(tmp_path, full.backup_id)
    hurt.write_bytes(hurt.read_bytes()[:-1])
    report = backup.verify(tmp_path)
    assert [fault.split(": ")[0] for fault in report.faults] == [str(hurt)]
    remove(Folder.at(tmp_path), full.backup_id)
    with pytest.raises(Corrupt, match=f"backup {made.backup_id} builds on {full.backup_id}, which is not in"):
        backup.verify(tmp_path)


def test_a_manifest_that_contradicts_itself_is_damage(tmp_path: Path) -> None:
    full = made_by_hand(tmp_path, snapshot=1 << 60)
    made = changed_by_hand(tmp_path, full, {1: "one"})
    for wrong in (dataclasses.replace(made, base=None),):
        with pytest.raises(Corrupt, match="it is a full backup, but has only the changes of some tablet"):
            Manifest.of(wrong.sealed(), "x", made.backup_id)
    assert Manifest.of(made.sealed(), "x", made.backup_id) == made
    cut = dataclasses.replace(full, tables=(dataclasses.replace(full.tables[0], tablets=()),))
    (table,) = made.tables
    with pytest.raises(Corrupt, match="but its base does not have it"):
        Chain((cut, made)).parts(table, table.tablets[0])


# --- on a cluster


def test_each_backup_of_a_chain_is_restored_as_it_was(there: There, tmp_path: Path) -> None:
    client, folder = there.client, tmp_path / "b"
    parts = [stele.hash("id", buckets=2), stele.range("id", ranges=[(0, 1_000), (1_000, 2_000)])]
    table = client.create_table("t", NUMBERS, parts)
    table.write_arrow(pa.table({"id": range(2_000), "name": [f"n{i}" for i in range(2_000)]}))
    with pytest.raises(
        Rejected, match="there is no complete backup of these tables to build on; make a full"
    ):
        backup.create(client, folder, "t", incremental=True)
    notes = list[str]()
    first = backup.create(client, folder, "t", incremental=True, full_if_needed=True, on_note=notes.append)
    assert first.kind == "full" and notes[0].startswith("making a full backup: there is no complete backup")
    shown = [(first, rows(table))]
    (held,) = table.holds()
    assert (held.name, held.since) == (first.hold, first.snapshot)

    table.write_arrow(pa.table({"id": np.arange(0, 2_000, 7)}), "delete")
    table.write_arrow(pa.table({"id": np.arange(0, 300), "name": ["new"] * 300}))
    second = backup.create(client, folder, "t", incremental=True, hold_for_s=3_600)
    assert second.kind == "incremental" and second.rows == 300 + len(range(301, 2_000, 7))
    shown.append((second, rows(table)))

    nothing = backup.create(client, folder, "t", incremental=True)
    assert nothing.rows == 0
    shown.append((nothing, rows(table)))

    table.alter(add=[("size", "int32", False, "5")], rename={"name": "called"}, drop_ranges=[(0, 1_000)])
    table.alter(add_ranges=[(0, 500)])
    table.write_arrow(
        pa.table({"id": [3, 1_500], "called": ["back", None], "size": pa.array([1, 2], pa.int32())})
    )
    third = backup.create(client, folder, "t", incremental=True)
    assert {tablet.whole for tablet in third.tables[0].tablets} == {True, False}
    shown.append((third, rows(table)))
    (held,) = table.holds()
    assert (held.name, held.since, held.tablets_without) == (first.hold, third.snapshot, 0)

    assert backup.compare(client, folder).differences == []
    report = backup.verify(folder)
    assert (report.faults, report.bases) == ([], 3)
    for number, (made, expected) in enumerate(shown):
        (done,) = backup.restore(client, folder, made.backup_id, tables={"t": f"r{number}"})
        assert rows(client.open_table(f"r{number}")) == expected
        assert done.rows == len(expected[0])
    backup.restore(
        client, folder, tables={"t": "wide"}, partitioning=stele.hash("id", buckets=5), replication_factor=1
    )
    assert rows(client.open_table("wide")) == shown[-1][1]
    full = backup.create(client, folder, "t")
    assert (full.kind, full.hold) == ("full", "")


async def test_changes_are_there_though_the_table_keeps_no_history_until_the_hold_breaks(
    tmp_path: Path,
) -> None:
    cluster, folder, notes = LocalCluster(tmp_path), tmp_path / "b", list[str]()
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await client.create_table("t", SCHEMA, HASHED)
            await table.write_arrow(pa.table({"id": range(100), "name": ["before"] * 100}))
            await without_history(cluster, table)
            first = await backup.create_async(client, folder, "t", hold_for_s=600)
            await table.write_arrow(pa.table({"id": range(10)}), "delete")
            await settled(cluster, table)
            second = await backup.create_async(client, folder, "t", incremental=True, on_note=notes.append)
            assert (second.rows, notes, [h.since for h in await table.holds()]) == (10, [], [second.snapshot])
            (done,) = await backup.restore_async(client, folder, tables={"t": "again"})
            assert done.rows == 90

            await table.release_hold(first.hold)
            await table.write_arrow(pa.table({"id": range(10, 20)}), "delete")
            await settled(cluster, table)
            with pytest.raises(
                Rejected, match=r"some changes since backup .* are no longer kept: .* make a full"
            ) as lost:
                await backup.create_async(client, folder, "t", incremental=True)
            assert lost.value.code is Code.CURSOR_LOST
            assert [b.state for b in backup.list_backups(folder)] == [State.COMPLETE] * 2
            third = await backup.create_async(
                client, folder, "t", incremental=True, full_if_needed=True, on_note=notes.append
            )
            assert (third.kind, third.rows, third.hold) == ("full", 80, first.hold)
            assert "making a full backup: some changes since" in notes[0]
            assert [(h.name, h.since) for h in await table.holds()] == [(first.hold, third.snapshot)]
    finally:
        await cluster.close()


def test_one_that_is_interrupted_goes_on_from_the_same_base(
    there: There, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = there.client
    monkeypatch.setattr(creating, "FILE_BYTES", 1)
    monkeypatch.setattr(creating, "BATCH_ROWS", 100)
    monkeypatch.setattr(row_files, "_GROUP_ROWS", 100)
    table = numbered(client, "t", 2_000, buckets=2)
    first = backup.create(client, tmp_path, "t", hold_for_s=600)
    table.write_arrow(pa.table({"id": range(1_000), "name": ["new"] * 1_000}))
    expected = rows(table)

    class Stop(Exception):
        pass

    def stop(now: backup.Progress) -> None:
        if now.rows >= 300:
            raise Stop

    with pytest.raises(Stop):
        backup.create(client, tmp_path, "t", incremental=True, parallel=1, on_progress=stop)
    (unfinished, _) = backup.list_backups(tmp_path)
    assert unfinished.state is State.UNFINISHED and unfinished.manifest is not None
    assert unfinished.manifest.base == base_of(first)
    table.write_arrow(pa.table({"id": range(1_000)}), "delete")
    backup.prune(tmp_path, keep=1)
    notes = list[str]()
    made = backup.create(client, tmp_path, "t", incremental=True, on_note=notes.append)
    assert (made.backup_id, made.rows) == (unfinished.backup_id, 1_000) and "going on with" in notes[0]
    backup.restore(client, tmp_path, tables={"t": "again"})
    assert rows(client.open_table("again")) == expected


def test_the_commands(there: There, run: Run, tmp_path: Path) -> None:
    client, folder = there.client, tmp_path / "backups"
    table = numbered(client, "t", 1_000)

    def stele_backup(*arguments: str | Path) -> tuple[int, str, str]:
        return run(*arguments, masters=there.masters)

    code, _, err = stele_backup("create", folder, "t", "--incremental")
    assert code == REFUSED and "CURSOR_LOST: there is no complete backup of these tables to build on" in err
    chain = ("create", folder, "t", "--incremental", "--full-if-needed", "--hold-for", "36h")
    code, out, err = stele_backup(*chain)
    assert code == 0 and "1,000 rows" in out and "note: making a full backup" in err
    table.put({"id": 5, "name": "new"})
    code, out, _ = stele_backup(*chain, "--json")
    made = json.loads(out)
    assert (code, made["kind"], made["rows"], bool(made["base"]), bool(made["hold"])) == (
        0,
        "incremental",
        1,
        True,
        True,
    )
    code, out, _ = stele_backup("list", folder)
    assert [line.split()[4] for line in out.splitlines()[1:]] == ["incremental", "full"]
    code, out, _ = stele_backup("verify", folder, "--compare")
    assert (
        code == 0
        and out.endswith("is whole, with the 1 backup that it builds on\n")
        and "t: 1,000 rows" in out
    )
    table.put({"id": 6, "name": "newer"})
    code, out, _ = stele_backup("create", folder, "t", "--incremental")
    assert code == 0 and f"1 change since {made['id']}" in out
    code, out, _ = stele_backup("restore", folder, "--table", "t=again")
    assert code == 0 and "restored table again from t: 1,000 rows" in out
    code, out, _ = stele_backup("prune", folder, "--keep", "1", "--yes")
    assert code == 0 and out.startswith("nothing to remove")
    remove(Folder.at(folder), made["base"])
    code, _, err = stele_backup("verify", folder)
    assert code == DISK and "which is not in" in err
    code, _, err = stele_backup("create", folder, "t", "--full-if-needed")
    assert code == REFUSED and "--full-if-needed needs --incremental" in err
