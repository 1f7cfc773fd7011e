"""Schemas: all faults at once, JSON and Arrow and back."""

from __future__ import annotations

import datetime
import decimal
import fractions

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from stele.model import column
from stele.model.column import Column, arrow_type, type_name
from stele.model.errors import Rejected
from stele.model.ids import ColumnId, SchemaVersion
from stele.model.schema import Schema


def test_every_fault_is_named_at_once() -> None:
    columns = (
        Column(ColumnId(0), "ok", "int64"),
        Column(ColumnId(1), "1bad", "int64"),
        Column(ColumnId(2), "OK", "string"),
        Column(ColumnId(2), "twice", "string"),
        Column(ColumnId(9), "far", "string"),
        Column(ColumnId(3), "odd", "int128"),
        Column(ColumnId(4), "nokey", "double", True),
        Column(ColumnId(5), "deflt", "int32", False, '"x"'),
        Column(ColumnId(6), "dec", "decimal(50,2)"),
        Column(ColumnId(7), "__stele_x", "bool"),
    )
    with pytest.raises(Rejected) as caught:
        Schema(SchemaVersion(0), columns, (ColumnId(4), ColumnId(8), ColumnId(4)), 9)
    message = str(caught.value)
    for part in (
        "the version is 0",
        "'1bad'",
        "OK: the name is used twice",
        "twice: the id 2",
        "far: its id 9",
        "int128",
        "nokey: a key column cannot be nullable",
        "nokey: a double cannot be a key",
        "deflt: the default",
        "decimal(50,2)",
        "reserved for Stele",
        "key column id 8",
        "it names a column twice",
    ):
        assert part in message, part
    with pytest.raises(Rejected, match=r"no columns.*no key"):
        Schema(SchemaVersion(1), (), (), 0)
    with pytest.raises(Rejected, match="nowhere"):
        Schema.make([("a", "int64")], ["nowhere"])


def test_json_round_trip_and_arrow() -> None:
    schema = Schema.make(
        [("a", "int64"), ("b", "decimal(9,2)", True), ("c", "timestamp", False, '"2024-01-01"')], ["a"]
    )
    assert Schema.from_json(schema.to_json()) == schema
    assert schema.to_arrow().names == ["a", "b", "c"]
    assert schema.to_arrow([2, 0]).types == [pa.timestamp("us", tz="UTC"), pa.int64()]
    assert schema.is_key(0)
    assert not schema.is_key(1)
    with pytest.raises(Rejected):
        schema.to_arrow([7])
    for bad in ("", "{}", "[1]", schema.to_json().replace("int64", "int65")):
        with pytest.raises(Rejected):
            Schema.from_json(bad)


@pytest.mark.parametrize(
    ("type_", "default", "value"),
    [
        ("bool", "true", True),
        ("int8", "-5", -5),
        ("float", "1", 1.0),
        ("decimal(5,2)", '"1.25"', decimal.Decimal("1.25")),
        ("string", '"x"', "x"),
        ("binary", '"AAE="', b"\x00\x01"),
        ("date", '"2024-02-29"', datetime.date(2024, 2, 29)),
        ("timestamp", '"2024-02-29T01:02:03Z"', datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.UTC)),
    ],
)
def test_defaults_are_json(type_: str, default: str, value: object) -> None:
    assert Column(ColumnId(0), "c", type_, False, default).default_scalar().as_py() == value


@pytest.mark.parametrize(
    ("type_", "default"),
    [
        ("int8", "300"),
        ("bool", "1"),
        ("int32", "true"),
        ("int64", "1.5"),
        ("int64", '"5"'),
        ("date", '"x"'),
        ("date", "5"),
        ("string", "x"),
        ("string", "5"),
        ("timestamp", "1.5"),
        ("decimal(5,2)", '"1.255"'),
        ("decimal(5,2)", "true"),
        ("int64", 5),
    ],
)
def test_bad_defaults_are_refused(type_: str, default: str) -> None:
    with pytest.raises(Rejected, match=r"column c: the default .* (is not|expected JSON)"):
        Column(ColumnId(0), "c", type_, False, default).default_scalar()
    with pytest.raises(Rejected, match="schema: column c: the default"):
        Schema.make([("k", "int64"), ("c", type_, True, default)], ["k"])


@pytest.mark.parametrize(
    ("type_", "default", "taken", "why"),
    [
        (
            "decimal(38,20)",
            "0.1234567890123456789",
            decimal.Decimal("0.12345678901234568"),
            "it would be read as 0.12345678901234568; write it as text",
        ),
        ("decimal(5,2)", "1e-99999999999999999999", 0, "it would be read as 0.0; write it as text"),
        ("int64", "9007199254740993.0", 2**53, "it would be read as 9007199254740992.0; write it without"),
        ("int64", "9.223372036854775e18", 9223372036854774784, "it would be read as 9.223372036854775e+18;"),
        (
            "timestamp",
            '"2024-01-01T00:00:00.1234567Z"',
            datetime.datetime(2024, 1, 1, 0, 0, 0, 123456, datetime.UTC),
            "it is finer than a microsecond",
        ),
        (
            "timestamp",
            '"2024-01-01T12:00.5"',
            datetime.datetime(2024, 1, 1, 12, 0, 0, 500_000, datetime.UTC),
            "only seconds may have a fraction",
        ),
        ("double", "1e400", float("inf"), "it is too large"),
        ("float", " -1e400 ", float("-inf"), "it is too large"),
    ],
)
def test_a_default_that_is_not_taken_as_it_stands_is_told_and_reads_as_ever_where_it_is_stored(
    type_: str, default: str, taken: object, why: str
) -> None:
    """Rows have it by then, and all replicas must give the same."""
    schema = Schema.make([("k", "int64"), ("c", type_, False, default)], ["k"])
    column = Schema.from_json(schema.to_json()).by_name["c"]
    assert column.default_scalar().as_py() == taken
    assert column.default_fault().startswith(f"column c: the default {default} is not {column.a_type} ({why}")


@pytest.mark.parametrize(
    ("type_", "default"),
    [
        ("decimal(38,20)", '"0.1234567890123456789"'),
        ("decimal(5,2)", "1.250"),
        ("decimal(5,2)", "5"),
        ("int64", "7.0"),
        ("int64", "9223372036854775807"),
        ("double", "0.1234567890123456789"),
        ("double", "Infinity"),
        ("double", "1e-400"),
        ("timestamp", '"2024-01-01T00:00:00.123456000Z"'),
        ("timestamp", "null"),
        ("date", '"2024-01-01"'),
        ("string", '"1e400"'),
        ("bool", "true"),
        ("int64", None),
    ],
)
def test_a_default_that_is_taken_as_it_stands_has_no_fault(type_: str, default: str | None) -> None:
    assert Column(ColumnId(0), "c", type_, True, default).default_fault() == ""


@pytest.mark.parametrize("default", ['"9999-12-31T23:59:59-05:00"', '"0001-01-01T00:00:00+14:00"'])
def test_a_default_that_python_cannot_hold_in_utc_has_a_fault_and_harms_no_reader(default: str) -> None:
    column = Column(ColumnId(0), "c", "timestamp", True, default)
    assert "outside of the years 1 to 9999" in column.default_fault()
    assert column.default_text() == default, "a table of an earlier release may have it"


@pytest.mark.parametrize(
    ("type_", "default", "text"),
    [
        ("decimal(10,2)", '"1_0"', '"10.00"'),
        ("decimal(10,2)", '" 1.5 "', '"1.50"'),
        ("timestamp", '"2026-01-31T12:00+02:00"', '"2026-01-31T10:00:00+00:00"'),
        ("int64", "7", "7"),
        ("string", None, None),
    ],
)
def test_other_programs_get_a_default_in_one_form(type_: str, default: str | None, text: str | None) -> None:
    assert Column(ColumnId(0), "c", type_, True, default).default_text() == text


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("int64", 1.5),
        ("int64", decimal.Decimal("Infinity")),
        ("int64", decimal.Decimal("sNaN")),
        ("int64", decimal.Decimal("1e30")),
        ("int64", fractions.Fraction(1, 2)),
        ("int64", np.float64("inf")),
        ("int64", True),
        ("int8", 300),
        ("int64", "1"),
        ("int64", [1]),
        ("string", 5),
        ("string", object()),
        ("bool", 1),
        ("timestamp", 0.5),
        ("date", "2024-01-01"),
        ("decimal(5,2)", 1.5),
        ("date", datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)),
        ("date", pd.Timestamp("2024-05-01")),
        ("date", pd.NaT),
        ("date", np.True_),
        ("timestamp", pd.Timestamp("2024-05-01T00:00:00.123456789")),
        ("float", 1e300),
        ("float", np.float64(-1e39)),
        ("float", True),
        ("double", True),
        ("double", np.True_),
        ("decimal(5,2)", True),
    ],
)
def test_a_column_says_why_a_value_is_none_of_its_own(type_: str, value: object) -> None:
    column = Column(ColumnId(0), "c", type_)
    why = column.fault(value)
    assert why.startswith("column c: ") and f"is not {column.a_type} (" in why
    with pytest.raises(Rejected) as caught:
        column.array([None, value])
    assert caught.value.args[0] == why


def test_of_types_that_are_not_looked_at_no_value_would_have_been_found_at_fault() -> None:
    day, moment = datetime.date(2024, 5, 1), datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)
    nan, inf = float("nan"), float("inf")
    values = (None, 0, -1, 2**70, 0.5, nan, inf, day, moment, moment.replace(tzinfo=None))
    for type_, sound in column._SOUND.items():
        find = column._fault_finder(arrow_type(type_))
        given = [value for value in values if type(value) in sound]
        assert find is not None and {type(value) for value in given} == sound
        assert not any(map(find, given))


def test_a_column_takes_what_is_whole_and_the_names_of_types_have_their_article() -> None:
    column = Column(ColumnId(0), "c", "int64")
    given = [None, 1, 2.0, decimal.Decimal("3.00"), fractions.Fraction(4), np.int8(5), np.float32(6)]
    assert column.array(given).to_pylist() == [None, 1, 2, 3, 4, 5, 6]
    inexact = Column(ColumnId(0), "c", "float").array([None, 0.1, 3.4e38, float("inf"), 2])
    assert inexact.to_pylist() == [None, float(np.float32(0.1)), float(np.float32(3.4e38)), float("inf"), 2]
    moment = pd.Timestamp("2024-05-01T00:00:00.123456Z")
    assert Column(ColumnId(0), "c", "timestamp").array([moment]).to_pylist() == [moment.to_pydatetime()]
    assert [Column(ColumnId(0), "c", t).a_type for t in ("int8", "bool")] == ["an int8", "a bool"]
    assert len(column.fault("x" * 10_000)) < 400


def test_type_names() -> None:
    for name in ("bool", "int16", "double", "decimal(9,2)", "string", "timestamp", "date"):
        assert type_name(arrow_type(name)) == name
    assert type_name(pa.uint32()) == "int64"
    assert type_name(pa.timestamp("ns")) == "timestamp"
    with pytest.raises(Rejected):
        type_name(pa.list_(pa.int8()))
    with pytest.raises(Rejected):
        arrow_type("decimal(3,4)")


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        ("string", 5, "it is of type int; expected a str"),
        ("binary", 5, "it is of type int; expected bytes"),
        ("bool", 5, "it is of type int; expected a bool"),
        ("int64", "5", "it is of type str; expected an int"),
        ("double", "5", "it is of type str; expected a float"),
        ("decimal(4,2)", 0.5, "it is of type float; expected a Decimal"),
        ("date", "2024-05-01", "it is of type str; expected a date"),
        ("timestamp", datetime.date(2024, 5, 1), "it is of type date; expected a datetime"),
        ("timestamp", pd.NaT, "it is pandas' null; pass None"),
        ("date", pd.NaT, "it is pandas' null; pass None"),
        ("int64", pd.NA, "it is pandas' null; pass None"),
        ("timestamp", np.datetime64("2024-05-01T00:00:00"), "it is a numpy value; pass its item()"),
        ("int64", np.datetime64("2024-05-01T00:00:00", "ns"), "it is a numpy value; pass its item()"),
        ("int64", np.timedelta64(5, "ns"), "it is a numpy value; pass its item()"),
        ("int8", 300, "it is out of range"),
        ("int64", -(2**70), "it is out of range"),
        ("int64", 1.5, "it is not a whole number"),
    ],
)
def test_a_value_of_another_type_is_told_in_words_of_python(kind: str, value: object, why: str) -> None:
    column = Schema.make([("id", "int64"), ("v", kind, True)], ["id"]).by_name["v"]
    assert column.fault(value) == f"column v: {value!r} is not {column.a_type} ({why})"
