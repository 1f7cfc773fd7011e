"""Reads the rows with some keys from the memtables and files of a view, the newest first. Used by view.py, in any thread.

Invariants: each key gets the newest version at or below the snapshot, or no row. Rows are copied part by part, so a read
keeps few groups in memory. It soon notices that its rows take too many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from stele.model.column import Column
from stele.model.errors import Code, Rejected
from stele.model.hashing import hash_binary, hash_bytes
from stele.tablet.colfile import ColumnFile
from stele.tablet.memtable import MemView
from stele.tablet.projection import projected
from stele.tablet.sorted_runs import Mask, concat_batches

_MANY_KEYS = 32
"""From this many keys on, one search for all costs less than one for each."""

_COPIED_ROWS = 8
"""How many single rows of a point read are copied together, before their size is checked. Asking for the size costs more than
copying a few small rows."""

_FEW_ROWS = 3
"""Up to this many rows of a group are copied one by one."""

_COPIED_VALUES = 4_096
"""The most values of several rows that are copied together. None of them is long."""


class _Found(NamedTuple):
    """Rows that a point read has found, and which of its keys they have."""

    places: Sequence[int]
    rows: pa.RecordBatch


class _Answer:
    """Collects the rows that a point read finds. Copies them part by part: so it keeps few groups in memory, and soon
    notices that the rows take more than `bytes_max` bytes. `brief`: copies at the end, and does not check the size."""

    __slots__ = ("_brief", "_bytes", "_bytes_max", "_copied", "_single")

    def __init__(self, bytes_max: int | None, brief: bool) -> None:
        self._bytes_max, self._brief = bytes_max, brief
        self._single: list[_Found] = []
        self._copied: list[_Found] = []
        self._bytes = 0  # of `_copied`

    def add_one(self, place: int, row: pa.RecordBatch) -> None:
        """Add the row of the key at this place. Raises Rejected: TOO_LARGE."""
        self._single.append(_Found((place,), row))
        if not self._brief and len(self._single) == _COPIED_ROWS:
            self._copy()

    def add_copy(self, places: Sequence[int], rows: pa.RecordBatch) -> None:
        """Add a copy of the rows of the keys at these places. Raises Rejected: TOO_LARGE."""
        self._copied.append(_Found(places, rows))
        self._bytes += rows.nbytes
        if self._bytes_max is not None and self._bytes > self._bytes_max:
            raise Rejected(
                f"the rows of one read take {self._bytes} bytes or more; at most {self._bytes_max} are allowed; "
                "read fewer at once",
                code=Code.TOO_LARGE,
            )

    def _copy(self) -> None:
        single, self._single = self._single, []
        self.add_copy([at for part in single for at in part.places], concat_batches([p.rows for p in single]))

    def end(self, values: Sequence[bytes], schema: pa.Schema) -> tuple[pa.RecordBatch, list[int]]:
        """Return (the rows in the order of their keys, the places of these keys). `values`: all keys of the read.
        Raises Rejected: TOO_LARGE."""
        if self._single and not self._brief:
            self._copy()
        found = sorted(self._copied + self._single, key=lambda part: values[part.places[0]])
        if not found:
            return pa.RecordBatch.from_pylist([], schema=schema), []
        places = [at for part in found for at in part.places]
        rows = concat_batches([part.rows for part in found])
        order = sorted(range(len(places)), key=lambda at: values[places[at]])
        if order == list(range(len(places))):
            return rows, places
        return rows.take(pa.array(order, pa.int64())), [places[at] for at in order]


class PointRead:
    """One read of some keys. `left`: the places of the keys that no source has had so far, in the order of the keys.

    `bytes_max`: the most bytes that the rows may take. `brief`: read no file for the first time, copy no long value, and do
    not check `bytes_max`."""

    __slots__ = ("_answer", "_brief", "_columns", "_keys", "_schema", "_snapshot", "_values", "left")

    def __init__(
        self,
        keys: pa.BinaryArray,
        columns: tuple[Column, ...],
        schema: pa.Schema,
        snapshot: int,
        bytes_max: int | None,
        *,
        brief: bool,
    ) -> None:
        """`schema`: the Arrow schema of `columns`."""
        self._keys, self._columns, self._schema = keys, columns, schema
        self._snapshot, self._brief = snapshot, brief
        self._values: list[bytes] = keys.to_pylist()
        self._answer = _Answer(bytes_max, brief)
        self.left = sorted(range(len(self._values)), key=self._values.__getitem__)

    def from_memory(self, memory: MemView) -> None:
        """Look for the keys that are left in a memtable. Raises Rejected: TOO_LARGE; WouldBlock, with `brief`."""
        missing, written = [], memory.table.schema
        for at in self.left:
            version = memory.find(self._values[at], self._snapshot, brief=self._brief)
            if version is None:
                missing.append(at)
            elif (row := version[1]) is not None:
                self._answer.add_one(at, projected(row, written, self._columns, self._schema))
        self.left = missing

    def from_file(self, file: ColumnFile, *, oldest: bool) -> None:
        """Look for the keys that are left in a file. A key that newer sources do not have is probably in the `oldest` one:
        its filter would cost more than a search.

        Raises:
            Rejected: TOO_LARGE. Corrupt: the file is damaged. WouldBlock: with `brief`.
        """
        if not self.left or file.min_time > self._snapshot:
            return
        if self._brief or len(self.left) < _MANY_KEYS:
            self.left = self._few(file, filtered=not oldest)
        else:
            self.left = self._many(file, filtered=not oldest)

    def end(self) -> tuple[pa.RecordBatch, list[int]]:
        """Return (the rows in key order; for each row, the position of its key). Raises Rejected: TOO_LARGE."""
        return self._answer.end(self._values, self._schema)

    def _few(self, file: ColumnFile, *, filtered: bool) -> list[int]:
        """Ask a file for each key by itself. Returns the places of the keys that it does not have."""
        missing = []
        marks: dict[int, Mask | None] = {}
        for at in self.left:
            key = self._values[at]
            place = file.find_one(key, hash_bytes(key) if filtered else None, brief=self._brief)
            row = -1
            if place is not None:
                group, row = place[0], file.version_at(*place, self._snapshot, brief=self._brief)
            if row < 0:
                missing.append(at)
                continue
            if group not in marks:
                marks[group] = file.deleted(group, brief=self._brief)
            deleted = marks[group]
            if deleted is None or not deleted[row]:
                found = file.row(group, row, self._columns, self._schema, brief=self._brief)
                self._answer.add_one(at, found)
        return missing

    def _many(self, file: ColumnFile, *, filtered: bool) -> list[int]:
        """As `_few`, but the keys of each group are asked for together."""
        wanted, sought = self._keys.take(pa.array(self.left, pa.int64())), np.array(self.left, np.int64)
        groups, rows = file.find(wanted, hash_binary(wanted) if filtered else None)
        missing = groups < 0
        for group in np.unique(groups[~missing]).tolist():
            members = np.flatnonzero(groups == group)
            versions = file.versions_at(group, rows[members], self._snapshot)
            missing[members[versions < 0]] = True
            deleted = file.deleted(group)
            live = versions >= 0
            if deleted is not None:
                live &= ~deleted[versions]  # -1 takes the last mark, and is no live row anyway
            places, versions = sought[members[live]].tolist(), versions[live]
            if len(places) <= _FEW_ROWS or file.any_long(group, self._columns):
                for at, row in zip(places, versions.tolist()):
                    self._answer.add_one(at, file.row(group, row, self._columns, self._schema))
            else:
                step = max(1, _COPIED_VALUES // len(self._columns))
                for start in range(0, len(places), step):
                    part = slice(start, start + step)
                    rows_there = file.rows_at(group, versions[part], self._columns, self._schema)
                    self._answer.add_copy(places[part], rows_there)
        rest: list[int] = sought[missing].tolist()
        return rest
