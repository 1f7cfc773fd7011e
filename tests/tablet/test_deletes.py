"""A delete stays as long as an older file may hold what it hides: without it the row would be back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from stele.model.block import RowOp
from stele.tablet.compaction import run_job
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.twin import Row, Twin, all_rows, compact, flush, new_store

DELETED, KEPT = 0, range(1, 3_000)


class Tablet:
    """A store without history, so a delete goes as soon as it hides nothing; and how its rows are written."""

    def __init__(self, directory: Path) -> None:
        self.store: TabletStore = new_store(directory, StoreOptions(history_us=0))
        self._twin = Twin()

    def write(self, numbers: Iterable[int], op: RowOp = RowOp.UPSERT) -> None:
        self.store.apply(self._twin.write([_row(n) for n in numbers], op)[0])

    def numbers(self) -> list[int]:
        """Which rows there are."""
        return [int(found["w"]) for found in all_rows(self.store)]


def _row(number: int) -> Row:
    return {"k": f"key-{number:06}", "n": 0, "v": f"value {number}", "w": number, "d": 0.5}


@pytest.fixture
def tablet(tmp_path: Path) -> Tablet:
    """All rows in a file; in memory a delete of one of them, which is history by what came later."""
    made = Tablet(tmp_path / "t")
    made.write([DELETED, *KEPT])
    flush(made.store)
    made.write([DELETED], RowOp.DELETE)
    made.write(KEPT[:20])
    return made


def test_a_flush_keeps_a_delete_that_hides_a_row_of_an_older_file(tablet: Tablet) -> None:
    flush(tablet.store)
    assert tablet.numbers() == list(KEPT)


def test_a_merge_of_newer_files_keeps_a_delete_that_hides_a_row_of_an_older_one(tablet: Tablet) -> None:
    flush(tablet.store)
    for first in (100, 200, 300):
        tablet.write(range(first, first + 20))
        flush(tablet.store)
    job = tablet.store.plan_compaction(full=False)
    assert job is not None and len(job.inputs) == 4, "the old file is too large to be merged with these"
    tablet.store.install_compaction(run_job(job))
    assert tablet.numbers() == list(KEPT)
    compact(tablet.store, full=True)
    assert tablet.numbers() == list(KEPT)
