"""Encoded keys: byte order is tuple order, decoding gives the values back, few rows and many agree."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.model import keys
from stele.model.column import TIMESTAMP
from stele.model.errors import Corrupt, Rejected
from stele.model.schema import Schema

_TEXT = st.text(alphabet="ab\x00\x01\xffü", max_size=12)
_VALUES: dict[str, tuple[pa.DataType, Any]] = {
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    "int16": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "decimal": (
        pa.decimal128(38, 3),
        st.integers(-(10**37), 10**37).map(lambda i: decimal.Decimal(i).scaleb(-3, decimal.Context(prec=60))),
    ),
    "date": (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    "timestamp": (TIMESTAMP, st.integers(-(2**63), 2**63 - 1)),
    "string": (pa.string(), _TEXT),
    "binary": (pa.binary(), st.binary(max_size=12)),
}


@st.composite
def tables(draw: Any) -> tuple[list[pa.DataType], list[tuple[Any, ...]]]:
    """Column types, and rows of raw values (dates in days, timestamps in microseconds)."""
    names = draw(st.lists(st.sampled_from(list(_VALUES)), min_size=1, max_size=4))
    row = st.tuples(*(_VALUES[n][1] for n in names))
    return [_VALUES[n][0] for n in names], draw(st.lists(row, min_size=1, max_size=30))


def _arrays(types: list[pa.DataType], rows: list[tuple[Any, ...]]) -> list[pa.Array]:
    return [pa.array([row[at] for row in rows], type_) for at, type_ in enumerate(types)]


def _comparable(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(v.encode() if isinstance(v, str) else v for v in row)


@given(tables())
def test_byte_order_is_tuple_order_and_decoding_gives_the_values(table: tuple[Any, Any]) -> None:
    types, rows = table
    encoded = keys.encode_arrays(_arrays(types, rows)).to_pylist()
    by_bytes = sorted(range(len(rows)), key=lambda i: (encoded[i], i))
    by_values = sorted(range(len(rows)), key=lambda i: (_comparable(rows[i]), i))
    assert by_bytes == by_values
    assert [keys.decode_key(key, types) for key in encoded] == rows


@given(tables())
def test_few_rows_and_many_encode_alike(table: tuple[Any, Any]) -> None:
    types, rows = table
    many = keys.encode_arrays([pa.concat_arrays([a] * 10) for a in _arrays(types, rows)]).slice(
        len(rows), len(rows)
    )
    each = [keys.key_list(_arrays(types, [row]))[0] for row in rows]
    assert many.to_pylist() == each
    assert keys.encode_arrays([a.slice(1) for a in _arrays(types, rows)]).to_pylist() == each[1:]


@given(st.lists(st.binary(max_size=20), max_size=40), st.booleans())
def test_vectorised_order_is_byte_order(values: list[bytes], long: bool) -> None:
    if long:
        values = [v + b"\x00" * 150 for v in values]
    array = pa.array(values, pa.binary())
    order = keys.sort_order(array)
    assert [values[i] for i in order] == sorted(values)
    ordered = array.take(pa.array(order))
    same = keys.same_as_before(ordered).tolist()
    assert same == [i > 0 and sorted(values)[i] == sorted(values)[i - 1] for i in range(len(values))]


def test_dates_and_timestamps_as_python_values_encode_like_their_numbers() -> None:
    at = datetime.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    day = datetime.date(2024, 1, 2)
    key = keys.encode_tuple((at, day), (TIMESTAMP, pa.date32()))
    assert keys.decode_key(key, (TIMESTAMP, pa.date32())) == (1704164645000006, 19724)
    assert key.hex() == "80060dedc04dd34680004d0c"


def test_of_many_numbers_the_negative_ones_come_first() -> None:
    numbers = list(range(-500, 500))
    for type_ in (pa.int16(), pa.int32(), pa.int64()):
        encoded = keys.encode_arrays([pa.array(numbers, type_)]).to_pylist()
        assert sorted(encoded) == encoded and len(set(encoded)) == 1_000


def test_of_many_strings_those_with_zero_bytes_are_told_apart() -> None:
    firsts, seconds = ["a", "a\0", "a\0\0", "a\0b", "a"] * 20, ["\0b", "b", "", "b", "\0\1b"] * 20
    many = keys.encode_arrays([pa.array(firsts), pa.array(seconds)]).to_pylist()
    types = (pa.string(), pa.string())
    assert many == [keys.encode_tuple(pair, types) for pair in zip(firsts, seconds)]
    assert len(set(many)) == 5


def test_golden_bytes_of_a_key() -> None:
    key = keys.encode_tuple(("a\x00b", -1, b"\x00z"), (pa.string(), pa.int32(), pa.binary()))
    assert key == b"a\x00\x01b\x00\x00" + b"\x7f\xff\xff\xff" + b"\x00z"


def test_bad_keys_are_refused() -> None:
    schema = Schema.make([("k", "int64"), ("v", "string")], ["k"])
    with pytest.raises(Rejected, match="missing"):
        keys.encode_keys(pa.record_batch([pa.array(["x"])], ["v"]), schema)
    with pytest.raises(Rejected, match="expected int64"):
        keys.encode_keys(pa.record_batch([pa.array(["x"])], ["k"]), schema)
    with pytest.raises(Rejected, match="nulls"):
        keys.encode_keys(pa.record_batch([pa.array([1, None])], ["k"]), schema)
    with pytest.raises(Rejected):
        keys.encode_tuple(("x",), (pa.int64(),))
    with pytest.raises(Rejected):
        keys.encode_arrays([pa.array([1.0] * 20)])
    for bad in (b"", b"\x80", b"a\x00", b"a\x00\x02", b"a\x00\x00\x80\x00\x00\x00\x00"):
        with pytest.raises(Corrupt):
            keys.decode_key(bad, (pa.string(), pa.int32()))
