"""Files of rows: Parquet that is written in bounded memory, and read only after its checksum was verified.

Invariant: `rows_of` yields rows only if the file has exactly the bytes that were written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from stele.backup.folder import Folder
from stele.backup.manifest import FileEntry
from stele.model.errors import Corrupt
from stele.model.predicate import Changes, ScanSpec
from stele.model.schema import Schema

_GROUP_ROWS, _GROUP_BYTES = 128 << 10, 32 << 20
"""Size of a Parquet row group. Small ones are slow to read; large ones take memory."""
FILE_BYTES = 64 << 20
"""A file ends once it has this many bytes. Restore holds a file in memory, and an interrupted backup goes on after its last
whole file."""
_READ_ROWS = 32_768
_SAMPLE_ROWS, _DISTINCT_MAX = 8_192, 0.75
"""A column gets a dictionary if, in a sample of this many rows, at most this share of its values are
different."""


def file_columns(schema: Schema, *, whole: bool) -> pa.Schema:
    """Return the columns of a tablet's files. `whole`: the files have all its rows; otherwise changes, with
    `_op` and `_ts`.

    Raises:
        Rejected: the table has a column called `_op` or `_ts`.
    """
    return schema.to_arrow() if whole else ScanSpec(changes=Changes(1)).arrow_schema(schema)


class ParquetRows:
    """Writes batches to a Parquet file in row groups. `sink`: a binary file."""

    def __init__(self, sink: Any, schema: pa.Schema) -> None:
        self._sink = sink
        self._schema = schema
        self._writer: parquet.ParquetWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows. Raises OSError."""
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_rows >= _GROUP_ROWS or self._waiting_bytes >= _GROUP_BYTES:
            self._end_group()

    def close(self) -> None:
        """Write what waits, and the footer. Raises OSError."""
        self._end_group()
        self._opened(self._schema.empty_table()).close()

    def _end_group(self) -> None:
        if self._waiting:
            rows = pa.Table.from_batches(self._waiting, self._schema)
            self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
            self._opened(rows).write_table(rows, row_group_size=_GROUP_ROWS)

    def _opened(self, rows: pa.Table) -> parquet.ParquetWriter:
        """The writer. The first rows decide which columns get a dictionary. A dictionary of many different values costs as
        much as all the rest, and makes files no smaller."""
        if self._writer is None:
            few = _of_few_values(rows)
            self._writer = parquet.ParquetWriter(
                self._sink, self._schema, compression="zstd", use_dictionary=few or False
            )
        return self._writer

    def abandon(self) -> None:
        """Release the writer, even if it has failed. It may still write to its sink, which must drop that."""
        self._waiting.clear()
        if self._writer is None:
            return
        try:
            self._writer.close()
        except (pa.ArrowException, OSError, ValueError):
            self._writer.is_open = False  # else it would be closed again when it is freed


def _of_few_values(rows: pa.Table) -> list[str]:
    """The columns whose values repeat, by a sample of rows."""
    step = -(-rows.num_rows // _SAMPLE_ROWS) or 1
    sample = rows.take(pa.array(range(0, rows.num_rows, step), pa.int64()))
    most = sample.num_rows * _DISTINCT_MAX
    return [field.name for field, values in zip(rows.schema, sample.columns) if len(values.unique()) <= most]


class RowFile:
    """A new file of a backup. `name`: below the folder of all backups."""

    def __init__(self, folder: Folder, name: str, schema: pa.Schema) -> None:
        self._folder = folder
        self._name = name
        self._rows = 0
        self._sink = folder.new_file(name)
        try:
            with folder.errors(name):
                self._parquet = ParquetRows(self._sink, schema)
        except BaseException:
            self._sink.discard()
            raise

    @property
    def bytes(self) -> int:
        """How many bytes were written so far."""
        return self._sink.bytes

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows. Raises Retryable DISK_FULL; other SteleErrors."""
        with self._folder.errors(self._name):
            self._parquet.write(batch)
        self._rows += batch.num_rows

    def finish(self) -> FileEntry:
        """Write the rest. The file is durable once this returns. Raises what `write` raises."""
        with self._folder.errors(self._name):
            self._parquet.close()
        self._sink.complete()
        return FileEntry(self._name.rpartition("/")[2], self._rows, self._sink.bytes, self._sink.sha256)

    def abandon(self) -> None:
        """Remove the file."""
        self._sink.discard()
        self._parquet.abandon()


def checked_bytes(folder: Folder, name: str, entry: FileEntry) -> pa.Buffer:
    """Read the bytes of a file, and check that they are those that were written.

    Raises:
        Corrupt: the file is missing, cut, longer, or its bytes differ.
        SteleError: it cannot be read now.
    """
    where, size = folder.called(name), folder.size(name)
    if size is None:
        raise Corrupt(f"{where}: the file is missing")
    if size != entry.bytes:
        raise Corrupt(f"{where}: it has {size} bytes; {entry.bytes} were written")
    found = folder.read(name)
    if hashlib.sha256(found).hexdigest() != entry.sha256:
        raise Corrupt(f"{where}: it is damaged: its SHA-256 is not that of what was written")
    return found


def rows_of(folder: Folder, name: str, entry: FileEntry, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, after its checksum was verified.

    Raises:
        Corrupt: as `checked_bytes`; or the file has other columns or another number of rows than its manifest says.
    """
    where = folder.called(name)
    raw = checked_bytes(folder, name, entry)
    rows = 0
    try:
        with parquet.ParquetFile(pa.BufferReader(raw)) as file:
            if not file.schema_arrow.equals(schema):
                raise Corrupt(f"{where}: its columns are not those of the manifest")
            for batch in file.iter_batches(_READ_ROWS):
                rows += batch.num_rows
                if batch.num_rows:
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    except (pa.ArrowException, OSError) as exc:
        raise Corrupt(f"{where}: it is no Parquet file ({exc})") from exc
    if rows != entry.rows:
        raise Corrupt(f"{where}: it has {rows} rows; its manifest says {entry.rows}")
