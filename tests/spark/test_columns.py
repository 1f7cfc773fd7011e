"""Which columns of a table a frame has, and by which names: names in any case, the option `columns`. Both readers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from stele.client import Client
from stele.model.schema import Schema
from tests.spark.readers import READERS, need_jar

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default")]

SCHEMA = Schema.make([("id", "int64"), ("Name", "string", True), ("amount", "double", True)], ["id"])
ROWS = [(n, f"n{n}", n / 4) for n in range(6)]


@pytest.fixture(scope="module")
def masters(masters: str) -> str:
    """The cluster, with the tables that are read."""
    with Client(masters) as client:
        ids, names, amounts = map(list, zip(*ROWS))
        client.create_table("mixed", SCHEMA).write_arrow(
            pa.table({"id": ids, "Name": names, "amount": amounts})
        )
    return masters


@pytest.fixture(params=READERS)
def read(request: pytest.FixtureRequest, spark: Any, masters: str) -> Callable[..., Any]:
    """A reader of a table with these options, by either reader."""
    if request.param == "jvm":
        need_jar()
    spark.conf.set("spark.stele.reader", request.param)
    return lambda table, **options: spark.read.format("stele").options(
        masters=masters, table=table, **options
    )


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, frame.collect()))


def is_refused(said: str, act: Callable[[], object]) -> None:
    with pytest.raises(Exception, match=re.escape(said)):
        act()


def test_names_are_read_in_any_case(read: Callable[..., Any]) -> None:
    frame = read("mixed", where="ID >= 1 AND name IS NOT NULL").schema("NAME string, ID long").load()
    assert frame.columns == ["NAME", "ID"]
    assert rows(frame) == [(name, n) for n, name, _ in ROWS[1:]]
    assert rows(frame.where("iD < 4 AND Name != 'n2'").select("id")) == [(1,), (3,)]
    assert frame.where("id = 3").count() == 1
    is_refused("'Id' is given twice", read("mixed").schema("ID long, Id long").load().collect)


def test_names_are_written_in_any_case(spark: Any, masters: str) -> None:
    written = spark.createDataFrame(
        [(1, "a", "upsert"), (2, "b", "insert"), (7, "c", "delete_ignore")], "ID long, NAME string, Op string"
    )
    with Client(masters) as client:
        table = client.create_table("written", SCHEMA)

        def save(frame: Any, **options: str) -> None:
            sink = frame.write.format("stele").options(masters=masters, table="written", **options)
            sink.mode("append").save()

        save(written, op_column="OP")
        save(written.select("name", "id"))
        found = table.scan(columns=["id", "Name"]).to_table().sort_by("id").to_pydict()
        assert found == {"id": [1, 2, 7], "Name": ["a", "b", "c"]}
    is_refused("'ID' is also a column of the table", lambda: save(written, op_column="ID"))


def test_the_columns_to_read_are_named_in_an_option(
    read: Callable[..., Any], spark: Any, masters: str
) -> None:
    frame = read("mixed", columns="AMOUNT, id", where="Name = 'n3'").load()
    assert frame.columns == ["amount", "id"] and rows(frame) == [(0.75, 3)]
    assert read("mixed", columns="id").load().count() == len(ROWS)
    options = f"masters '{masters}', table 'mixed', columns 'name'"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW names USING stele OPTIONS ({options})")
    assert rows(spark.sql("SELECT * FROM names WHERE name < 'n2'")) == [("n0",), ("n1",)]
    same = read("mixed", columns="name, id").schema("NAME string, id long").load()
    assert len(rows(same)) == len(ROWS)

    said = "columns: the table has no column 'who'; 'ID' is given twice; the table has id, Name, amount"
    is_refused(said, read("mixed", columns="id,who,ID").load)
    is_refused("\"columns\" is 'id,,name': expected names", read("mixed", columns="id,,name").load)
    is_refused("\"columns\" is '': expected names", read("mixed", columns="").load)
    other = read("mixed", columns="id").schema("id long, amount double").load()
    is_refused('"columns" names id, but .schema(...) names id, amount; give one', other.collect)
    write = frame.write.format("stele").options(masters=masters, table="mixed", columns="id").mode("append")
    is_refused('"columns" is an option of a read, not of a write', write.save)
