"""Workers that try jobs again, or run two attempts at once, as Spark's executors do. Each attempt has pickled values."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stele import backup
from stele.backup.workers import Bench, Did, Job, Tell
from stele.client import AsyncClient
from stele.model.errors import Retryable
from tests.backup.conftest import There
from tests.backup.tables import data_files, numbered, rows


class Twice:
    """Runs two attempts at each job, one after the other or both at once, and gives the result of the second."""

    repeats = True

    def __init__(self, masters: str, *, at_once: bool) -> None:
        self._masters = masters
        self._at_once = at_once
        self.dropped: list[Any] = []
        self.late: list[Callable[[], Awaitable[object]]] = []

    async def run(self, jobs: Sequence[Job[Any]], parallel: int, tell: Tell) -> list[Any]:
        found = []
        async with AsyncClient(self._masters) as client:
            for number, job in enumerate(jobs):
                sent = pickle.dumps(job)
                first, second = (
                    pickle.loads(sent).run(Bench(client), lambda _: None),
                    pickle.loads(sent).run(Bench(client), lambda _: None),
                )
                if self._at_once:
                    results = await asyncio.gather(first, second)
                else:
                    results = [await first, await second]
                self.dropped.append(results[0])
                found.append(pickle.loads(pickle.dumps(results[1])))
                tell(number, Did(ended=True))
                self.late.append(lambda sent=sent: self._once_more(sent))
        return found

    async def _once_more(self, sent: bytes) -> None:
        async with AsyncClient(self._masters) as client:
            await pickle.loads(sent).run(Bench(client), lambda _: None)


def test_two_attempts_at_once_leave_one_whole_backup(there: There, tmp_path: Path) -> None:
    table = numbered(there.client, "t", 2_000)
    workers = Twice(there.masters, at_once=True)
    made = backup.create(there.client, tmp_path, "t", workers=workers)
    named = {file.name for entry in made.tables for file in entry.files}
    others = {file.name for done in workers.dropped for file in done.files}
    assert len(others) == 4 and not named & others, "each attempt has names of its own for its files"
    assert {path.name for path in data_files(tmp_path, made.backup_id)} == named
    assert made.rows == 2_000
    report = backup.compare(there.client, tmp_path, workers=Twice(there.masters, at_once=True))
    assert (report.faults, report.differences, report.strays) == ([], [], [])
    there.client.delete_table("t")
    backup.restore(there.client, tmp_path, workers=Twice(there.masters, at_once=True))
    del table
    report = backup.compare(there.client, tmp_path)
    assert (report.faults, report.differences) == ([], [])


def test_an_attempt_goes_on_behind_the_files_of_the_one_before(there: There, tmp_path: Path) -> None:
    numbered(there.client, "t", 400)
    workers = Twice(there.masters, at_once=False)
    made = backup.create(there.client, tmp_path, "t", workers=workers)
    named = {file.name for entry in made.tables for file in entry.files}
    assert named == {file.name for done in workers.dropped for file in done.files}, "they were recorded"


def test_the_manifest_names_what_the_attempts_that_count_have_written(there: There, tmp_path: Path) -> None:
    """Although the records are those of other attempts."""

    class First(Twice):
        async def run(self, jobs: Sequence[Job[Any]], parallel: int, tell: Tell) -> list[Any]:
            await super().run(jobs, parallel, tell)
            for path in tmp_path.glob("2*/unfinished/*.json"):
                path.unlink()
            for attempt in self.late:
                await attempt()
            return self.dropped

    numbered(there.client, "t", 400)
    workers = First(there.masters, at_once=False)
    made = backup.create(there.client, tmp_path, "t", workers=workers)
    counted = {file.name for done in workers.dropped for file in done.files}
    assert {file.name for entry in made.tables for file in entry.files} == counted
    assert {path.name for path in data_files(tmp_path, made.backup_id)} == counted
    assert backup.verify(tmp_path).faults == []


def test_a_late_attempt_at_a_restore_changes_nothing_that_others_wrote_since(
    there: There, tmp_path: Path
) -> None:
    client = there.client
    numbered(client, "t", 400)
    backup.create(client, tmp_path, "t")
    workers = Twice(there.masters, at_once=False)
    backup.restore(client, tmp_path, tables={"t": "new"}, workers=workers)
    table = client.open_table("new")
    table.put({"id": 7, "name": "newer"})
    table.delete({"id": 8})
    before = rows(table)
    for attempt in workers.late:
        asyncio.run(attempt())
    assert table.get(7) == {"id": 7, "name": "newer"} and table.get(8) is None
    assert rows(table) == before


def test_the_error_of_a_job_leaves_no_backup(there: There, tmp_path: Path) -> None:
    class Failing(Twice):
        async def run(self, jobs: Sequence[Job[Any]], parallel: int, tell: Tell) -> list[Any]:
            await super().run(jobs[:2], parallel, tell)
            raise Retryable("the other executors are gone")

    numbered(there.client, "t", 400)
    with pytest.raises(Retryable, match="executors are gone"):
        backup.create(there.client, tmp_path, "t", workers=Failing(there.masters, at_once=False))
    (left,) = backup.list_backups(tmp_path)
    assert left.state is backup.State.UNFINISHED
    made = backup.create(there.client, tmp_path, "t")
    assert made.backup_id == left.backup_id and backup.verify(tmp_path).faults == []
