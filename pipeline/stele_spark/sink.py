"""Writes frames to a table: the driver's and the tasks' side of `frame.write.format("stele")`. Called by
source.py.

The driver checks what it can, makes a job, and commits. Each task is a part of that job. If the job has a
name, another run of it may distribute the rows to other tasks. So for a named job all tasks write the same
part, and the second row of a key belongs to another part (turns.py). A refused row fails its task, or with
the option `rejects` is written to a file of rejects.

Invariant: each row is written once, however often its task runs. A repeated task does not undo what others
wrote since.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import datasource as ds
from pyspark.sql.types import StringType, StructType

from stele.client import Client, Job, JobPart
from stele.client.arrow_input import fit
from stele.client.bulk import BulkWriter, Ops
from stele.client.table import AsyncTable
from stele.model.block import RowError, RowOp
from stele.model.clock import physical_us
from stele.model.errors import Code, Rejected
from stele.model.nearest import in_any_case
from stele.model.schema import Schema
from stele_spark import progress, types
from stele_spark.options import Options, one_sentence
from stele_spark.rejects import EXTRA, RejectFile, Rejects
from stele_spark.turns import Turns

_BLOCK_TIMEOUT_S = 60.0
_BUFFER_BYTES = 16 << 20
"""Write buffer of one task, in bytes. A machine may run as many tasks as it has cores."""
_BATCH_ROWS = 65_536
_BATCH_BYTES = 16 << 20
"""Spark's small batches are joined up to this size, because each batch that is distributed to tablets costs
much.
"""
_CLOCK_BEHIND_MAX_S = 2.5
"""How far this machine's clock may be behind. Clocks may be up to 2 s apart (stele.model.clock), and
timestamps run at most half a second ahead.
"""
_OPS = {op.name.lower(): op for op in RowOp}


@dataclass
class Written(ds.WriterCommitMessage):
    """The result of one task. `timestamp`: the highest hybrid time of its rows; 0 if it wrote none. `ops`:
    how many rows each operation wrote. `rejects`: the file of its refused rows; "" if there are none. `job`:
    the job's id in hex.
    """

    rows: int
    timestamp: int
    ops: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    rejects: str = ""
    job: str = ""


def named_job(name: str) -> Job:
    """The job of this name. The same name always gives the same job."""
    return replace(Job.new(), id=hashlib.blake2b(name.encode(), digest_size=16).digest())


class Writer(ds.DataSourceArrowWriter):
    """Writes record batches. Each task is a part of one job, so its rows are written once, however often it
    runs.

    Made in the driver, which asks the masters for the tablets' locations. A task asks again only for tablets
    that have moved.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._job = named_job(options.job) if options.job else Job.new()
        with Client(options.masters) as client:
            table = client.open_table(options.table)
            self._plan = table.asynchronous.plan_write()
        self._op_column = _op_column(schema, options.op_column, table.schema)
        columns = StructType([field for field in schema if field.name != self._op_column])
        names = dict(zip(columns.names, types.written_columns(columns, table.schema), strict=True))
        fields = [table.arrow_schema.field(name) for name in names.values()]
        self._fields = dict(zip(names, fields, strict=True))
        none = pa.RecordBatch.from_pylist([], schema=pa.schema([pa.field(f.name, f.type) for f in fields]))
        # With an operation for each row: one that is updated needs the least columns.
        self._op = None if options.op_column else RowOp[options.op.upper()]
        fit(none, options.table, table.schema, self._op or RowOp.UPDATE)
        self._rejects = _rejects(options, self._job, table.schema)

    @one_sentence()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write a task's batches and wait until all rows are durable on a majority.

        Raises:
            RowErrors: rows were refused, without the option `rejects`; the first few are named. Other rows
                read by then are written; later ones are not read.
            Rejected: NOT_FOUND, the table was deleted, or deleted and created again. JOB_TOO_OLD, a tablet no
                longer knows what earlier attempts wrote. INVALID_ARGUMENT, a row has an unknown operation.
            SteleError: a block was not written within 60 s. Other blocks may be written.
        """
        with _telling(self._options.table) as on_rows:
            return self.write_job(iterator, self._job, named=bool(self._options.job), on_rows=on_rows)

    def write_job(
        self,
        iterator: Iterator[pa.RecordBatch],
        job: Job,
        *,
        named: bool,
        on_rows: Callable[[int], None] | None = None,
    ) -> Written:
        """Like `write`, for the given job. `named`: whether the user named the job. A later run of a named job
        may spread the rows over other tasks. `on_rows`: called with the number of rows of each written block.
        """
        part = _task()
        rejects = None if self._rejects is None else replace(self._rejects, job=job.id.hex())
        reject_file = None if rejects is None else rejects.file(part)
        with Client(self._options.masters, timeout_s=_BLOCK_TIMEOUT_S) as client:
            table = client.open_planned(self._plan).asynchronous
            counts = _Counts(self._op, reject_file)

            def writer_of(turn: int) -> BulkWriter:
                part_of = job.part(turn if named else part)
                return self._writer(
                    table, part_of if table.takes_jobs else None, reject_file, counts, on_rows
                )

            writes = _Writes(client, writer_of, Turns(table.schema) if named else None)
            try:
                self._feed(writes, counts, iterator)
                writes.finish()
                name = "" if reject_file is None else reject_file.close()
            except BaseException:
                writes.abandon()
                if reject_file is not None:
                    reject_file.discard()
                raise
        told = counts.written(), counts.rows_refused, name, job.id.hex()
        return Written(writes.rows_written, writes.timestamp, *told)

    def _writer(
        self,
        table: AsyncTable,
        part: JobPart | None,
        reject_file: RejectFile | None,
        counts: _Counts,
        on_rows: Callable[[int], None] | None,
    ) -> BulkWriter:
        return table.arrow_writer(
            self._op,
            buffer_bytes=_BUFFER_BYTES,
            on_rows=on_rows,
            part=part,  # None: before an upgrade is finalized no node knows jobs
            on_refused=None if reject_file is None else counts.refuse,
        )

    def _feed(self, writes: _Writes, counts: _Counts, iterator: Iterator[pa.RecordBatch]) -> None:
        for batch in joined(iterator):
            ops = None
            batch = self._fitted(batch)
            if self._op_column:
                batch, ops = counts.split(batch, self._op_column)
            counts.take(batch.num_rows, ops)
            writes.feed(batch, ops)
            counts.settle()
            if writes.refused:
                return

    def _fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with the table's names and types. The column of operations stays as it is."""
        fields = [self._fields.get(field.name, field) for field in batch.schema]
        columns = [column.cast(field.type) for column, field in zip(batch.columns, fields, strict=True)]
        return pa.RecordBatch.from_arrays(columns, names=[field.name for field in fields])

    @one_sentence()
    def commit(self, messages: list[ds.WriterCommitMessage | None]) -> None:
        """Publish the files of refused rows and print what was written. Then wait until a read that begins on
        this machine sees the rows. They are durable already.

        Raises:
            Rejected: CLOCK_BEHIND, this machine's clock is too far behind the cluster's. The message has the
                snapshot that contains the rows.
        """
        written = [m for m in messages if isinstance(m, Written)]
        self.publish(written)
        print(self._told(written), file=sys.stderr)
        latest = max((m.timestamp for m in written), default=0)
        deadline = time.monotonic() + _CLOCK_BEHIND_MAX_S
        while (now_us := time.time_ns() // 1_000) < (seen_us := physical_us(latest) + 1):
            behind_s = (seen_us - now_us) / 1e6
            if time.monotonic() + behind_s > deadline:
                raise Rejected(
                    f"table {self._options.table}: all rows are written, but this machine's clock is behind the cluster's, so "
                    f'load() sees them only after {behind_s:.1f} s, or with option("snapshot", "{latest}"); '
                    "synchronize the clock",
                    code=Code.CLOCK_BEHIND,
                )
            time.sleep(behind_s)

    def publish(self, written: Sequence[Written]) -> None:
        """Give the files of refused rows of these tasks their visible names."""
        if self._rejects is None:
            return
        for job in sorted({self._rejects.job, *(m.job for m in written)}):
            names = [m.rejects for m in written if m.rejects and m.job == job]
            replace(self._rejects, job=job).publish(names)

    def _told(self, written: Sequence[Written]) -> str:
        rows = {name: sum(m.ops.get(name, 0) for m in written) for name in _OPS}
        by_op = ", ".join(f"{name} {count}" for name, count in rows.items() if count) or "no rows"
        refused = sum(m.refused for m in written)
        told = f"; refused {refused}, in {self._rejects.folder.shown}" if self._rejects and refused else ""
        done = "written now or before" if self._options.job else "written"
        return f"stele: table {self._options.table}: {done} {by_op}{told}"

    def abort(self, messages: list[ds.WriterCommitMessage | None]) -> None:
        """Delete the files of refused rows. Rows that were written stay."""
        if self._rejects is not None:
            self._rejects.clear()


class _Writes:
    """The writers of one attempt, one after the other.

    A key may have several rows. Writer 0 takes the first row of each key, writer 1 the second, and so on;
    `writer_of(n)` makes writer n. Without `turns`, writer 0 takes all rows.
    """

    def __init__(self, client: Client, writer_of: Callable[[int], BulkWriter], turns: Turns | None) -> None:
        self.rows_written = 0
        self.timestamp = 0
        self._client = client
        self._writer_of = writer_of
        self._turns = turns
        self._turn = 0
        self._writer = writer_of(0)

    @property
    def refused(self) -> bool:
        """Whether rows were refused that go to no file of rejects."""
        return bool(self._writer.result.row_errors)

    def feed(self, batch: pa.RecordBatch, ops: Ops | None) -> None:
        """Accept a batch. The rows of a key are written in their order."""
        if self._turns is None:
            self._client.run(self._writer.feed(batch, ops))
            return
        turns = self._turns.of(batch)
        for turn in np.unique(turns).tolist():
            at = np.flatnonzero(turns == turn)
            rows = batch if len(at) == batch.num_rows else batch.take(pa.array(at))
            if turn != self._turn:
                self.finish()
                self._writer, self._turn = self._writer_of(turn), turn
            self._client.run(self._writer.feed(rows, None if ops is None else ops[at]))

    def finish(self) -> None:
        """Wait until all rows are written.

        Raises:
            RowErrors: some rows were refused.
            SteleError: a block was not written.
        """
        result = self._client.run(self._writer.finish()).raise_for_errors()
        self.rows_written += result.rows_written
        self.timestamp = max(self.timestamp, result.timestamp)

    def abandon(self) -> None:
        """Stop sending rows."""
        self._client.end(self._writer.abandon())


class _Counts:
    """Counts the rows of one attempt by operation, and those that were refused."""

    def __init__(self, op: RowOp | None, reject_file: RejectFile | None) -> None:
        self._op = op
        self._reject_file = reject_file
        self._rows = np.zeros(len(RowOp) + 1, np.int64)

    def split(self, batch: pa.RecordBatch, op_column: str) -> tuple[pa.RecordBatch, Ops]:
        """The rows without the column `op_column`, and the operation of each row. Rows with an unknown
        operation are refused.

        Raises:
            Rejected: a row has an unknown operation, and there is no file of rejects.
        """
        names = batch.column(batch.schema.get_field_index(op_column))
        rows = batch.drop_columns([op_column])
        known = pa.array(list(_OPS))
        places = pc.index_in(pc.utf8_lower(names), value_set=known)
        # RowOp counts from 1, in this order; 0 is none.
        ops: Ops = (np.asarray(pc.fill_null(places, -1)) + 1).astype(np.uint8)
        bad = np.flatnonzero(ops == 0)
        if not len(bad):
            return rows, ops
        given = names.take(pa.array(bad)).to_pylist()
        errors = [RowError(int(at), Code.INVALID_ARGUMENT, _unknown(op)) for at, op in zip(bad, given)]
        if self._reject_file is None:
            raise Rejected(f"column {op_column}: {errors[0].message}")
        self._reject_file.take(rows.take(pa.array(bad)), given, errors)
        good = np.flatnonzero(ops)
        return rows.take(pa.array(good)), ops[good]

    def take(self, rows: int, ops: Ops | None) -> None:
        """Count rows that were given to the writer. `refuse` subtracts those that are refused."""
        if ops is not None:
            self._rows += np.bincount(ops, minlength=len(self._rows))
        elif self._op is not None:
            self._rows[self._op] += rows

    def refuse(self, rows: pa.RecordBatch, errors: list[RowError]) -> None:
        """Record refused rows in the file of rejects. Called by the writer, in the client's thread."""
        assert self._reject_file is not None
        if self._op is None:
            last = rows.num_columns - 1
            ops, rows = np.asarray(rows.column(last)), rows.select(list(range(last)))
        else:
            ops = np.full(rows.num_rows, self._op, np.uint8)
        self._rows -= np.bincount(ops, minlength=len(self._rows))
        self._reject_file.take(rows, [RowOp(op).name.lower() for op in ops.tolist()], errors)

    @property
    def rows_refused(self) -> int:
        """How many rows were written to the file of rejects, or wait to be."""
        return 0 if self._reject_file is None else self._reject_file.rows

    def settle(self) -> None:
        """Write to the file of rejects what was refused so far."""
        if self._reject_file is not None:
            self._reject_file.settle()

    def written(self) -> dict[str, int]:
        """How many rows each operation wrote, without operations that wrote none. Call this once all rows are
        answered.
        """
        return {name: int(self._rows[op]) for name, op in _OPS.items() if self._rows[op]}


def joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of up to 65,536 rows or about 16 MiB."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if waiting and (rows + batch.num_rows > _BATCH_ROWS or size + batch.nbytes > _BATCH_BYTES):
            yield pa.concat_batches(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _BATCH_ROWS or size >= _BATCH_BYTES:
            yield pa.concat_batches(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.concat_batches(waiting)


def _unknown(op: str | None) -> str:
    return f"operation {op!r}: expected one of {', '.join(_OPS)}"


def _op_column(schema: StructType, asked: str, table: Schema) -> str:
    """The frame's column with the operations, by its name in the frame; "" if none is asked for.

    Raises:
        Rejected: there is no such column, or it does not fit.
    """
    if not asked:
        return ""
    faults = []
    found = in_any_case(asked, schema.names)
    if found is None:
        faults.append(f"the frame has no column {asked!r}; it has {', '.join(schema.names)}")
    elif not isinstance(schema[found].dataType, StringType):
        faults.append(f"column {found!r} is {schema[found].dataType.simpleString()}, not string")
    if in_any_case(asked, table.by_name):
        faults.append(f"{asked!r} is also a column of the table")
    if faults:
        raise Rejected(f'data source stele: "op_column": {"; ".join(faults)}')
    return found or ""


def _rejects(options: Options, job: Job, table: Schema) -> Rejects | None:
    if not options.rejects:
        return None
    taken = [name for name in EXTRA if name in table.by_name]
    if taken:
        raise Rejected(
            f'data source stele: "rejects": the table has a column {taken[0]}, which the files of refused rows need'
        )
    from stele.backup.folder import Folder  # here, as each worker of Spark imports this module

    folder = Folder.at(options.rejects)
    folder.is_there()
    folder.make()
    return Rejects(folder, job.id.hex(), tuple(column.name for column in table.columns))


def _telling(table: str) -> AbstractContextManager[Callable[[int], None] | None]:
    """A context for one task. It gives a function that tells the display how many rows were written; None if
    there is no display.
    """
    context = TaskContext.get()
    if context is None:
        return nullcontext()
    number = context.stageId(), context.partitionId(), context.attemptNumber()
    return progress.telling(context.getLocalProperty(progress.SETTING), table, *number)


def _task() -> int:
    """The number of this task. It is the same in each attempt, and 0 outside of Spark."""
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()
