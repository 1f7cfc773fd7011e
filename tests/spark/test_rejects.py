"""Files of refused rows: seen only when they are whole and their attempt counts. No Java."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stele.backup.folder import Folder
from stele.model.block import RowError
from stele.model.errors import Code
from stele_spark.rejects import Rejects

ROWS = pa.record_batch({"id": [1, 2], "name": ["a", None]})
ERRORS = [RowError(0, Code.ALREADY_PRESENT, "it is there"), RowError(1, Code.INVALID_ARGUMENT, "null")]


def seen(folder: Path) -> list[str]:
    """What Spark would read: names that begin with _ are hidden."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("_"))


def test_a_file_is_seen_once_its_attempt_counts_and_those_of_others_go(tmp_path: Path) -> None:
    rejects = Rejects(Folder.at(tmp_path), "a" * 32, ("id", "name"))
    another = Rejects(Folder.at(tmp_path), "b" * 32, ("id", "name")).file(0)
    attempts = [rejects.file(3) for _ in range(2)]
    for attempt in (*attempts, another):
        attempt.take(ROWS, ["insert", "insert"], ERRORS)
        attempt.settle()
    assert seen(tmp_path) == [] and len(list(tmp_path.iterdir())) == 3
    names = [attempt.close() for attempt in attempts]
    assert seen(tmp_path) == [] and len(set(names)) == 2
    rejects.publish(names[:1])
    (name,) = seen(tmp_path)
    assert pq.read_table(tmp_path / name).to_pylist() == [
        {"id": 1, "name": "a", "_op": "insert", "_code": "ALREADY_PRESENT", "_message": "it is there"},
        {"id": 2, "name": None, "_op": "insert", "_code": "INVALID_ARGUMENT", "_message": "null"},
    ]
    left = [path.name for path in tmp_path.iterdir() if path.name != name]
    assert left == [another.close()], "that of another job stays"


def test_of_an_attempt_without_refused_rows_there_is_no_file(tmp_path: Path) -> None:
    rejects = Rejects(Folder.at(tmp_path), "a" * 32, ("id", "name"))
    file = rejects.file(0)
    file.settle()
    assert file.close() == "" and list(tmp_path.iterdir()) == []
    rejects.publish([])
