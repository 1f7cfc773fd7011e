"""Casts an array to a column's type and says which of its values do not fit. Called by bulk.py; sends
nothing.

Arrow does not say where a cast failed. So common faults are found in all values at once, and the few others
by bisecting the array. Invariant: the same values fit as if each were cast alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stele.client.casts import NO_CAST, cast, local_time, turned_infinite

_INTEGER_TEXT = r"^\s*[+-]?(0[xX][0-9a-fA-F]+|[0-9]+)\s*$"
_NUMBER_TEXT = r"(?i)^\s*[+-]?([0-9.]+(e[+-]?[0-9]+)?|inf(inity)?|nan.*)\s*$"
_TIME_TEXT = r"^\s*[+-]?[0-9]+-?[0-9]"
_BOOL_TEXT = r"(?i)^\s*(true|false|[01])\s*$"
_ROUNDED = 1e23
"""10^23, the first power of ten that no double holds exactly. This double, the nearest one, is slightly less."""
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def cast_each(array: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Cast `array` to the column type `wanted`. Returns it with null for each value that would change, and
    the reasons by position.

    Raises:
        pa.ArrowInvalid, pa.ArrowNotImplementedError: no value of this type can be cast to that one.
    """
    try:
        return cast(array, wanted), {}
    except NO_CAST:
        cast(array.slice(0, 0), wanted)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    refused: dict[int, str] = {}
    given = array
    for unfit, why in _certain(given, wanted):
        found = pc.fill_null(unfit, False)
        refused.update(dict.fromkeys(pc.indices_nonzero(found).to_pylist(), why))
        array = pc.if_else(found, pa.scalar(None, array.type), array)
    fitting = _by_text(array, wanted, refused) if is_text(array.type) else _by_halves(array, wanted, refused)
    return fitting, dict(sorted(refused.items()))


def is_text(type_: pa.DataType) -> bool:
    """Whether the values of this type are text."""
    return bool(
        pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_)
    )


def _by_halves(array: pa.Array, wanted: pa.DataType, refused: dict[int, str]) -> pa.Array:
    return pa.concat_arrays(list(_halves(array, wanted, 0, refused)))


def _halves(array: pa.Array, wanted: pa.DataType, first: int, refused: dict[int, str]) -> Iterator[pa.Array]:
    try:
        yield cast(array, wanted)
    except NO_CAST as exc:
        if len(array) == 1:
            refused[first] = str(exc)
            yield pa.nulls(1, wanted)
            return
        half = len(array) // 2
        yield from _halves(array.slice(0, half), wanted, first, refused)
        yield from _halves(array.slice(half), wanted, first + half, refused)


def _by_text(array: pa.Array, wanted: pa.DataType, refused: dict[int, str]) -> pa.Array:
    """Cast each distinct text once: it fits everywhere or nowhere."""
    encoded = array.cast(pa.large_string()).dictionary_encode()
    why: dict[int, str] = {}
    texts = _by_halves(encoded.dictionary, wanted, why)
    numbers = encoded.indices.fill_null(-1).to_numpy()
    for row in np.flatnonzero(np.isin(numbers, list(why))).tolist():
        refused[row] = why[int(numbers[row])]
    return texts.take(encoded.indices)


def _certain(array: pa.Array, wanted: pa.DataType) -> Iterator[tuple[pa.Array, str]]:
    """Masks of values that certainly do not fit, and why. Other values may not fit either."""
    given, types = array.type, pa.types
    if is_text(given):
        yield from _no_such_text(array, wanted)
    elif types.is_integer(given):
        bounds = _bounds_of(wanted)
        if bounds is not None:
            yield from _beyond(array, *bounds)
    elif types.is_float32(given) or types.is_float64(given):
        yield from _of_floats(array, wanted)
    elif types.is_timestamp(given) and types.is_date(wanted):
        try:
            local = local_time(array)
            day = pc.cast(pc.cast(local, wanted), local.type)
        except NO_CAST:
            return
        yield pc.not_equal(day, local), "it has a time of day"
    elif types.is_timestamp(given) and types.is_timestamp(wanted):
        yield from _of_times(array, wanted)


def _bounds_of(wanted: pa.DataType) -> tuple[int, int] | None:
    """The least and greatest integer that fit a numeric type."""
    if pa.types.is_integer(wanted):
        info = np.iinfo(wanted.to_pandas_dtype())
        return int(info.min), int(info.max)
    if pa.types.is_float32(wanted) or pa.types.is_float64(wanted):
        # Beyond this, not every integer has an exact value.
        most = 1 << (24 if pa.types.is_float32(wanted) else 53)
        return -most, most
    if pa.types.is_decimal(wanted):
        most = 10 ** (wanted.precision - wanted.scale) - 1
        return -most, most
    return None


def _beyond(array: pa.Array, least: int, most: int) -> Iterator[tuple[pa.Array, str]]:
    info = np.iinfo(array.type.to_pandas_dtype())
    if least > info.min:
        yield pc.less(array, pa.scalar(least, array.type)), "it is out of range"
    if most < info.max:
        yield pc.greater(array, pa.scalar(most, array.type)), "it is out of range"


def _of_floats(array: pa.Array, wanted: pa.DataType) -> Iterator[tuple[pa.Array, str]]:
    if pa.types.is_floating(wanted):
        yield turned_infinite(array, pc.cast(array, wanted)), "it is too large"
    elif pa.types.is_integer(wanted):
        info = np.iinfo(wanted.to_pandas_dtype())
        inside = pc.and_(
            pc.greater_equal(array, pa.scalar(float(info.min), array.type)),
            pc.less(array, pa.scalar(float(int(info.max) + 1), array.type)),
        )
        yield pc.invert(inside), "it is out of range"
        yield pc.not_equal(pc.trunc(array), array), "it is not a whole number"
    elif pa.types.is_decimal(wanted):
        most = 10.0 ** (wanted.precision - wanted.scale)
        size = pc.abs(pc.cast(array, pa.float64()))
        inside = pc.less(size, most) if most < _ROUNDED else pc.less_equal(size, most)
        yield pc.invert(inside), "it is out of range"
        fitting = pc.if_else(inside, array, pa.scalar(None, array.type))
        try:
            found = pc.cast(fitting, wanted)
        except NO_CAST:
            return
        yield (
            pc.not_equal(pc.cast(pc.cast(found, pa.string()), array.type), fitting),
            "it has more digits than the type keeps",
        )


def _of_times(array: pa.Array, wanted: pa.DataType) -> Iterator[tuple[pa.Array, str]]:
    numbers = array.cast(pa.int64())
    given, per_second = _PER_SECOND[array.type.unit], _PER_SECOND[wanted.unit]
    if per_second > given:
        most = ((1 << 63) - 1) // (per_second // given)
        yield from _beyond(numbers, -most, most)
    elif per_second < given:
        units = pa.scalar(given // per_second, pa.int64())
        yield (
            pc.not_equal(pc.multiply(pc.divide(numbers, units), units), numbers),
            "it is finer than a microsecond",
        )


def _no_such_text(array: pa.Array, wanted: pa.DataType) -> Iterator[tuple[pa.Array, str]]:
    types = pa.types
    if types.is_integer(wanted):
        form = _INTEGER_TEXT
    elif types.is_floating(wanted) or types.is_decimal(wanted):
        form = _NUMBER_TEXT
    elif types.is_date(wanted) or types.is_timestamp(wanted):
        form = _TIME_TEXT
    elif types.is_boolean(wanted):
        form = _BOOL_TEXT
    else:
        return
    yield pc.invert(pc.match_substring_regex(array.cast(pa.large_string()), form)), "it has another form"
