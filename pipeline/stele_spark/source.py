"""The Spark data source `stele`: a batch reader and a sink.

The driver chooses one snapshot, has the leaders prepare it, and makes partitions of about 64 MiB. Executors scan their tablets over Arrow
Flight, and write through sessions that retry without applying twice. Channels are opened inside `read` and
`write`, never before Spark forks or pickles.

Options and refusals: docs/spark.md. Whatever the driver can check is checked there, at load() or save(),
before a task runs. An error in a task appears in Spark's log once for each attempt.

Spark's own filter pushdown is not used. Spark 4.3 reuses the partitions planned for one filter in a later
query of the same frame. If that query has no filter, it misses rows (tests/spark has the case). For the same
reason a frame stays at the snapshot of its first action; load again to see newer rows.

Invariants: all partitions of one read see the same snapshot. A repeated task changes nothing, whatever others have
written meanwhile.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource as ds
from pyspark.sql.types import StructType

from stele.client import Client, Job, Table
from stele.client.arrow_input import fit
from stele.client.tablet_scan import FlightPool, ScanPlan, TabletScan
from stele.model import texts
from stele.model.block import RowOp
from stele.model.clock import physical_us
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.nearest import did_you_mean
from stele_spark import types

_SCAN_TIMEOUT_S = 60.0
_BLOCK_TIMEOUT_S = 60.0
_BUFFER_BYTES = 16 << 20
"""Write buffer of one task. A machine may run as many tasks as it has cores."""
_PART_BYTES = 64 << 20
"""Bytes of files that one task reads, about."""
_CLOCK_BEHIND_MAX_S = 2.5
"""Clocks may be up to 2 s apart (stele.model.clock), and timestamps run at most half a second ahead."""
_LOCATE_TIMEOUT_S = 2.0
_CHECK_TIMEOUT_S = 10.0
WRITE_OPS = ("upsert", "insert", "insert_ignore", "update", "update_ignore", "delete", "delete_ignore")
OPTIONS = {
    "masters": "host:port of the masters, separated by commas",
    "table": "the name of a table",
    "where": "for reads: comparisons joined by AND",
    "snapshot": "for reads: a hybrid time, or an ISO 8601 time",
    "op": f"for writes: {', '.join(WRITE_OPS)}",
}
_ONLY_OF = {"where": "read", "snapshot": "read", "op": "write"}


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Within the block, in a Spark worker: errors of Stele show only their message, without the worker's
    traceback.

    Spark reads the setting from the environment when it formats an exception
    (`pyspark.util.handle_worker_exception`). The worker ends with that exception, so functions of the user
    never lose their tracebacks.
    """
    try:
        yield
    except SteleError as exc:
        main = getattr(sys.modules["__main__"], "__spec__", None)
        if main is not None and main.name.startswith("pyspark."):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise exc from None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one read or write, checked."""

    masters: tuple[str, ...]
    table: str
    snapshot: int
    where: str
    op: str

    @staticmethod
    def parse(raw: dict[str, str]) -> Options:
        """Check the options that the user gave.

        Raises:
            Rejected: naming every option that is missing or wrong.
        """
        given = {key.lower(): value for key, value in raw.items()}
        faults = _unknown(given)
        masters = tuple(part.strip() for part in given.get("masters", "").split(",") if part.strip())
        if not masters:
            faults.append(f'"masters" is missing: {OPTIONS["masters"]}')
        if not given.get("table"):
            faults.append(f'"table" is missing: {OPTIONS["table"]}')
        snapshot, text = 0, given.get("snapshot", "0")
        try:
            snapshot = texts.snapshot(text)
        except ValueError as exc:
            faults.append(f'"snapshot" is {text!r}: expected a hybrid time or an ISO 8601 time ({exc})')
        op = given.get("op", "upsert").lower()
        if op not in WRITE_OPS:
            faults.append(f'"op" is {op!r}: expected one of {", ".join(WRITE_OPS)}')
        _refuse(faults)
        return Options(masters, given["table"], snapshot, given.get("where", ""), op)


def _unknown(given: dict[str, str]) -> list[str]:
    if "provider" in given:  # CREATE TABLE; Spark would pass no options to readers of such a table
        return ["CREATE TABLE is not supported; use CREATE TEMPORARY VIEW ... USING stele OPTIONS (...)"]
    if "path" in given or "paths" in given:  # Spark's names for the argument of load() and save()
        return ['load() and save() take no path; name the table with option("table", ...)']
    unknown = [f'"{key}"{did_you_mean(key, OPTIONS)}' for key in given if key not in OPTIONS]
    there = ", ".join(f'"{key}" ({what})' for key, what in OPTIONS.items())
    return [f"unknown option {', '.join(unknown)}; options are {there}"] if unknown else []


def _refuse(faults: list[str]) -> None:
    if faults:
        raise Rejected(f"data source stele: {'; '.join(faults)}")


class SteleDataSource(ds.DataSource):
    """`spark.read.format("stele")` and `frame.write.format("stele")`. Spark makes one at load() and at
    save()."""

    @_one_sentence()
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._parsed = Options.parse(dict(options))

    @classmethod
    def name(cls) -> str:
        """The name that format() takes."""
        return "stele"

    @_one_sentence()
    def schema(self) -> StructType:
        """The table's schema. A read with `.schema(...)` selects columns, and does not call this."""
        self._is_for("read")
        with Client(self._parsed.masters) as client:
            table = client.open_table(self._parsed.table)
            _check(_plan(table, self._parsed), self._parsed)
            return types.spark_schema(table.schema)

    @_one_sentence()
    def reader(self, schema: StructType) -> ds.DataSourceReader:
        """A reader of exactly the columns of `schema`."""
        self._is_for("read")
        return Reader(self._parsed, schema)

    @_one_sentence()
    def writer(self, schema: StructType, overwrite: bool) -> ds.DataSourceWriter:
        """A sink that upserts.

        Raises:
            Rejected: mode overwrite. A write replaces rows by key and never empties the table.
        """
        self._is_for("write")
        if overwrite:
            raise Rejected('data source stele: use mode("append"), which replaces rows with the same key')
        return Writer(self._parsed, schema)

    def _is_for(self, use: str) -> None:
        given = {key.lower() for key in self.options}
        _refuse(
            [
                f'"{key}" is an option of a {of}, not of a {use}'
                for key, of in _ONLY_OF.items()
                if key in given and of != use
            ]
        )


def _plan(table: Table, options: Options, columns: Sequence[str] | None = None) -> ScanPlan:
    scan = table.asynchronous.scan(
        columns,
        options.where or (),
        ordered=True,  # so that a scan can resume at another replica after its last row
        snapshot=options.snapshot or None,
    )
    return scan.plan


def _check(plan: ScanPlan, options: Options) -> None:
    """If the user chose the snapshot, read one row of one tablet at it.

    Raises:
        Rejected: SNAPSHOT_TOO_OLD.
        Retryable: the snapshot cannot be read yet, or no replica answers.
    """
    if not options.snapshot or not plan.tablets:
        return
    (tablet, *_) = plan.tablets
    pool = FlightPool()
    try:
        one = replace(plan, spec=replace(plan.spec, predicates=(), limit=1))
        next(iter(TabletScan(pool, one, tablet, _CHECK_TIMEOUT_S, lambda: None)), None)
    finally:
        pool.close()


class TabletPartition(ds.InputPartition):
    """One tablet, or a part of it, at one snapshot: a scan plan with that tablet alone."""

    def __init__(self, plan: ScanPlan) -> None:
        super().__init__(plan.tablets[0].tablet_id)
        self.plan = plan


class Reader(ds.DataSourceReader):
    """Plans in the driver, scans in the executors."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        with Client(options.masters) as client:
            table = client.open_table(options.table)
            self._columns = types.projection(schema, table.schema)
            types.check_nulls(schema, table.schema)
            _check(_plan(table, options, self._columns), options)
        arrow = types.arrow_types(schema)
        # Spark also compares nullability, and the user's schema may declare any column nullable.
        self._arrow = pa.schema([pa.field(f.name, arrow[f.name], f.nullable) for f in schema])

    @_one_sentence()
    def partitions(self) -> Sequence[ds.InputPartition]:
        """Partitions of about 64 MiB, each of one tablet that can hold a wanted row, all at one snapshot.

        The snapshot is prepared, so any replica of a tablet can serve it."""
        with Client(self._options.masters) as client:
            table = client.open_table(self._options.table)
            plan = _plan(table, self._options, self._columns)
            client.run(table.asynchronous.reads.prepare(plan))
            parts = client.run(table.asynchronous.reads.split(plan, _PART_BYTES))
        return [TabletPartition(part) for part in parts]

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of one tablet as record batches, in exactly the columns asked for.

        Raises:
            Rejected: NOT_FOUND, the table was deleted, or deleted and created again.
            SteleError: no replica served it in time.
        """
        if not isinstance(partition, TabletPartition):  # Spark's own, if no tablet can hold a wanted row
            return
        (tablet,) = partition.plan.tablets
        pool = FlightPool()
        failed = 0

        def locate() -> None:
            # Replicas may have moved since the driver planned. Ask the masters only when no known replica
            # serves.
            nonlocal failed
            failed += 1
            if tablet.replicas and failed % len(tablet.replicas):
                return
            try:
                with Client(
                    self._options.masters, timeout_s=_LOCATE_TIMEOUT_S, first_contact_s=_LOCATE_TIMEOUT_S
                ) as client:
                    locations = client.open_table(self._options.table).asynchronous.locations
                    there = {fresh.tablet_id: fresh for fresh in locations.tablets}
                    if tablet.tablet_id in there:
                        tablet.update(there[tablet.tablet_id])
                    elif locations.complete:
                        raise Rejected(
                            f"table {self._options.table} was deleted and created again since this frame was planned; "
                            "load() it again",
                            code=Code.NOT_FOUND,
                        )
            except Retryable:
                # The masters may be unavailable; the known nodes are tried again.
                time.sleep(_LOCATE_TIMEOUT_S * random.random())

        try:
            with _one_sentence():
                for batch in TabletScan(pool, partition.plan, tablet, _SCAN_TIMEOUT_S, locate):
                    assert batch is not None  # only unordered scans start again
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=self._arrow)
        finally:
            pool.close()


@dataclass
class Written(ds.WriterCommitMessage):
    """The result of one task. `timestamp`: the highest hybrid time of its rows, 0 if there were none."""

    rows: int
    timestamp: int


class Writer(ds.DataSourceArrowWriter):
    """Writes record batches. Each task is a part of one job, so its rows are written once, however often it runs.

    Made in the driver, which asks the masters for the tablets' locations. A task asks again only for tablets
    that have moved.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._job = Job.new()
        with Client(options.masters) as client:
            table = client.open_table(options.table)
            self._plan = table.asynchronous.plan_write()
        types.projection(schema, table.schema)
        none = pa.RecordBatch.from_pylist([], schema=pa.schema(types.arrow_types(schema).items()))
        fit(none, options.table, table.schema, RowOp[options.op.upper()])

    @_one_sentence()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write a task's batches and wait until all of it is durable on a majority.

        Raises:
            RowErrors: rows were refused; the first few are named. Other rows read by then are written; later ones are not
                read.
            Rejected: NOT_FOUND, the table was deleted, or deleted and created again. JOB_TOO_OLD, a tablet no longer knows
                what earlier attempts wrote.
            SteleError: a block was not written within 60 s. Other blocks may be written.
        """
        with Client(self._options.masters, timeout_s=_BLOCK_TIMEOUT_S) as client:
            table = client.open_planned(self._plan)
            # Before an upgrade is finalized no node knows jobs.
            part = self._job.part(_task()) if table.asynchronous.takes_jobs else None
            writer = table.asynchronous.arrow_writer(self._options.op, buffer_bytes=_BUFFER_BYTES, part=part)
            try:
                for batch in iterator:
                    client.run(writer.feed(batch))
                    if writer.result.row_errors:
                        break
                result = client.run(writer.finish()).raise_for_errors()
            except BaseException:
                client.end(writer.abandon())
                raise
        return Written(result.rows_written, result.timestamp)

    @_one_sentence()
    def commit(self, messages: list[ds.WriterCommitMessage | None]) -> None:
        """Wait until a read that begins on this machine sees the rows. They are durable already.

        Raises:
            Rejected: CLOCK_BEHIND, this machine's clock is too far behind the cluster's. The message has the snapshot that
                contains the rows.
        """
        latest = max((m.timestamp for m in messages if isinstance(m, Written)), default=0)
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

    def abort(self, messages: list[ds.WriterCommitMessage | None]) -> None:
        """Nothing to undo: written rows stay."""


def _task() -> int:
    """The number of this task, the same in each attempt at it. 0 outside of Spark."""
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()
