"""Finds the newest version of a key, or one that was written at given times: in a memtable or in a file. Used by the
write path.

It works on one state of the store, which no flush or merge changes. Invariant: places found by a `StoreRows`
are valid only for that `StoreRows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stele.model.hashing import hash_bytes
from stele.model.schema import Schema
from stele.tablet.colfile import ColumnFile
from stele.tablet.machine import WouldBlock
from stele.tablet.memtable import MemTable
from stele.tablet.projection import projected
from stele.tablet.sorted_runs import Mask, Positions, concat_batches
from stele.tablet.writing import U64, Located

_BRIEF_CELLS_MAX = 256
"""The most values that a brief look copies. Each row may be in a chunk of its own, and every column of that chunk is
read."""


class StoreRows:
    """One state of a store: its memtables and its files, newest first.

    `brief`: raise WouldBlock before a step that would take longer than a few milliseconds."""

    __slots__ = ("_brief", "files", "memory", "schema")

    def __init__(
        self,
        schema: Schema,
        memory: Sequence[MemTable],
        files: Sequence[ColumnFile],
        *,
        brief: bool = False,
    ) -> None:
        self.schema = schema
        self.memory = memory
        self.files = files
        self._brief = brief

    @property
    def active(self) -> MemTable:
        """See stele.tablet.writing.Rows."""
        return self.memory[0]

    def locate_one(self, key: bytes) -> tuple[int, int, bool] | None:
        """See stele.tablet.writing.Rows."""
        brief = self._brief
        for source, table in enumerate(self.memory):
            if table.rows:
                found = table.newest_small(key, brief=brief)
                if found is not None:
                    return source, found[0], not found[1]
        if self.files:
            hash_ = hash_bytes(key)
            for at, file in enumerate(self.files):
                place = file.find_one(key, hash_, brief=brief)
                if place is not None:
                    group, row = place
                    deleted = file.deleted(group, brief=brief)
                    return len(self.memory) + at, (group << 32) | row, deleted is None or not deleted[row]
        return None

    def locate(self, keys: pa.BinaryArray, hashes: U64) -> Located:
        """See stele.tablet.writing.Rows."""
        if self._brief:
            raise WouldBlock
        found = Located(np.full(len(keys), -1), np.zeros(len(keys), np.int64), np.zeros(len(keys), bool))
        left = np.arange(len(keys))
        for source, table in enumerate(self.memory):
            if not table.rows or not len(left):
                continue
            whole = len(left) == len(keys)
            ordinals = table.newest(keys if whole else keys.take(pa.array(left)), hashes[left])
            hit = ordinals >= 0
            if hit.any():
                rows = left[hit]
                found.source[rows], found.place[rows] = source, ordinals[hit]
                found.live[rows] = ~table.deleted_at(ordinals[hit])
                left = left[~hit]
        if len(left) and self.files:
            whole = len(left) == len(keys)
            rest = self._locate_in_files(keys if whole else keys.take(pa.array(left)), hashes[left])
            found.source[left], found.place[left], found.live[left] = rest.source, rest.place, rest.live
        return found

    def _locate_in_files(self, keys: pa.BinaryArray, hashes: U64) -> Located:
        found = Located(np.full(len(keys), -1), np.zeros(len(keys), np.int64), np.zeros(len(keys), bool))
        left = np.arange(len(keys))
        for at, file in enumerate(self.files):
            if not len(left):
                break
            whole = len(left) == len(keys)
            groups, rows = file.find(keys if whole else keys.take(pa.array(left)), hashes[left])
            hit = groups >= 0
            if not hit.any():
                continue
            members = left[hit]
            found.source[members] = len(self.memory) + at
            found.place[members] = (groups[hit] << 32) | rows[hit]
            for group in np.unique(groups[hit]).tolist():
                deleted = file.deleted(group)
                inside = groups[hit] == group
                found.live[members[inside]] = True if deleted is None else ~deleted[rows[hit][inside]]
            left = left[~hit]
        return found

    def written_at(self, keys: pa.BinaryArray, hashes: U64, times: U64) -> Mask:
        """See stele.tablet.writing.Rows."""
        if self._brief:
            raise WouldBlock
        found, left = np.zeros(len(keys), bool), np.arange(len(keys))
        sources: tuple[MemTable | ColumnFile, ...] = (*self.memory, *self.files)
        for source in sources:
            if not len(left):
                break
            wanted = keys if len(left) == len(keys) else keys.take(pa.array(left))
            if isinstance(source, MemTable):
                found[left] = _written_in_memory(source, wanted, hashes[left], times)
            else:
                found[left] = _written_in_file(source, wanted, hashes[left], times)
            left = left[~found[left]]
        return found

    def fetch(self, located: Located) -> pa.RecordBatch:
        """See stele.tablet.writing.Rows."""
        columns, arrow, first_file = self.schema.columns, self.schema.to_arrow(), len(self.memory)
        if self._brief and (
            int(located.source.max()) >= first_file or len(located.place) * len(columns) > _BRIEF_CELLS_MAX
        ):
            raise WouldBlock
        parts = []
        for source in np.unique(located.source).tolist():
            members = np.flatnonzero(located.source == source)
            places = located.place[members]
            if source < first_file:
                table = self.memory[source]
                rows_there = table.rows_at(places)
                if source and len(places) == 1:  # such a row would keep a frozen table in memory
                    rows_there = rows_there.take(pa.array([0]))
                parts.append((members, projected(rows_there, table.schema, columns, arrow)))
                continue
            file = self.files[source - first_file]
            for group in np.unique(places >> 32).tolist():
                inside = places >> 32 == group
                rows = places[inside] & 0xFFFF_FFFF
                parts.append((members[inside], file.rows_at(group, rows, columns, arrow)))
        return _gather(parts)


def _among(times: U64, sought: U64) -> Mask:
    """Return which of `times` are in `sought`, which is ascending."""
    place = np.minimum(np.searchsorted(sought, times), len(sought) - 1)
    found: Mask = sought[place] == times
    return found


def _written_in_memory(table: MemTable, keys: pa.BinaryArray, hashes: U64, sought: U64) -> Mask:
    """Which keys have a version in the memtable from one of these times."""
    found = np.zeros(len(keys), bool)
    if not table.rows:
        return found
    ordinals = table.newest(keys, hashes)
    there = np.flatnonzero(ordinals >= 0)
    times = table.times_at(ordinals[there])
    found[there] = _among(times, sought)
    # Somebody has replaced these. The versions before them are found key by key.
    for at in there[~found[there] & (times > sought[0])].tolist():
        for _, time, _ in table.versions(keys[at].as_py(), int(ordinals[at])):
            if time < sought[0]:
                break
            if _among(np.array([time], np.uint64), sought)[0]:
                found[at] = True
                break
    return found


def _written_in_file(file: ColumnFile, keys: pa.BinaryArray, hashes: U64, sought: U64) -> Mask:
    """Which keys have a version in the file from one of these times."""
    found = np.zeros(len(keys), bool)
    if file.max_time < int(sought[0]) or file.min_time > int(sought[-1]):
        return found
    groups, rows = file.find(keys, hashes)
    for group in np.unique(groups[groups >= 0]).tolist():
        oldest, newest = file.span(group)
        if newest < int(sought[0]) or oldest > int(sought[-1]):
            continue
        at, times, stored = np.flatnonzero(groups == group), file.times(group), file.keys(group)
        place = rows[at]
        while len(at):
            seen = times[place]
            found[at] = _among(seen, sought)
            older = ~found[at] & (seen > sought[0]) & (place + 1 < len(times))
            at, place = at[older], place[older] + 1
            same = np.asarray(pc.equal(stored.take(pa.array(place)), keys.take(pa.array(at))))
            at, place = at[same], place[same]
    return found


def _gather(parts: list[tuple[Positions, pa.RecordBatch]]) -> pa.RecordBatch:
    """Join batches whose rows belong at the given positions into one batch in order."""
    if len(parts) == 1:  # its positions rise, and are all
        return parts[0][1]
    back = np.argsort(np.concatenate([places for places, _ in parts]))
    return concat_batches([batch for _, batch in parts]).take(pa.array(back))
