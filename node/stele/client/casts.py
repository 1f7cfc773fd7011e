"""Arrow's casts, without those that silently lose information. Called by cast_values.py and bulk.py; sends
nothing.

Invariant: a cast keeps the meaning of a value, except for the precision of `float` and `double`.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

NO_CAST = (pa.ArrowInvalid, pa.ArrowNotImplementedError)
"""The exceptions of a cast."""
_ALL_INTEGERS = pa.decimal128(20, 0)
"""A decimal type that holds every integer."""


def cast(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Cast `array` to the column type `wanted`.

    Raises:
        pa.ArrowInvalid: a value would change.
        pa.ArrowNotImplementedError: no value of this type can be cast to that one.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    given = array.type
    if pa.types.is_boolean(wanted) and (_is_real(given) or pa.types.is_integer(given)):
        raise pa.ArrowNotImplementedError("a number is not a bool")
    if pa.types.is_date(wanted) and pa.types.is_timestamp(given):
        return _dates(array, wanted)
    if pa.types.is_decimal(wanted) and pa.types.is_integer(given):
        # For integers, Arrow asks whether the type's largest value would fit; for decimals it checks each
        # value.
        array = pc.cast(array, _ALL_INTEGERS)
    found = pc.cast(array, wanted)
    if pa.types.is_decimal(wanted) and pa.types.is_floating(given):
        # By way of text: from a decimal, Arrow may give a neighbour of the nearest number.
        _check(
            array,
            pc.equal(pc.cast(pc.cast(found, pa.string()), given), array),
            "it has more digits than the type keeps",
        )
    if pa.types.is_floating(wanted):
        _check(array, pc.invert(turned_infinite(array, found)), "it is too large")
    return found


def _is_real(type_: pa.DataType) -> bool:
    return bool(pa.types.is_floating(type_) or pa.types.is_decimal(type_))


def _dates(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return the dates of timestamps. Raises pa.ArrowInvalid if one is not midnight in its time zone."""
    local = local_time(array)
    found = pc.cast(local, wanted)
    _check(array, pc.equal(pc.cast(found, local.type), local), "it has a time of day")
    return found


def local_time(array: pa.Array) -> pa.Array:
    """Return timestamps as local times of their time zone."""
    return array if array.type.tz is None else pc.local_timestamp(array)


def turned_infinite(array: pa.Array, found: pa.Array) -> pa.Array:
    """Which numbers, or texts of numbers, became infinite in `found`."""
    infinite = pc.is_inf(found)
    if pa.types.is_floating(array.type):
        return pc.and_(infinite, pc.is_finite(array))
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return pc.and_(infinite, pc.match_substring_regex(array, "[0-9]"))  # and is not a word for infinity
    return infinite


def _check(array: pa.Array, same: pa.Array, why: str) -> None:
    if pc.index(same, False).as_py() >= 0:
        raise pa.ArrowInvalid(why)


def python_value(scalar: pa.Scalar) -> Any:
    """A scalar as a Python value. If Python has no value for it: its number, or its bytes."""
    if isinstance(scalar, pa.DictionaryScalar):
        scalar = scalar.value
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes()
    except (OverflowError, ValueError, KeyError):  # a time out of range, or in an unknown time zone
        return scalar.value
