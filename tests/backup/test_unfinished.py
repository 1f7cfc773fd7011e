"""A backup while it is written: what counts of it, what lasts, and who may finish it. No cluster."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from stele.backup.folder import Folder
from stele.backup.increments import known_tablets
from stele.backup.manifest import Manifest
from stele.backup.row_files import RowFile, rows_of
from stele.backup.unfinished import Done, Unfinished
from stele.model import keys
from stele.model.errors import Code, Rejected
from tests.backup.tables import NUMBERS, data_files, made_by_hand


def begun(folder: Path) -> tuple[Manifest, Path]:
    """A backup that was killed when all its files were there, and the folder of its records."""
    plan = made_by_hand(folder, finished=False)
    return plan, folder / plan.backup_id / "unfinished"


def next_run(folder: Path, plan: Manifest) -> Unfinished:
    return Unfinished(Folder.at(folder), plan, "0000bbbb")


def found(folder: Path, plan: Manifest) -> list[tuple[int, int, bool]]:
    """Of each tablet: the files that count, the number of the next one, whether all rows are there."""
    (table,) = plan.tables
    done = [next_run(folder, plan).load(table, tablet) for tablet in table.tablets]
    return [(len(each.files), each.next_number, each.whole) for each in done]


def test_what_has_no_record_or_other_bytes_than_its_record_counts_as_nothing(tmp_path: Path) -> None:
    plan, records = begun(tmp_path)
    tablets = [tablet.tablet_id for tablet in plan.tables[0].tablets]
    assert found(tmp_path, plan) == [(2, 2, True)] * 4
    (records / f"{tablets[0]}-00001.json").unlink()
    (hurt,) = (path for path in data_files(tmp_path, plan.backup_id) if f"{tablets[1]}-00000" in path.name)
    raw = bytearray(hurt.read_bytes())
    raw[len(raw) // 2] ^= 1
    hurt.write_bytes(raw)
    cut = records / f"{tablets[2]}-00001.json"
    cut.write_bytes(cut.read_bytes()[:-9])
    assert found(tmp_path, plan) == [(1, 1, False), (0, 0, False), (1, 1, False), (2, 2, True)]
    assert len(data_files(tmp_path, plan.backup_id)) == 8, "all are there still"


def test_a_file_behind_one_that_was_written_anew_with_another_end_does_not_count(tmp_path: Path) -> None:
    """Else rows between the two would be missing in silence."""
    plan, _ = begun(tmp_path)
    (table,), place = plan.tables, Folder.at(tmp_path)
    tablet, work = table.tablets[0], next_run(tmp_path, plan)
    first = work.load(table, tablet).files[0]
    (batch,) = rows_of(place, plan.name_of(table, first), first, NUMBERS.to_arrow())
    file = RowFile(place, work.file_name(table, tablet, 0), NUMBERS.to_arrow())
    file.write(batch.slice(0, 10))
    last_key = keys.encode_keys(batch.slice(9, 1), NUMBERS)[0].as_py()
    work.record(tablet, Done(), file.finish(), last_key, whole=False)
    assert found(tmp_path, plan)[0] == (1, 1, False)


def test_two_processes_write_no_file_of_one_name(tmp_path: Path) -> None:
    """Both take the folder for theirs, as no file system has locks that hold everywhere."""
    plan, _ = begun(tmp_path)
    (table,), place = plan.tables, Folder.at(tmp_path)
    both = [Unfinished(place, plan, run) for run in ("0000bbbb", "0000cccc")]
    files = [RowFile(place, work.file_name(table, table.tablets[0], 2), NUMBERS.to_arrow()) for work in both]
    entries = [file.finish() for file in files]
    assert len({entry.name for entry in entries}) == 2
    assert {entry.name for entry in entries} < {p.name for p in data_files(tmp_path, plan.backup_id)}


def test_a_manifest_is_never_replaced(tmp_path: Path) -> None:
    made = made_by_hand(tmp_path)
    path = tmp_path / made.backup_id / "manifest.json"
    raw = path.read_bytes()
    late = dataclasses.replace(made, program="another process, which took the folder for its own")
    with pytest.raises(Rejected, match="another process finished it") as refused:
        Unfinished(Folder.at(tmp_path), made, "0000bbbb").publish(late)
    assert refused.value.code is Code.ALREADY_PRESENT
    assert path.read_bytes() == raw and len(data_files(tmp_path, made.backup_id)) == 8


def test_a_record_is_put_once_its_file_lasts_and_the_manifest_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss would leave a record of a file that is not there, or is empty."""
    synced = list[Path]()
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    made = made_by_hand(tmp_path)
    files = data_files(tmp_path, made.backup_id)
    assert len(files) == 8
    for path in files:
        named = synced.index(path.parent, synced.index(path))  # its name lasts, too
        record = f".{path.stem.rpartition('-')[0]}.json."
        assert named < next(at for at, each in enumerate(synced) if each.name.startswith(record))
    manifest = [at for at, each in enumerate(synced) if each.name.startswith(".manifest.json.")]
    assert len(manifest) == 1 and manifest[0] > max(synced.index(path) for path in files)
    assert synced[manifest[0] + 1] == tmp_path / made.backup_id


def test_a_tablet_that_was_recovered_since_is_not_known_to_its_base(tmp_path: Path) -> None:
    """Its rows are read whole: the recovery may have given up some that the base has."""
    made = made_by_hand(tmp_path)
    (table,) = made.tables
    first, *_ = tablets = [
        dataclasses.replace(tablet, incarnation=number) for number, tablet in enumerate(table.tablets)
    ]
    base = dataclasses.replace(made, tables=(dataclasses.replace(table, tablets=tuple(tablets)),))
    assert known_tablets(base) == {(tablet.tablet_id, n) for n, tablet in enumerate(tablets)}
    assert (first.tablet_id, 1) not in known_tablets(base) and known_tablets(None) == set()
