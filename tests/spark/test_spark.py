"""Spark reads and writes real tables on real nodes; one JVM and one cluster for all of it."""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stele.client import Client
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Column, Schema
from tests.harness.processes import Cluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

TYPES = {
    "id": "int64",
    "flag": "bool",
    "tiny": "int8",
    "small": "int16",
    "medium": "int32",
    "ratio": "float",
    "amount": "double",
    "price": "decimal(12,2)",
    "name": "string",
    "raw": "binary",
    "day": "date",
    "moment": "timestamp",
}
ROWS = 5_000
EPOCH = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


def schema() -> Schema:
    columns = tuple(
        Column(i, name, kind, nullable=name != "id") for i, (name, kind) in enumerate(TYPES.items())
    )
    return Schema(version=1, columns=columns, key_column_ids=(0,), next_column_id=len(columns))


def rows(arrow: pa.Schema) -> pa.Table:
    made = [
        {
            "id": n,
            "flag": n % 2 == 0,
            "tiny": n % 100,
            "small": n % 1000,
            "medium": n,
            "ratio": n / 4,
            "amount": None if n % 7 == 0 else n / 8,
            "price": decimal.Decimal(n) / 100,
            "name": None if n % 11 == 0 else f"name {n}",
            "raw": bytes([n % 256]),
            "day": dt.date(2024, 1, 1) + dt.timedelta(days=n % 365),
            "moment": EPOCH + dt.timedelta(minutes=n),
        }
        for n in range(ROWS)
    ]
    return pa.Table.from_pylist(made, schema=arrow)


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster that stands while the module runs, on a loop of its own, and a table `kinds` of all types."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(120)

    cluster = Cluster(tmp_path_factory.mktemp("spark"), masters=1, nodes=3)
    run(cluster.__aenter__())
    try:
        addresses = ",".join(cluster.master_addresses)
        with Client(addresses) as client:
            for name in ("kinds", "copy"):
                partitioning = PartitionSchema(hash=(HashPartition((0,), 3, 0),))
                table = client.create_table(name, schema(), partitioning)
            client.open_table("kinds").write_arrow(rows(table.arrow_schema))
        yield addresses
    finally:
        run(cluster.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from stele_spark.session import session

    engine = session("stele-tests", cores=2)
    engine.sparkContext.setLogLevel("ERROR")
    yield engine
    engine.stop()


def test_a_task_finds_replicas_that_listen_elsewhere_now(masters: str) -> None:
    """Nodes may have moved between the plan of a read and the start of a task."""
    from stele_spark.source import Options, Reader
    from stele_spark.types import spark_schema

    with Client(masters) as client:
        wanted = spark_schema(client.open_table("kinds").schema)
    reader = Reader(Options.parse({"masters": masters, "table": "kinds"}), wanted)
    found = 0
    for partition in reader.partitions():
        (tablet,) = partition.plan.tablets
        tablet.replicas = tuple(replace(r, flight_address="127.0.0.1:9") for r in tablet.replicas)
        found += sum(batch.num_rows for batch in reader.read(partition))
    assert found == ROWS


@pytest.mark.filterwarnings("default")
def test_source_and_sink(spark: Any, masters: str, tmp_path: Path) -> None:
    def read(table: str = "kinds", **options: str) -> Any:
        return spark.read.format("stele").options(masters=masters, table=table, **options)

    # Every type comes out as it went in; three tablets are three partitions.
    frame = read().load()
    assert frame.rdd.getNumPartitions() == 3
    got = pa.Table.from_batches(frame.orderBy("id").toArrow().to_batches())
    with Client(masters) as client:
        table = client.open_table("kinds")
        expected = table.scan().to_table().sort_by("id")
        assert got.cast(expected.schema).equals(expected)

        # A projection by schema, in the user's order; predicates for the scan and a filter for Spark.
        narrow = read(where="id >= 4990 and name is not null").schema("name string, id long").load()
        taken = narrow.where("length(name) > 3")
        assert [(r.name, r.id) for r in taken.orderBy("id").collect()] == [
            (f"name {n}", n) for n in range(4_990, ROWS) if n % 11
        ]

        # One frame, several filters: none is taken for another's, and the frame's snapshot is that of its first action.
        one = read().load()
        assert [one.where(f"id = {n}").count() for n in (3, 4, 5)] == [1, 1, 1]
        assert one.where("id < 10").count() == 10 and one.count() == ROWS

        # One snapshot stays what it was.
        before = client.now()
        table.write_arrow(pa.Table.from_pylist([{"id": ROWS + 1}], schema=table.arrow_schema))
        assert read(snapshot=str(before)).load().count() == ROWS
        assert read().load().count() == ROWS + 1

        # The sink upserts; a second write changes nothing.
        for _ in range(2):
            frame.write.format("stele").options(masters=masters, table="copy").mode("append").save()
        copied = client.open_table("copy").scan().to_table().sort_by("id")
        assert copied.slice(0, ROWS).equals(expected)


@pytest.mark.filterwarnings("default")
def test_what_is_refused_says_why(spark: Any, masters: str) -> None:
    reader = spark.read.format("stele")
    for broken, sentence in (
        (reader.options(table="kinds"), '"masters" is missing'),
        (spark.read.format("stele").options(masters=masters, table="nothing"), "nothing"),
        (
            spark.read.format("stele").options(masters=masters, table="kinds").schema("id string, who long"),
            "'who' is no column of the table",
        ),
        (spark.read.format("stele").options(masters=masters, table="kinds", where="who = 3"), "who"),
    ):
        with pytest.raises(Exception, match=sentence) as caught:
            broken.load().collect()
        first, *others = str(caught.value).splitlines()
        assert sentence in first, caught.value
        assert not any("Traceback" in line for line in others)
    frame = spark.createDataFrame([(1,)], "id long")
    with pytest.raises(Exception, match=r'use mode\("append"\)'):
        frame.write.format("stele").options(masters=masters, table="copy").mode("overwrite").save()
