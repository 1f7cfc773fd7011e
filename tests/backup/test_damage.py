"""Whatever happened to a backup's files is found, named, and never restored. No cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from stele import backup
from stele.backup.finding import State, choose
from stele.backup.folder import Folder
from stele.backup.manifest import Manifest, seal
from stele.backup.row_files import rows_of
from stele.model.errors import Code, Corrupt, Rejected
from tests.backup.tables import NUMBERS, data_files, made_by_hand


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def swap(first: Path, second: Path) -> None:
    raw = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(raw)


DAMAGES: dict[str, Callable[[list[Path]], object]] = {
    "a bit of its rows": lambda files: flip(files[3], files[3].stat().st_size // 2),
    "its first bit": lambda files: flip(files[3], 0),
    "its last bit": lambda files: flip(files[3], -1),
    "its end is cut": lambda files: files[3].write_bytes(files[3].read_bytes()[:-1]),
    "it is empty": lambda files: files[3].write_bytes(b""),
    "it is longer": lambda files: files[3].write_bytes(files[3].read_bytes() + b"x"),
    "it is gone": lambda files: files[3].unlink(),
    "it is another one": lambda files: swap(files[3], files[0]),
    "it is a folder": lambda files: (files[3].unlink(), files[3].mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_others_are_read(damage: str, tmp_path: Path) -> None:
    made = made_by_hand(tmp_path)
    assert (backup.verify(tmp_path).tables[0].rows, backup.verify(tmp_path).faults) == (300, [])
    files = data_files(tmp_path, made.backup_id)
    DAMAGES[damage](files)
    report = backup.verify(tmp_path)
    hurt = [files[3], files[0]] if damage == "it is another one" else [files[3]]
    assert sorted(fault.split(": ")[0] for fault in report.faults) == sorted(map(str, hurt))
    assert 0 < report.tables[0].rows < 300


def test_no_row_of_a_damaged_file_is_given_out(tmp_path: Path) -> None:
    """Not even one that stands before the damage."""
    made = made_by_hand(tmp_path)
    table = made.tables[0]
    (path, *_) = data_files(tmp_path, made.backup_id)
    flip(path, -20)
    with pytest.raises(Corrupt, match="SHA-256"):
        next(
            rows_of(
                Folder.at(tmp_path), made.name_of(table, table.files[0]), table.files[0], NUMBERS.to_arrow()
            )
        )


def test_rows_of_another_tablet_or_in_another_order_are_found(tmp_path: Path) -> None:
    """As a faulty program would write them, with checksums that are right."""
    made = made_by_hand(tmp_path)
    raw = json.loads((tmp_path / made.backup_id / "manifest.json").read_text())["content"]
    tablets = raw["tables"][0]["tablets"]
    tablets[0]["files"].reverse()
    tablets[1]["files"], tablets[2]["files"] = tablets[2]["files"], tablets[1]["files"]
    (tmp_path / made.backup_id / "manifest.json").write_bytes(seal(raw))
    faults = backup.verify(tmp_path).faults
    assert ["its keys do not ascend" in fault for fault in faults].count(True) == 1
    assert ["it has rows of another tablet" in fault for fault in faults].count(True) == 4


def test_columns_and_rows_that_are_not_those_of_the_manifest(tmp_path: Path) -> None:
    made = made_by_hand(tmp_path)
    path = tmp_path / made.backup_id / "manifest.json"
    raw = json.loads(path.read_text())["content"]
    raw["tables"][0]["tablets"][0]["files"][0]["rows"] += 1
    path.write_bytes(seal(raw))
    assert "its manifest says 21" in backup.verify(tmp_path).faults[0]
    raw["tables"][0]["schema"]["columns"][1][3] = False
    path.write_bytes(seal(raw))
    assert len(backup.verify(tmp_path).faults) == 8
    assert "its columns are not those of the manifest" in backup.verify(tmp_path).faults[0]


def test_a_cut_or_changed_manifest_is_never_believed(tmp_path: Path) -> None:
    made = made_by_hand(tmp_path)
    path = tmp_path / made.backup_id / "manifest.json"
    raw = path.read_bytes()
    where, backup_id = str(path), made.backup_id
    assert Manifest.of(raw, where, backup_id) == made
    for length in range(0, len(raw) - 2, 7):
        with pytest.raises(Corrupt):
            Manifest.of(raw[:length], where, backup_id)
    for at in range(len(raw)):
        for bit in (1, 16, 128):
            changed = bytes((*raw[:at], raw[at] ^ bit, *raw[at + 1 :]))
            try:
                assert Manifest.of(changed, where, backup_id) == made  # blanks between words
            except Corrupt as exc:
                assert where in str(exc)
            except Rejected as exc:  # a higher version
                assert exc.code is Code.UNSUPPORTED_VERSION and at < 60


def test_a_damaged_backup_hides_no_other_and_the_next_older_one_is_not_taken_in_silence(
    tmp_path: Path,
) -> None:
    old, new = made_by_hand(tmp_path, snapshot=1 << 60), made_by_hand(tmp_path)
    path = tmp_path / new.backup_id / "manifest.json"
    path.write_bytes(path.read_bytes()[:500])
    assert [(b.backup_id, b.state) for b in backup.list_backups(tmp_path)] == [
        (new.backup_id, State.DAMAGED),
        (old.backup_id, State.COMPLETE),
    ]
    with pytest.raises(Corrupt, match="name another backup by its id"):
        backup.verify(tmp_path)
    assert backup.verify(tmp_path, old.backup_id[:6]).manifest == old


def test_a_later_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    made = made_by_hand(tmp_path)
    path = tmp_path / made.backup_id / "manifest.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"version": 2}))
    with pytest.raises(Rejected, match="version 2 is unknown to this program; upgrade it"):
        backup.verify(tmp_path)
    path.write_bytes(seal(document["content"] | {"kind": "partial", "base": made.backup_id}))
    with pytest.raises(Rejected, match="kind partial is unknown to this program; upgrade it") as refused:
        choose(Folder.at(tmp_path), None)
    assert refused.value.code is Code.UNSUPPORTED_VERSION
    assert [b.state for b in backup.list_backups(tmp_path)] == [State.UNKNOWN]


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    made = made_by_hand(tmp_path)
    path = tmp_path / made.backup_id / "manifest.json"
    for name in ("../x.parquet", "/etc/passwd", "a/b", "", ".x", "x" * 300):
        raw = json.loads(path.read_text())["content"]
        raw["tables"][0]["folder"] = name
        with pytest.raises(Corrupt, match="no name of a file"):
            Manifest.of(seal(raw), "m", made.backup_id)


def test_a_backup_under_another_name_is_refused(tmp_path: Path) -> None:
    """A manifest that was copied into another backup's folder is not that backup's."""
    made = made_by_hand(tmp_path)
    other = made.backup_id[:-8] + "01234567"
    shutil.copytree(tmp_path / made.backup_id, tmp_path / other)
    with pytest.raises(Corrupt, match=f"is of backup {made.backup_id}"):
        backup.verify(tmp_path, other)


def test_a_wrong_folder_is_told(tmp_path: Path) -> None:
    made = made_by_hand(tmp_path / "all")
    with pytest.raises(Rejected, match="there is no such folder"):
        backup.list_backups(tmp_path / "none")
    with pytest.raises(Rejected, match="is one backup; give the folder above it"):
        backup.list_backups(tmp_path / "all" / made.backup_id)
    assert backup.list_backups(tmp_path) == []
    with pytest.raises(Rejected, match="has no complete backup"):
        backup.verify(tmp_path)
    with pytest.raises(Rejected, match=r"0 backups .* begin with '1999'"):
        backup.verify(tmp_path / "all", "1999")
    with pytest.raises(Rejected, match="has no table u; it has t"):
        backup.verify(tmp_path / "all", tables="u")
    with pytest.raises(Rejected, match="expected a path, or a URI"):
        backup.list_backups("")


def test_files_that_are_no_part_of_it_are_told_and_harm_nothing(tmp_path: Path) -> None:
    made = made_by_hand(tmp_path)
    assert backup.verify(tmp_path).strays == []
    (tmp_path / made.backup_id / "t-ffffffff" / "mine.txt").write_text("x")
    report = backup.verify(tmp_path)
    assert (report.faults, report.strays) == ([], ["t-ffffffff/mine.txt"])


def test_the_first_format_stays_readable() -> None:
    """What release 0.2 wrote. A change of the format must not need another golden file, but one more."""
    golden = Path(__file__).with_name("manifest_v1.json")
    found = Manifest.of(golden.read_bytes(), "golden", "20260501T120000Z-1a2b3c4d")
    table = found.table("flights")
    assert (found.snapshot, found.rows, table.replication_factor, len(table.tablets)) == (
        7_281_200_332_800_000_000,
        3,
        3,
        2,
    )
    assert [c.name for c in table.schema.columns] == ["id", "carrier"]
    assert found.sealed() == golden.read_bytes()


def test_a_file_is_read_by_any_program(tmp_path: Path) -> None:
    made = made_by_hand(tmp_path)
    tables = [parquet.read_table(path) for path in data_files(tmp_path, made.backup_id)]
    assert sum(table.num_rows for table in tables) == 300
