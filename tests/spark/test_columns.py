"""Names and types of columns: names in any case, the option `columns`, wider types than the table's. Both readers."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from stele.client import Client
from stele.model.schema import Schema

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default")]

SCHEMA = Schema.make([("id", "int64"), ("Name", "string", True), ("amount", "double", True)], ["id"])
NUMBERS = Schema.make(
    [
        ("id", "int64"),
        ("tiny", "int8", True),
        ("small", "int16", True),
        ("medium", "int32", True),
        ("ratio", "float", True),
        ("price", "decimal(9,2)", True),
        ("day", "date", True),
    ],
    ["id"],
)
VALUES = {
    "id": [-(2**63), 2**63 - 1, 1, 2],
    "tiny": [-128, 127, None, 0],
    "small": [-(2**15), 2**15 - 1, None, 0],
    "medium": [-(2**31), 2**31 - 1, None, None],
    "ratio": [0.1, math.nan, 3.4028234663852886e38, None],
    "price": [*map(decimal.Decimal, ("-9999999.99", "9999999.99", "0.01")), None],
    "day": [dt.date(2024, 1, 1)] * 4,
}
WIDER = [
    {"tiny": "smallint", "small": "int", "medium": "bigint", "ratio": "double", "price": "decimal(10,2)"},
    {"tiny": "int", "small": "bigint", "medium": "double", "price": "decimal(11,4)", "id": "decimal(20,0)"},
    {"tiny": "bigint", "small": "float", "medium": "decimal(10,0)", "price": "decimal(38,18)"},
    {"id": "decimal(22,2)", "tiny": "float", "small": "double", "medium": "decimal(13,3)"},
    {"tiny": "double", "small": "decimal(5,0)"},
    {"small": "bigint", "tiny": "decimal(3,0)"},
]
COMPARED = {
    "medium > 3000000000": 0,
    "medium < 3000000000": 2,
    "ratio > 0.1": 3,  # 0.1 as a float is more, and NaN is more in Spark
    "id = 1.5": 0,
    "id = 1": 1,
}
NARROWER = [
    ("id", "double", "bigint"),
    ("id", "int", "bigint"),
    ("id", "decimal(19,0)", "bigint"),
    ("medium", "float", "int"),
    ("medium", "decimal(12,3)", "int"),
    ("ratio", "decimal(9,2)", "float"),
    ("price", "decimal(9,1)", "decimal(9,2)"),
    ("price", "decimal(9,3)", "decimal(9,2)"),
    ("price", "double", "decimal(9,2)"),
    ("day", "timestamp", "date"),
    ("tiny", "string", "tinyint"),
]
WIDE = Schema.make(
    [
        ("id", "int64"),
        ("n", "int64", True),
        ("d", "double", True),
        ("f", "float", True),
        ("p", "decimal(12,3)", True),
        ("at", "timestamp", True),
    ],
    ["id"],
)
ROWS = [(n, f"n{n}", n / 4) for n in range(6)]


@pytest.fixture(scope="module")
def masters(masters: str) -> str:
    """The cluster, with the tables that are read."""
    with Client(masters) as client:
        ids, names, amounts = map(list, zip(*ROWS))
        client.create_table("mixed", SCHEMA).write_arrow(
            pa.table({"id": ids, "Name": names, "amount": amounts})
        )
        numbers = client.create_table("numbers", NUMBERS)
        numbers.write_arrow(pa.table(VALUES, schema=numbers.arrow_schema))
    return masters


def texts(frame: Any) -> list[tuple[str, ...]]:
    """Rows as text, in which NaN is NaN."""
    return sorted(tuple(map(str, row)) for row in frame.collect())


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


def test_a_wider_type_may_be_asked_for_and_no_value_changes(read: Callable[..., Any]) -> None:
    """Each value is what Spark's own cast makes of it."""
    plain = read("numbers").load()
    for wider in WIDER:
        frame = read("numbers").schema(", ".join(f"{name} {kind}" for name, kind in wider.items())).load()
        expected = plain.selectExpr(*(f"CAST({name} AS {kind}) AS {name}" for name, kind in wider.items()))
        assert frame.dtypes == expected.dtypes
        assert texts(frame) == texts(expected), wider
    frame = read("numbers").schema("id decimal(22,2), medium long, ratio double").load()
    assert {text: frame.where(text).count() for text in COMPARED} == COMPARED
    for name, kind, was in NARROWER:
        frame = read("numbers").schema(f"{name} {kind}").load()
        is_refused(f"'{name}' is {was} in the table, not {kind}", frame.collect)


def test_a_narrower_type_is_written_and_no_value_changes(spark: Any, masters: str) -> None:
    def save(columns: dict[str, str]) -> None:
        chosen = spark.createDataFrame(values, of_all).selectExpr(
            *(f"CAST({name} AS {kind}) AS {name}" for name, kind in columns.items())
        )
        chosen.write.format("stele").options(masters=masters, table="wide").mode("append").save()

    values, of_all = [(1, 7, 7, 1, 5), (2, -128, -3, None, -9)], "id int, n int, d int, f int, p int"
    with Client(masters) as client:
        table = client.create_table("wide", WIDE)
        for kinds in (
            {"id": "int", "n": "smallint", "d": "int", "f": "smallint", "p": "decimal(8,2)"},
            {"id": "tinyint", "n": "tinyint", "d": "float", "f": "tinyint", "p": "smallint"},
            {"id": "smallint", "n": "int", "d": "smallint", "f": "float", "p": "tinyint"},
        ):
            save(kinds)
            assert table.scan(ordered=True).to_table().select(list(kinds)).to_pylist() == [
                {"id": 1, "n": 7, "d": 7.0, "f": 1.0, "p": decimal.Decimal(5)},
                {"id": 2, "n": -128, "d": -3.0, "f": None, "p": decimal.Decimal(-9)},
            ]
            table.write_arrow(pa.table({"id": [1, 2], "n": [0, 0]}))
        for name, kind, was in (
            ("d", "bigint", "double"),
            ("f", "int", "float"),
            ("f", "double", "float"),
            ("n", "float", "bigint"),
            ("n", "decimal(5,0)", "bigint"),
            ("p", "int", "decimal(12,3)"),
            ("p", "decimal(12,2)", "decimal(12,3)"),
            ("p", "decimal(9,4)", "decimal(12,3)"),
            ("n", "string", "bigint"),
        ):
            said = f"'{name}' is {was} in the table, not {kind}"
            is_refused(said, partial(save, {"id": "int", name: kind}))
        day = spark.sql("SELECT 1 AS id, DATE '2024-01-01' AS at")
        sink = day.write.format("stele").options(masters=masters, table="wide").mode("append")
        is_refused("'at' is timestamp in the table, not date", sink.save)
