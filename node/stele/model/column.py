"""One column of a table: type names and their Arrow types, which values fit and why others do not, defaults.

Shared by client, master and store; opens no files. Invariant: a value that does not fit a column is refused.
It is never rounded, cut or parsed to make it fit, except for the precision of `float`.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import fractions
import json
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from stele.model import texts
from stele.model.errors import Rejected
from stele.model.ids import ColumnId
from stele.model.jsons import parse_json

_DECIMAL = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)\Z")
_DECIMAL_PRECISION_MAX = 38

TIMESTAMP = pa.timestamp("us", tz="UTC")
_TYPES: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": TIMESTAMP,
}
_INTS = frozenset((int, type(None)))
_SOUND: dict[str, frozenset[type]] = {
    **dict.fromkeys(("int8", "int16", "int32", "int64"), _INTS),
    "double": _INTS | {float},
    "date": _INTS | {datetime.date},
    "timestamp": _INTS | {datetime.datetime},
}
"""Python types whose values `_fault_finder` always accepts, so each value need not be checked."""
_FLOAT = struct.Struct("<f")
_NO_VALUE = (pa.ArrowException, TypeError, ValueError, OverflowError, ArithmeticError, AttributeError)
"""What Arrow raises for a Python value that does not fit the type."""
_OTHER_TYPE = (TypeError, pa.ArrowTypeError, pa.ArrowNotImplementedError)
_PYTHON_KINDS = {
    "bool": "a bool",
    "float": "a float",
    "double": "a float",
    "string": "a str",
    "binary": "bytes",
    "date": "a date",
    "timestamp": "a datetime",
}
_LONE_SURROGATE = "it has half of a surrogate pair"
_SHOWN_CHARS_MAX = 120


def arrow_type(name: str) -> pa.DataType:
    """The Arrow type of a column type name: bool, int8…int64, float, double, decimal(p,s), string, binary,
    date, timestamp (microseconds, UTC).

    Raises:
        Rejected: there is no type of that name.
    """
    found = _TYPES.get(name)
    if found is not None:
        return found
    match = _DECIMAL.match(name)
    if match:
        precision, scale = int(match[1]), int(match[2])
        if 1 <= precision <= _DECIMAL_PRECISION_MAX and scale <= precision:
            return pa.decimal128(precision, scale)
        raise Rejected(
            f"type {name}: expected 1 <= precision <= {_DECIMAL_PRECISION_MAX} and scale <= precision"
        )
    raise Rejected(f"type {name!r} is unknown; expected one of {', '.join(_TYPES)}, decimal(p,s)")


def _fault_finder(arrow: pa.DataType) -> Callable[[object], str] | None:
    """Return a function that says why a Python or numpy value does not fit this type; "" if it may fit.

    It finds values that Arrow would silently change: 1.5 to 1, a datetime to its day. None: Arrow changes no
    value of this type."""
    if pa.types.is_date(arrow):
        return _date_fault
    if pa.types.is_timestamp(arrow):
        return _timestamp_fault
    if pa.types.is_integer(arrow):
        return _whole_fault
    if pa.types.is_float32(arrow):
        return _float_fault
    return _double_fault if pa.types.is_float64(arrow) else None


def _whole_fault(value: object) -> str:
    if type(value) is int or value is None:
        return ""
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return "it is a numpy value; pass its item()"  # which for nanoseconds is a bare number
    if isinstance(value, (bool, np.bool_)):
        return "a bool is not a number"
    if isinstance(value, (float, np.floating)):
        whole = float(value).is_integer()
    elif isinstance(value, decimal.Decimal):
        whole = value.is_finite() and value == value.to_integral_value()
    else:
        whole = not isinstance(value, fractions.Fraction) or value.denominator == 1
    return "" if whole else "it is not a whole number"


def _date_fault(value: object) -> str:
    if isinstance(value, datetime.datetime):
        return _null_fault(value) or "it is a datetime; pass its date()"
    return _whole_fault(value)


def _timestamp_fault(value: object) -> str:
    if getattr(value, "nanosecond", 0):  # a pandas Timestamp
        return _null_fault(value) or "it has nanoseconds, but a timestamp has microseconds"
    return _whole_fault(value)


def _null_fault(value: object) -> str:
    return "it is pandas' null; pass None" if type(value).__name__ in ("NaTType", "NAType") else ""


def _double_fault(value: object) -> str:
    return "a bool is not a number" if isinstance(value, (bool, np.bool_)) else ""


def _float_fault(value: object) -> str:
    if isinstance(value, (float, np.floating)):
        try:
            _FLOAT.pack(value)
        except OverflowError:
            return "it is too large"
    return _double_fault(value)


def shown(value: object) -> str:
    """Return a value as text for a message: its repr, cut if it is long. If the repr fails, as for a huge int,
    return its type."""
    try:
        return _cut(repr(value))
    except Exception:  # noqa: BLE001 - a message about a value must not fail with it
        return f"<{type(value).__name__}>"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."


def type_name(arrow: pa.DataType) -> str:
    """The column type name for the values of an Arrow type. Unsigned types and coarser times get a wider
    type.

    Raises:
        Rejected: no column type can hold it.
    """
    for name, known in _TYPES.items():
        if known == arrow:
            return name
    if pa.types.is_decimal(arrow) and arrow.precision <= _DECIMAL_PRECISION_MAX:
        return f"decimal({arrow.precision},{arrow.scale})"
    if pa.types.is_dictionary(arrow):
        return type_name(arrow.value_type)
    if pa.types.is_timestamp(arrow):
        return "timestamp"
    if pa.types.is_date(arrow):
        return "date"
    if pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow):
        return "string"
    if pa.types.is_large_binary(arrow) or pa.types.is_fixed_size_binary(arrow):
        return "binary"
    widened = {pa.uint8(): "int16", pa.uint16(): "int32", pa.uint32(): "int64", pa.float16(): "float"}
    if arrow in widened:
        return widened[arrow]
    raise Rejected(
        f"no column type holds the Arrow type {arrow}; expected one of {', '.join(_TYPES)}, decimal(p,s)"
    )


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `default` is JSON text; None if there is no default.

    In the JSON, dates and timestamps are ISO 8601, decimals are strings, binary is base64. `read_default`: the
    value of rows that are older than the column, in the same form; None means null. It is the default that the
    column was added with, and never changes.

    Example:
        >>> column = table.schema.by_name["value"]
        >>> column.type, column.nullable
        ('double', True)
    """

    id: ColumnId
    name: str
    type: str
    nullable: bool = False
    default: str | None = None
    read_default: str | None = None

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type of the values."""
        return arrow_type(self.type)

    @property
    def a_type(self) -> str:
        """The type with its article: "an int64"."""
        return f"{'an' if self.type.startswith('int') else 'a'} {self.type}"

    def array(self, values: Sequence[Any]) -> pa.Array:
        """Python values (None for null) as an Arrow array of the column's type. A datetime without time zone
        is UTC.

        Raises:
            Rejected: a value does not fit the column. Values are never rounded, cut or parsed to
                make them fit, except for the precision of `float`.
        """
        arrow = self.arrow
        sound = _SOUND.get(self.type)
        try:
            if sound is not None and sound.issuperset(map(type, values)):
                return pa.array(values, arrow)
            find = _fault_finder(arrow)
            if find is None or not any(map(find, values)):
                return pa.array(values, arrow)
            why = ""
        except _NO_VALUE as exc:
            why = f"column {self.name}: {shown(values)} are not {self.type} ({_cut(str(exc))})"
        raise Rejected(next(filter(None, map(self.fault, values)), why))

    def fault(self, value: object) -> str:
        """Why `value` does not fit the column, as a message that names the column; "" if it fits, or is
        None."""
        why = self._fault(value)
        said = "is not UTF-8" if why.startswith(_LONE_SURROGATE) else f"is not {self.a_type}"
        return f"column {self.name}: {shown(value)} {said} ({why})" if why else ""

    def _fault(self, value: object) -> str:
        arrow = self.arrow
        find = _fault_finder(arrow)
        if find is not None and (why := find(value)):
            return why
        try:
            pa.array([value], arrow)
        except _NO_VALUE as exc:
            return self._why(value, exc)
        return ""

    def _why(self, value: object, exc: Exception) -> str:
        """Return Arrow's reason for refusing a value, in Python's terms. Arrow's own text names C and Arrow types."""
        text = str(exc)
        if isinstance(exc, UnicodeEncodeError):
            return f"{_LONE_SURROGATE} at position {exc.start}"
        if isinstance(exc, OverflowError) or "too large" in text:
            return "it is out of range"
        if isinstance(exc, _OTHER_TYPE) or text.startswith("Could not convert"):
            if why := _null_fault(value):
                return why
            kind = "a Decimal" if pa.types.is_decimal(self.arrow) else _PYTHON_KINDS.get(self.type, "an int")
            return f"it is of type {type(value).__name__}; expected {kind}"
        return _cut(text) or type(exc).__name__

    def default_scalar(self) -> pa.Scalar:
        """The value that a write stores in a row without the column: the default, else null.

        Raises:
            Rejected: the default does not fit the type, or is not JSON text.
        """
        return self._scalar(self.default)

    def default_text(self) -> str | None:
        """Return the default in canonical form, because other programs' parsers accept fewer forms than Python's.

        Dates are YYYY-MM-DD. Timestamps have hours, minutes, seconds and the zone UTC. Decimals are digits. A time
        that Python cannot hold stays as it is. None: there is no default, or it is null."""
        temporal, exact = pa.types.is_temporal(self.arrow), pa.types.is_decimal(self.arrow)
        if self.default is None or not (temporal or exact):
            return self.default
        try:
            value = self.default_scalar().as_py()
        except OverflowError:
            return self.default
        return None if value is None else json.dumps(value.isoformat() if temporal else format(value, "f"))

    def read_scalar(self) -> pa.Scalar:
        """The value of a stored row that is older than the column: `read_default`, else null.

        Raises:
            Rejected: as `default_scalar`.
        """
        return self._scalar(self.read_default)

    def _scalar(self, text: str | None) -> pa.Scalar:
        if text is None:
            return pa.scalar(None, self.arrow)
        if not isinstance(text, str):
            raise Rejected(f"column {self.name}: the default is {shown(text)}; expected JSON text, like '5'")
        try:
            value = _parsed(parse_json(text, parse_float=float), self.arrow)
            why = self._fault(value)
        except (ValueError, TypeError, ArithmeticError) as exc:
            why = str(exc)
        if why:
            raise Rejected(f"column {self.name}: the default {_cut(text)} is not {self.a_type} ({why})")
        return self.array([value])[0]

    def default_fault(self) -> str:
        """What is wrong with the default, as a message; "" if rows get exactly the value that its text says.

        The default must fit the type. Call this only for new or changed defaults. Stored schemas are not checked
        by it, so that all replicas read them alike.
        """
        if self.default is None:
            return ""
        why = ""
        try:
            read = texts.number if pa.types.is_floating(self.arrow) else decimal.Decimal
            said = parse_json(self.default, parse_float=read)
            if pa.types.is_timestamp(self.arrow) and said is not None:
                texts.moment(said)
                try:
                    self.default_scalar().as_py()
                except OverflowError:
                    raise texts.Inexact("in UTC it lies outside of the years 1 to 9999") from None
            rounded = isinstance(said, decimal.Decimal) and said != self.default_scalar().as_py()
        except texts.Inexact as exc:
            why, rounded = str(exc), False
        except ArithmeticError:  # the exponent is too large for a Decimal
            rounded = True
        if rounded:
            form = "as text" if pa.types.is_decimal(self.arrow) else "without a point or exponent"
            why = f"it would be read as {json.loads(self.default)}; write it {form}"
        return (
            f"column {self.name}: the default {_cut(self.default)} is not {self.a_type} ({why})"
            if why
            else ""
        )


def _parsed(value: Any, arrow: pa.DataType) -> Any:
    """The Python value of a default's parsed JSON."""
    if value is None:
        return None
    if pa.types.is_binary(arrow):
        return base64.b64decode(value, validate=True)
    if pa.types.is_decimal(arrow):
        return decimal.Decimal(str(value))
    if pa.types.is_date(arrow):
        return datetime.date.fromisoformat(value)
    if pa.types.is_timestamp(arrow):
        return datetime.datetime.fromisoformat(value)
    return value
