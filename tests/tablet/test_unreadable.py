"""Column files that the disk does not give: one replica's damage, never the end of the process that reads them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stele.model.block import RowOp
from stele.model.errors import Code, Corrupt, Retryable, SteleError
from stele.tablet.store import TabletStore
from tests.tablet.twin import Twin, all_rows, compact, flush, new_store

_READS_A_CUT_FILE = """
import os, sys
from pathlib import Path
from stele.model.errors import Corrupt
from stele.tablet.store import TabletStore
store = TabletStore.open(Path(sys.argv[1]))
os.truncate(next(Path(sys.argv[1]).glob("rows-*")), 4096)
try:
    with store.view() as view:
        list(view.scan())
except Corrupt as exc:
    print("told:", exc)
"""


def _store(home: Path) -> TabletStore:
    store, twin = new_store(home / "t"), Twin()
    for start in (0, 2000):
        rows = [{"k": "k", "n": n, "v": "v" * 20, "w": n, "d": None} for n in range(start, start + 3000)]
        store.apply(twin.write(rows, RowOp.UPSERT)[0])
        flush(store)
    store.close()
    return TabletStore.open(home / "t")


def _failing(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    def fails(*arguments: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fails)


def test_pages_that_are_not_there_end_no_process(tmp_path: Path) -> None:
    """To who reads a map, a page past the file's end is what an unreadable one is: SIGBUS."""
    _store(tmp_path)
    reader = subprocess.run(
        [sys.executable, "-c", _READS_A_CUT_FILE, tmp_path / "t"], capture_output=True, text=True, check=False
    )
    assert (reader.returncode, reader.stdout[:13]) == (0, "told: CORRUPT"), reader.stderr


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [(errno.EIO, Corrupt, Code.IO_ERROR), (errno.EMFILE, Retryable, Code.UNAVAILABLE)],
)
@pytest.mark.parametrize(
    "read", [lambda store: store.verify(), all_rows, compact], ids=["verify", "scan", "merge"]
)
def test_a_part_that_cannot_be_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[TabletStore], object],
    number: int,
    kind: type[SteleError],
    code: Code,
) -> None:
    store = _store(tmp_path)
    _failing(monkeypatch, "preadv", number)
    with pytest.raises(kind) as told:
        read(store)
    assert told.value.code is code
    monkeypatch.undo()
    assert len(all_rows(store)) == 5000


def test_a_header_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _store(tmp_path)
    _failing(monkeypatch, "pread", errno.EIO)
    with pytest.raises(Corrupt) as told:
        TabletStore.open(tmp_path / "t")
    assert told.value.code is Code.IO_ERROR


def test_who_reads_files_that_a_merge_took_away_reads_on(tmp_path: Path) -> None:
    store = _store(tmp_path)
    expected = all_rows(TabletStore.open(tmp_path / "t"))
    with store.view() as view:
        compact(store)
        assert sum(batch.num_rows for batch in view.scan()) == len(expected) == 5000


def test_what_was_right_once_is_read_again_to_verify(tmp_path: Path) -> None:
    store = _store(tmp_path)
    all_rows(store)
    path = max((tmp_path / "t").glob("rows-*"))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(Corrupt):
        store.verify()
