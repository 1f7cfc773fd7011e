"""What Spark does with a stream, without Spark: its calls in its order, texts between them as in its checkpoint."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from stele.client import AsyncTable
from stele_spark.source import SteleDataSource
from stele_spark.stream import StreamReader
from tests.tserver.local import LocalCluster

ALL = ReadAllAvailable()
Row = dict[str, Any]


def stream(
    cluster: LocalCluster, table: str = "t", *, columns: StructType | None = None, **options: str
) -> StreamReader:
    """A reader as a query has it, after load()."""
    given = {"masters": cluster.master_address, "table": table, "startingSnapshot": "table", **options}
    source = SteleDataSource(given)
    schema = columns or source.schema()
    made = pickle.loads(pickle.dumps(source)).streamReader(schema)
    assert isinstance(made, StreamReader)
    return made


def shown(cluster: LocalCluster) -> StructType:
    """The columns of the stream of table t."""
    given = {"masters": cluster.master_address, "table": "t", "startingSnapshot": "table"}
    return SteleDataSource(given).schema()


class Query:
    """What Spark does with a stream, in its order. Texts between the calls, as in its checkpoint."""

    def __init__(self, reader: StreamReader, at: str = "") -> None:
        self.reader = reader
        self.at = at or json.dumps(reader.initialOffset())

    def plan(self, limit: Any = ALL) -> str:
        return json.dumps(self.reader.latestOffset(json.loads(self.at), limit))

    def rows(self, end: str) -> list[Row]:
        """The rows from here to `end`, by a reader of its own, as in a task."""
        tasks = pickle.dumps(self.reader.partitions(json.loads(self.at), json.loads(end)))
        other = StreamReader.__new__(StreamReader)
        other.__dict__.update({**self.reader.__dict__, "_follower": None})
        return [
            row
            for task in pickle.loads(tasks)
            for batch in pickle.loads(pickle.dumps(other)).read(task)
            for row in batch.to_pylist()
        ]

    def batch(self, limit: Any = ALL) -> list[Row]:
        """The rows of the next batch; none if there is nothing new."""
        end = self.plan(limit)
        rows = [] if end == self.at else self.rows(end)
        self.at = end
        return rows


class Streams:
    """Readers of a test, all stopped at its end. Each call runs in a thread, as the cluster runs in the loop."""

    def __init__(self) -> None:
        self._readers: list[StreamReader] = []

    async def query(self, *args: Any, at: str = "", **kwargs: Any) -> Query:
        def make() -> Query:
            reader = stream(*args, **kwargs)
            self._readers.append(reader)
            return Query(reader, at)

        return await asyncio.to_thread(make)

    def stop(self) -> None:
        for reader in self._readers:
            reader.stop()


async def call(work: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(work, *args)


async def held(table: AsyncTable, name: str = "c") -> Any:
    return next((hold for hold in await table.holds() if hold.name == name), None)
