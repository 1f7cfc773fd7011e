"""What the JVM reader has beyond the Python reader, and its catalog: a real Spark, and processes of a real cluster."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest

from stele.client import Client
from stele.model.keys import encode_tuple
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.schema import Schema
from tests.harness.processes import Cluster
from tests.harness.spark_python import forked_workers
from tests.harness.standing import running
from tests.spark import agreement
from tests.spark.readers import need_jar

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = Schema.make([("id", "int64"), ("name", "string", True), ("amount", "double", True)], ["id"])
ROWS = 3_000
AT_ONCE = 30
LONGER_THAN_A_CALL_S = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_jar()
    with running(Cluster(tmp_path_factory.mktemp("jvm"), masters=1, nodes=3)) as cluster:
        with Client(cluster.master_addresses) as client:
            table = client.create_table("t", SCHEMA, PartitionSchema(hash=(HashPartition((0,), 3),)))
            table.write_arrow(
                pa.table(
                    {
                        "id": range(ROWS),
                        "name": [None if n % 7 == 0 else f"n{n}" for n in range(ROWS)],
                        "amount": [n / 4 for n in range(ROWS)],
                    }
                )
            )
        yield cluster


@pytest.fixture(scope="module")
def engine(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from stele_spark.session import session

    with forked_workers():
        engine = session(
            "stele-jvm",
            cores=2,
            spark__sql__warehouse__dir=str(tmp_path_factory.mktemp("warehouse")),
            spark__sql__catalog__st="dev.stele.spark.SteleCatalog",
            spark__sql__catalog__st__masters=",".join(cluster.master_addresses),
        )
    engine.sparkContext.setLogLevel("ERROR")
    engine.conf.set("spark.stele.reader", "jvm")
    yield engine
    engine.stop()


def loaded(engine: Any, cluster: Cluster, table: str = "t", **options: str) -> Any:
    masters = ",".join(cluster.master_addresses)
    return engine.read.format("stele").options(masters=masters, table=table, **options).load()


def planned(frame: Any) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def test_columns_filters_limit_and_count_are_pushed_down(engine: Any, cluster: Cluster) -> None:
    frame = loaded(engine, cluster)
    few = frame.where("id >= 5 AND id < 9 AND name IS NOT NULL").select("name")
    plan = planned(few)
    assert "id >= 5 AND id < 9" in plan and "Filter (" not in plan, plan
    assert sorted(r.name for r in few.collect()) == ["n5", "n6", "n8"]

    counted = frame.where("id < 100").groupBy().count()
    assert "counted" in planned(counted) and counted.collect()[0][0] == 100
    assert frame.count() == ROWS
    grouped = frame.where("id < 14").groupBy("name").count()
    assert "counted" not in planned(grouped) and {r[0]: r[1] for r in grouped.collect()}[None] == 2
    limited = frame.where("id > 10").limit(4)
    assert "limit 4" in planned(limited) and limited.count() == 4

    # Spark keeps what the nodes would judge otherwise, and then pushes neither count nor limit.
    kept = frame.where("amount > 10.0")
    assert "amount > 10.0" not in planned(kept).split("BatchScan")[1].split("RuntimeFilters")[0]
    assert kept.count() == ROWS - 41 and kept.limit(7).count() == 7
    assert frame.where("length(name) = 2").count() == 8


def test_a_count_of_no_tablet_is_zero(engine: Any, cluster: Cluster) -> None:
    with Client(cluster.master_addresses) as client:
        splits = tuple(encode_tuple([n], [pa.int64()]) for n in (10, 20))
        schema = Schema.make([("id", "int64")], ["id"])
        client.create_table("ranges", schema, PartitionSchema(range=RangePartition((0,), splits)))
        client.open_table("ranges").write_arrow(pa.table({"id": list(range(30))}))
    assert loaded(engine, cluster, "ranges").where("id > 25 AND id < 5").count() == 0
    assert loaded(engine, cluster, "ranges").where("id > 25").count() == 4


def test_the_nodes_and_spark_agree_on_every_filter_that_is_pushed(engine: Any, cluster: Cluster) -> None:
    """Spark does not evaluate it again."""
    from pyspark.sql import functions as F

    with Client(cluster.master_addresses) as client:
        client.create_table("edges", agreement.SCHEMA).write_arrow(agreement.rows())
    frame = loaded(engine, cluster, "edges")
    shown = frame.selectExpr("id", *agreement.CONDITIONS).collect()
    differ = []
    for first in range(0, len(agreement.CONDITIONS), AT_ONCE):
        some = agreement.CONDITIONS[first : first + AT_ONCE]
        frames = [frame.where(text).select(F.lit(n).alias("n"), "id") for n, text in enumerate(some)]
        found = {(r.n, r.id) for r in functools.reduce(lambda a, b: a.union(b), frames).collect()}
        for n, text in enumerate(some):
            of_nodes = {key for number, key in found if number == n}
            of_spark = {row.id for row in shown if row[first + n + 1]}
            if of_nodes != of_spark:
                differ.append((text, of_nodes, of_spark))
    assert not differ


def test_small_tables_are_broadcast_by_their_statistics(engine: Any, cluster: Cluster) -> None:
    frame = loaded(engine, cluster)
    statistics = frame._jdf.queryExecution().optimizedPlan().stats()
    assert 0 < int(str(statistics.sizeInBytes())) < 10 << 20
    big = engine.range(0, 100_000)
    assert "BroadcastHashJoin" in planned(big.join(frame, "id"))


def test_the_catalog_shows_describes_reads_and_drops_tables(engine: Any, cluster: Cluster) -> None:
    with Client(cluster.master_addresses) as client:
        table = client.create_table("old", SCHEMA, PartitionSchema(hash=(HashPartition((0,), 2),)))
        table.write_arrow(pa.table({"id": [1, 2], "name": ["a", "b"]}))
        between = client.now()
        moment = dt.datetime.now(dt.UTC)
        time.sleep(0.01)
        table.write_arrow(pa.table({"id": [2, 3], "name": ["B", "C"]}))

    def names(sql: str) -> list[str]:
        return [r.name for r in engine.sql(sql).collect()]

    shown = [r.tableName for r in engine.sql("SHOW TABLES IN st").collect()]
    assert {"t", "old"} <= set(shown)
    told = {r.col_name: r.data_type for r in engine.sql("DESCRIBE TABLE EXTENDED st.old").collect()}
    assert (told["id"], told["name"], told["Part 0"]) == ("bigint", "string", "bucket(2, id)"), told
    assert "primary_key=id" in told["Table Properties"]
    assert names("SELECT name FROM st.old ORDER BY id") == ["a", "B", "C"]
    assert names(f"SELECT name FROM st.old VERSION AS OF '{between}' ORDER BY id") == ["a", "b"]
    at = moment.strftime("%Y-%m-%d %H:%M:%S.%f")
    assert names(f"SELECT name FROM st.old TIMESTAMP AS OF '{at}' ORDER BY id") == ["a", "b"]
    engine.sql("INSERT INTO st.old (id, name) VALUES (4, 'd')")
    assert names("SELECT name FROM st.old ORDER BY id") == ["a", "B", "C", "d"]
    with pytest.raises(Exception, match="SNAPSHOT_TOO_OLD"):
        engine.sql("SELECT * FROM st.old VERSION AS OF '5'")
    columns = "(id BIGINT, day DATE NOT NULL, price DECIMAL(9,2))"
    for wrong, said in (
        ("", "name the key"),
        ("TBLPROPERTIES ('primary_key'='id', 'colour'='red')", "there is no property 'colour'"),
        ("PARTITIONED BY (day) TBLPROPERTIES ('primary_key'='id')", r"takes bucket\("),
        ("TBLPROPERTIES ('primary_key'='who')", "which are not columns"),
        ("TBLPROPERTIES ('primary_key'='id', 'history_s'='5')", "expected 1 minute to 10 years"),
    ):
        with pytest.raises(Exception, match=said):
            engine.sql(f"CREATE TABLE st.new {columns} {wrong}")
    for wrong, said in (
        ("id BIGINT COMMENT 'of the day'", "column id has a comment, which Stele does not keep"),
        ("id BIGINT, at TIMESTAMP DEFAULT now()", "default of column at is now\\(\\); expected a constant"),
        ("id BIGINT, stops INT DEFAULT 'many'", "Failed to execute CREATE TABLE command"),
        ("id BIGINT PRIMARY KEY", "constraint"),
    ):
        with pytest.raises(Exception, match=said):
            engine.sql(f"CREATE TABLE st.new ({wrong}) TBLPROPERTIES ('primary_key'='id')")
    properties = (
        "PARTITIONED BY (bucket(2, id)) TBLPROPERTIES ('primary_key'='day, id', 'replication_factor'='1')"
    )
    engine.sql(f"CREATE TABLE st.new {columns} COMMENT 'of each day' {properties}")
    with pytest.raises(Exception, match="TABLE_OR_VIEW_ALREADY_EXISTS"):
        engine.sql(f"CREATE TABLE st.new {columns} {properties}")
    engine.sql("INSERT INTO st.new VALUES (1, DATE '2026-01-31', 2.5)")
    assert [tuple(map(str, r)) for r in engine.sql("SELECT * FROM st.new").collect()] == [
        ("1", "2026-01-31", "2.50")
    ]
    with Client(cluster.master_addresses) as client:
        info = client.describe("new")
        assert info.schema is not None and [c.name for c in info.schema.key_columns] == ["day", "id"]
        assert (info.tablets, info.replication_factor, info.comment) == (2, 1, "of each day")
    with pytest.raises(Exception, match="TABLE_OR_VIEW_NOT_FOUND"):
        engine.sql("SELECT * FROM st.nothing")
    engine.sql("DROP TABLE st.old")
    with pytest.raises(Exception, match="TABLE_OR_VIEW_NOT_FOUND"):
        engine.sql("SELECT * FROM st.old")
    with Client(cluster.master_addresses) as client:
        assert [each.name for each in client.dropped_tables()] == ["old"]


COUNTED = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
assert not [name for name in sys.modules if name.startswith("stele_spark.session")]
frame = spark.read.format("stele").options(masters=sys.argv[1], table="t").load().where("id < 100").groupBy().count()
plan = frame._jdf.queryExecution().executedPlan().toString()
print("told:", frame.collect()[0][0], "counted" in plan)
"""


def test_one_line_of_the_guide_gives_the_reader_to_any_session(cluster: Cluster, tmp_path: Path) -> None:
    """`--jars` of spark-submit, in the folder of a checkout."""
    from tests.spark.test_programs import environment

    guide = (ROOT / "docs" / "spark.md").read_text()
    (line,) = set(re.findall(r"`(--jars \S+)`", guide))
    program = tmp_path / "program.py"
    program.write_text(COUNTED)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    conf = ["--master", "local[2]", "--conf", "spark.ui.enabled=false"]
    words = [str(submit), *line.split(), *conf, str(program), *cluster.master_addresses]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert "told: 100 True" in done.stdout, done.stdout + done.stderr[-3_000:]


def test_the_catalog_alters_tables(engine: Any, cluster: Cluster) -> None:
    with Client(cluster.master_addresses) as client:
        table = client.create_table("old2", SCHEMA)
        table.write_arrow(pa.table({"id": [1, 2], "name": ["a", "b"]}))
    for change in (
        "ALTER TABLE st.old2 ADD COLUMNS (gate STRING, stops TINYINT)",
        "ALTER TABLE st.old2 RENAME COLUMN NAME TO title",
        "ALTER TABLE st.old2 DROP COLUMN amount",
        "ALTER TABLE st.old2 DROP COLUMN IF EXISTS nothing",
        "COMMENT ON TABLE st.old2 IS 'who waits'",
        "ALTER TABLE st.old2 RENAME TO new2",
        "INSERT INTO st.new2 VALUES (3, 'c', 'A1', 2)",
    ):
        engine.sql(change)
    found = engine.sql("SELECT * FROM st.new2 ORDER BY id")
    assert found.dtypes == [("id", "bigint"), ("title", "string"), ("gate", "string"), ("stops", "tinyint")]
    assert list(map(tuple, found.collect())) == [
        (1, "a", None, None),
        (2, "b", None, None),
        (3, "c", "A1", 2),
    ]
    told = {r.col_name: r.data_type for r in engine.sql("DESCRIBE TABLE EXTENDED st.new2").collect()}
    assert told["Comment"] == "who waits"
    for wrong, said in (
        ("ALTER TABLE st.new2 ADD COLUMNS (good INT, more INT NOT NULL)", "more"),
        ("ALTER TABLE st.new2 ADD COLUMNS (good INT, more ARRAY<INT>)", "array<int>"),
        (
            "ALTER TABLE st.new2 ADD COLUMN more INT COMMENT 'c'",
            "column more has a comment, which Stele does not keep",
        ),
        ("ALTER TABLE st.new2 ADD COLUMN more INT FIRST", "column more comes last, as each new column"),
        ("ALTER TABLE st.new2 ADD COLUMN more INT AFTER title", "column more comes last, as each new column"),
        ("ALTER TABLE st.new2 ALTER COLUMN stops FIRST", "column stops cannot move"),
        ("ALTER TABLE st.new2 ALTER COLUMN stops COMMENT 'c'", "column stops has a comment"),
        (
            "ALTER TABLE st.new2 ALTER COLUMN stops TYPE INT",
            "the type of column stops cannot change; create a new",
        ),
        ("ALTER TABLE st.new2 ALTER COLUMN id DROP NOT NULL", "whether column id may be null cannot change"),
        (
            "ALTER TABLE st.new2 SET TBLPROPERTIES ('colour' = 'red')",
            "property 'colour' cannot change; comment and history_s",
        ),
        ("ALTER TABLE st.new2 SET TBLPROPERTIES ('history_s' = '7d')", "history_s is '7d'; expected seconds"),
        ("ALTER TABLE st.new2 SET TBLPROPERTIES ('history_s' = '5')", "expected 1 minute to 10 years"),
        ("ALTER TABLE st.new2 DROP COLUMN id", "key"),
        ("ALTER TABLE st.new2 RENAME TO t", "TABLE_OR_VIEW_ALREADY_EXISTS"),
        ("ALTER TABLE st.nothing RENAME TO something", "TABLE_OR_VIEW_NOT_FOUND"),
        ("ALTER TABLE st.nothing ADD COLUMNS (more INT)", "TABLE_OR_VIEW_NOT_FOUND"),
    ):
        with pytest.raises(Exception, match=said):
            engine.sql(wrong)
    with Client(cluster.master_addresses) as client:
        info = client.describe("new2")
        assert info.schema is not None and [c.name for c in info.schema.columns] == [
            "id",
            "title",
            "gate",
            "stops",
        ]
        assert info.comment == "who waits"
    engine.sql("ALTER TABLE st.new2 UNSET TBLPROPERTIES ('comment')")
    with Client(cluster.master_addresses) as client:
        assert client.describe("new2").comment == ""


DEFAULTS = (
    ("flag", "BOOLEAN", "true", "true"),
    ("tiny", "TINYINT", "-7", "-7"),
    ("small", "SMALLINT", "1 + 1", "2"),
    ("whole", "INT", "'12'", "12"),
    ("far", "BIGINT", "9007199254740993", "9007199254740993"),
    ("single", "FLOAT", "0.1", "0.1"),
    ("round", "FLOAT", "123456789", "1.23456792E8"),
    ("half", "DOUBLE", "-2.5e30", "-2.5E+30"),
    ("huge", "DOUBLE", "1.2345678901234568E16D", "1.2345678901234568E16"),
    ("below", "DOUBLE", "-0.0D", "-0.0"),
    ("price", "DECIMAL(9,2)", "1.5", '"1.50"'),
    ("name", "STRING", "'it''s \"new\"'", '"it\'s \\"new\\""'),
    ("raw", "BINARY", "X'00FF'", '"AP8="'),
    ("word", "STRING", "'today'", '"today"'),
    ("day", "DATE", "DATE '1581-02-03'", '"1581-02-03"'),
    ("first", "DATE", "DATE 'epoch'", '"1970-01-01"'),
    ("moment", "TIMESTAMP", "TIMESTAMP '2024-10-27 02:30:00.000001+02:00'", '"2024-10-27T00:30:00.000001Z"'),
    ("nothing", "STRING", "NULL", None),
)
"""Column, type, default in SQL, and as JSON text of Stele."""


def test_defaults_of_all_types_are_kept_and_used(engine: Any, cluster: Cluster) -> None:
    """By INSERTs of Spark that leave columns out, and by other writers alike; in a time zone with a double hour."""
    engine.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    columns = ", ".join(f"{name} {type_} DEFAULT {sql}" for name, type_, sql, _ in DEFAULTS)
    engine.sql(
        f"CREATE TABLE st.made (id BIGINT, {columns}) TBLPROPERTIES ('primary_key' = 'id', 'history_s' = '3600')"
    )
    engine.sql("CREATE TABLE st.grown (id BIGINT) TBLPROPERTIES ('primary_key' = 'id')")
    engine.sql(f"ALTER TABLE st.grown ADD COLUMNS ({columns})")
    engine.sql(
        "CREATE TABLE st.set (id BIGINT, "
        + ", ".join(f"{n} {t}" for n, t, *_ in DEFAULTS)
        + ") TBLPROPERTIES ('primary_key' = 'id')"
    )
    for name, _, sql, _ in DEFAULTS:
        engine.sql(f"ALTER TABLE st.set ALTER COLUMN {name} SET DEFAULT {sql}")
    with Client(cluster.master_addresses) as client:
        assert client.describe("made").history_s == 3_600
        for table in ("made", "grown", "set"):
            opened = client.open_table(table)
            told = {c.name: c.default and json.loads(c.default) for c in opened.schema.columns[1:]}
            assert told == {name: text and json.loads(text) for name, _, _, text in DEFAULTS}, table
            assert math.copysign(1, told["below"]) == -1
            opened.put({"id": 1})
            engine.sql(f"INSERT INTO st.{table} (id) VALUES (2)")
            one, two = (opened.get(key) for key in (1, 2))
            assert one is not None and {**one, "id": 2} == two, table
    engine.conf.set("spark.sql.session.timeZone", "UTC")


OF_TODAY = (
    ("DATE", "DATE 'today'"),
    ("DATE", "DATE 'tomorrow'"),
    ("TIMESTAMP", "TIMESTAMP ' NOW '"),
    ("STRING", "CAST(CAST('12:30' AS TIMESTAMP) AS STRING)"),
    ("TIMESTAMP", "TIMESTAMP '12:30'"),
    ("STRING", "CAST(DATE 'today' AS STRING)"),
)
"""Type and default in SQL: another value each day."""


def test_defaults_and_history_change(engine: Any, cluster: Cluster) -> None:
    with Client(cluster.master_addresses) as client:
        columns = [
            ("id", "int64"),
            ("stops", "int8", False, "2"),
            ("at", "timestamp", True, '"2024-05-01 12:00"'),
        ]
        table = client.create_table("kept", Schema.make(columns, ["id"]))
        engine.sql("INSERT INTO st.kept (id) VALUES (1)")
        for change in (
            "ALTER TABLE st.kept ALTER COLUMN STOPS SET DEFAULT 5",
            "ALTER TABLE st.kept ADD COLUMN gate STRING NOT NULL DEFAULT 'A1'",
            "ALTER TABLE st.kept ALTER COLUMN at DROP DEFAULT",
            "ALTER TABLE st.kept SET TBLPROPERTIES ('history_s' = '7200')",
            "INSERT INTO st.kept (id) VALUES (2)",
        ):
            engine.sql(change)
        noon = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)
        rows = table.refresh() or table.scan().to_table().sort_by("id").to_pylist()
        assert rows == [
            {"id": 1, "stops": 2, "at": noon, "gate": "A1"},
            {"id": 2, "stops": 5, "at": None, "gate": "A1"},
        ]
        assert client.describe("kept").history_s == 7_200
        told = {r.col_name: r.data_type for r in engine.sql("DESCRIBE TABLE EXTENDED st.kept").collect()}
        assert "history_s=7200" in told["Table Properties"]
        engine.sql("ALTER TABLE st.kept ALTER COLUMN stops DROP DEFAULT")
        with pytest.raises(Exception, match="stops"):
            engine.sql("INSERT INTO st.kept (id) VALUES (3)")
        engine.sql("ALTER TABLE st.kept UNSET TBLPROPERTIES ('history_s')")
        assert client.describe("kept").history_s == 900
    for wrong, said in (
        ("ALTER COLUMN stops SET DEFAULT 300", "stops|300"),
        ("ALTER COLUMN at SET DEFAULT current_timestamp()", "default of column at is .*expected a constant"),
        ("ALTER COLUMN gate SET DEFAULT upper('a')", "default of column gate is .*expected a constant"),
        ("ADD COLUMN day DATE DEFAULT current_date", "default of column day is .*expected a constant"),
        (
            "ADD COLUMN rate DOUBLE DEFAULT CAST('NaN' AS DOUBLE)",
            "default of column rate is .*expected a constant",
        ),
        *((f"ADD COLUMN day {of} DEFAULT {sql}", "day is .*expected a constant") for of, sql in OF_TODAY),
        ("ALTER COLUMN nothing SET DEFAULT 1", "nothing"),
    ):
        with pytest.raises(Exception, match=said):
            engine.sql(f"ALTER TABLE st.kept {wrong}")


def test_spark_knows_every_default_that_others_may_set(engine: Any, cluster: Cluster) -> None:
    """Python takes more texts than JSON and Java do."""
    columns = [
        ("id", "int64"),
        ("nan", "double", True, "NaN"),
        ("low", "double", True, "-Infinity"),
        ("high", "float", True, "Infinity"),
        ("ten", "decimal(9,2)", True, '"1_0"'),
        ("half", "decimal(9,2)", True, '" 1.5 "'),
        ("none", "string", True, " null "),
    ]
    with Client(cluster.master_addresses) as client:
        table = client.create_table("foreign", Schema.make(columns, ["id"]))
        table.put({"id": 1})
        engine.sql("INSERT INTO st.foreign (id) VALUES (2)")
        one, two = (table.get(key) for key in (1, 2))
        assert (
            one is not None and two is not None and math.isnan(one.pop("nan")) and math.isnan(two.pop("nan"))
        )
        assert {**one, "id": 2} == two
        assert (two["low"], str(two["ten"]), str(two["half"]), two["none"]) == (
            -math.inf,
            "10.00",
            "1.50",
            None,
        )


def test_a_drop_whose_end_is_not_known_is_asked_for_again(engine: Any, cluster: Cluster) -> None:
    """It ends once the nodes answer, however long one call waits for them."""
    with Client(cluster.master_addresses) as client:
        client.create_table("left", SCHEMA)
        silent = cluster.nodes[:2]  # no majority is left that could take the table over
        for node in silent:
            cluster.pause(node)
        try:
            with ThreadPoolExecutor(1) as threads:
                drop = threads.submit(engine.sql, "DROP TABLE st.left")
                with pytest.raises(TimeoutError):
                    drop.result(timeout=LONGER_THAN_A_CALL_S)
                for node in silent:
                    cluster.resume(node)
                drop.result()
        finally:
            for node in silent:
                cluster.resume(node)
        assert [each.name for each in client.dropped_tables()].count("left") == 1
    for node in silent:
        asyncio.run(cluster.wait_ready(node))


def test_both_readers_know_the_same_options(engine: Any, cluster: Cluster) -> None:
    from stele_spark.options import OPTIONS

    with pytest.raises(Exception, match='unknown option "colour"') as caught:
        loaded(engine, cluster, colour="red")
    there = ", ".join(f'"{key}" ({what})' for key, what in OPTIONS.items())
    assert f"options are {there}" in str(caught.value)
    for option in ("op", "op_column", "rejects", "job"):
        with pytest.raises(Exception, match=f'"{option}" is an option of a write, not of a read'):
            loaded(engine, cluster, **{option: "insert"})
    with pytest.raises(Exception, match='"cursor" is an option of a stream, not of a read'):
        engine.sql("SELECT * FROM st.t WITH (`cursor` = 'c')").collect()


def test_a_master_that_is_not_there_is_told_in_one_sentence(engine: Any) -> None:
    with pytest.raises(Exception, match=r"no master answers: 127\.0\.0\.1:9: ") as caught:
        engine.read.format("stele").options(masters="127.0.0.1:9", table="t").load()
    assert len(str(caught.value).splitlines()) <= 2
