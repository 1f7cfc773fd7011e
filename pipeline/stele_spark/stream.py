"""The stream of a table's changes: the methods that Spark calls, in the driver and in tasks. Made by
source.py.

Spark keeps one `StreamReader` in a process beside the driver, and makes others that only read. So connections
and holds are made at the first call that needs them.

Invariant: a batch has the same rows whenever it is planned, with the versions of each key oldest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import datasource as ds
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from stele.client import Client
from stele.client.tablet_scan import ScanPlan
from stele.model.errors import Code, Rejected
from stele.model.predicate import UPSERT
from stele_spark import types
from stele_spark.following import Follower
from stele_spark.offset import Offset
from stele_spark.options import OPTIONS, Options, one_sentence, refuse
from stele_spark.reading import TabletPartition, batches_of

_LOST = frozenset((Code.CURSOR_LOST, Code.SNAPSHOT_TOO_OLD))


class ChangesPartition(TabletPartition):
    """The changes of one tablet in a batch. `version`: the schema version that the batch's rows show."""

    def __init__(self, plan: ScanPlan, version: int) -> None:
        super().__init__(plan)
        self.version = version


class StreamReader(ds.DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches in the driver, and reads them in the executors. `inferred`: the schema was taken from the
    table at load().
    """

    def __init__(self, options: Options, schema: StructType, *, inferred: bool) -> None:
        if not options.following.start:
            refuse([f'"startingSnapshot" is missing: {OPTIONS["startingSnapshot"]}'])
        self._options = options
        self._inferred = inferred
        with Client(options.masters) as client:
            table = client.open_table(options.table).schema
        self._columns = types.stream_projection(schema, table)
        self._names = [name for name in self._columns if name in table.by_name]
        arrow = types.arrow_types(schema)
        self._arrow = pa.schema([pa.field(f.name, arrow[f.name], f.nullable) for f in schema])
        self._follower: Follower | None = None

    @property
    def _driver(self) -> Follower:
        if self._follower is None:
            self._follower = Follower(self._options, self._names, inferred=self._inferred)
        return self._follower

    @one_sentence()
    def initialOffset(self) -> dict[str, Any]:
        """The offset at which a new stream starts, by the option startingSnapshot."""
        with _told(self._options):
            return self._driver.initial().to_dict()

    @one_sentence()
    def prepareForTriggerAvailableNow(self) -> None:
        """Let no batch end later than the present moment."""
        self._driver.stop_at_present()

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of a batch, by the option maxRowsPerTrigger."""
        rows_max = self._options.following.rows_max
        return ReadMaxRows(rows_max) if rows_max else ReadAllAvailable()

    @one_sentence()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The offset at which the next batch ends. It is `start` if nothing has changed.

        Raises:
            Rejected: CURSOR_LOST, SCHEMA_MISMATCH, NOT_FOUND: see `Follower.latest`.
        """
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else 0
        with _told(self._options):
            return self._driver.latest(Offset.of(start), rows_max).to_dict()

    @one_sentence()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[ds.InputPartition]:
        """One partition for each tablet. If the first batch is the whole table, one for about each
        `splitBytes` bytes.

        Spark asks for an empty batch when it starts again, and may ask twice for one.
        """
        begin, until = Offset.of(start), Offset.of(end)
        with _told(self._options):
            return [ChangesPartition(plan, until.schema) for plan in self._driver.plans(begin, until)]

    @one_sentence()
    def commit(self, end: dict[str, Any]) -> None:
        """Let the cursor move on to `end`. Spark calls this one batch late, and may never call it for the
        last batch.
        """
        with _told(self._options):
            self._driver.commit(Offset.of(end))

    def stop(self) -> None:
        """Close all connections, because the query ends. The cursor stays, for the next run."""
        if self._follower is not None:
            self._follower.close()

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        """The changes of one tablet, the versions of each key oldest first.

        Raises:
            Rejected: CURSOR_LOST, some of the changes are gone; or NOT_FOUND, the table was deleted.
            SteleError: no replica served the changes in time.
        """
        assert isinstance(partition, ChangesPartition)
        plan = partition.plan
        with one_sentence(), _told(self._options):
            for batch in batches_of(self._options, plan):
                yield self._shown(batch, plan.snapshot, partition.version)

    def _shown(self, batch: pa.RecordBatch, snapshot: int, version: int) -> pa.RecordBatch:
        """A batch of changes in Spark's columns. Rows of the table, in a first batch, get the columns that
        describe a change.
        """

        def column(name: str, wanted: pa.DataType) -> pa.Array:
            there = batch.schema.get_field_index(name)
            if there >= 0:
                return batch.column(there).cast(wanted)
            value = {types.OP: UPSERT, types.TIME: snapshot, types.VERSION: version}[name]
            return pa.repeat(pa.scalar(value, wanted), batch.num_rows)

        arrays = map(column, self._columns, self._arrow.types)
        return pa.RecordBatch.from_arrays(list(arrays), schema=self._arrow)


class _told:
    """A context that turns errors about lost history into CURSOR_LOST, with a message that says what to do."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if not isinstance(exc, Rejected) or exc.code not in _LOST:
            return
        following = self._options.following
        more = (
            f'raise "cursorMaxBytes" ({following.cursor_bytes_max:,} now) or "cursorExpiresInS" ({following.cursor_expires_s:,})'
            if following.cursor
            else 'name a "cursor", or give the table a longer history'
        )
        raise Rejected(
            f"table {self._options.table}: the stream is too slow, or was stopped too long: {exc.args[0]}. Start it with a new checkpoint "
            f'and startingSnapshot "table". To prevent it: {more}, and run the stream more often',
            code=Code.CURSOR_LOST,
        ) from exc
