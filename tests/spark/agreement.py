"""Rows and conditions on which the nodes' `where` and Spark's own filters may differ: nulls, NaN, zeros, bounds, text, time."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from typing import Any

import pyarrow as pa

from stele.model.schema import Schema

SCHEMA = Schema.make(
    [
        ("id", "int64"),
        ("tiny", "int8", True),
        ("d", "double", True),
        ("f", "float", True),
        ("s", "string", True),
        ("m", "timestamp", True),
        ("day", "date", True),
        ("p", "decimal(12,2)", True),
        ("ok", "bool", True),
    ],
    ["id"],
)
LOWEST, HIGHEST = -(2**63), 2**63 - 1
_NUMBERS = [0.0, -0.0, 1.5, -1.5, math.nan, math.inf, -math.inf, 1.7976931348623157e308, 5e-324]
_TEXTS = ["", "a", "A", "a ", "it's", "é", "z", "\uffff", "\U0001f600", "a\x00b"]
_TIMES = [
    dt.datetime(1970, 1, 1, tzinfo=dt.UTC),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC),
    dt.datetime(2024, 5, 1, 10, tzinfo=dt.UTC),
    dt.datetime(2024, 5, 1, 10, 0, 0, 1, tzinfo=dt.UTC),
    dt.datetime(1883, 11, 18, 12, tzinfo=dt.UTC),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC),
]
_DAYS = [dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(2024, 2, 29), dt.date(9999, 12, 31)]
_PRICES = [decimal.Decimal(text) for text in ("0.00", "-0.01", "12.34", "9999999999.99")]


def _pick(values: list[Any], n: int) -> Any:
    return values[n] if n < len(values) else None


def rows() -> pa.Table:
    """Each value of each column once, then nulls; keys at the bounds."""
    made = [
        {
            "id": key,
            "tiny": _pick([-128, 127, 0], n),
            "d": _pick(_NUMBERS, n),
            "f": _pick([0.0, -0.0, 0.1, math.nan, math.inf], n),
            "s": _pick(_TEXTS, n),
            "m": _pick(_TIMES, n),
            "day": _pick(_DAYS, n),
            "p": _pick(_PRICES, n),
            "ok": _pick([True, False], n),
        }
        for n, key in enumerate([LOWEST, HIGHEST, -1, 0, *range(1, 9)])
    ]
    return pa.Table.from_pylist(made, schema=pa.schema([(c.name, c.arrow) for c in SCHEMA.columns]))


_OPERATORS = ("=", "!=", "<", "<=", ">", ">=")
_VALUES = {
    "id": [str(LOWEST), str(HIGHEST), "0"],
    "tiny": ["-128", "127", "0"],
    "d": ["0.0", "-0.0", "1.5", "1.7976931348623157e308", "5e-324"],
    "f": ["0.0", "0.5"],
    "s": ["''", "'a'", "'a '", "'it''s'", "'é'", "'\U0001f600'"],
    "m": [
        "'1970-01-01'",
        "'2024-05-01T10:00:00'",
        "'2024-05-01T12:00:00+02:00'",
        "'1969-12-31T23:59:59.999999Z'",
        "'9999-12-31 23:59:59.999999'",
    ],
    "day": ["'0001-01-01'", "'2024-02-29'"],
    "p": ["0", "12.34", "-0.01"],
}
_LISTS = ["id IN (0, -1)", "d IN (0.0, 1.5)", "s IN ('a', '', 'é')", "p IN (12.34, 0)", "ok = true"]
CONDITIONS = [
    *(
        f"{column} {operator} {value}"
        for column, values in _VALUES.items()
        for value in values
        for operator in _OPERATORS
    ),
    *(f"{column} IS {null}" for column in _VALUES for null in ("NULL", "NOT NULL")),
    *_LISTS,
]


def of_nan(condition: str) -> bool:
    """Whether Spark takes NaN for greater, where the nodes take it for neither greater nor less."""
    column, operator, *_ = condition.split()
    return column in ("d", "f") and operator in (">", ">=")
