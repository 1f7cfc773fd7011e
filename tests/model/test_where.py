"""Conditions as text: what is understood, and what is said of what is not."""

from __future__ import annotations

import datetime
import time

import pytest

from stele.model.errors import Rejected
from stele.model.schema import Schema
from stele.model.where import parse_where

SCHEMA = Schema.make(
    [
        ("id", "int64"),
        ("name", "string", True),
        ("v", "double", True),
        ("at", "timestamp", True),
        ("price", "decimal(10,2)", True),
        ("ok", "bool", True),
    ],
    ["id"],
)


def test_conditions() -> None:
    text = (
        "id >= -3 AND name = 'it''s' and v < 1.5e3 AND at > '2013-01-01T05:00:00' AND price != 3.10 AND ok = TRUE "
        "AND name IS NULL AND name IS NOT NULL AND id IN (1, 2,3)"
    )
    found = parse_where(text, SCHEMA)
    assert [(c, o) for c, o, _ in found] == [
        ("id", ">="),
        ("name", "="),
        ("v", "<"),
        ("at", ">"),
        ("price", "!="),
        ("ok", "="),
        ("name", "is_null"),
        ("name", "is_not_null"),
        ("id", "in"),
    ]
    assert [found[i][2] for i in (0, 1, 2, 5, 8)] == [-3, "it's", 1500.0, True, [1, 2, 3]]
    assert str(found[3][2]) == "2013-01-01 05:00:00+00:00"
    assert parse_where("v >= .5 AND v <> -.5e1", SCHEMA) == [("v", ">=", 0.5), ("v", "!=", -5.0)]
    noon = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)
    text = (
        "at IN ('2024-05-01T12:00:00.000000000Z', '20240501T120000,5', '2024-05-01 14:00:00.1234560+02:00')"
    )
    assert parse_where(text, SCHEMA)[0][2] == [
        noon + datetime.timedelta(microseconds=part) for part in (0, 500_000, 123_456)
    ]


def test_names_of_columns_are_taken_in_any_case() -> None:
    assert parse_where("ID = 1 AND Name = 'x'", SCHEMA) == [("id", "=", 1), ("name", "=", "x")]


def test_names_in_quotes_are_taken_as_they_are() -> None:
    assert parse_where("\"id\" = 1 AND `name` = 'x'", SCHEMA) == [("id", "=", 1), ("name", "=", "x")]


def test_blanks_at_the_end_cost_next_to_nothing() -> None:
    begun = time.thread_time()
    assert parse_where("id = 1" + " " * 60_000, SCHEMA) == [("id", "=", 1)]
    assert time.thread_time() - begun < 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "ends too early; expected COLUMN OPERATOR VALUE"),
        ("id", "ends too early"),
        ("id =", "ends too early"),
        ("id = 1 and", "ends too early"),
        ("id = 1 OR id = 2", "conditions are joined by AND; there is no OR (for several values"),
        ("id = 1 || id = 2", "there is no OR"),
        ("id = 1 & id = 2", "conditions are joined by AND, not &"),
        ("id = 1 && id = 2", "conditions are joined by AND, not &&"),
        ("id = 1, v = 2", "conditions are joined by AND, not by commas"),
        ("id = 1 v = 2", "expected AND before v"),
        ("id >= 1 <= 5", "expected AND before <="),
        ("id = 1;", "leave out the ;"),
        ("(id = 1)", "write conditions without parentheses, joined by AND"),
        ("NOT id = 1", "there is no NOT; use the opposite operator, such as != for ="),
        ("colour = 1", "no column colour; expected one of id, name"),
        ("1 = id", "1 where a column is expected; write COLUMN OPERATOR VALUE"),
        ('"ID" = 1', "no column ID; expected one of id, name"),
        ("`i d` = 1", "no column i d; expected one of id, name"),
        ("id == 1", "use = instead of =="),
        ("id => 1", "use >= instead of =>"),
        ("id =< 1", "use <= instead of =<"),
        ("id ~ 1", "~ after id; expected =, !=, <, <=, >, >=, IN, IS NULL or IS NOT NULL"),
        ("name like 'U%'", "there is no LIKE; text that begins with U is name >= 'U' AND name < 'V'"),
        ("name LIKE 'Os%'", "text that begins with Os is name >= 'Os' AND name < 'Ot'"),
        ("name LIKE 'Oslo'", "there is no LIKE; use name = 'Oslo'"),
        ("name LIKE '%lo'", "there is no LIKE; compare whole values"),
        ("name LIKE '%'", "there is no LIKE; compare whole values"),
        ("name LIKE 'a_b%'", "there is no LIKE; compare whole values"),
        ("name LIKE", "it ends too early"),
        ("id between 1 and 5", "there is no BETWEEN; use id >= LOW AND id <= HIGH"),
        ("id not in (1, 2)", "there is no NOT IN; use id != A AND id != B"),
        ("id IN (1", "ends too early"),
        ("id IN 1", "expected ( after IN, like id IN (7)"),
        ("id IN ()", ") where a value of id is expected, like 7"),
        ("id IN (1 2)", "expected , or ) in the list after IN"),
        ("id IS 1", "expected IS NULL or IS NOT NULL after id"),
        ("name = null", "a comparison with null is never true; use name IS NULL or IS NOT NULL"),
        ("name = UA", "UA is not a string; column name is compared with one like 'UA'; put text in ''"),
        ('name = "UA"', "\"UA\": put text in '', like 'UA'"),
        ("name = 'UA", "a ' has no end; put text in '', and write a ' within it as ''"),
        ("name = 'it's'", "a ' has no end"),
        ("id = 'one'", "'one' is not an int64; column id is compared with one like 7"),
        ("id > 1.5", "1.5 is not an int64"),
        ("id > v", "v is a column; id is compared with a value, not with a column"),
        (
            "at > 2013-01-01",
            "2013 is not a timestamp; column at is compared with one like '2026-01-31T12:00:00Z'",
        ),
        ("at = 'soon'", "'soon' is not a timestamp"),
        (
            "at < '2024-01-01T00:00:00.1234567'",
            "'2024-01-01T00:00:00.1234567' is not a timestamp (it is finer than a microsecond)",
        ),
        ("at = '20240101T000000,0000001000Z'", "is not a timestamp (it is finer than a microsecond)"),
        ("at = '2024-01-01T12:00.5'", "is not a timestamp (only seconds may have a fraction)"),
        ("at = '2024-01-01T12.5Z'", "is not a timestamp (only seconds may have a fraction)"),
        ("v = 1e400", "1e400 is not a double (it is too large)"),
        ("v IN (1, -1e400)", "-1e400 is not a double (it is too large)"),
        ("ok = 1", "1 is not a bool; column ok is compared with one like true"),
        ("price = 'x'", "'x' is not a decimal(10,2); column price is compared with one like 1.5"),
        pytest.param("name{6 IN (1)", "{ after name", id="braces"),
    ],
)
def test_conditions_that_are_not_understood(text: str, words: str) -> None:
    with pytest.raises(Rejected, match="where ") as caught:
        parse_where(text, SCHEMA)
    assert words in str(caught.value)
