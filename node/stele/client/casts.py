"""Arrow's casts, without those that lose something and do not say so. Called by bulk.py; sends nothing.

Invariant: what is cast means the same as before, but for the precision of `float` and `double`.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stele.model.schema import shown

_ALL_INTEGERS = pa.decimal128(20, 0)
"""Holds those of any integer type."""


def cast(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """`array` as the `wanted` type of a column.

    Raises:
        pa.ArrowInvalid: a value would become another one.
        pa.ArrowNotImplementedError: one type is never made from the other.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    given = array.type
    if pa.types.is_boolean(wanted) and (_is_real(given) or pa.types.is_integer(given)):
        raise pa.ArrowNotImplementedError("a number is no bool")
    if pa.types.is_date(wanted) and pa.types.is_timestamp(given):
        return _dates(array, wanted)
    if pa.types.is_decimal(wanted) and pa.types.is_integer(given):
        # Arrow asks whether the largest integer of the type would fit; of a decimal it asks each value.
        array = pc.cast(array, _ALL_INTEGERS)
    found = pc.cast(array, wanted)
    if pa.types.is_decimal(wanted) and pa.types.is_floating(given):
        # By way of text: from a decimal Arrow makes a neighbour of the nearest number.
        _check(array, pc.equal(pc.cast(pc.cast(found, pa.string()), given), array), "it has more digits")
    if pa.types.is_floating(wanted):
        _check(array, pc.invert(_turned_infinite(array, found)), "it is too large")
    return found


def _is_real(type_: pa.DataType) -> bool:
    return bool(pa.types.is_floating(type_) or pa.types.is_decimal(type_))


def _dates(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """The days of moments that are midnight, each in its own time zone."""
    local = array if array.type.tz is None else pc.local_timestamp(array)
    found = pc.cast(local, wanted)
    _check(array, pc.equal(pc.cast(found, local.type), local), "it has a time of day")
    return found


def _turned_infinite(array: pa.Array, found: pa.Array) -> pa.Array:
    infinite = pc.is_inf(found)
    if pa.types.is_floating(array.type):
        return pc.and_(infinite, pc.is_finite(array))
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return pc.and_(infinite, pc.match_substring_regex(array, "[0-9]"))  # and no word for infinity
    return infinite


def _check(array: pa.Array, same: pa.Array, why: str) -> None:
    at = pc.index(same, False).as_py()
    if at >= 0:
        raise pa.ArrowInvalid(f"{shown(_python(array[at]))}: {why}")


def _python(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):  # a time that Python has no value for is its number
        return scalar.value
