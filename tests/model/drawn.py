"""Tables and values of every column type, drawn by hypothesis: empty, large, odd and null ones among them."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from stele.model.schema import Schema

LARGE = 70_000
"""Bytes of large values: more than an array of small ones, less than what makes a test slow."""


def _ints(bits: int) -> st.SearchStrategy[int]:
    edge = 2 ** (bits - 1)
    return st.integers(-edge, edge - 1) | st.sampled_from([0, -edge, edge - 1])


TEXTS = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["", "\x00", "x" * LARGE, "é" * 9]
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{f"int{bits}": _ints(bits) for bits in (8, 16, 32, 64)},
    "bool": st.booleans(),
    "float": st.floats(width=32),
    "double": st.floats(),
    "decimal(9,2)": st.decimals(-9_999_999, 9_999_999, places=2),
    "string": TEXTS,
    "binary": st.binary(max_size=12) | st.just(b"b" * LARGE),
    "date": st.dates(datetime.date(1970, 1, 1)),
    "timestamp": st.datetimes(datetime.datetime(1970, 1, 1), timezones=st.just(datetime.UTC)),
}
"""By column type."""
FEW_TYPES = ("int8", "int32", "int64", "double", "string")
"""Those that rows of plain Python values may have (`stele.model.plain`)."""
_KEYS = frozenset(VALUES) - {"float", "double", "decimal(9,2)"}


@st.composite
def schemas(draw: Callable[..., Any]) -> Schema:
    """One or two key columns and up to four others; half of the tables have FEW_TYPES alone."""
    names = draw(st.sampled_from([FEW_TYPES, tuple(VALUES)]))
    keys = draw(st.lists(st.sampled_from([n for n in names if n in _KEYS]), min_size=1, max_size=2))
    others = draw(st.lists(st.sampled_from(names), max_size=4))
    columns: list[tuple[Any, ...]] = [(f"k{n}", name) for n, name in enumerate(keys)]
    columns += [(f"v{n}", name, draw(st.booleans())) for n, name in enumerate(others)]
    return Schema.make(columns, [f"k{n}" for n in range(len(keys))])


def row(draw: Callable[..., Any], schema: Schema) -> dict[str, Any]:
    """A whole row that fits; nulls only where they may be."""
    return {
        column.name: draw(VALUES[column.type] | st.none() if column.nullable else VALUES[column.type])
        for column in schema.columns
    }
