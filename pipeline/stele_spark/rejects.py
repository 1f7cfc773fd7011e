"""Writes the refused rows of a job to Parquet files of their own. Used by sink.py, in tasks and in the
driver.

A task writes its refused rows to a file with a hidden name, which Spark does not read. Some attempts at a
task do not count. The commit gives visible names to the files of attempts that count, and deletes the other
files.

Invariant: a file with a visible name is whole, and belongs to an attempt that ended well.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from stele.model.block import RowError
from stele.model.ids import new_id

if TYPE_CHECKING:
    from stele.backup.folder import Folder

EXTRA = ("_op", "_code", "_message")
"""Columns that follow those of the row: its operation, and why it was refused."""
_HIDDEN = "_"


@dataclass(frozen=True, slots=True)
class Rejects:
    """The files of one job in a folder. `columns`: the table's columns, in the order of the files. Spark
    pickles this to tasks.
    """

    folder: Folder
    job: str
    columns: tuple[str, ...]

    def file(self, part: int) -> RejectFile:
        """A new file for one attempt at a task."""
        name = f"{_HIDDEN}{self._prefix}{part:05}-{new_id()[:8]}.parquet"
        return RejectFile(self.folder, name, self.columns)

    @property
    def _prefix(self) -> str:
        return f"rejects-{self.job[:12]}-"

    def publish(self, names: Collection[str]) -> None:
        """Give these files visible names. Delete the files of other attempts, and those of an earlier run of
        the job.

        Raises:
            SteleError: the folder cannot be changed. Or a file is missing, because the folder is not the same
                for all machines.
        """
        for name in self.folder.entries(""):
            if name.startswith(self._prefix):  # of an earlier run, which refused these rows, too
                self.folder.delete(name)
        for name in names:
            with self.folder.errors(name):
                self.folder.fs.move(self.folder.path(name), self.folder.path(name.removeprefix(_HIDDEN)))
        self.clear()

    def clear(self) -> None:
        """Delete all files of the job that have no visible names yet."""
        for name in self.folder.entries(""):
            if name.startswith(_HIDDEN + self._prefix):
                self.folder.delete(name)


class RejectFile:
    """The refused rows of one attempt. `take` takes them at any time, and `settle` writes them. There is no
    file if no row was refused.
    """

    def __init__(self, folder: Folder, name: str, columns: Collection[str]) -> None:
        self.rows = 0
        self._folder = folder
        self._name = name
        self._columns = columns
        self._lock = threading.Lock()
        self._waiting: list[pa.RecordBatch] = []
        self._writer: pq.ParquetWriter | None = None
        self._sink: pa.NativeFile | None = None

    def take(self, rows: pa.RecordBatch, ops: list[str], errors: list[RowError]) -> None:
        """Take refused rows, with an operation and an error for each. Any thread may call this; it writes
        nothing yet.
        """
        told = (
            pa.array(ops, pa.string()),
            pa.array([error.code.name for error in errors], pa.string()),
            pa.array([error.message for error in errors], pa.string()),
        )
        names = [name for name in self._columns if name in rows.schema.names]
        # Named anew, all columns are nullable: a null may be why the row was refused.
        arrays = [*map(rows.column, names), *told]
        batch = pa.RecordBatch.from_arrays(arrays, names=[*names, *EXTRA])
        with self._lock:
            self._waiting.append(batch)
            self.rows += batch.num_rows

    def settle(self) -> None:
        """Write the rows taken so far.

        Raises:
            SteleError: the folder cannot be written to.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
        with self._folder.errors(self._name):
            for batch in waiting:
                if self._writer is None:
                    self._sink = self._folder.fs.open_output_stream(self._folder.path(self._name))
                    self._writer = pq.ParquetWriter(self._sink, batch.schema)
                self._writer.write_batch(batch)

    def close(self) -> str:
        """Write the remaining rows. Returns the name of the file; "" if no row was refused."""
        self.settle()
        if self._writer is None or self._sink is None:
            return ""
        with self._folder.errors(self._name):
            self._writer.close()
            self._sink.close()
        return self._name

    def discard(self) -> None:
        """Remove the file, because the attempt has failed."""
        if self._writer is not None and self._sink is not None:
            self._writer.close()
            self._sink.close()
            self._folder.delete(self._name)
