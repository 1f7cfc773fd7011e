"""Spark reads and writes real tables on real nodes; one JVM and one cluster for all of it."""

from __future__ import annotations

import datetime as dt
import decimal
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stele.client import Client
from stele.model.column import Column
from stele.model.errors import Rejected
from stele.model.keys import encode_tuple
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.schema import Schema
from tests.harness.standing import standing
from tests.spark import agreement
from tests.spark.readers import READERS, need_jar

pytestmark = pytest.mark.spark
by_python_alone = pytest.mark.parametrize("reader", ["python"], indirect=True)
"""The JVM reader has no part in it, so once is enough."""

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


@pytest.fixture(scope="module", params=READERS)
def reader(request: pytest.FixtureRequest) -> str:
    """Each test says the same of both readers. Each has a cluster of its own."""
    return str(request.param)


@pytest.fixture(scope="module")
def masters(reader: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster that stands while the module runs, and a table `kinds` of all types."""
    if reader == "jvm":
        need_jar()
    with standing(tmp_path_factory.mktemp("spark")) as addresses:
        with Client(addresses) as client:
            for name in ("kinds", "copy"):
                partitioning = PartitionSchema(hash=(HashPartition((0,), 3, 0),))
                table = client.create_table(name, schema(), partitioning)
            client.open_table("kinds").write_arrow(rows(table.arrow_schema))
        yield addresses


@pytest.fixture
def spark(spark: Any, reader: str) -> Any:
    """The session, with one of the readers."""
    spark.conf.set("spark.stele.reader", reader)
    return spark


@by_python_alone
def test_a_task_finds_replicas_that_listen_elsewhere_now(masters: str) -> None:
    """Nodes may have moved between the plan of a read and the start of a task."""
    from stele_spark.options import Options
    from stele_spark.source import Reader
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


@by_python_alone
def test_a_table_that_was_made_anew_is_told_from_one_whose_nodes_are_away(masters: str) -> None:
    """Its tablets are not those that were planned, and no waiting brings these back."""
    from stele_spark.options import Options
    from stele_spark.source import Reader
    from stele_spark.types import spark_schema

    with Client(masters) as client:
        again = Schema.make([("id", "int64")], ["id"])
        client.create_table("again", again)
        reader = Reader(Options.parse({"masters": masters, "table": "again"}), spark_schema(again))
        (partition,) = reader.partitions()
        client.delete_table("again")
        client.create_table("again", again)
    begun = time.monotonic()
    with pytest.raises(Rejected, match="again was deleted and created again"):
        while time.monotonic() - begun < 120:  # until the nodes have dropped the tablet
            list(reader.read(partition))
            time.sleep(0.1)


@pytest.mark.filterwarnings("default")
def test_a_read_that_no_tablet_can_answer_is_empty(spark: Any, masters: str) -> None:
    with Client(masters) as client:
        schema = Schema.make([("id", "int64")], ["id"])
        splits = tuple(encode_tuple([n], [pa.int64()]) for n in (10, 20))
        client.create_table("ranges", schema, PartitionSchema(range=RangePartition((0,), splits)))
        client.open_table("ranges").write_arrow(pa.table({"id": list(range(30))}))
    reader = spark.read.format("stele").options(masters=masters, table="ranges")
    assert reader.load().count() == 30
    assert reader.option("where", "id > 25 AND id < 5").load().collect() == []


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


HIDE = "spark.sql.execution.pyspark.udf.hideTraceback.enabled"


def is_told(sentence: str, act: Callable[[], object]) -> None:
    """In the first line of what is raised, and without a traceback."""
    with pytest.raises(Exception, match=re.escape(sentence)) as caught:
        act()
    lines = [line for line in str(caught.value).splitlines() if line.strip()]
    assert not any("Traceback" in line for line in lines), caught.value
    # A failure in a task is told by Spark in a line of its own; SQLSTATE follows.
    assert len(lines) <= 3 or "Driver stacktrace" in str(caught.value), caught.value


@pytest.fixture
def told(spark: Any) -> Iterator[Any]:
    """`is_told`, in a session that nobody set up: it does not hide tracebacks, as ours does."""
    spark.conf.set(HIDE, "false")
    yield is_told
    spark.conf.set(HIDE, "true")


@pytest.mark.filterwarnings("default")
def test_a_session_of_ours_hides_tracebacks(spark: Any, masters: str) -> None:
    assert spark.conf.get(HIDE) == "true"
    read = spark.read.format("stele").options(masters=masters)
    is_told("no table nothing", read.option("table", "nothing").load)
    is_told("the table has no column 'who'", read.option("table", "kinds").schema("who long").load().collect)


@pytest.mark.filterwarnings("default")
def test_what_cannot_be_read_is_refused_at_load(spark: Any, masters: str, told: Any) -> None:
    def load(**options: str) -> Callable[[], object]:
        return lambda: spark.read.format("stele").options(**options).load()

    given = {"masters": masters, "table": "kinds"}
    told('"masters" is missing', load(table="kinds"))
    told("no table nothing", load(masters=masters, table="nothing"))
    told('unknown option "limit"; options are "masters" (', load(**given, Limit="3"))
    told('"op" is an option of a write, not of a read', load(**given, op="insert"))
    told("\"snapshot\" is 'now': expected a hybrid time or an ISO 8601 time", load(**given, snapshot="now"))
    told("SNAPSHOT_TOO_OLD", load(**given, snapshot="5"))
    told("no column who", load(**given, where="who = 3"))
    told("take no path", lambda: spark.read.format("stele").options(**given).load("kinds"))
    told(
        "CREATE TABLE is not supported",
        lambda: spark.sql(f"CREATE TABLE t USING stele OPTIONS (masters '{masters}', table 'kinds')"),
    )
    # With a schema of the user's Spark asks nobody before it reads.
    asked = spark.read.format("stele").options(**given).schema("id string, who long").load()
    told("the table has no column 'who'", asked.collect)

    def ask(columns: str) -> Callable[[], object]:
        return spark.read.format("stele").options(**given).schema(columns).load().collect

    told("'name' may be null in the table; remove NOT NULL", ask("id long NOT NULL, name string NOT NULL"))
    told("'id' is given twice", ask("id long, id long"))
    assert len(ask("amount double, id long NOT NULL")()) >= ROWS  # type: ignore[arg-type]


@pytest.mark.filterwarnings("default")
@by_python_alone
def test_what_cannot_be_written_is_refused_at_save(spark: Any, masters: str, told: Any) -> None:
    def save(frame: Any, mode: str = "append", **options: str) -> Callable[[], object]:
        written = frame.write.format("stele").options(masters=masters, table="strict", **options)
        return lambda: written.mode(mode).save()

    with Client(masters) as client:
        client.create_table("strict", Schema.make([("id", "int64"), ("name", "string")], ["id"]))
    frame = spark.createDataFrame([(1, "one")], "id long, name string")
    told('Use mode("append") or INSERT INTO', save(frame, mode="overwrite"))
    told('unknown option "batch"', save(frame, batch="3"))
    told('"where" is an option of a read, not of a write', save(frame, where="id = 3"))
    told("\"op\" is 'merge'", save(frame, op="merge"))
    told("the table has no column 'other'", save(spark.createDataFrame([(1, 2)], "id long, other long")))
    told(
        "'id' is bigint in the table, not double",
        save(spark.createDataFrame([(1.0, "x")], "id double, name string")),
    )
    told("column name is missing", save(spark.createDataFrame([(1,)], "id long")))
    # What rows alone can tell comes from the task that writes them.
    save(frame)()
    told("ALREADY_PRESENT", save(frame, op="insert"))
    save(frame.select("id"), op="delete")()
    told("NOT_FOUND", save(frame.select("id"), op="delete"))


@pytest.mark.filterwarnings("default")
def test_a_view_of_a_table_takes_the_same_options(spark: Any, masters: str) -> None:
    options = f"masters '{masters}', table 'kinds', where 'id < 10'"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW few USING stele OPTIONS ({options})")
    assert spark.sql("SELECT count(*) FROM few").collect()[0][0] == 10


@pytest.mark.filterwarnings("default")
def test_insert_into_a_view_upserts_and_the_view_stays_at_its_snapshot(spark: Any, masters: str) -> None:
    with Client(masters) as client:
        client.create_table("seen", Schema.make([("id", "int64"), ("name", "string", True)], ["id"]))
    options = f"masters '{masters}', table 'seen'"
    create = f"CREATE OR REPLACE TEMPORARY VIEW seen USING stele OPTIONS ({options})"
    asked = "SELECT name FROM seen ORDER BY id"
    spark.sql(create)
    spark.sql("INSERT INTO seen VALUES (1, 'a'), (2, 'b')")
    assert [row.name for row in spark.sql(asked).collect()] == ["a", "b"]
    spark.sql("INSERT INTO seen (name, id) SELECT 'c', 2")
    assert [row.name for row in spark.sql(asked).collect()] == ["a", "b"]
    spark.sql(create)
    assert [row.name for row in spark.sql(asked).collect()] == ["a", "c"]
    with pytest.raises(Exception, match=r'Use mode\("append"\)'):
        spark.sql("INSERT OVERWRITE seen VALUES (4, 'e')")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW seen USING stele OPTIONS ({options}, where 'id < 10')")
    with pytest.raises(Exception, match='"where" is an option of a read'):
        spark.sql("INSERT INTO seen VALUES (5, 'f')")


@pytest.mark.filterwarnings("default")
def test_a_frame_is_saved_in_another_thread_that_was_given_the_session(spark: Any, masters: str) -> None:
    from stele_spark.session import JAR, activate

    with Client(masters) as client:
        table = client.create_table("threads", Schema.make([("id", "int64")], ["id"]))
        frame = spark.createDataFrame([(1,)], "id long")
        told: list[BaseException | None] = []

        def save(prepare: Callable[[], None]) -> None:
            prepare()
            try:
                frame.write.format("stele").options(masters=masters, table="threads").mode("append").save()
            except Exception as exc:  # noqa: BLE001 - looked at below
                told.append(exc)
            else:
                told.append(None)

        for prepare in (lambda: None, lambda: activate(spark)):
            thread = threading.Thread(target=save, args=(prepare,))
            thread.start()
            thread.join()
        without, given = told
        if JAR.exists():
            assert without is None, "Spark finds what a jar has by its name, in any thread"
        else:
            assert "DATA_SOURCE_NOT_FOUND" in str(without), (
                "Spark has mended it: activate() is needed no more"
            )
        assert given is None
        assert table.scan().count() == 1


@pytest.mark.filterwarnings("default")
def test_the_nodes_and_spark_agree_on_what_a_condition_is_true_of(spark: Any, masters: str) -> None:
    with Client(masters) as client:
        table = client.create_table("edges", agreement.SCHEMA)
        table.write_arrow(agreement.rows())
        of_nodes = [
            set(table.scan(columns=["id"], predicates=text).to_table()["id"].to_pylist())
            for text in agreement.CONDITIONS
        ]
    frame = spark.read.format("stele").options(masters=masters, table="edges").load()
    nan = "isnan(d) OR isnan(f)"
    found = frame.selectExpr("id", f"{nan} AS nan", *agreement.CONDITIONS).collect()
    nans = {row.id for row in found if row.nan}
    differ = []
    for n, text in enumerate(agreement.CONDITIONS):
        of_spark = {row.id for row in found if row[n + 2]}
        if agreement.of_nan(text):
            column = "d" if text.startswith("d") else "f"
            of_spark -= nans & {
                row["id"] for row in agreement.rows().to_pylist() if row[column] != row[column]
            }
        if of_nodes[n] != of_spark:
            differ.append((text, of_nodes[n], of_spark))
    assert not differ
