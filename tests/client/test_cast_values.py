"""Values that do not cast, found many at once: the same ones, and the same values beside them, as one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.client import cast_values
from stele.client.cast_values import cast_each
from stele.client.casts import NO_CAST, cast, python_value

WANTED = [
    pa.bool_(),
    pa.int8(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.decimal128(5, 2),
    pa.decimal128(11, 0),
    pa.decimal128(23, 0),
    pa.decimal128(38, 20),
]
TIMES = [pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "America/New_York")]
INTEGERS = [pa.int8(), pa.int16(), pa.int64(), pa.uint8(), pa.uint64()]
REALS = [pa.float16(), pa.float32(), pa.float64()]
EDGES = [sign * (1 << bits) + near for bits in range(0, 65) for near in (-1, 0, 1) for sign in (-1, 1)]
EDGES += [sign * 10**digits + near for digits in range(24) for near in (-1, 0, 1) for sign in (-1, 1)]
DAY_S = 86_400
TEXTS = [
    "",
    "n/a",
    "x17",
    "NaN",
    "-Inf",
    "infinity",
    "true",
    "FALSE",
    "0x1f",
    " 7",
    "7 ",
    "+7",
    "-7",
    "7.",
    ".5",
    "1e3",
]
TEXTS += [
    "1e",
    "1E+39",
    "1e999",
    "1.005",
    "300",
    "99999999999999999999",
    "2024-05-01",
    "2024-5-1",
    "20240501",
    "24-05-01",
]
TEXTS += [
    "2024-05-01 12:30:00",
    "2024-05-01T12:30:00.0000001Z",
    "2024-05-01T12",
    "-2024-05-01",
    "1_000",
    "٣",
    "−1",
]


def integers(type_: pa.DataType) -> st.SearchStrategy[Any]:
    """Of this type or of a time's 64 bits, most of them where something ends."""
    if pa.types.is_timestamp(type_):
        info = np.iinfo(np.int64)
        days = st.integers(-40_000, 40_000).map(lambda day: day * DAY_S)
    else:
        info = np.iinfo(type_.to_pandas_dtype())
        days = st.just(0)
    low, high = int(info.min), int(info.max)
    edges = st.sampled_from([edge for edge in EDGES if low <= edge <= high])
    return st.one_of(edges, days, st.integers(low, high))


def floats(type_: pa.DataType) -> st.SearchStrategy[Any]:
    near = st.sampled_from([float(edge) for edge in EDGES]).map(lambda edge: float(np.nextafter(edge, 0)))
    some = st.one_of(
        st.sampled_from([float(edge) for edge in EDGES]),
        near,
        st.integers(-99_999, 99_999).map(lambda cents: cents / 100),
        st.floats(),
    )
    with np.errstate(over="ignore"):
        return some.map(lambda value: type_.to_pandas_dtype()(value))


@st.composite
def arrays(draw: st.DrawFn) -> pa.Array:
    type_ = draw(
        st.sampled_from(
            [*INTEGERS, *REALS, *TIMES, pa.date32(), pa.decimal128(10, 3), pa.string(), pa.bool_()]
        )
    )
    if pa.types.is_string(type_):
        values = st.one_of(st.sampled_from(TEXTS), st.text("0123456789+-.eExXaf :TZ", max_size=8))
    elif pa.types.is_floating(type_):
        values = floats(type_)
    elif pa.types.is_boolean(type_):
        values = st.booleans()
    elif pa.types.is_decimal(type_):
        values = st.decimals(-9_999_999, 9_999_999, places=3)
    elif pa.types.is_date(type_):
        values = st.dates()
    else:
        values = integers(type_)
    with np.errstate(over="ignore"):
        array = pa.array(draw(st.lists(st.none() | values, max_size=12)), type_)
    return array.dictionary_encode() if draw(st.booleans()) else array


def one_by_one(array: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, list[int]]:
    """A cast for each value."""
    cast(array.slice(0, 0), wanted)
    parts, rows = [pa.nulls(0, wanted)], []
    for row in range(len(array)):
        try:
            parts.append(cast(array.slice(row, 1), wanted))
        except NO_CAST:
            parts.append(pa.nulls(1, wanted))
            rows.append(row)
    return pa.concat_arrays(parts), rows


def shown(array: pa.Array) -> list[str]:
    """As text, in which one NaN is like another."""
    return [repr(python_value(value)) for value in array]


def compare(array: pa.Array, wanted: pa.DataType) -> None:
    """All at once must come to the same as one by one."""
    try:
        expected, rows = one_by_one(array, wanted)
    except NO_CAST:
        with pytest.raises(NO_CAST):
            cast_each(array, wanted)
        return
    found, reasons = cast_each(array, wanted)
    assert list(reasons) == rows and all(reasons.values())
    assert found.type == wanted and shown(found) == shown(expected)


@given(arrays(), st.sampled_from(WANTED))
def test_the_same_values_fit_as_one_by_one(array: pa.Array, wanted: pa.DataType) -> None:
    compare(array, wanted)


LAST_S = ((1 << 63) - 1) // 10**6


@pytest.mark.parametrize(
    ("array", "wanted"),
    [
        (pa.array([2.0**31 - 1, 2.0**31, -(2.0**31), -(2.0**31) - 1]), pa.int32()),
        (pa.array([LAST_S, LAST_S + 1, -LAST_S, -LAST_S - 1], pa.timestamp("s")), pa.timestamp("us", "UTC")),
    ],
)
def test_the_last_value_that_a_type_has_fits(array: pa.Array, wanted: pa.DataType) -> None:
    assert list(cast_each(array, wanted)[1]) == [1, 3]
    compare(array, wanted)


@pytest.mark.parametrize(
    ("number", "type_", "digits"), [(99_999_997_952, pa.float32(), 11), (1e23, pa.float64(), 23)]
)
def test_a_number_just_below_a_power_of_ten_fits(number: float, type_: pa.DataType, digits: int) -> None:
    """Which as a number of the same type is that number."""
    array = pa.array(np.array([number, 5.5], type_.to_pandas_dtype()))
    assert list(cast_each(array, pa.decimal128(digits, 0))[1]) == [1]
    compare(array, pa.decimal128(digits, 0))


ROWS = 4_096
COUNT = np.arange(ROWS)


@pytest.mark.parametrize(
    ("array", "wanted"),
    [
        (pa.array(COUNT + 0.5), pa.int64()),
        (pa.array(COUNT * np.nan), pa.int64()),
        (pa.array(COUNT + 1e300), pa.float32()),
        (pa.array(COUNT + 0.005), pa.decimal128(9, 2)),
        (pa.array(COUNT + 1e9), pa.decimal128(9, 2)),
        (pa.array(COUNT + 1_000), pa.int8()),
        (pa.array(-COUNT - 1_000), pa.int8()),
        (pa.array(COUNT + (1 << 53) + 1), pa.float64()),
        (pa.array(COUNT + 1_000), pa.decimal128(5, 2)),
        (pa.array(COUNT * 1_003 + 1, pa.timestamp("ms")), pa.date32()),
        (pa.array(COUNT * 1_003 + 1, pa.timestamp("ms", "America/New_York")), pa.date32()),
        (pa.array(COUNT * 1_000 + 1, pa.timestamp("ns")), pa.timestamp("us", "UTC")),
        (pa.array(COUNT + (1 << 60), pa.timestamp("s")), pa.timestamp("us", "UTC")),
        (pa.array(["n/a"] * ROWS), pa.int32()),
        (pa.array(["n/a"] * ROWS), pa.timestamp("us", "UTC")),
        (pa.array(["99999999999"] * ROWS), pa.int32()),
        (pa.array([f"x{number}" for number in COUNT]), pa.int32()),
        (pa.array([f"x{number}" for number in COUNT]), pa.float64()),
        (pa.array([f"x{number}" for number in COUNT]), pa.decimal128(20, 0)),
        (pa.array([f"x{number}" for number in COUNT]), pa.date32()),
        (pa.array([f"x{number}" for number in COUNT]).dictionary_encode(), pa.bool_()),
    ],
)
def test_where_no_value_fits_there_is_not_a_cast_for_each(
    array: pa.Array, wanted: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65,536 rows took 5 s where nothing else ran: a million with nothing to put into a column, minutes."""
    calls = []

    def counted(*arguments: Any) -> pa.Array:
        calls.append(len(arguments[0]))
        return cast(*arguments)

    monkeypatch.setattr(cast_values, "cast", counted)
    found, reasons = cast_each(array, wanted)
    assert len(reasons) == found.null_count == ROWS
    assert len(calls) < 20
