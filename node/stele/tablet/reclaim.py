"""How much of a store's files a merge of them all would free: what is deleted, or overwritten, and history no more.

Which files are merged by their sizes (compaction.py) says nothing of this: a file of deletes is small beside the rows that it
hides. What dies in a store is found by looking at the keys of some parts of it, once for each file whose versions are all
history, and only where these are enough to have killed a good share. Used by the store; opens no files.

Invariant: `due` is cheap, and false where nothing has come since; a judgement is only of files that its names name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import FileMeta
from stele.tablet.sorted_runs import Run, kept_rows

SHARE_MIN = 0.25
"""Of a store's bytes: so many dead ones are worth a merge of all. Each of them then costs four bytes written at most."""
STORE_BYTES_MIN = 4 << 20
"""Smaller stores are left to the merges by size: what they hold in vain is not worth a worker's start."""
_RANGES = 16
"""So many key ranges of a store are looked at, of a row group of each file at most."""
_NO_COLUMNS = pa.RecordBatch.from_arrays([], schema=pa.schema([]))


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was found of the files so named, all of whose versions were at or below the mark: which share of the bytes of all
    files, these and newer ones, a merge of all would drop."""

    names: frozenset[str] = frozenset()
    share: float = 0.0


def due(files: Sequence[FileMeta], mark: int, found: Judgement) -> bool:
    """Whether files that have become history since `found` may have made it worth a merge of all. Files newest first."""
    if sum(file.size for file in files) < STORE_BYTES_MIN:
        return False
    # A row is one version too many at most, and kills no more than one; a delete goes itself, too.
    news = sum(
        file.rows + file.deletes
        for at, file in enumerate(files)
        if file.max_time <= mark and file.name not in found.names and not _plain(file, at == len(files) - 1)
    )
    return news > 0 and found.share + news / sum(file.rows for file in files) >= SHARE_MIN


def _plain(file: FileMeta, bottom: bool) -> bool:
    """Whether nothing can be dead on account of this file."""
    return bottom and file.unique and not file.deletes


def judge(files: Sequence[ColumnFile], mark: int) -> Judgement:
    """Look at some key ranges, evenly spread: all of them where there are few. Blocks; reads keys alone.

    Raises:
        Corrupt: a file is damaged.
    """
    every = _ranges(files)
    chosen = np.unique(np.linspace(0, len(every) - 1, _RANGES).round().astype(int)) if every else ()
    rows, kept = np.zeros(len(files)), np.zeros(len(files))
    for at in chosen:
        low, high = every[at]
        parts = [(place, run) for place, file in enumerate(files) for run in _runs(file, low, high)]
        stays = kept_rows([run for _, run in parts], mark)
        start = 0
        for place, run in parts:
            rows[place] += run.rows
            kept[place] += np.count_nonzero(stays[start : start + run.rows])
            start += run.rows
    sizes = np.array([file.size for file in files], float)
    dead = sizes * (1 - np.divide(kept, rows, out=np.ones(len(files)), where=rows > 0))
    names = frozenset(file.name for file in files if file.max_time <= mark)
    return Judgement(names, float(dead.sum() / max(1.0, sizes.sum())))


def worth(files: Sequence[FileMeta], found: Judgement, room_bytes: int | None) -> bool:
    """Whether to merge all: the files judged are there still, and what is left of them all has room."""
    names = {file.name for file in files}
    if found.share < SHARE_MIN or not found.names or not found.names <= names:
        return False
    size = sum(file.merge_bytes for file in files)
    left = size * min(1.0, 1 - found.share + SHARE_MIN)  # the share is that of some parts
    return room_bytes is None or left <= room_bytes


def _ranges(files: Sequence[ColumnFile]) -> list[tuple[bytes, bytes]]:
    """All keys, cut where a row group begins."""
    begins = sorted({key for file in files for key in file.first_keys})
    return list(zip(begins, [*begins[1:], b""]))


def _runs(file: ColumnFile, low: bytes, high: bytes) -> list[Run]:
    runs = [
        Run(_NO_COLUMNS, file.keys(group), file.times(group), file.deleted(group)).between(low, high)
        for group in file.groups_between(low, high)
    ]
    return [run for run in runs if run.rows]
