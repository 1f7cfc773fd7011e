"""The Spark data source `stele`: a batch reader and an upserting sink.

The driver picks one snapshot and makes one partition per tablet; executors scan their tablets over Arrow Flight and
write back through sessions that retry without applying twice. Channels are opened inside `read` and `write`, after
Spark forked or pickled, never before.

Options, and what is refused: docs/spark.md. What can be known in the driver is checked there, at load() or save(), before a
task runs: a refusal in a task comes with Spark's log of it, once for each attempt.

Spark's own filter pushdown is left alone: Spark 4.3 keeps the partitions that one filter planned and gives them to a
later query of the same frame that has no filter, which then misses rows (tests/spark holds the case). For the same
reason a frame stays at the snapshot of its first action; load again to see newer rows.

Invariant: all partitions of one read see the same snapshot; a task that is tried again changes nothing that is there.
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
from pyspark.sql import datasource as ds
from pyspark.sql.types import StructType

from stele.client import Client, Table
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
"""Of a task that writes, and as many may run on one machine as it has cores."""
_CLOCK_BEHIND_MAX_S = 2.5
"""Clocks up to 2 s apart are nobody's fault (stele.model.clock), and timestamps run half a second ahead at most."""
_LOCATE_TIMEOUT_S = 2.0
_CHECK_TIMEOUT_S = 10.0
WRITE_OPS = ("upsert", "insert", "insert_ignore", "update", "update_ignore", "delete", "delete_ignore")
OPTIONS = {
    "masters": "host:port of the masters, separated by commas",
    "table": "the name of a table",
    "where": "of a read: comparisons joined by AND",
    "snapshot": "of a read: a hybrid time, or an ISO 8601 time",
    "op": f"of a write: {', '.join(WRITE_OPS)}",
}
_ONLY_OF = {"where": "read", "snapshot": "read", "op": "write"}


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Within, in a worker of Spark: what Stele refuses is told by its sentence alone, without the worker's traceback.

    Spark asks the environment as it writes an exception down (`pyspark.util.handle_worker_exception`), and the worker
    ends with it, so no function of the user ever loses its own traceback.
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
            faults.append(f'"op" is {op!r}: one of {", ".join(WRITE_OPS)}')
        _refuse(faults)
        return Options(masters, given["table"], snapshot, given.get("where", ""), op)


def _unknown(given: dict[str, str]) -> list[str]:
    if "provider" in given:  # CREATE TABLE; readers of such a table would be given no options at all
        return ["CREATE TABLE is not understood; CREATE TEMPORARY VIEW ... USING stele OPTIONS (...) is"]
    if "path" in given or "paths" in given:  # Spark's names for what load() and save() were given
        return ['load() and save() take no path; name the table with option("table", ...)']
    unknown = [f'"{key}"{did_you_mean(key, OPTIONS)}' for key in given if key not in OPTIONS]
    there = ", ".join(f'"{key}" ({what})' for key, what in OPTIONS.items())
    return [f"no option {', '.join(unknown)}; there are {there}"] if unknown else []


def _refuse(faults: list[str]) -> None:
    if faults:
        raise Rejected(f"data source stele: {'; '.join(faults)}")


class SteleDataSource(ds.DataSource):
    """`spark.read.format("stele")` and `frame.write.format("stele")`. Spark makes one at load() and at save()."""

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
        """The table's schema; a read with `.schema(...)` takes fewer columns, and does not ask here."""
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
            Rejected: for mode overwrite; rows are replaced by key, a table is never emptied by a write.
        """
        self._is_for("write")
        if overwrite:
            raise Rejected('data source stele: use mode("append"): rows with the same key are replaced')
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
    return table.asynchronous.plan_scan(
        columns,
        options.where or (),
        ordered=True,  # so that a scan resumes at another replica behind the last row it gave
        snapshot=options.snapshot or None,
    )


def _check(plan: ScanPlan, options: Options) -> None:
    """Ask one tablet for one row, where the snapshot is the user's.

    Raises:
        Rejected: SNAPSHOT_TOO_OLD.
        Retryable: it cannot be read yet, or nobody answers.
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
    """One tablet at one snapshot: a scan plan with that tablet alone."""

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
        # Spark compares nullability too, and a schema of the user's may call any column nullable.
        self._arrow = pa.schema([pa.field(f.name, arrow[f.name], f.nullable) for f in schema])

    @_one_sentence()
    def partitions(self) -> Sequence[ds.InputPartition]:
        """One partition per tablet that can hold a wanted row, all at one snapshot."""
        with Client(self._options.masters) as client:
            plan = _plan(client.open_table(self._options.table), self._options, self._columns)
        return [TabletPartition(replace(plan, tablets=(tablet,))) for tablet in plan.tablets]

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of one tablet as record batches, in exactly the columns asked for.

        Raises:
            Rejected: NOT_FOUND, the table was deleted, or deleted and made anew.
            SteleError: no replica served it in time.
        """
        if not isinstance(partition, TabletPartition):  # Spark's own, where no tablet can hold a wanted row
            return
        (tablet,) = partition.plan.tablets
        pool = FlightPool()
        failed = 0

        def locate() -> None:
            # Nodes may have moved since the driver planned. Any replica serves a scan: asked only once none of them does.
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
                            f"table {self._options.table} was deleted and made anew since this frame was planned; "
                            "load() it again",
                            code=Code.NOT_FOUND,
                        )
            except Retryable:
                # The masters may be away; the nodes are asked again.
                time.sleep(_LOCATE_TIMEOUT_S * random.random())

        try:
            with _one_sentence():
                for batch in TabletScan(pool, partition.plan, tablet, _SCAN_TIMEOUT_S, locate):
                    assert batch is not None  # only scans without order start again
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=self._arrow)
        finally:
            pool.close()


@dataclass
class Written(ds.WriterCommitMessage):
    """What one task wrote. `timestamp`: the highest hybrid time of its rows, 0 if there were none."""

    rows: int
    timestamp: int


class Writer(ds.DataSourceArrowWriter):
    """Writes record batches; upserts are idempotent, so a task may run twice. Made in the driver, which asks the masters where
    the tablets are: a task asks them only for those that are elsewhere by then."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
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
            RowErrors: if rows were refused; the first few are named. The other rows that were taken in by then are written,
                later ones are not read any more.
            Rejected: NOT_FOUND, the table was deleted, or deleted and made anew.
            SteleError: a block was not written within 60 s; others may be.
        """
        with Client(self._options.masters, timeout_s=_BLOCK_TIMEOUT_S) as client:
            table = client.open_planned(self._plan)
            writer = table.asynchronous.arrow_writer(self._options.op, buffer_bytes=_BUFFER_BYTES)
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
        """Every task's rows are durable already. Returns once a read that begins on this machine sees them.

        Raises:
            Rejected: CLOCK_BEHIND, its clock is further behind the cluster's than clocks may be; with the snapshot that has
                the rows.
        """
        latest = max((m.timestamp for m in messages if isinstance(m, Written)), default=0)
        deadline = time.monotonic() + _CLOCK_BEHIND_MAX_S
        while (now_us := time.time_ns() // 1_000) < (seen_us := physical_us(latest) + 1):
            behind_s = (seen_us - now_us) / 1e6
            if time.monotonic() + behind_s > deadline:
                raise Rejected(
                    f"table {self._options.table}: all rows are written, but this machine's clock is behind the cluster's, and "
                    f'load() does not see them for another {behind_s:.1f} s; with option("snapshot", "{latest}") it does; set '
                    "the clock right",
                    code=Code.CLOCK_BEHIND,
                )
            time.sleep(behind_s)

    def abort(self, messages: list[ds.WriterCommitMessage | None]) -> None:
        """Rows that were written stay: each is whole, and the next attempt replaces it by key."""
