"""Promises that one line of a store keeps, each asked for by itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stele.model.errors import Code, Rejected, Retryable
from stele.tablet.files import FILES
from stele.tablet.store import TabletStore
from tests.tablet.test_exactly_once import ONE, _insert
from tests.tablet.twin import FOREVER, SCHEMA, new_store, rows_of, write_entry


def filled(directory: Path) -> TabletStore:
    store = new_store(directory)
    store.apply(write_entry(1, _insert(1), client_id=ONE, sequence=1))
    return store


def test_a_store_that_is_there_is_not_made_anew(tmp_path: Path) -> None:
    store = filled(tmp_path / "t")
    job = store.begin_flush()
    assert job is not None
    job.write()
    with pytest.raises(Rejected) as refused:
        TabletStore.create(tmp_path / "t", SCHEMA, FOREVER)
    assert refused.value.code is Code.ALREADY_PRESENT
    again = TabletStore.open(tmp_path / "t", FOREVER)
    with again.view() as view:
        assert len(rows_of(view.scan())) == 1


def test_no_number_of_a_file_is_given_twice(tmp_path: Path) -> None:
    """Not to a flush beside a merge either: the later file would replace the earlier one, which is listed."""
    contents = filled(tmp_path / "t")._contents
    numbers = [contents.reserve_number() for _ in range(5)]
    assert numbers == sorted(set(numbers))


def test_a_flush_is_written_once(tmp_path: Path) -> None:
    """Its rows would stand in two files."""
    job = filled(tmp_path / "t").begin_flush()
    assert job is not None
    job.write()
    before = sorted(p.name for p in (tmp_path / "t").iterdir())
    job.write()
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == before


def test_a_new_file_is_on_the_disk_as_a_whole_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    assert FILES.write_new(tmp_path / "f", [b"abc", b"", b"de"]) == 5
    assert synced == [5]


def test_a_file_that_could_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"abc"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Retryable) as full:
        FILES.write_new(tmp_path / "f", parts())
    assert full.value.code is Code.DISK_FULL and list(tmp_path.iterdir()) == []
