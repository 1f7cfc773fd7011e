"""Tables that SQL creates by the JVM catalog, with and without rows; and that none is ever replaced or emptied."""

from __future__ import annotations

from typing import Any

import pytest

from stele.client import Client
from stele.model.schema import Schema
from tests.harness.processes import Cluster
from tests.spark.readers import with_catalog

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default")]

SCHEMA = Schema.make([("id", "int64"), ("name", "string", True)], ["id"])
KEY = "TBLPROPERTIES ('primary_key' = 'id')"
ROWS = "SELECT id, string(id) AS name FROM range(10)"


@pytest.fixture
def engine(spark: Any, masters: str) -> Any:
    return with_catalog(spark, masters)


def test_a_table_is_never_replaced(engine: Any, processes: Cluster) -> None:
    """Spark drops a table that is replaced, unless the catalog says that it stages tables."""
    rows = engine.sql(ROWS)
    new = rows.writeTo("st.kept").tableProperty("primary_key", "id")
    ways = {
        "CREATE OR REPLACE TABLE": lambda: engine.sql(
            f"CREATE OR REPLACE TABLE st.kept (id BIGINT, name STRING) {KEY}"
        ),
        "... AS SELECT": lambda: engine.sql(f"CREATE OR REPLACE TABLE st.kept {KEY} AS {ROWS}"),
        "REPLACE TABLE": lambda: engine.sql(f"REPLACE TABLE st.kept (id BIGINT) {KEY}"),
        "REPLACE TABLE ... AS SELECT": lambda: engine.sql(f"REPLACE TABLE st.kept {KEY} AS {ROWS}"),
        "createOrReplace()": new.createOrReplace,
        "replace()": new.replace,
        "saveAsTable": lambda: rows.write.mode("overwrite").saveAsTable("st.kept"),
        "saveAsTable of stele": lambda: rows.write.format("stele").mode("overwrite").saveAsTable("st.kept"),
    }
    with Client(processes.master_addresses) as client:
        table = client.create_table("kept", SCHEMA)
        table.put({"id": 7, "name": "seven"})
        before = client.describe("kept").table_id
        for what, way in ways.items():
            with pytest.raises(Exception, match="the table exists, and tables are not replaced") as told:
                way()
            assert type(told.value).__name__ == "AnalysisException", what
            assert client.describe("kept").table_id == before, what
        for statement in (
            f"INSERT OVERWRITE st.kept {ROWS}",
            "TRUNCATE TABLE st.kept",
            "DELETE FROM st.kept",
            "DELETE FROM st.kept WHERE id = 7",
            "UPDATE st.kept SET name = 'x'",
        ):
            with pytest.raises(Exception, match=r"never empties|truncates|deletes|UPDATE"):
                engine.sql(statement)
        assert table.scan().to_table().to_pylist() == [{"id": 7, "name": "seven"}]
        assert not client.dropped_tables()


def test_create_or_replace_creates_where_there_is_nothing(engine: Any, processes: Cluster) -> None:
    engine.sql(f"CREATE OR REPLACE TABLE st.fresh (id BIGINT, name STRING) {KEY}")
    engine.sql(f"CREATE OR REPLACE TABLE st.filled {KEY} AS {ROWS}")
    engine.sql(ROWS).writeTo("st.written").tableProperty("primary_key", "id").createOrReplace()
    with Client(processes.master_addresses) as client:
        counts = {
            name: client.open_table(name).scan().to_table().num_rows
            for name in ("fresh", "filled", "written")
        }
    assert counts == {"fresh": 0, "filled": 10, "written": 10}
    with pytest.raises(Exception, match="TABLE_OR_VIEW_NOT_FOUND"):
        engine.sql(f"REPLACE TABLE st.nowhere (id BIGINT) {KEY}")


def test_create_as_select_leaves_no_table_without_its_rows(engine: Any, processes: Cluster) -> None:
    engine.sql(f"CREATE TABLE st.chosen PARTITIONED BY (bucket(2, id)) {KEY} AS {ROWS}")
    engine.sql(f"CREATE TABLE IF NOT EXISTS st.chosen {KEY} AS SELECT id + 100 AS id, name FROM ({ROWS})")
    with pytest.raises(Exception, match="TABLE_OR_VIEW_ALREADY_EXISTS"):
        engine.sql(f"CREATE TABLE st.chosen {KEY} AS {ROWS}")
    with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
        engine.sql(
            f"CREATE TABLE st.failed {KEY} AS SELECT id, string(1 div (5 - id)) AS name FROM range(10)"
        )
    with Client(processes.master_addresses) as client:
        assert client.open_table("chosen").scan().to_table().num_rows == 10
        assert len(client.describe("chosen").partitioning) == 1
        assert "failed" not in {table.name for table in client.list_tables()}


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("(id BIGINT) USING parquet", "tables of this catalog are tables of Stele: leave out USING parquet"),
        ("(id BIGINT) LOCATION '/somewhere'", "nodes keep the table's rows; leave out LOCATION"),
        ("(id BIGINT) OPTIONS (op 'insert')", "take no options; leave out option 'op'"),
    ],
)
def test_what_a_table_cannot_be(engine: Any, statement: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        engine.sql(f"CREATE TABLE st.odd {statement} {KEY}")
    assert not engine.sql("SHOW TABLES IN st LIKE 'odd'").collect()


@pytest.mark.parametrize("reader", ["jvm", "python"])
def test_a_stream_needs_to_know_where_it_starts(engine: Any, masters: str, reader: str) -> None:
    engine.conf.set("spark.stele.reader", reader)
    try:
        with pytest.raises(Exception, match='"startingSnapshot" is missing') as told:
            engine.readStream.format("stele").options(masters=masters, table="kept").load()
        assert type(told.value).__name__ == "AnalysisException"
    finally:
        engine.conf.unset("spark.stele.reader")
