"""How much of a store a merge of all its files would free: rows that are deleted or overwritten, below the
history mark.

Merges by size (compaction.py) do not see this: a file of deletes is small beside the rows that it hides. This
module looks at the keys of some parts of the store. It does so when all versions of a new file have come below the
history mark. They must also be able to make a good share of the rows dead. Used by the store; opens no files.

Invariant: `due` is cheap, and false if no such file has come since the last judgement. A judgement applies only to
the files that it names.
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
"""A full merge is worth it at this dead share of a store's bytes. Each freed byte then costs at most four
written ones."""
STORE_BYTES_MIN = 4 << 20
"""Smaller stores are left to the merges by size: what they would free is not worth starting a worker."""
_RANGES = 16
"""Number of key ranges of a store that are looked at; each is at most one row group of each file."""
_NO_COLUMNS = pa.RecordBatch.from_arrays([], schema=pa.schema([]))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The dead share of a store: the share of bytes that a merge of all files would drop.

    `names`: the files whose versions were all at or below the mark. The share is that of these and all newer
    files."""

    names: frozenset[str] = frozenset()
    share: float = 0.0


def due(files: Sequence[FileMeta], mark: int, found: Judgement) -> bool:
    """Whether a full merge may be worth it, because of files whose versions all came below `mark` since `found`.
    Files are newest first."""
    if sum(file.size for file in files) < STORE_BYTES_MIN:
        return False
        # A row may be one version too many, and kills at most one other. A delete goes itself too.
    news = sum(
        file.rows + file.deletes
        for at, file in enumerate(files)
        if file.max_time <= mark and file.name not in found.names and not _plain(file, at == len(files) - 1)
    )
    return news > 0 and found.share + news / sum(file.rows for file in files) >= SHARE_MIN


def _plain(file: FileMeta, bottom: bool) -> bool:
    """Whether no row is dead because of this file. `bottom`: there is no older file."""
    return bottom and file.unique and not file.deletes


def judge(files: Sequence[ColumnFile], mark: int) -> Judgement:
    """Estimate the dead share from some key ranges, spread evenly, or from all if there are few. Blocks; reads only
    keys.

    Raises:
        Corrupt: a file is damaged.
    """
    (share,) = dead_shares(files, [mark])
    return Judgement(frozenset(file.name for file in files if file.max_time <= mark), share)


def dead_shares(files: Sequence[ColumnFile], marks: Sequence[int]) -> list[float]:
    """For each history mark the share of bytes that a merge of all files would drop. As `judge`."""
    every = _ranges(files)
    chosen = np.unique(np.linspace(0, len(every) - 1, _RANGES).round().astype(int)) if every else ()
    rows, kept = np.zeros(len(files)), np.zeros((len(marks), len(files)))
    for at in chosen:
        low, high = every[at]
        parts = [(place, run) for place, file in enumerate(files) for run in _runs(file, low, high)]
        for place, run in parts:
            rows[place] += run.rows
        for number, mark in enumerate(marks):
            stays = kept_rows([run for _, run in parts], mark)
            start = 0
            for place, run in parts:
                kept[number, place] += np.count_nonzero(stays[start : start + run.rows])
                start += run.rows
    sizes = np.array([file.size for file in files], float)
    total = max(1.0, sizes.sum())
    dead = sizes * (1 - np.divide(kept, rows, out=np.ones_like(kept), where=rows > 0))
    return [float(each.sum() / total) for each in dead]


def worth(files: Sequence[FileMeta], found: Judgement, room_bytes: int | None) -> bool:
    """Whether to merge all files: enough is dead, all judged files still exist, and the result fits in `room_bytes`."""
    names = {file.name for file in files}
    if found.share < SHARE_MIN or not found.names or not found.names <= names:
        return False
    size = sum(file.merge_bytes for file in files)
    left = size * min(1.0, 1 - found.share + SHARE_MIN)  # a margin, because only some parts were looked at
    return room_bytes is None or left <= room_bytes


def _ranges(files: Sequence[ColumnFile]) -> list[tuple[bytes, bytes]]:
    """The whole key space, cut at the beginnings of row groups."""
    begins = sorted({key for file in files for key in file.first_keys})
    return list(zip(begins, [*begins[1:], b""]))


def _runs(file: ColumnFile, low: bytes, high: bytes) -> list[Run]:
    runs = [
        Run(_NO_COLUMNS, file.keys(group), file.times(group), file.deleted(group)).between(low, high)
        for group in file.groups_between(low, high)
    ]
    return [run for run in runs if run.rows]
