"""What programs need that run backups by themselves: once, again, away, for practice; and lines of JSON to follow."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest

from stele import backup
from stele.backup.claim import Claim
from stele.backup.finding import State
from stele.backup.folder import Folder
from stele.cli.errors import REFUSED, TRY_AGAIN
from stele.model.errors import Code, Corrupt, Rejected
from tests.backup.conftest import Run, There
from tests.backup.tables import data_files, made_by_hand, numbered, rows
from tests.backup.test_interrupted import killed


def last_line(out: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


def test_a_key_makes_a_backup_once_and_another_key_begins_anew(there: There, tmp_path: Path) -> None:
    client, notes = there.client, list[str]()
    numbered(client, "t", 2_000)
    first = backup.create(client, tmp_path, "t", key="a")
    again = backup.create(client, tmp_path, "t", key="a", on_note=notes.append)
    assert (again.backup_id, again.key) == (first.backup_id, "a")
    assert notes == [f"backup {first.backup_id} of {first.time} was made by an earlier run"]
    assert backup.create(client, tmp_path, "t").backup_id != first.backup_id

    killed(there, tmp_path, "t", 700)  # leaves one without a key
    unfinished = [b.backup_id for b in backup.list_backups(tmp_path) if b.state is State.UNFINISHED]
    assert len(unfinished) == 1
    notes.clear()
    third = backup.create(client, tmp_path, "t", key="b", on_note=notes.append)
    assert any(
        f"removing the unfinished backup {unfinished[0]}: it was begun without a key" in n for n in notes
    )
    assert third.backup_id != unfinished[0] and third.key == "b"


def test_removing_takes_one_and_keeps_what_another_builds_on(there: There, tmp_path: Path) -> None:
    client = there.client
    table = numbered(client, "t", 100)
    full = backup.create(client, tmp_path, "t", key="a", hold_for_s=600)
    table.put({"id": 1_000, "name": "new"})
    more = backup.create(client, tmp_path, "t", incremental=True, key="b")
    with pytest.raises(Rejected, match=f"backup {more.backup_id} builds on {full.backup_id}"):
        backup.remove(tmp_path, full.backup_id)
    assert len(backup.list_backups(tmp_path)) == 2
    assert backup.remove(tmp_path, key="b") == [more.backup_id]
    assert backup.remove(tmp_path, key="b") == []
    assert backup.remove(tmp_path, full.backup_id) == [full.backup_id]
    assert backup.list_backups(tmp_path) == []
    assert backup.remove(tmp_path / "nowhere", key="b") == []
    with pytest.raises(Rejected, match="say what to remove"):
        backup.remove(tmp_path)


def test_the_newest_full_ones_stay_with_all_that_is_newer(tmp_path: Path) -> None:
    ids = [made_by_hand(tmp_path, snapshot=(1_000 + n) << 40).backup_id for n in range(4)]
    assert [b.backup_id for b in backup.prune(tmp_path, keep_full=2, dry_run=True).removed] == ids[1::-1]
    backup.prune(tmp_path, keep_full=3)
    assert sorted(b.backup_id for b in backup.list_backups(tmp_path)) == sorted(ids[1:])


def test_a_restore_may_be_repeated_and_another_table_is_never_taken_for_it(
    there: There, tmp_path: Path
) -> None:
    client = there.client
    numbered(client, "t", 500)
    made = backup.create(client, tmp_path, "t")
    with pytest.raises(Rejected, match="table t exists already"):  # the very table that was backed up
        backup.restore(client, tmp_path, again=True)
    backup.restore(client, tmp_path, tables={"t": "copy"})
    (again,) = backup.restore(client, tmp_path, tables={"t": "copy"}, again=True)
    assert (again.name, again.rows) == ("copy", 500)
    client.open_table("copy").put({"id": 7, "name": "other"})
    with pytest.raises(Rejected, match="does not have the rows of the backup") as refused:
        backup.restore(client, tmp_path, made.backup_id, tables={"t": "copy"}, again=True)
    assert refused.value.code is Code.ALREADY_PRESENT


def test_a_drill_restores_compares_and_leaves_nothing(there: There, tmp_path: Path) -> None:
    client, notes = there.client, list[str]()
    numbered(client, "t", 500)
    made = backup.create(client, tmp_path, "t")
    left = f"t.drill-{_digits(made.backup_id)}"
    numbered(client, left, 3)  # of a drill that was killed
    found = backup.drill(client, tmp_path, on_note=notes.append)
    assert (found.rows, found.report.differences, found.manifest.backup_id) == (500, [], made.backup_id)
    assert any(f"deleting table {left}" in note for note in notes)
    assert [info.name for info in client.list_tables()] == ["t"]
    data_files(tmp_path, made.backup_id)[0].write_bytes(b"damaged")
    with pytest.raises(Corrupt):
        backup.drill(client, tmp_path)
    assert [info.name for info in client.list_tables()] == ["t"]


def _digits(backup_id: str) -> str:
    return hashlib.sha256(f"drill/{backup_id}/t".encode()).hexdigest()[:8]


def test_a_program_that_follows_is_told_all_in_lines_of_json(
    there: There,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbered(there.client, "t", 1_000)
    folder, last = tmp_path / "backups", tmp_path / "termination-log"
    monkeypatch.setenv("STELE_TERMINATION_LOG", str(last))

    def follow(*words: str | Path) -> tuple[int, dict[str, object]]:
        code, out, _ = run(*words, "--json-progress", masters=there.masters)
        assert last.read_text() == out.splitlines()[-1] + "\n"
        return code, last_line(out)

    code, out, _ = run(
        "create", folder, "t", "--key", "k", "--keep-full", "1", "--json-progress", masters=there.masters
    )
    progress = json.loads(out.splitlines()[0])["progress"]
    assert code == 0 and progress["total"] == 4
    result = last_line(out)["result"]
    assert isinstance(result, dict)
    assert (result["rows"], result["kind"], result["pruned"], result["holds"]) == (1_000, "full", 0, [])
    assert progress["rowsExpected"] == 1_000
    assert progress["holds"] == [f"backup-{result['backup']}"]
    code, end = follow("restore", folder, "--table", "t=copy", "--verify", "--again")
    assert (code, end["result"]["rows"], end["result"]["verified"]) == (0, 1_000, True)  # type: ignore[index]
    assert rows(there.client.open_table("copy")) == rows(there.client.open_table("t"))
    code, end = follow("drill", folder)
    assert code == 0 and end["result"]["rows"] == 1_000  # type: ignore[index]
    code, end = follow("create", folder, "nothing")
    assert code == REFUSED and end["error"]["code"] == "NOT_FOUND" and not end["error"]["again"]  # type: ignore[index]
    code, end = follow("create", folder, "t", "--at", "noon")
    assert code == REFUSED and "noon" in end["error"]["message"]  # type: ignore[index]
    code, end = follow("create", "/dev/null/x", "t")
    assert code in (REFUSED, TRY_AGAIN) and "/dev/null/x" in end["error"]["message"]  # type: ignore[index]
    code, end = follow("restore", folder, "--at", "1990-01-01")
    assert code == REFUSED and "no complete backup from 1990-01-01" in end["error"]["message"]  # type: ignore[index]
    code, end = follow("remove", folder, "--key", "k", "--yes")
    assert code == 0 and end["result"] == {"removed": [result["backup"]]}


def test_a_table_that_differs_is_told_and_a_refusal_that_passes_asks_for_another_try(
    there: There,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbered(there.client, "t", 50)
    made = backup.create(there.client, tmp_path, "t")
    assert made.rows == 50

    async def meanwhile() -> tuple[int, str, str]:
        async with Claim(Folder.at(tmp_path), "create", print):
            return await asyncio.to_thread(
                run, "create", tmp_path, "t", "--json-progress", masters=there.masters
            )

    code, out, _ = asyncio.run(meanwhile())
    end = last_line(out)["error"]
    assert isinstance(end, dict)
    assert (code, end["code"], end["again"]) == (TRY_AGAIN, "CHANGE_IN_PROGRESS", True)
