"""What pruning removes, and what it never does. No cluster."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path

import pytest

from stele import backup
from stele.backup.claim import Claim
from stele.backup.finding import State, choose
from stele.backup.folder import Folder
from stele.backup.increments import newest_of
from stele.backup.manifest import MANIFEST, Base
from stele.backup.unfinished import remove
from stele.model.clock import from_physical_us
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from tests.backup.tables import made_by_hand

DAY_US = 86_400 * 1_000_000


def days_ago(days: float) -> int:
    """The hybrid time of so many days ago."""
    return int(from_physical_us(time.time_ns() // 1_000 - int(days * DAY_US)))


def aged(folder: Path, days: float, *, finished: bool = True) -> str:
    """A backup of so many days ago."""
    return made_by_hand(folder, rows=200, snapshot=days_ago(days), finished=finished).backup_id


def there(folder: Path) -> list[str]:
    return [b.backup_id for b in backup.list_backups(folder)]


def test_the_newest_and_those_of_the_last_days_stay(tmp_path: Path) -> None:
    ids = [aged(tmp_path, days) for days in (0.1, 1, 2, 3, 40)]
    assert [b.backup_id for b in backup.prune(tmp_path, keep=4, dry_run=True).removed] == ids[4:]
    assert there(tmp_path) == ids
    backup.prune(tmp_path, keep=4)
    assert there(tmp_path) == ids[:4]
    backup.prune(tmp_path, keep=1, keep_days=2.5)
    assert there(tmp_path) == ids[:3]
    backup.prune(tmp_path, keep_days=1.5)
    assert there(tmp_path) == ids[:2]
    backup.prune(tmp_path, keep_days=0.01)
    assert there(tmp_path) == ids[:1]  # the newest stays, however old it is
    assert backup.verify(tmp_path).faults == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [ids[0], "writers"]


def test_the_only_backup_of_a_table_stays(tmp_path: Path) -> None:
    """Newer backups of other tables filled the number that was to be kept."""
    first = made_by_hand(tmp_path, "big", rows=200, snapshot=days_ago(3)).backup_id
    second = made_by_hand(tmp_path, "big", rows=200, snapshot=days_ago(2.5)).backup_id
    others = [aged(tmp_path, days) for days in (0.1, 1, 2)]
    for dry_run in (True, False):
        notes: list[str] = []
        pruned = backup.prune(tmp_path, keep=1, dry_run=dry_run, on_note=notes.append)
        assert [b.backup_id for b in pruned.removed] == [*others[1:], first]
        assert notes == [f"backup {second} stays: no newer one has table big"]
    assert there(tmp_path) == [others[0], second]


def test_a_backup_is_removed_by_the_first_digits_of_its_id(tmp_path: Path) -> None:
    old, new = aged(tmp_path, 40), aged(tmp_path, 1)
    with pytest.raises(Rejected, match=f"several backups begin with 2: .*{old}"):
        backup.remove(tmp_path, "2")
    with pytest.raises(Rejected, match=f"NOT_FOUND: no backup begins with 30; there are {new}, {old}"):
        backup.remove(tmp_path, "30")
    assert backup.remove(tmp_path, old[:8]) == [old] and there(tmp_path) == [new]


def chained(folder: Path, *days: float) -> list[str]:
    """The ids of a full backup and of incremental ones, each built on the one before."""
    found = [made_by_hand(folder, rows=200, snapshot=days_ago(days[0]))]
    for each in days[1:]:
        made = made_by_hand(folder, rows=200, snapshot=days_ago(each))
        base = Base(found[-1].backup_id, found[-1].digest)
        found.append(dataclasses.replace(made, base=base))
        Folder.at(folder).put(f"{made.backup_id}/{MANIFEST}", found[-1].sealed())
    return [manifest.backup_id for manifest in found]


@pytest.mark.parametrize("how", ["damaged", "missing", "another"])
def test_what_a_broken_chain_leaves_is_not_taken_for_a_backup(tmp_path: Path, how: str) -> None:
    """Pruning removed the last backup that could be restored, and the next incremental one was built on the broken chain."""
    full, middle, last, newest = chained(tmp_path, 4, 3, 2, 1)
    if how == "damaged":
        (tmp_path / middle / MANIFEST).write_text("{")
    elif how == "missing":
        shutil.rmtree(tmp_path / middle)
    else:
        other = dataclasses.replace(backup.list_backups(tmp_path)[2].manifest, key="another")
        Folder.at(tmp_path).put(f"{middle}/{MANIFEST}", other.sealed())
    found = {b.backup_id: b for b in backup.list_backups(tmp_path)}
    whole = [full, middle] if how == "another" else [full]
    broken = [last, newest]
    assert [b for b in (full, middle) if b in found and found[b].state is State.COMPLETE] == whole
    assert [found[b].state for b in broken] == [State.BROKEN, State.BROKEN]
    assert f"backup {last} builds on {middle}, which is" in found[newest].fault
    with pytest.raises(Corrupt, match=f"backup {last} builds on {middle}"):
        choose(Folder.at(tmp_path), None)
    assert choose(Folder.at(tmp_path), full).backup_id == full
    manifest = found[full].manifest
    assert manifest is not None
    place, tables = Folder.at(tmp_path), {t.table_id for t in manifest.tables}
    base = newest_of(place, tables, manifest.cluster_id)
    assert base is not None and base.backup_id == whole[-1]
    kept = backup.prune(tmp_path, keep=1, keep_days=0.1).kept
    assert {full, last, newest} <= {b.backup_id for b in kept}
    with pytest.raises(Rejected, match=f"builds on {last}"):
        backup.remove(tmp_path, last)
    assert backup.remove(tmp_path, newest) == [newest]


def test_an_older_one_with_the_table_is_named(tmp_path: Path) -> None:
    big = [made_by_hand(tmp_path, "big", rows=200, snapshot=days_ago(d)).backup_id for d in (3, 2)]
    new = aged(tmp_path, 1)
    place = Folder.at(tmp_path)
    assert choose(place, None).backup_id == new
    with pytest.raises(
        Rejected,
        match=rf"{new} has no table big; it has t\. It is the newest backup; name {big[1]}, which has the table",
    ):
        choose(place, None, ["big"])
    with pytest.raises(Rejected, match=f"{new} has no table huge; it has t$"):
        choose(place, None, ["huge"])
    with pytest.raises(Rejected, match=f"{big[1]} has no table t; it has big$"):
        choose(place, big[1], ["t"])


def test_an_unfinished_one_goes_once_a_complete_one_is_newer(tmp_path: Path) -> None:
    old, new = aged(tmp_path, 2, finished=False), aged(tmp_path, 0.1, finished=False)
    backup.prune(tmp_path, keep=1)
    assert there(tmp_path) == [new, old]
    whole = aged(tmp_path, 1)
    backup.prune(tmp_path, keep=1)
    assert there(tmp_path) == [new, whole]


def test_damaged_ones_stay_and_remains_go(tmp_path: Path) -> None:
    damaged, remains, whole = aged(tmp_path, 3), aged(tmp_path, 2), aged(tmp_path, 1)
    (tmp_path / damaged / MANIFEST).write_text("{")
    (tmp_path / remains / MANIFEST).unlink()
    (tmp_path / "mine").mkdir()
    backup.prune(tmp_path, keep=1)
    assert there(tmp_path) == [whole, damaged]
    assert (tmp_path / "mine").exists()


def test_a_removal_that_is_cut_short_leaves_no_backup(tmp_path: Path) -> None:
    """The manifest goes first: what is left is removed by the next pruning, and never restored."""
    gone, whole = aged(tmp_path, 2), aged(tmp_path, 1)

    class Cut(Exception):
        pass

    class Stops(Folder):
        def delete_all(self, name: str) -> None:
            raise Cut

    place = Folder.at(tmp_path)
    with pytest.raises(Cut):
        remove(Stops(place.fs, place.root, place.shown), gone)
    assert [(b.backup_id, b.state) for b in backup.list_backups(tmp_path)] == [
        (whole, State.COMPLETE),
        (gone, State.REMAINS),
    ]
    with pytest.raises(Rejected, match="is not complete: remains"):
        backup.verify(tmp_path, gone)
    backup.prune(tmp_path, keep=5)
    assert there(tmp_path) == [whole]


def test_bad_arguments_and_wrong_folders_are_refused(tmp_path: Path) -> None:
    aged(tmp_path, 1)
    for arguments in (
        {},
        {"keep": 0},
        {"keep": 1.5},
        {"keep_days": 0},
        {"keep_days": -1},
        {"keep_days": "x"},
    ):
        with pytest.raises(Rejected):
            backup.prune(tmp_path, **arguments)
    with pytest.raises(Rejected, match="no such folder"):
        backup.prune(tmp_path / "none", keep=1)
    assert not (tmp_path / "none").exists()
    with pytest.raises((Rejected, Retryable)):
        backup.prune(tmp_path / "writers" / "x" / "y", keep=1)


def test_pruning_stops_once_another_process_took_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it chose is of a folder that another has changed since."""
    names = [aged(tmp_path, days) for days in (4, 3, 2, 1)]
    calls = []

    async def check(claim: Claim) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise Rejected("another writes here", code=Code.CHANGE_IN_PROGRESS)

    monkeypatch.setattr(Claim, "check", check)
    with pytest.raises(Rejected):
        backup.prune(tmp_path, keep=1)
    assert len(names) == 4 and len(there(tmp_path)) == 3
