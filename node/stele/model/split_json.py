"""Split keys of ranges as JSON, for `stele table describe --json` and `stele table create`. Pure.

Invariant: `split_key` reads what `split_values` returned, for every key.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from stele.model.column import Column, shown
from stele.model.errors import Corrupt, Rejected
from stele.model.json_values import json_value
from stele.model.keys import decode_key, encode_tuple
from stele.model.rows import python_values

ENCODED = "encoded"
"""The name in {"encoded": HEX}, for a key that ends within a value."""


def split_values(key: bytes, columns: Sequence[Column]) -> list[Any] | dict[str, str]:
    """Return a value for each column. If a split key ends within a value, return {"encoded": HEX}, its bytes."""
    types = [column.arrow for column in columns]
    try:
        values = [python_values(pa.array([v], t))[0] for v, t in zip(decode_key(key, types), types)]
        shown_values = [json_value(value) for value in values]
        if split_key(shown_values, columns) == key:
            return shown_values
    except (Corrupt, Rejected, ValueError):
        pass
    return {ENCODED: key.hex()}


def shown_range(start: bytes, end: bytes, columns: Sequence[Column]) -> str:
    """A range as `stele table describe` shows it, for example "2024-01-01".."2024-02-01"."""
    return "..".join(shown_split(split_values(key, columns)) if key else "" for key in (start, end))


def shown_split(split: list[Any] | dict[str, str]) -> str:
    """A split key, as `split_values` returned it, for people."""
    if isinstance(split, dict):
        return f'"0x{next(iter(split.values()))}"'
    return json.dumps(split if len(split) > 1 else split[0])


def split_key(said: Any, columns: Sequence[Column]) -> bytes:
    """The key for a JSON value: a list of values, a single value for one column, or {"encoded": HEX}.

    Raises:
        Rejected: it is none of these.
    """
    if isinstance(said, dict):
        try:
            (name, text), *others = said.items()
            if name == ENCODED and not others and isinstance(text, str):
                return bytes.fromhex(text)
        except ValueError:
            pass
        raise Rejected(f'{shown(said)}: expected values, or {{"{ENCODED}": HEX}}')
    values = said if isinstance(said, list) else [said]
    if len(values) != len(columns):
        names = ", ".join(column.name for column in columns)
        raise Rejected(f"{shown(said)}: expected a value for each of {names}")
    found = [_value(value, column) for value, column in zip(values, columns)]
    return encode_tuple(found, [column.arrow for column in columns])


def _value(said: Any, column: Column) -> Any:
    """Convert a value from JSON or YAML to the Python value of a key column."""
    try:
        value = _read(said, column.arrow)
    except (ValueError, TypeError, ArithmeticError):
        value = said
    if value is None:
        raise Rejected(f"column {column.name}: the value is null; a key is never null")
    if why := column.fault(value):
        raise Rejected(why)
    return python_values(column.array([value]))[0]


def _read(said: Any, arrow: pa.DataType) -> Any:
    convert: Callable[[Any], Any] | None = None
    if pa.types.is_binary(arrow):
        convert = bytes.fromhex
    elif pa.types.is_date(arrow):
        convert = datetime.date.fromisoformat
    elif pa.types.is_timestamp(arrow):
        convert = datetime.datetime.fromisoformat
    elif pa.types.is_decimal(arrow):
        convert = decimal.Decimal
    return convert(said) if convert is not None and isinstance(said, str) else said
