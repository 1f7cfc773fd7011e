"""What a scan reads from: column files and memory behind one small protocol; and which rows of overlapping sources
are the newest versions, worked out once from the keys alone.

Invariant: masks are made of immutable sources and named by them, so a mask is never applied to other rows.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from stele.model import keys as key_bytes
from stele.model.schema import Column, Schema
from stele.tablet.memtable import MemView
from stele.tablet.runs import KeyList, Mask, Run

GROUPS_PER_PIECE = 4


class Source(Protocol):
    """Sorted versions, by group; all versions of a key are in one group."""

    @property
    def name(self) -> Hashable:
        """Stands for these very rows, for ever."""

    @property
    def first_keys(self) -> Sequence[bytes]:
        """The lowest key of each group."""

    @property
    def last_key(self) -> bytes:
        """The highest key."""

    @property
    def max_time(self) -> int:
        """The newest version's hybrid time."""

    def groups_between(self, lower: bytes, upper: bytes) -> range:
        """Groups that may hold keys in [lower, upper); b"" is unbounded."""

    def keys(self, group: int) -> pa.BinaryArray:
        """A group's keys."""

    def deleted(self, group: int) -> Mask | None:
        """A group's delete marks; None if it has none."""

    def batch(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> pa.RecordBatch:
        """These columns of a group."""

    def run(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> Run:
        """A group's versions."""


class MemorySource:
    """The rows in memory, as one group."""

    def __init__(self, memory: MemView, schema: Schema) -> None:
        self._run = memory.run()
        self._schema = schema
        self.name: Hashable = (memory.table.serial, memory.rows)
        self.first_keys: list[bytes] = [self._run.keys[0].as_py()]
        self.last_key: bytes = self._run.keys[-1].as_py()
        self.max_time = int(self._run.times.max())

    def groups_between(self, lower: bytes, upper: bytes) -> range:
        """See Source."""
        outside = (lower and lower > self.last_key) or (upper and upper <= self.first_keys[0])
        return range(0) if outside else range(1)

    def keys(self, group: int) -> pa.BinaryArray:
        """See Source."""
        return self._run.keys

    def deleted(self, group: int) -> Mask | None:
        """See Source."""
        return self._run.deleted

    def batch(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> pa.RecordBatch:
        """See Source."""
        place = self._schema.column_ids
        arrays = [self._run.batch.column(place.index(int(c.id))) for c in columns]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def run(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> Run:
        """See Source."""
        run = self._run
        return Run(self.batch(group, columns, schema), run.keys, run.times, run.deleted)


def clusters(sources: Sequence[Source], lower: bytes, upper: bytes) -> list[list[Source]]:
    """Sources that hold something in [lower, upper), grouped so that no two groups overlap, in key order; within a
    group newest first, as they came."""
    wanted = [(at, s) for at, s in enumerate(sources) if len(s.groups_between(lower, upper))]
    wanted.sort(key=lambda item: item[1].first_keys[0])
    found: list[list[tuple[int, Source]]] = []
    end = b""
    for at, source in wanted:
        if found and source.first_keys[0] <= end:
            found[-1].append((at, source))
            end = max(end, source.last_key)
        else:
            found.append([(at, source)])
            end = source.last_key
    return [[source for _, source in sorted(cluster, key=lambda item: item[0])] for cluster in found]


def pieces(sources: Sequence[Source], lower: bytes, upper: bytes) -> list[tuple[bytes, bytes]]:
    """[lower, upper) cut into key ranges of a few groups each, so that a merge needs bounded memory."""
    begins = sorted({s.first_keys[g] for s in sources for g in s.groups_between(lower, upper)})
    cuts = [key for key in begins[GROUPS_PER_PIECE::GROUPS_PER_PIECE] if key > lower]
    return list(zip([lower, *cuts], [*cuts, upper]))


Masks = list[list[Mask | None]]
"""Per source and group: which rows are the newest version of their key and no delete; None: all of them."""


class LiveMasks:
    """The masks of the sources last asked for. One per store; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: tuple[Hashable, ...] = ()
        self._masks: Masks = []

    def of(self, sources: Sequence[Source]) -> Masks:
        """Masks of overlapping sources, which come newest first."""
        names = tuple(s.name for s in sources)
        with self._lock:  # whoever else scans the same files waits for the masks instead of making them, too
            if names != self._names:
                self._masks = _live(sources)
                self._names = names
            return self._masks


def _live(sources: Sequence[Source]) -> Masks:
    every = [[np.zeros(len(s.keys(g)), bool) for g in s.groups_between(b"", b"")] for s in sources]
    for low, high in pieces(sources, b"", b""):
        _mark(sources, low, high, every)
    return [[None if mask.all() else mask for mask in masks] for masks in every]


def _mark(sources: Sequence[Source], low: bytes, high: bytes, masks: list[list[Mask]]) -> None:
    parts: list[pa.BinaryArray] = []
    places: list[Mask] = []
    deleted: list[Mask] = []
    for source, of_source in zip(sources, masks):
        for group in source.groups_between(low, high):
            keys = source.keys(group)
            listed = KeyList(keys)
            start = bisect.bisect_left(listed, low) if low else 0
            end = bisect.bisect_left(listed, high) if high else len(keys)
            if start >= end:
                continue
            marks = source.deleted(group)
            parts.append(keys.slice(start, end - start))
            places.append(of_source[group][start:end])
            deleted.append(np.zeros(end - start, bool) if marks is None else marks[start:end])
    if not parts:
        return
    whole = pa.concat_arrays(parts)
    order = key_bytes.sort_order(whole) if len(parts) > 1 else np.arange(len(whole))
    same = key_bytes.same_as_before(whole.take(pa.array(order)))
    live = np.zeros(len(whole), bool)
    live[order[~same]] = True
    live &= ~np.concatenate(deleted)
    at = 0
    for place in places:
        place[:] = live[at : at + len(place)]
        at += len(place)
