"""An immutable view of a store at one snapshot: scans, point reads (point_read.py), checksum. Any thread, while writes go on.

A scan handles one cluster after the other. A cluster is a set of sources (files, memtables) whose key bounds overlap. A
file that overlaps nothing is streamed straight from its map. Overlapping sources are merged piece by piece in key
order. If order and bounds do not matter and the snapshot is the newest, they are streamed one by one instead. Masks,
computed from the keys, then say which rows are the newest versions.

Predicates on key columns become ranges of keys (stele.model.key_bounds), and groups outside them are not read. Of the
others, a group is passed over if its bounds show that a predicate is true for none of its rows. A group that may hide
wanted rows of older sources is read all the same (skipping.py). The filter still tests every row that is read.

Invariant: two scans of one view give the same rows. Its files stay readable until it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import pyarrow as pa

from stele.model import keys as key_bytes
from stele.model.checksum import MASK, checksum
from stele.model.clock import physical_us, utc
from stele.model.column import Column
from stele.model.errors import Code, Rejected
from stele.model.ids import OpId
from stele.model.key_bounds import KeyRange, key_ranges, within
from stele.model.predicate import ScanSpec
from stele.model.schema import Schema
from stele.tablet.changes import ChangeReader
from stele.tablet.colfile import ColumnFile
from stele.tablet.filters import Filter
from stele.tablet.masks import LiveMasks
from stele.tablet.memtable import MemView
from stele.tablet.point_read import PointRead
from stele.tablet.skipping import Wanted, needed, runs_of
from stele.tablet.sorted_runs import Run, visible
from stele.tablet.sources import MemorySource, Source, clusters, mostly, pieces, reads

_SIGN_OF_LIFE = 32
"""After this many batches without a wanted row, an empty batch is yielded, so that the caller sees
progress."""


@dataclass(frozen=True, slots=True)
class TableChecksum:
    """A tablet's rows at a snapshot: their number, and the order-independent checksum of
    model/checksum.py."""

    rows: int
    checksum: int


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a scan reads: the columns, their Arrow schema, and which groups can hold a wanted row."""

    columns: tuple[Column, ...]
    schema: pa.Schema
    may_hold: Wanted


class View:
    """Rows as they were at `snapshot`. A context manager; closing it releases its files and memory."""

    def __init__(
        self,
        schema: Schema,
        snapshot: int,
        memory: Sequence[MemView],
        files: Sequence[ColumnFile],
        applied: OpId,
        live: LiveMasks,
        mark: int,
        broken_since: Callable[[int], str] = lambda time: "",
    ) -> None:
        """`mark`: all versions above this hybrid time are there, up to the snapshot. `broken_since`: the end
        of a message, which names a broken hold that would have kept history from a time on."""
        self._mark = mark
        self._broken_since = broken_since
        self.schema = schema
        self.snapshot = snapshot
        self.applied = applied
        self._live = live
        self._memory: Sequence[MemView] = [m for m in memory if m.rows]  # newest first
        self._files: Sequence[ColumnFile] = list(files)  # newest first
        # May include rows newer than the snapshot.
        self._newest = min(snapshot, self._memory[0].max_time) if self._memory else snapshot

    @property
    def memory(self) -> dict[int, int]:
        """Return about how many bytes of each memtable this view keeps, by the memtable's serial number."""
        return {m.table.serial: m.table.bytes for m in self._memory}

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release files and memory. Batches handed out stay valid."""
        self._memory, self._files = (), ()

    # --- scans

    def scan(
        self,
        spec: ScanSpec = ScanSpec(),  # noqa: B008 (immutable)
        *,
        last: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """Batches of the rows that the spec asks for, with the columns of `spec.column_ids`.

        They are in key order if `spec.ordered` or `spec.resume_after` is set, or if they are changes. `last`: the
        caller reads nothing else, so the view closes once the scan has its sources. Once a memtable is
        flushed, a long scan then holds only the sorted rows that it needs of it.

        Raises:
            Rejected: unknown columns, or predicates that do not fit. CURSOR_LOST: some changes may be gone.
            Corrupt: a file is damaged. No row of the damaged part was handed out.
        """
        wanted = [self._column(i) for i in (spec.column_ids or self.schema.column_ids)]
        filter_ = Filter(spec.predicates, self.schema)
        names = {c.id for c in wanted}
        extra = [self.schema.by_id[p.column_id] for p in spec.predicates if p.column_id not in names]
        columns = (*wanted, *dict.fromkeys(extra))
        lower = max(spec.lower_key, spec.resume_after + b"\x00") if spec.resume_after else spec.lower_key
        if spec.changes is not None:
            self._check_history(spec.changes.after)
            batches = self._changes(spec, tuple(wanted), lower, last)
            return _limited(_sliced(batches, spec.batch_rows), spec.limit)
        return _limited(self._filtered(columns, len(wanted), filter_, lower, spec, last), spec.limit)

    def _check_history(self, after: int) -> None:
        """Refuse changes after a time if some may be gone. All versions newer than the mark are there."""
        if after < self._mark:
            raise Rejected(
                f"changes after {after}, which is {utc(physical_us(after))}, are not all there: this replica has them "
                f"from {self._mark} on, which is {utc(physical_us(self._mark))}; begin again with a scan at a snapshot, "
                f"and give the table a longer history, or hold it{self._broken_since(after)}",
                code=Code.CURSOR_LOST,
            )

    def _changes(
        self, spec: ScanSpec, columns: tuple[Column, ...], lower: bytes, last: bool
    ) -> Iterator[pa.RecordBatch]:
        assert spec.changes is not None
        arrow = pa.schema([pa.field(c.name, c.arrow, c.nullable) for c in columns])
        keys = frozenset(int(i) for i in self.schema.key_column_ids)
        reader = ChangeReader(spec.changes, self._newest, columns, keys, arrow)
        sources = self._sources(spec.changes.after)
        if last:
            self.close()
        yield from reader.read(sources, lower, spec.upper_key)

    def _column(self, column_id: int) -> Column:
        column = self.schema.by_id.get(column_id)
        if column is None:
            raise Rejected(
                f"scan: schema version {self.schema.version} has no column with id {column_id}",
                code=Code.SCHEMA_MISMATCH,
            )
        return column

    def _filtered(
        self,
        columns: tuple[Column, ...],
        wanted: int,
        filter_: Filter,
        lower: bytes,
        spec: ScanSpec,
        last: bool,
    ) -> Iterator[pa.RecordBatch]:
        free = not (spec.ordered or spec.resume_after or lower or spec.upper_key)
        ranges = key_ranges(self.schema.key_column_ids, self.schema, spec.predicates)
        schema = pa.schema([pa.field(c.name, c.arrow, c.nullable) for c in columns])
        asked = _Asked(columns, schema, Wanted(spec.predicates, self.schema))
        batches = self._batches(asked, within(ranges, lower, spec.upper_key), free, last)
        return _sliced(self._passed(batches, wanted, filter_), spec.batch_rows)

    @staticmethod
    def _passed(batches: Iterator[pa.RecordBatch], wanted: int, filter_: Filter) -> Iterator[pa.RecordBatch]:
        """The rows that pass, with the first `wanted` columns."""
        for batch in batches:
            mask = filter_.mask(batch)
            passed = batch if mask is None else batch.filter(mask)
            if passed.num_columns > wanted:
                passed = passed.select(list(range(wanted)))
            yield passed

    def _batches(
        self, asked: _Asked, ranges: Sequence[KeyRange], free: bool, last: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yield all rows of these ascending ranges that may be wanted, and others that cost nothing to read.

        `free`: in any order, and also with rows outside of the ranges. A batch may be empty if none of the rows read is
        visible."""
        found = clusters(self._sources(), ranges[0][0], ranges[-1][1]) if ranges else []
        if last:
            self.close()
        for cluster in found:
            wanted = reads(cluster, ranges)
            if len(cluster) == 1 and isinstance(cluster[0], ColumnFile):
                for lower, upper in wanted:
                    yield from self._stream(cluster[0], asked, lower, upper)
            elif free and self._through_masks(cluster, asked, wanted):
                yield from self._unordered(cluster, asked, wanted)
            else:
                for lower, upper in wanted:
                    yield from self._merge(cluster, asked, lower, upper)

    def _through_masks(self, cluster: Sequence[Source], asked: _Asked, ranges: Sequence[KeyRange]) -> bool:
        """Whether masks cost less than a merge. Masks of files alone serve all scans until the next flush. Masks of
        memtables, too, serve scans until the next write."""
        if max(source.max_time for source in cluster) > self._newest:
            return False
        lasting = all(isinstance(source, ColumnFile) for source in cluster) or self._live.known(cluster)
        return mostly(cluster, ranges, (lambda source, group: True) if lasting else asked.may_hold)

    def _sources(self, after: int = -1) -> list[Source]:
        """All sources; but no memtables whose rows are all at or below the time `after`."""
        memory: list[Source] = [
            MemorySource(rows, m.table.serial, m.table.schema)
            for m in self._memory
            if m.max_time > after
            for rows in m.sorted_rows()
        ]
        return [*memory, *self._files]

    def _unordered(
        self, cluster: Sequence[Source], asked: _Asked, ranges: Sequence[KeyRange]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the groups that overlap these ranges, each whole, without rows that newer sources overwrite. Only for
        a snapshot that shows the newest versions."""
        wanted = [
            sorted(
                {
                    group
                    for lower, upper in ranges
                    for group in source.groups_between(lower, upper)
                    if asked.may_hold(source, group)  # the masks say which older rows the others hide
                }
            )
            for source in cluster
        ]
        if not any(wanted):
            return
        for source, groups, masks in zip(cluster, wanted, self._live.of(cluster)):
            for group in groups:
                mask = masks[group]
                if mask is None:
                    yield source.batch(group, asked.columns, asked.schema)
                elif mask.true_count:
                    yield source.batch(group, asked.columns, asked.schema).filter(mask)
                else:
                    yield pa.RecordBatch.from_pylist([], schema=asked.schema)

    def _stream(
        self, file: ColumnFile, asked: _Asked, lower: bytes, upper: bytes
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file that overlaps no other source, so that a group has all versions of its keys."""
        groups = file.groups_between(lower, upper)
        for group in groups:
            if not asked.may_hold(file, group):
                continue
            _, _, deletes, unique, _, newest = file.groups[group]
            edge = (lower and group == groups[0]) or (upper and group == groups[-1])
            if unique and not deletes and newest <= self.snapshot and not edge:
                yield file.batch(group, asked.columns, asked.schema)
                continue
            run = file.run(group, asked.columns, asked.schema)
            if edge:
                run = run.between(lower, upper)
            yield from self._visible([run])

    def _visible(self, runs: Sequence[Run]) -> Iterator[pa.RecordBatch]:
        runs = [r for r in runs if r.rows]
        if runs:
            yield visible(runs, self._newest)

    def _merge(
        self, cluster: Sequence[Source], asked: _Asked, lower: bytes, upper: bytes
    ) -> Iterator[pa.RecordBatch]:
        for low, high in pieces(cluster, lower, upper):
            found: list[list[Run]] = []
            for source, groups in needed(cluster, low, high, asked.may_hold):
                runs = [
                    run.between(low, high) for run in runs_of(source, groups, asked.columns, asked.schema)
                ]
                if any(run.rows for run in runs):
                    found.append(runs)
            if len(found) == 1:  # already in order
                for run in found[0]:
                    yield from self._visible([run])
            else:
                yield from self._visible([run for runs in found for run in runs])

    # --- point reads

    def get(
        self,
        keys: pa.BinaryArray,
        column_ids: Sequence[int] = (),
        *,
        bytes_max: int | None = None,
        brief: bool = False,
    ) -> tuple[pa.RecordBatch, list[int]]:
        """Return (the existing rows with these encoded keys, in key order; for each row, the position of its key).

        `brief`: take little time for some dozens of keys: read no file for the first time, and copy no long value.
        Then `bytes_max` is not checked.

        Raises:
            Rejected: unknown columns. TOO_LARGE: the rows take more than `bytes_max` bytes.
            Corrupt: a file is damaged.
            WouldBlock: with `brief`: ask again without it, in a thread.
        """
        wanted = tuple(self._column(i) for i in (column_ids or self.schema.column_ids))
        schema = self.schema.to_arrow(tuple(int(c.id) for c in wanted))
        read = PointRead(keys, wanted, schema, self.snapshot, bytes_max, brief=brief)
        for memory in self._memory:
            read.from_memory(memory)
        for file in self._files:
            read.from_file(file, oldest=file is self._files[-1])
        return read.end()

    def checksum(self) -> TableChecksum:
        """Count and checksum of all live rows at the snapshot.

        Raises:
            Corrupt: a file is damaged.
        """
        rows = total = 0
        for batch in self.scan():
            rows += batch.num_rows
            total = (total + checksum(batch, self.schema)) & MASK
        return TableChecksum(rows, total)


def _sliced(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of at most `rows` rows. After many batches without a row, yield an empty one, so
    that the caller sees progress."""
    barren = 0
    for batch in batches:
        barren = 0 if batch.num_rows else barren + 1
        if barren == _SIGN_OF_LIFE:
            barren = 0
            yield batch
        for start in range(0, batch.num_rows, max(1, rows)):
            yield batch.slice(start, rows)


def _limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    if limit is None:
        yield from batches
        return
    left = limit
    while left > 0 and (batch := next(batches, None)) is not None:
        yield batch.slice(0, left)
        left -= batch.num_rows


def key_array(rows: pa.RecordBatch, schema: Schema) -> pa.BinaryArray:
    """Encoded keys from a batch of key columns (found by name), for `View.get`.

    Raises:
        Rejected: a key column is missing, has the wrong type, or has nulls.
    """
    return key_bytes.encode_keys(rows, schema)
