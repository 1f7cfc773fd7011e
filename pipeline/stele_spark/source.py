"""The Spark data source `stele`: what Spark finds by name, and the batch reader. sink.py writes, stream.py
follows.

The driver chooses one snapshot, lets the leaders prepare it, and makes partitions of about 64 MiB (option
`splitBytes`). Executors scan their tablets over Arrow Flight, and write through sessions that retry without
applying twice. Channels are opened inside `read` and `write`, never before Spark forks or pickles.

Options and refusals: docs/spark.md. What the driver can check is checked there, at load() or save(), before a
task runs. An error in a task appears in Spark's log once for each attempt.

Spark's own filter pushdown is not used. Spark 4.3 reuses the partitions planned for one filter in a later
query of the same frame. If that query has no filter, it misses rows (tests/spark has the case). For the same
reason a frame stays at the snapshot of its first action; load again to see newer rows.

Invariants: all partitions of one read see the same snapshot. A repeated task changes nothing, whatever others
have written meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import datasource as ds
from pyspark.sql.types import StructType

from stele.client import Client, Table
from stele.client.tablet_scan import FlightPool, ScanPlan, TabletScan
from stele.model.errors import Rejected
from stele_spark import types
from stele_spark.options import Options, one_sentence, refuse
from stele_spark.reading import TabletPartition, batches_of
from stele_spark.sink import Writer
from stele_spark.stream import StreamReader
from stele_spark.stream_sink import StreamWriter

_CHECK_TIMEOUT_S = 10.0


class SteleDataSource(ds.DataSource):
    """The data source behind `spark.read`, `spark.readStream` and `frame.write` with `format("stele")`. Spark
    makes one at load() and one at save().
    """

    @one_sentence()
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._parsed = Options.parse(dict(options))
        self._inferred = False

    @classmethod
    def name(cls) -> str:
        """The name that format() takes."""
        return "stele"

    @one_sentence()
    def schema(self) -> StructType:
        """The Spark schema of the table, or of its changes. A read with `.schema(...)` selects columns, and
        does not call this.

        Spark does not say whether the schema is for a stream. It counts as a stream's if an option is given
        that only streams have.
        """
        stream = self._parsed.is_stream
        self._is_for("stream" if stream else "read")
        self._inferred = True  # Spark pickles this object afterwards
        with Client(self._parsed.masters) as client:
            table = client.open_table(self._parsed.table)
            if stream:
                return types.stream_schema(table.schema)
            _check(_plan(table, self._parsed), self._parsed)
            if self._parsed.columns:
                return types.chosen(self._parsed.columns, table.schema)
            return types.spark_schema(table.schema)

    @one_sentence()
    def reader(self, schema: StructType) -> ds.DataSourceReader:
        """A reader that returns exactly the columns of `schema`."""
        self._is_for("read")
        return Reader(self._parsed, schema)

    @one_sentence()
    def streamReader(self, schema: StructType) -> ds.DataSourceStreamReader:
        """A reader of the table's changes that returns the columns of `schema`."""
        self._is_for("stream")
        return StreamReader(self._parsed, schema, inferred=self._inferred)

    @one_sentence()
    def writer(self, schema: StructType, overwrite: bool) -> ds.DataSourceWriter:
        """A sink for a frame. It upserts, unless an option says otherwise.

        Raises:
            Rejected: the mode is overwrite. A write replaces rows by key and never empties the table.
        """
        self._is_for("write")
        if overwrite:
            raise Rejected(
                'data source stele: a write never empties a table. Use mode("append") or INSERT INTO, '
                "which replace rows with the same key"
            )
        return Writer(self._parsed, schema)

    @one_sentence()
    def streamWriter(self, schema: StructType, overwrite: bool) -> ds.DataSourceStreamArrowWriter:
        """A sink for a stream's batches.

        Raises:
            Rejected: the output mode is complete, but a batch never empties the table. Or the option `job` is
                given, but each batch is a job of its own.
        """
        self._is_for("write")
        if overwrite:
            raise Rejected(
                'data source stele: use outputMode("update") or "append", which replace rows with the same key'
            )
        if self._parsed.job:
            raise Rejected(
                'data source stele: leave out "job" for a stream: each of its batches is a job of its own'
            )
        return StreamWriter(self._parsed, schema)

    def _is_for(self, use: str) -> None:
        refuse(Options.not_of(use, dict(self.options)))


def _plan(table: Table, options: Options, columns: Sequence[str] | None = None) -> ScanPlan:
    scan = table.asynchronous.scan(
        columns,
        options.where or (),
        ordered=True,  # so that a scan can resume at another replica after its last row
        snapshot=options.snapshot or None,
        max_staleness=options.max_staleness_s,
    )
    return scan.plan


def _check(plan: ScanPlan, options: Options) -> None:
    """If the user chose the snapshot, try to read one row of one tablet at it.

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


def _check_chosen(names: Sequence[str], of_schema: Sequence[str]) -> None:
    if names != of_schema:
        raise Rejected(
            f'data source stele: "columns" names {", ".join(names)}, but .schema(...) names {", ".join(of_schema)}; give one '
            "of them"
        )


class Reader(ds.DataSourceReader):
    """The batch reader: plans in the driver, scans in the executors."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        with Client(options.masters) as client:
            table = client.open_table(options.table)
            self._columns = types.projection(schema, table.schema)
            if options.columns:
                _check_chosen(types.chosen(options.columns, table.schema).names, self._columns)
            _check(_plan(table, options, self._columns), options)
        arrow = types.arrow_types(schema)
        # Spark also compares nullability, and the user's schema may declare any column nullable.
        self._arrow = pa.schema([pa.field(f.name, arrow[f.name], f.nullable) for f in schema])

    @one_sentence()
    def partitions(self) -> Sequence[ds.InputPartition]:
        """Partitions of about `splitBytes`, all at one snapshot. Each is of one tablet that can hold a wanted
        row.

        The snapshot is prepared, so any replica of a tablet can serve it. If rows may be old, no leader is
        asked to prepare it. Followers then serve what they have. They ask their leaders only if they cannot
        know how old their rows are.
        """
        with Client(self._options.masters) as client:
            table = client.open_table(self._options.table)
            plan = _plan(table, self._options, self._columns)
            if self._options.max_staleness_s is None:
                client.run(table.asynchronous.reads.prepare(plan))
            parts = client.run(table.asynchronous.reads.split(plan, self._options.split_bytes))
        return [TabletPartition(part) for part in parts]

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one tablet as record batches, in exactly the columns asked for.

        Raises:
            Rejected: NOT_FOUND, the table was deleted, or deleted and created again.
            SteleError: no replica served the rows in time.
        """
        if not isinstance(partition, TabletPartition):  # Spark's own, if no tablet can hold a wanted row
            return
        with one_sentence():
            for batch in batches_of(self._options, partition.plan):
                # This also casts columns that Spark asked for in a wider type.
                yield pa.RecordBatch.from_arrays(batch.columns, schema=self._arrow)
