"""`stele backup`: what one types, and what one sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stele
from stele import backup
from stele.backup.manifest import unseal
from stele.cli.errors import DISK, NO, REFUSED, TRY_AGAIN
from tests.backup.conftest import Run, There
from tests.backup.tables import data_files, made_by_hand, numbered, rows


def test_a_table_from_the_first_backup_to_the_pruning(there: There, run: Run, tmp_path: Path) -> None:
    client, folder = there.client, tmp_path / "backups"
    table = numbered(client, "t", 1_000)
    client.create_keyspace("space")

    def stele_backup(*arguments: str | Path) -> tuple[int, str, str]:
        return run(*arguments, masters=there.masters)

    code, out, err = stele_backup("create", folder, "--all")
    assert (code, "left out: key space space" in err) == (0, True)
    assert "of 1 table as of" in out and "1,000 rows, 4 files" in out
    code, out, _ = stele_backup("create", folder, "t", "--json")
    made = json.loads(out)
    assert (made["rows"], made["tables"][0]["files"], int(made["snapshot"]) > 0) == (1_000, 4, True)
    code, out, _ = stele_backup("list", folder)
    header, newest, _ = out.splitlines()
    assert header.split() == ["backup", "rows", "of", "kind", "state", "rows", "size", "tables"]
    assert newest.split()[0] == made["id"] and newest.split()[-1] == "t"
    code, out, _ = stele_backup("verify", folder, "--compare")
    assert code == 0 and "table t as of" in out and "has the same rows" in out
    assert out.endswith(f"backup {made['id']} is whole\n")
    code, out, err = stele_backup("restore", folder)
    assert (code, out) == (REFUSED, "") and "ALREADY_PRESENT: table t exists already; " in err
    assert "with `--table t=NEW`" in err
    code, out, _ = stele_backup("restore", folder, made["id"], "--table", "t=new", "--hash", "id:2")
    assert code == 0 and out.startswith("restored table new from t: 1,000 rows\n")
    code, _, err = stele_backup("restore", folder, made["id"], "--table", "t=new")
    assert code == REFUSED and "table new exists already; choose another name with `--table t=NEW`" in err
    assert rows(client.open_table("new")) == rows(table) and client.describe("new").tablets == 2
    (tmp_path / "like.json").write_text(
        '{"columns": [{"name": "id", "type": "int64"}], "primaryKey": ["id"], "partitioning":'
        ' {"range": {"columns": ["id"], "splitAt": [10, 20]}}}'
    )
    code, *_ = stele_backup("restore", folder, "--table", "t=three", "--partitioning", tmp_path / "like.json")
    assert code == 0 and client.describe("three").tablets == 3
    cut = ("--range", 'id:.."400"', "--range", "id:400..", "--hash", "id:2")
    code, *_ = stele_backup("restore", folder, "--table", "t=four", *cut)
    four = client.describe("four")
    assert code == 0 and (four.tablets, four.partitioning[1]) == (4, stele.range("id", split_at=[400]))
    assert rows(client.open_table("four")) == rows(table)
    code, _, err = stele_backup("restore", folder, "--table", "t=half", "--range", "id:..500")
    assert code == REFUSED and "would be in no range; give ranges for all rows" in err, err
    code, _, err = stele_backup("restore", folder, "--table", "t=half", "--range", "ID:..500")
    assert code == REFUSED and "--range: table t has no column 'ID'; did you mean 'id'?" in err
    code, _, err = stele_backup("restore", folder, "--table", "t=half", "--range", "id:..noon")
    assert code == REFUSED and "--range id: ..noon: " in err, err
    assert "half" not in {info.name for info in client.list_tables()}
    client.open_table("new").put({"id": 5, "name": "other"})
    code, out, err = stele_backup("verify", folder, "--compare", "--table", "t=new")
    assert code == NO and "table new as it is now: it has as many rows, but other values" in err
    client.open_table("new").put({"id": -5})
    code, out, err = stele_backup("verify", folder, "--compare", "--table", "t=new")
    assert code == NO and "it has 1001 rows, but the files have 1000" in err
    proofs = tmp_path / "proofs"
    code, out, _ = stele_backup("verify", folder, "--compare", "--table", "t=four", "--record", proofs)
    (file,) = proofs.iterdir()
    assert code == 0 and out.endswith(f"recorded in {file}\n")
    proof = unseal(file.read_bytes(), "")
    assert (proof["id"], proof["whole"], proof["differences"]) == (made["id"], True, [])
    (checked,) = proof["checked"]
    assert (checked["rows"], checked["compared"]) == (1_000, "table four as it is now")
    code, out, _ = stele_backup("prune", folder, "--keep", "1", "--yes")
    assert code == 0 and out.endswith("removed 1 backup; 1 left\n")
    code, out, _ = stele_backup("prune", folder, "--keep", "1", "--yes")
    assert (code, out) == (0, f"nothing to remove; 1 backup in {folder}\n")


def test_damage_is_told_with_the_file_and_an_exit_code_of_its_own(run: Run, tmp_path: Path) -> None:
    made = made_by_hand(tmp_path)
    path = data_files(tmp_path, made.backup_id)[2]
    path.write_bytes(path.read_bytes()[:-1])
    code, out, err = run("verify", tmp_path)
    assert (code, out) == (DISK, "")
    assert str(path) in err and err.splitlines()[-1].startswith(
        f"stele: CORRUPT: backup {made.backup_id} is damaged"
    )
    code, out, _ = run("verify", tmp_path, "--json")
    assert code == DISK and len(json.loads(out)["faults"]) == 1
    (tmp_path / made.backup_id / "manifest.json").write_text("{")
    code, out, err = run("list", tmp_path)
    assert code == 0 and "damaged" in out and "manifest.json: it is cut or damaged" in err


def test_pruning_asks_or_says_what_it_would_do(run: Run, tmp_path: Path) -> None:
    old, new = made_by_hand(tmp_path, snapshot=1 << 60), made_by_hand(tmp_path)
    code, out, _ = run("prune", tmp_path, "--keep", "1", "--dry-run")
    assert (code, out) == (0, f"would remove {old.backup_id} (complete, rows of {old.time})\n")
    code, _, err = run("prune", tmp_path, "--keep", "1")
    assert code == REFUSED and "add --yes" in err
    assert [b.backup_id for b in backup.list_backups(tmp_path)] == [new.backup_id, old.backup_id]


WRONG = [
    (("create", "FOLDER"), REFUSED, "name the tables to back up, or give --all"),
    (("create", "FOLDER", "t", "--all"), REFUSED, "name tables or give --all, not both"),
    (("create", "FOLDER", "t", "--at", "noon"), REFUSED, "--at noon: expected a hybrid time or an ISO 8601"),
    (("create", "FOLDER", "t", "--parallel", "0"), REFUSED, "--parallel"),
    (("create", "FOLDER", "t", "--timeout", "1"), TRY_AGAIN, "127.0.0.1:1"),
    (("list", "FOLDER/none"), REFUSED, "FOLDER/none: there is no such folder; check its path"),
    (("list", "s4://bucket/x"), REFUSED, "s4://bucket/x: Unrecognized filesystem type"),
    (("verify", "FOLDER"), REFUSED, "FOLDER has no complete backup"),
    (("verify", "FOLDER", "--table", "a=b"), REFUSED, "names another table to compare with; add --compare"),
    (("verify", "FOLDER", "--table", "a", "--table", "a"), REFUSED, "--table a is given twice"),
    (("restore", "FOLDER", "--table", "a="), REFUSED, "expected NAME, or NAME=OTHER"),
    (("restore", "FOLDER", "--hash", "id"), REFUSED, "--hash id: expected NAME,...:BUCKETS"),
    (
        ("restore", "FOLDER", "--hash", "id:2", "--partitioning", "x"),
        REFUSED,
        "--partitioning excludes --hash",
    ),
    (("restore", "FOLDER", "--range", "..5"), REFUSED, "--range ..5: expected COLUMN,...:RANGE"),
    (
        ("restore", "FOLDER", "--range", "a:..5", "--range", "b:5.."),
        REFUSED,
        "the other ranges have columns a",
    ),
    (("prune", "FOLDER"), REFUSED, "say what to keep: add --keep, --keep-days or --keep-full"),
    (("prune", "FOLDER", "--keep", "0"), REFUSED, "--keep"),
]


@pytest.mark.parametrize(
    ("arguments", "expected", "message"),
    WRONG,
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_a_wrong_command_is_refused_in_one_line(
    arguments: tuple[str, ...], expected: int, message: str, run: Run, tmp_path: Path
) -> None:
    code, out, err = run(*(text.replace("FOLDER", str(tmp_path)) for text in arguments))
    assert (code, out) == (expected, "")
    assert message.replace("FOLDER", str(tmp_path)) in " ".join(err.split())
    assert "Traceback" not in err
