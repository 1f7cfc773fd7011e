"""A backup with the backups that it builds on, and the rows that they give together.

An incremental backup has the changes of each tablet since its base: the newest change of each key, deletes
too. Files of all backups are in key order, so the rows of a tablet come from one pass over them, in bounded
memory.

Invariants: a chain begins with a full backup. A checksum ensures that each base is the backup that was built
on. Each row comes from the newest backup that has its key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stele.backup.folder import Folder
from stele.backup.manifest import MANIFEST, Manifest, TableEntry, TabletEntry
from stele.backup.row_files import file_columns, rows_of
from stele.model import keys
from stele.model.errors import Corrupt
from stele.model.predicate import DELETE
from stele.model.schema import Schema

_DELETED = pa.field("_deleted", pa.bool_())


@dataclass(frozen=True, slots=True)
class Part:
    """A tablet in one backup of a chain."""

    manifest: Manifest
    table: TableEntry
    tablet: TabletEntry

    def batches(self, folder: Folder) -> Iterator[pa.RecordBatch]:
        """The rows of its files, as they were written. Raises Corrupt."""
        columns = file_columns(self.table.schema, whole=self.tablet.whole)
        for file in self.tablet.files:
            yield from rows_of(folder, self.manifest.name_of(self.table, file), file, columns)


@dataclass(frozen=True, slots=True)
class Chain:
    """Backups, each the base of the next; the first is a full one. The last is the one that was asked for."""

    backups: tuple[Manifest, ...]

    @staticmethod
    def of(folder: Folder, manifest: Manifest) -> Chain:
        """Load a backup with all backups that it builds on.

        Raises:
            Corrupt: one of these is missing, damaged, or not the backup that was built on.
        """
        found = [manifest]
        while (base := found[0].base) is not None:
            name = f"{base.backup_id}/{MANIFEST}"
            where = f"backup {found[0].backup_id} builds on {base.backup_id}"
            if folder.size(name) is None:
                raise Corrupt(
                    f"{where}, which is not in {folder.shown}; restore an earlier backup, and make a full one"
                )
            other = Manifest.of(bytes(folder.read(name)), folder.called(name), base.backup_id)
            if other.digest != base.sha256 or other.snapshot >= found[0].snapshot:
                raise Corrupt(
                    f"{where}, but {folder.called(name)} is not the one that it was built on; restore an earlier backup, and make a full one"
                )
            found.insert(0, other)
        return Chain(tuple(found))

    @property
    def newest(self) -> Manifest:
        """The backup itself. The others are those that it builds on."""
        return self.backups[-1]

    def parts(self, table: TableEntry, tablet: TabletEntry) -> list[Part]:
        """Return the parts with the rows of a tablet of `newest`, the oldest first.

        Raises:
            Corrupt: a backup lacks what the next one builds on.
        """
        found = [Part(self.newest, table, tablet)]
        for manifest in reversed(self.backups[:-1]):
            if found[0].tablet.whole:
                break
            its = next((t for t in manifest.tables if t.table_id == table.table_id), None)
            there = next((t for t in its.tablets if t.tablet_id == tablet.tablet_id), None) if its else None
            if its is None or there is None:
                break
            found.insert(0, Part(manifest, its, there))
        if not found[0].tablet.whole:
            raise Corrupt(
                f"backup {found[0].manifest.backup_id} has changes of tablet {tablet.tablet_id}, but its base does not have it; "
                "restore an earlier backup, and make a full one"
            )
        return found

    def rows(self, folder: Folder, table: TableEntry, tablet: TabletEntry) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a tablet at the moment of `newest`, in key order, with the columns of `table`.
        Raises Corrupt."""
        yield from rows_of_parts(folder, self.parts(table, tablet), table.schema)


def rows_of_parts(folder: Folder, parts: Sequence[Part], schema: Schema) -> Iterator[pa.RecordBatch]:
    """The rows that all parts of a tablet give together, in key order, with the columns of `schema`. Raises Corrupt."""
    if len(parts) == 1:
        yield from parts[0].batches(folder)
        return
    streams = [_Stream(number, _shaped(part, folder, schema), schema) for number, part in enumerate(parts)]
    arrow = schema.to_arrow()
    for batch in _merged(streams):
        yield pa.RecordBatch.from_arrays(batch.columns, schema=arrow)


def _shaped(part: Part, folder: Folder, wanted: Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part with the columns of another schema of the table, and for each row whether it
    is deleted. Columns are matched by their ids.

    Rows that are older than a column have its read default."""
    fields = [pa.field(c.name, c.arrow) for c in wanted.columns]
    arrow = pa.schema([*fields, _DELETED])
    for batch in part.batches(folder):
        arrays = []
        for column in wanted.columns:
            at = part.table.schema.places.get(int(column.id))
            arrays.append(
                batch.column(at)
                if at is not None
                else _defaults(column.read_scalar(), column.arrow, batch.num_rows)
            )
        gone = (
            pa.repeat(pa.scalar(False), batch.num_rows)
            if part.tablet.whole
            else pc.equal(batch.column(batch.schema.get_field_index("_op")), DELETE)
        )
        yield pa.RecordBatch.from_arrays([*arrays, gone], schema=arrow)


def _defaults(scalar: pa.Scalar, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(scalar, rows) if scalar.is_valid else pa.nulls(rows, kind)


class _Stream:
    """Batches in key order; `upto` takes rows from the front. `age`: higher for newer backups."""

    def __init__(self, age: int, batches: Iterator[pa.RecordBatch], schema: Schema) -> None:
        self.age = age
        self._batches = batches
        self._schema = schema
        self._batch: pa.RecordBatch | None = None
        self._keys: pa.BinaryArray | None = None

    @property
    def last(self) -> bytes | None:
        """The last key of the present batch; None at the end."""
        if self._batch is None or not self._batch.num_rows:
            self._batch = next(self._batches, None)
            self._keys = None if self._batch is None else keys.encode_keys(self._batch, self._schema)
        return None if self._keys is None else self._keys[-1].as_py()

    def upto(self, bound: bytes) -> tuple[pa.RecordBatch, pa.BinaryArray] | None:
        """Take the rows of the present batch whose keys are at most `bound`; None if there are none."""
        if self._batch is None or self._keys is None:
            return None
        count = pc.sum(pc.less_equal(self._keys, pa.scalar(bound, self._keys.type))).as_py()
        if not count:
            return None
        taken = self._batch.slice(0, count), self._keys.slice(0, count)
        self._batch, self._keys = self._batch.slice(count), self._keys.slice(count)
        return taken


def _merged(streams: Sequence[_Stream]) -> Iterator[pa.RecordBatch]:
    """The newest row of each key, without deleted ones and without the mark that says so."""
    while bounds := [last for stream in streams if (last := stream.last) is not None]:
        bound = min(bounds)
        taken = [(stream.age, *piece) for stream in streams if (piece := stream.upto(bound)) is not None]
        yield from (batch for batch in _newest(taken) if batch.num_rows)


def _newest(taken: Sequence[tuple[int, pa.RecordBatch, pa.BinaryArray]]) -> list[pa.RecordBatch]:
    """The newest version of each row in one range of keys, in batches. `taken`: (age, rows, keys) from each stream."""
    rows = pa.Table.from_batches([batch for _, batch, _ in taken])
    if len(taken) > 1:
        found = pa.concat_arrays([each for _, _, each in taken])
        ages = np.repeat([age for age, _, _ in taken], [batch.num_rows for _, batch, _ in taken])
        order = pc.sort_indices(
            pa.table({"key": found, "age": ages}), sort_keys=[("key", "ascending"), ("age", "descending")]
        )
        found = found.take(order)
        first = np.ones(len(found), bool)
        first[1:] = pc.not_equal(found[1:], found[:-1]).to_numpy(zero_copy_only=False)
        rows = rows.take(order.filter(pa.array(first)))
    there: list[pa.RecordBatch] = (
        rows.filter(pc.invert(rows.column(rows.num_columns - 1))).drop_columns([_DELETED.name]).to_batches()
    )
    return there
