"""The Spark data source `stele`: a batch reader and an upserting sink.

The driver picks one snapshot and makes one partition per tablet; executors scan their tablets over Arrow Flight and
write back through sessions that retry without applying twice. Channels are opened inside `read` and `write`, after
Spark forked or pickled, never before.

Options: `masters` (host:port,...), `table`, `snapshot` (a hybrid time; default: that of the first action), `where`
(predicates for the scan itself, as `stele table scan --where` takes them: "id >= 10 and name is not null"), `op` for the
sink (upsert by default).

Spark's own filter pushdown is left alone: Spark 4.3 keeps the partitions that one filter planned and gives them to a
later query of the same frame that has no filter, which then misses rows (tests/spark holds the case). For the same
reason a frame stays at the snapshot of its first action; load again to see newer rows.

Errors come as Spark words them, behind a traceback of its Python worker; in a session with
`spark.sql.execution.pyspark.udf.hideTraceback.enabled` (stele_spark.session sets it) their first line says what is wrong.

Invariant: all partitions of one read see the same snapshot; a task that is tried again changes nothing that is there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql import datasource as ds
from pyspark.sql.types import StructType

from stele.client import Client
from stele.client.scan import FlightPool, ScanPlan, TabletScan
from stele.client.where import parse_where
from stele.model.errors import Rejected, Retryable
from stele_spark import types

_SCAN_TIMEOUT_S = 60.0
_LOCATE_TIMEOUT_S = 2.0
WRITE_OPS = ("upsert", "insert", "insert_ignore", "update", "update_ignore", "delete", "delete_ignore")


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
        faults = []
        masters = tuple(part.strip() for part in given.get("masters", "").split(",") if part.strip())
        if not masters:
            faults.append('"masters" is missing: host:port of the masters, separated by commas')
        if not given.get("table"):
            faults.append('"table" is missing: the name of a table')
        if not given.get("snapshot", "0").isdigit():
            faults.append(f'"snapshot" is {given["snapshot"]!r}: a hybrid time is a whole number')
        op = given.get("op", "upsert").lower()
        if op not in WRITE_OPS:
            faults.append(f'"op" is {op!r}: one of {", ".join(WRITE_OPS)}')
        if faults:
            raise Rejected(f"data source stele: {'; '.join(faults)}")
        return Options(masters, given["table"], int(given.get("snapshot", "0")), given.get("where", ""), op)


class SteleDataSource(ds.DataSource):
    """`spark.read.format("stele")` and `frame.write.format("stele")`."""

    @classmethod
    def name(cls) -> str:
        """The name that format() takes."""
        return "stele"

    def schema(self) -> StructType:
        """The table's schema; a read with `.schema(...)` takes fewer columns."""
        options = Options.parse(dict(self.options))
        with Client(options.masters) as client:
            return types.spark_schema(client.open_table(options.table).schema)

    def reader(self, schema: StructType) -> ds.DataSourceReader:
        """A reader of exactly the columns of `schema`."""
        options = Options.parse(dict(self.options))
        return Reader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> ds.DataSourceWriter:
        """A sink that upserts.

        Raises:
            Rejected: for mode overwrite; rows are replaced by key, a table is never emptied by a write.
        """
        if overwrite:
            raise Rejected('data source stele: use mode("append"): rows with the same key are replaced')
        return Writer(Options.parse(dict(self.options)), schema)


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
            self._predicates = parse_where(options.where, table.schema) if options.where else []
        arrow = types.arrow_types(schema)
        # Spark checks nullability too, and calls every column of a schema given by the user nullable.
        self._arrow = pa.schema([pa.field(f.name, arrow[f.name], f.nullable) for f in schema])

    def partitions(self) -> Sequence[ds.InputPartition]:
        """One partition per tablet that can hold a wanted row, all at one snapshot."""
        with Client(self._options.masters) as client:
            plan = client.open_table(self._options.table).asynchronous.plan_scan(
                self._columns,
                self._predicates,
                ordered=True,  # so that a scan resumes at another replica behind the last row it gave
                snapshot=self._options.snapshot or None,
            )
        return [TabletPartition(replace(plan, tablets=(tablet,))) for tablet in plan.tablets]

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of one tablet as record batches, in exactly the columns asked for."""
        assert isinstance(partition, TabletPartition)
        (tablet,) = partition.plan.tablets
        pool = FlightPool()
        failed = 0

        def locate() -> None:
            # Nodes may have moved since the driver planned. Any replica serves a scan: asked only once none of them does.
            nonlocal failed
            failed += 1
            if failed % len(tablet.replicas):
                return
            try:
                with Client(
                    self._options.masters, timeout_s=_LOCATE_TIMEOUT_S, first_contact_s=_LOCATE_TIMEOUT_S
                ) as client:
                    for fresh in client.open_table(self._options.table).asynchronous.locations.tablets:
                        if fresh.tablet_id == tablet.tablet_id:
                            tablet.update(fresh)
            except Retryable:
                # The masters may be away; the nodes are asked again.
                time.sleep(_LOCATE_TIMEOUT_S * random.random())

        try:
            for batch in TabletScan(pool, partition.plan, tablet, _SCAN_TIMEOUT_S, locate):
                assert batch is not None  # only scans without order start again
                yield pa.RecordBatch.from_arrays(batch.columns, schema=self._arrow)
        finally:
            pool.close()


@dataclass
class Written(ds.WriterCommitMessage):
    """What one task wrote."""

    rows: int


class Writer(ds.DataSourceArrowWriter):
    """Writes record batches; upserts are idempotent, so a task may run twice."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        with Client(options.masters) as client:
            types.projection(schema, client.open_table(options.table).schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write a task's batches and wait until all of it is durable on a majority.

        Raises:
            RowErrors: if rows were refused; the first few are named, the others are written.
        """
        rows = 0
        with Client(self._options.masters) as client:
            table = client.open_table(self._options.table)
            for batch in iterator:
                rows += table.write_arrow(batch, op=self._options.op).rows_written
        return Written(rows)

    def commit(self, messages: list[ds.WriterCommitMessage | None]) -> None:
        """Every task's rows are durable already."""

    def abort(self, messages: list[ds.WriterCommitMessage | None]) -> None:
        """Rows that were written stay: each is whole, and the next attempt replaces it by key."""
