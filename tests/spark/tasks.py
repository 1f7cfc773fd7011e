"""Tasks of a write without Spark around them, and what they leave: used by tests of the sink and of named jobs."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import LongType, StringType, StructField, StructType

from stele.client import Client, Table
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele_spark.options import Options
from stele_spark.sink import Writer
from stele_spark.source import Reader
from stele_spark.types import spark_schema
from tests.harness.processes import Cluster

SCHEMA = Schema.make([("id", "int64"), ("v", "string", True)], ["id"])
PARTITIONING = PartitionSchema((HashPartition((0,), 3),))
ROWS = 30_000


def made(cluster: Cluster, table: str, **options: str) -> Writer:
    """A new table, and a writer to it as a task gets it."""
    masters = ",".join(cluster.master_addresses)
    with Client(masters) as client:
        client.create_table(table, SCHEMA, PARTITIONING)
    writer = Writer(Options.parse({"masters": masters, "table": table, **options}), spark_schema(SCHEMA))
    return shipped(writer)


def shipped(writer: Writer) -> Writer:
    """As a task gets it."""
    copy = pickle.loads(pickle.dumps(writer))
    assert isinstance(copy, Writer)
    return copy


def batches(rows: int = ROWS, batch_rows: int = 10_000) -> Iterator[pa.RecordBatch]:
    """The rows of a task."""
    yield from pa.table({"id": np.arange(rows), "v": ["x"] * rows}).to_batches(max_chunksize=batch_rows)


def count(cluster: Cluster, table: str, **options: str) -> int:
    """How many rows a load() on this machine finds."""
    masters = ",".join(cluster.master_addresses)
    reader = Reader(Options.parse({"masters": masters, "table": table, **options}), spark_schema(SCHEMA))
    return sum(batch.num_rows for partition in reader.partitions() for batch in reader.read(partition))


class Lost(Exception):
    """What ends an attempt."""


def torn(enough: Callable[[], bool]) -> Iterator[pa.RecordBatch]:
    """The batches of a task that ends with an error once it has written enough."""
    yield from batches()
    until = time.monotonic() + 60
    while not enough() and time.monotonic() < until:
        time.sleep(0.05)
    raise Lost


OPS = ("upsert", "insert", "insert_ignore", "update", "update_ignore", "delete", "delete_ignore")


def contents(table: Table, snapshot: int | None = None) -> dict[int, str | None]:
    """Its rows, now or at a snapshot."""
    found = table.scan(snapshot=snapshot).to_table()
    return dict(zip(found["id"].to_pylist(), found["v"].to_pylist()))


WITH_OP = StructType(
    [StructField("id", LongType()), StructField("v", StringType()), StructField("op", StringType())]
)


def mixed(ids: Sequence[int | None], ops: list[str | None], v: str = "new") -> Iterator[pa.RecordBatch]:
    yield from pa.table(
        {"id": pa.array(ids, pa.int64()), "v": [v] * len(ids), "op": pa.array(ops, pa.string())}
    ).to_batches()


def writer_with(cluster: Cluster, table: str, schema: StructType = WITH_OP, **options: str) -> Writer:
    masters = ",".join(cluster.master_addresses)
    with Client(masters) as client:
        if table not in {info.name for info in client.list_tables()}:
            client.create_table(table, SCHEMA, PARTITIONING)
    return shipped(Writer(Options.parse({"masters": masters, "table": table, **options}), schema))


def refused_in(folder: Path) -> list[tuple[int | None, str | None, str]]:
    """(id, operation, code) of the rows in the files that Spark would read."""
    found = [pq.read_table(path) for path in sorted(folder.glob("[!_.]*"))]
    rows = [(row["id"], row["_op"], row["_code"]) for table in found for row in table.to_pylist()]
    return sorted(rows, key=str)
