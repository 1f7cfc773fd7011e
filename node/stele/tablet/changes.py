"""Reads what changed between two times: the versions of rows after one time and up to another. Called by view.py;
opens no files.

Of a row group it first reads the times, then only the rows that changed. Sources and groups whose range of times shows
no change are not read at all.

Invariant: no version in the range is missed, as long as the store has kept all of them (`View.scan` checks that).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stele.model.column import Column
from stele.model.predicate import CHANGE_FIELDS, DELETE, UPSERT, Changes
from stele.tablet.sorted_runs import U64, KeyList, Mask, Run, changed
from stele.tablet.sources import Source, clusters, pieces


class ChangeReader:
    """The changes of some sources (newest first) after `wanted.after` and up to `upto`.

    `columns`: the columns to return. `keys`: the ids of the key columns. In deletes all other columns are null."""

    def __init__(
        self, wanted: Changes, upto: int, columns: tuple[Column, ...], keys: frozenset[int], arrow: pa.Schema
    ) -> None:
        """`arrow`: the schema of `columns`."""
        self._wanted, self._upto = wanted, upto
        self._columns, self._arrow = columns, arrow
        self._emptied = [at for at, column in enumerate(columns) if int(column.id) not in keys]
        shown = [
            field.with_nullable(True) if at in self._emptied else field for at, field in enumerate(arrow)
        ]
        self._shown = pa.schema([*shown, *CHANGE_FIELDS])

    def read(self, sources: Sequence[Source], lower: bytes, upper: bytes) -> Iterator[pa.RecordBatch]:
        """Yield batches in key order, the versions of one key oldest first. Now and then a batch is empty, so that
        the caller sees progress."""
        fresh = [source for source in sources if source.max_time > self._wanted.after]
        for cluster in clusters(fresh, lower, upper):
            for low, high in pieces(cluster, lower, upper):
                runs = [run for source in cluster for run in self._runs(source, low, high)]
                if runs:
                    yield self._rows(self._unseen(changed(runs, every=self._wanted.every), lower))
                else:
                    yield pa.RecordBatch.from_pylist([], schema=self._shown)

    def _runs(self, source: Source, low: bytes, high: bytes) -> Iterator[Run]:
        """The changed rows of a source with keys in [low, high)."""
        for group in source.groups_between(low, high):
            oldest, newest = source.span(group)
            if (
                newest <= self._wanted.after
                or oldest > self._upto
                or not self._inside(source.times(group)).any()
            ):
                continue
            run = source.run(group, self._columns, self._arrow).between(low, high)
            at = np.flatnonzero(self._inside(run.times))
            if len(at):
                yield run if len(at) == run.rows else run.take(at)

    def _inside(self, times: U64) -> Mask:
        return (times > np.uint64(self._wanted.after)) & (times <= np.uint64(self._upto))

    def _unseen(self, run: Run, lower: bytes) -> Run:
        """Return the run without the versions that the reader already has: of the key `lower`, up to the time `seen`."""
        if not self._wanted.seen:
            return run
        versions = bisect.bisect_right(KeyList(run.keys), lower)
        skipped = int(np.searchsorted(run.times[:versions], np.uint64(self._wanted.seen), "right"))
        return run.slice(skipped, run.rows - skipped)

    def _rows(self, run: Run) -> pa.RecordBatch:
        arrays = list(run.batch.columns)
        if run.deleted is None or not run.deleted.any():
            ops = pa.repeat(pa.scalar(UPSERT), run.rows)
        else:
            gone = pa.array(run.deleted)
            ops = pc.if_else(gone, DELETE, UPSERT)
            for at in self._emptied:
                arrays[at] = pc.if_else(gone, pa.scalar(None, arrays[at].type), arrays[at])
        return pa.RecordBatch.from_arrays([*arrays, ops, pa.array(run.times)], schema=self._shown)
