"""An immutable view of a store at one snapshot: scans, point reads, checksum. Any thread, while writes go on.

A scan goes cluster by cluster: files (and the memory run) whose key bounds overlap are merged piece by piece in key
order; a file that overlaps nothing streams straight from the map.

Invariant: two scans of one view give the same rows; files it was made with stay readable until it is closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import pyarrow as pa

from stele.model import keys as key_bytes
from stele.model.checksum import MASK, checksum
from stele.model.errors import Rejected
from stele.model.hashing import hash_bytes
from stele.model.ids import OpId
from stele.model.predicate import ScanSpec
from stele.model.schema import Column, Schema
from stele.tablet.colfile import ColumnFile
from stele.tablet.filters import Filter
from stele.tablet.memtable import MemView
from stele.tablet.runs import Run, concat_batches, take_batch, visible

_GROUPS_PER_PIECE = 4


@dataclass(frozen=True, slots=True)
class TableChecksum:
    """Rows of a tablet at a snapshot: how many, and the order-independent checksum of model/checksum.py."""

    rows: int
    checksum: int


class _Source(Protocol):
    """Sorted versions, by group."""

    first_keys: list[bytes]
    last_key: bytes

    def groups_between(self, lower: bytes, upper: bytes) -> range:
        """Groups that may hold keys in [lower, upper)."""

    def run(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> Run:
        """A group's versions."""

    def keys(self, group: int) -> pa.BinaryArray:
        """A group's keys."""


class _MemorySource:
    """The rows in memory, as one group."""

    def __init__(self, memory: MemView, schema: Schema) -> None:
        self._run = memory.run()
        self._schema = schema
        self.first_keys: list[bytes] = [self._run.keys[0].as_py()]
        self.last_key: bytes = self._run.keys[-1].as_py()

    def groups_between(self, lower: bytes, upper: bytes) -> range:
        outside = (lower and lower > self.last_key) or (upper and upper <= self.first_keys[0])
        return range(0) if outside else range(1)

    def keys(self, group: int) -> pa.BinaryArray:
        return self._run.keys

    def run(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> Run:
        place = {int(c.id): at for at, c in enumerate(self._schema.columns)}
        arrays = [self._run.batch.column(place[int(c.id)]) for c in columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        return Run(batch, self._run.keys, self._run.times, self._run.deleted)


class View:
    """Rows as they were at `snapshot`. A context manager; closing it lets its files and memory go."""

    def __init__(
        self,
        schema: Schema,
        snapshot: int,
        memory: Sequence[MemView],
        files: Sequence[ColumnFile],
        applied: OpId,
    ) -> None:
        self.schema = schema
        self.snapshot = snapshot
        self.applied = applied
        self._memory: Sequence[MemView] = [m for m in memory if m.rows]  # newest first
        self._files: Sequence[ColumnFile] = list(files)  # newest first

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of files and memory; batches handed out stay valid."""
        self._memory, self._files = (), ()

    # --- scans -----------------------------------------------------------------------------------------------------

    def scan(self, spec: ScanSpec = ScanSpec()) -> Iterator[pa.RecordBatch]:  # noqa: B008 (immutable)
        """Batches of the rows that the spec asks for, in key order, columns as in `spec.column_ids`.

        Raises:
            Rejected: unknown columns, predicates that do not fit.
            Corrupt: a file is damaged; no row of the damaged part was handed out.
        """
        wanted = [self._column(i) for i in (spec.column_ids or self.schema.column_ids)]
        filter_ = Filter(spec.predicates, self.schema)
        names = {c.id for c in wanted}
        extra = [self.schema.by_id[p.column_id] for p in spec.predicates if p.column_id not in names]
        columns = (*wanted, *dict.fromkeys(extra))
        lower = max(spec.lower_key, spec.resume_after + b"\x00") if spec.resume_after else spec.lower_key
        return _limited(self._filtered(columns, len(wanted), filter_, lower, spec), spec.limit)

    def _column(self, column_id: int) -> Column:
        column = self.schema.by_id.get(column_id)
        if column is None:
            raise Rejected(f"scan: column id {column_id} is not in schema version {self.schema.version}")
        return column

    def _filtered(
        self, columns: tuple[Column, ...], wanted: int, filter_: Filter, lower: bytes, spec: ScanSpec
    ) -> Iterator[pa.RecordBatch]:
        for batch in self._batches(columns, lower, spec.upper_key):
            mask = filter_.mask(batch)
            passed = batch if mask is None else batch.filter(mask)
            if passed.num_columns > wanted:
                passed = passed.select(list(range(wanted)))
            for start in range(0, passed.num_rows, max(1, spec.batch_rows)):
                yield passed.slice(start, spec.batch_rows)

    def _batches(self, columns: tuple[Column, ...], lower: bytes, upper: bytes) -> Iterator[pa.RecordBatch]:
        # Arrow forgets the row count of a batch without columns, so even a count reads one.
        schema = pa.schema([pa.field(c.name, c.arrow, c.nullable) for c in columns])
        for cluster in _clusters(self._sources(), lower, upper):
            if len(cluster) == 1 and isinstance(cluster[0], ColumnFile):
                yield from self._stream(cluster[0], columns, schema, lower, upper)
            else:
                yield from self._merge(cluster, columns, schema, lower, upper)

    def _sources(self) -> list[_Source]:
        memory: list[_Source] = [_MemorySource(m, self.schema) for m in self._memory]
        return [*memory, *self._files]

    def _stream(
        self, file: ColumnFile, columns: tuple[Column, ...], schema: pa.Schema, lower: bytes, upper: bytes
    ) -> Iterator[pa.RecordBatch]:
        """A file that overlaps no other."""
        groups = file.groups_between(lower, upper)
        for group in groups:
            _, _, deletes, unique, _, newest = file.groups[group]
            edge = (lower and group == groups[0]) or (upper and group == groups[-1])
            if unique and not deletes and newest <= self.snapshot and not edge:
                yield file.batch(group, columns, schema)
                continue
            run = file.run(group, columns, schema)
            if edge:
                run = run.between(lower, upper)
            yield from self._visible([run])

    def _visible(self, runs: Sequence[Run]) -> Iterator[pa.RecordBatch]:
        runs = [r for r in runs if r.rows]
        if runs:
            whole, chosen = visible(runs, self.snapshot)
            if len(chosen) == whole.rows and len(runs) == 1:
                yield whole.batch
            elif len(chosen):
                yield take_batch(whole.batch, pa.array(chosen))

    def _merge(
        self,
        cluster: Sequence[_Source],
        columns: tuple[Column, ...],
        schema: pa.Schema,
        lower: bytes,
        upper: bytes,
    ) -> Iterator[pa.RecordBatch]:
        begins = sorted(
            {k for s in cluster for g in s.groups_between(lower, upper) for k in (s.first_keys[g],)}
        )
        cuts = begins[_GROUPS_PER_PIECE::_GROUPS_PER_PIECE]
        cuts = [c for c in cuts if c > lower]
        for low, high in zip([lower, *cuts], [*cuts, upper]):
            runs = []
            for source in cluster:
                for group in source.groups_between(low, high):
                    runs.append(source.run(group, columns, schema).between(low, high))
            yield from self._visible(runs)

    # --- point reads -----------------------------------------------------------------------------------------------

    def get(self, keys: pa.BinaryArray, column_ids: Sequence[int] = ()) -> pa.RecordBatch:
        """The rows with these encoded keys that are there, in key order, each once.

        Raises:
            Rejected: unknown columns.
            Corrupt: a file is damaged.
        """
        wanted = tuple(self._column(i) for i in (column_ids or self.schema.column_ids))
        schema = self.schema.to_arrow(tuple(int(c.id) for c in wanted))
        values = sorted(set(keys.to_pylist()))
        found: dict[bytes, pa.RecordBatch | None] = {}
        for key in values:
            self._get_from_memory(key, found)
        left = [k for k in values if k not in found]
        for file in self._files:
            if not left:
                break
            self._get_from_file(file, left, found, wanted, schema)
            left = [k for k in left if k not in found]
        place = [self.schema.column_ids.index(int(c.id)) for c in wanted]
        rows = []
        for key in values:
            row = found.get(key)
            if row is not None:
                whole = (
                    row.num_columns == len(self.schema.columns)
                    and row.schema.names == self.schema.to_arrow().names
                )
                arrays = [row.column(at) for at in place] if whole else row.columns
                rows.append(pa.RecordBatch.from_arrays(list(arrays), schema=schema))
        return concat_batches(rows) if rows else pa.RecordBatch.from_pylist([], schema=schema)

    def _get_from_memory(self, key: bytes, found: dict[bytes, pa.RecordBatch | None]) -> None:
        for memory in self._memory:
            version = memory.find(key, self.snapshot)
            if version is not None:
                found[key] = version[1]
                return

    def _get_from_file(
        self,
        file: ColumnFile,
        keys: Sequence[bytes],
        found: dict[bytes, pa.RecordBatch | None],
        columns: tuple[Column, ...],
        schema: pa.Schema,
    ) -> None:
        if file.min_time > self.snapshot:
            return
        for key in keys:
            place = file.find_one(key, hash_bytes(key))
            row = -1 if place is None else file.version_at(*place, self.snapshot)
            if place is not None and row >= 0:
                deleted = file.deleted(place[0])
                gone = deleted is not None and bool(deleted[row])
                found[key] = None if gone else file.batch(place[0], columns, schema).slice(row, 1)

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


def _limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    left = limit
    for batch in batches:
        if left is None:
            yield batch
            continue
        if left <= 0:
            return
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left <= 0:
            return


def _clusters(sources: Sequence[_Source], lower: bytes, upper: bytes) -> list[list[_Source]]:
    """Sources that hold something in [lower, upper), grouped so that no two groups overlap, in key order; within a
    group newest first, as they came."""
    wanted = [(at, s) for at, s in enumerate(sources) if len(s.groups_between(lower, upper))]
    wanted.sort(key=lambda item: item[1].first_keys[0])
    found: list[list[tuple[int, _Source]]] = []
    end = b""
    for at, source in wanted:
        if found and source.first_keys[0] <= end:
            found[-1].append((at, source))
            end = max(end, source.last_key)
        else:
            found.append([(at, source)])
            end = source.last_key
    return [[source for _, source in sorted(cluster, key=lambda item: item[0])] for cluster in found]


def key_array(rows: pa.RecordBatch, schema: Schema) -> pa.BinaryArray:
    """Encoded keys of a batch of key columns (found by name), for `View.get`.

    Raises:
        Rejected: a key column is missing, has another type, or holds nulls.
    """
    return key_bytes.encode_keys(rows, schema)
