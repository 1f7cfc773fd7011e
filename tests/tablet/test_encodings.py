"""Parts of column files of format 2: each layout and codec gives back what went in, takes less, and is safe to read from anybody."""

from __future__ import annotations

import decimal
import struct
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stele.tablet.colformat import DICTIONARY, FIXED, NARROW, PLAIN, VERSION, version_for
from stele.tablet.decoding import RAW_BYTES_MAX, Column, decode, one, some, whole
from stele.tablet.encoding import Encoded, encode, encode_keys, encode_times

LZ4, ZSTD = 1 << 8, 2 << 8
TYPES = [
    pa.bool_(),
    pa.int8(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(12, 2),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.string(),
    pa.binary(),
]
NANS = np.array([0x7FF8_0000_0000_0000, 0x7FF8_0000_0000_0001, 0xFFF8_0000_0000_0000], np.uint64).view(
    np.float64
)


def schema_of(array: pa.Array) -> pa.Schema:
    return pa.schema([pa.field("x", array.type)])


def value(kind: pa.DataType, number: int) -> Any:
    """A value of this type; mostly another for another number."""
    if pa.types.is_boolean(kind):
        return number % 2 == 0
    if pa.types.is_floating(kind):
        return [float(NANS[number % 3]), -0.0, 0.0, number / 4][number % 4]
    if pa.types.is_decimal(kind):
        return decimal.Decimal(number % 10**9) / 100
    if pa.types.is_string(kind):
        return ["", f"é{number}", "ab"][number % 3]
    if pa.types.is_binary(kind):
        return number.to_bytes(8, "little")[: 8 if number % 2 else number % 5]
    return number % 127 if kind == pa.int8() else number % 2**31


def same_bits(one: pa.Array, other: pa.Array) -> bool:
    """Whether two arrays have the same values, down to the bits of floats."""
    bits = {pa.float32(): pa.int32(), pa.float64(): pa.int64()}.get(one.type)
    if bits is not None and one.type == other.type:
        one, other = pa.concat_arrays([one]).view(bits), pa.concat_arrays([other]).view(bits)
    return bool(one.equals(other))


def read(found: Encoded, schema: pa.Schema, rows: int) -> Column:
    """What a reader makes of an encoded part, which lies in a file at a multiple of 64."""
    return decode(found.form, np.frombuffer(bytes(found.data), np.uint8), schema, rows)


@st.composite
def columns(draw: Any) -> pa.Array:
    """A column of few or many values, with nulls or without, perhaps a part of a longer array."""
    kind = draw(st.sampled_from(TYPES))
    rows, values = draw(st.integers(1, 3_000)), draw(st.sampled_from([1, 2, 7, 300, 100_000]))
    seed, nulls = draw(st.integers(0, 1_000)), draw(st.sampled_from([0, 0, 3, 1]))
    start = draw(st.integers(0, 9))
    numbers = np.random.default_rng(seed).integers(0, values, rows + start).tolist()
    found = [None if nulls and n % nulls == 0 else value(kind, n) for n in numbers]
    if pa.types.is_float64(kind):  # the bits of NaNs do not survive a list
        floats = np.array([0.0 if f is None else f for f in found])
        marks = np.array([f is not None and f != f for f in found])
        floats[marks] = NANS[np.array(numbers)[marks] % 3]
        return pa.array(floats, mask=np.array([f is None for f in found])).slice(start)
    return pa.array(found, kind).slice(start)


@settings(max_examples=150, deadline=None)
@given(columns(), st.booleans())
def test_a_column_comes_back_bit_by_bit(array: pa.Array, compress: bool) -> None:
    schema, rows = schema_of(array), len(array)
    column = read(encode(array, schema, compress=compress), schema, rows)
    assert same_bits(whole(column), array)
    whole(column).validate(full=True)
    places = np.unique(np.linspace(0, rows - 1, 5).astype(np.int64))
    assert same_bits(some(column, places), array.take(pa.array(places)))
    for at in places.tolist():
        assert same_bits(one(column, at), array.slice(at, 1))


def of_rows(make: Callable[[int], Any], kind: pa.DataType, rows: int = 32_768) -> pa.Array:
    return pa.array([make(n) for n in range(rows)], kind)


NOISE = np.random.default_rng(5)
CHOSEN: list[tuple[str, pa.Array, bool, int, float]] = [
    (
        "text that repeats, of one length",
        of_rows(lambda n: ("UA", "DL", "B6")[n % 7 % 3], pa.string()),
        False,
        DICTIONARY,
        0.2,
    ),
    (
        "text that repeats",
        of_rows(lambda n: f"tail {n * 7919 % 2_000}", pa.string()),
        False,
        DICTIONARY,
        0.35,
    ),
    (
        "text that repeats, or null",
        of_rows(lambda n: None if n % 5 == 0 else f"t{n % 90}", pa.string()),
        False,
        DICTIONARY,
        0.3,
    ),
    ("numbers that repeat", of_rows(lambda n: n * 7919 % 1_300 * 10**9, pa.int64()), False, DICTIONARY, 0.35),
    ("floats that repeat", pa.array(NOISE.integers(0, 300, 32_768) / 2), False, DICTIONARY, 0.3),
    ("one value, merged", of_rows(lambda n: 2013, pa.int64()), True, NARROW | LZ4, 0.01),
    ("numbers all different", pa.array(NOISE.integers(0, 2**62, 32_768)), True, PLAIN, 1.01),
    ("rising numbers", of_rows(lambda n: n * 3, pa.int64()), True, NARROW, 0.51),
    (
        "numbers near each other",
        of_rows(lambda n: -(10**12) - int(NOISE.integers(9_000)), pa.int64()),
        True,
        NARROW,
        0.26,
    ),
    ("days", of_rows(lambda n: 20_000 + n * 31 % 200, pa.int32()).view(pa.date32()), False, NARROW, 0.26),
    (
        "few numbers, near each other",
        of_rows(lambda n: n * 7919 % 5 * 10_000, pa.int64()),
        False,
        DICTIONARY,
        0.14,
    ),
    ("the ends of all numbers", pa.array([-(2**63), 2**63 - 1] * 9_000), False, DICTIONARY, 0.14),
    ("random bytes of one length", of_rows(lambda n: NOISE.bytes(20), pa.binary()), True, FIXED, 0.9),
    ("random bytes", of_rows(lambda n: NOISE.bytes(n % 40), pa.binary()), True, PLAIN, 1.01),
    (
        "letters of few kinds",
        of_rows(lambda n: "".join("acgtn"[i] for i in NOISE.integers(0, 5, 120 + n % 9)), pa.string(), 8_000),
        True,
        PLAIN | ZSTD,
        0.4,
    ),
    (
        "long lines that differ little",
        of_rows(lambda n: f"GET /api/v1/customers/{n:07d}/orders?page=1", pa.string()),
        True,
        FIXED | LZ4,
        0.5,
    ),
    ("booleans", of_rows(lambda n: n % 3 == 0, pa.bool_()), False, PLAIN, 1.2),
    ("booleans, merged", of_rows(lambda n: n % 3 == 0, pa.bool_()), True, PLAIN | LZ4, 0.5),
]


@pytest.mark.parametrize(
    ("array", "compress", "form", "share"), [each[1:] for each in CHOSEN], ids=[each[0] for each in CHOSEN]
)
def test_each_column_gets_what_takes_least(array: pa.Array, compress: bool, form: int, share: float) -> None:
    found = encode(array, schema_of(array), compress=compress)
    assert found.form == form
    assert len(found.data) <= share * found.plain_bytes
    assert same_bits(whole(read(found, schema_of(array), len(array))), array)


def test_a_part_that_is_too_large_for_a_reader_is_not_compressed() -> None:
    for count, form in ((31, LZ4), (32, 0)):
        array = pa.array([bytes([n]) * (1 << 20) for n in range(count)], pa.binary())
        found = encode(array, schema_of(array), compress=True)
        assert found.form & 0xFF00 == form and (len(found.data) > RAW_BYTES_MAX) == (form == 0)
        assert whole(read(found, schema_of(array), count)).equals(array)


def test_times_of_few_entries_take_a_byte_a_row() -> None:
    times = np.repeat(np.arange(9, dtype=np.uint64) * 4096 + (1 << 60), 1_000)
    NOISE.shuffle(times)
    found = encode_times(times)
    assert found.form == DICTIONARY and len(times) < len(found.data) < 1.1 * len(times)
    assert np.array_equal(whole(read(found, pa.schema([pa.field("t", pa.uint64())]), len(times))), times)
    each_its_own = encode_times(np.arange(9_000, dtype=np.uint64))
    assert (each_its_own.form, len(each_its_own.data)) == (PLAIN, 72_000)


def test_keys_of_one_length_have_no_offsets_and_are_never_compressed() -> None:
    keys = pa.array([n.to_bytes(8, "big") for n in range(32_768)], pa.binary())
    found = encode_keys(keys, schema_of(keys))
    assert found.form == FIXED and len(found.data) == 16 + 8 * len(keys)
    full, other = (read(found, schema_of(keys), len(keys)) for _ in range(2))
    assert full.equals(keys)
    assert full.buffers()[1].address == other.buffers()[1].address  # full groups share their offsets


# --- from anybody


def reseal(raw: bytes) -> bytes:
    """Compressed, with a checksum that is right."""
    return (
        struct.pack("<QII", len(raw), google_crc32c.value(raw), 0)
        + pa.Codec("lz4_raw").compress(raw).to_pybytes()
    )


def put(data: bytes, layout: str, at: int, number: int) -> bytes:
    raw = bytearray(data)
    struct.pack_into(layout, raw, at, number)
    return bytes(raw)


ROWS = 3_000
NUMBERS = of_rows(lambda n: n % 300 * 10**12, pa.int64(), ROWS)
NEAR = of_rows(lambda n: n % 200, pa.int32(), ROWS)
TEXTS = of_rows(lambda n: f"text {n % 90}", pa.string(), ROWS)
CODES = of_rows(lambda n: f"code{n:08d}", pa.string(), ROWS)
SAME = of_rows(lambda n: 7 if n % 2 else None, pa.int64(), ROWS)
MADE_UP: list[tuple[str, pa.Array, bool, Callable[[bytes], bytes], str]] = [
    (
        "an index out of range",
        NUMBERS,
        False,
        lambda d: put(d, "<H", 16 + 2 * 77, 300),
        "an index of 300 into 300",
    ),
    ("a width of 3", NUMBERS, False, lambda d: put(d, "<I", 0, 3), "indices of 3 bytes"),
    ("no values", NUMBERS, False, lambda d: put(d, "<I", 4, 0), "0 values"),
    (
        "more values than bytes",
        NUMBERS,
        False,
        lambda d: put(d, "<I", 4, 2**16),
        "bytes for 65536 values of int64",
    ),
    (
        "more values than indices, one of them null",
        NUMBERS,
        False,
        lambda d: put(put(d, "<I", 4, 2**17), "<I", 8, 0),
        "131072 values at",
    ),
    ("a null that is no value", NUMBERS, False, lambda d: put(d, "<I", 8, 300), "value 300 of 300 is null"),
    ("values among the indices", NUMBERS, False, lambda d: put(d, "<I", 12, 64), "indices of 2 bytes"),
    ("values behind the end", NUMBERS, False, lambda d: put(d, "<I", 12, 2**31), "indices of 2 bytes"),
    (
        "offsets that fall",
        TEXTS,
        False,
        lambda d: put(d, "<I", struct.unpack_from("<I", d, 12)[0] + 40, 1),
        "the offsets of 90",
    ),
    (
        "offsets behind the end",
        TEXTS,
        False,
        lambda d: put(d, "<I", struct.unpack_from("<I", d, 12)[0] + 360, 2**31 - 1),
        "the offsets of 90",
    ),
    (
        "offsets that are cut off",
        TEXTS,
        False,
        lambda d: d[: struct.unpack_from("<I", d, 12)[0] + 90],
        "offsets of 90",
    ),
    ("another length", CODES, False, lambda d: put(d, "<I", 0, 11), "values of 11 bytes"),
    ("no length", CODES, False, lambda d: put(d, "<I", 0, 0), "values of 0 bytes"),
    ("a byte too few", CODES, False, lambda d: d[:-1], "values of 12 bytes"),
    ("nothing", CODES, False, lambda d: b"", "values of one length is cut off after 0"),
    ("narrow numbers of 3 bytes", NEAR, False, lambda d: put(d, "<I", 0, 3), "numbers of 3 bytes"),
    ("a narrow number too few", NEAR, False, lambda d: d[:-1], "3000 numbers of 1 bytes"),
    ("narrow numbers, cut off", NEAR, False, lambda d: d[:9], "narrow numbers is cut off after 9"),
    (
        "a lowest value of another type",
        NEAR,
        False,
        lambda d: put(d, "<q", 4, -(2**31) - 1),
        "values of -2147483649",
    ),
    ("a value of another type", NEAR, False, lambda d: put(d, "<q", 4, 2**31 - 199), "and 199 above it"),
    ("a bomb", SAME, True, lambda d: put(d, "<Q", 0, RAW_BYTES_MAX + 1), "more than"),
    ("a length that is too long", SAME, True, lambda d: put(d, "<Q", 0, RAW_BYTES_MAX), "different"),
    ("a length that is too short", SAME, True, lambda d: put(d, "<Q", 0, 64), "(?i)lz4|different"),
    ("another checksum", SAME, True, lambda d: put(d, "<I", 8, 1), "different"),
    ("no compressed bytes", SAME, True, lambda d: d[:9], "codec 1 in 9 bytes"),
    (
        "an index out of range, compressed",
        SAME,
        True,
        lambda d: reseal(b"".join((struct.pack("<IIII", 1, 2, 0, 3_072), b"\2" * 3_056, bytes(16)))),
        "an index of 2 into 2",
    ),
]


@pytest.mark.parametrize(
    ("array", "compress", "change", "told"), [each[1:] for each in MADE_UP], ids=[each[0] for each in MADE_UP]
)
def test_what_is_made_up_is_one_clear_error(
    array: pa.Array, compress: bool, change: Callable[[bytes], bytes], told: str
) -> None:
    """Whoever makes a file up puts right checksums under it."""
    schema = schema_of(array)
    good = encode(array, schema, compress=compress)
    assert good.form != PLAIN
    data, before = np.frombuffer(change(bytes(good.data)), np.uint8), pa.total_allocated_bytes()
    with pytest.raises((ValueError, OSError), match=told):
        decode(good.form, data, schema, ROWS)
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize("form", [4, 3 << 8, 9 << 8 | DICTIONARY])
def test_forms_that_no_program_writes_are_refused(form: int) -> None:
    with pytest.raises(ValueError, match=r"form|codec"):
        decode(form, np.zeros(100, np.uint8), schema_of(NUMBERS), ROWS)


def test_a_message_that_is_compressed_twice_is_refused() -> None:
    """Arrow would take as much memory as its inner length says."""
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    zeros = pa.record_batch([pa.array(np.zeros(1 << 20))], schema=pa.schema([pa.field("x", pa.float64())]))
    inner = _compressed_message(zeros, options)
    with pytest.raises(ValueError, match="compressed buffers"):
        decode(PLAIN | LZ4, np.frombuffer(reseal(inner), np.uint8), zeros.schema, 1 << 20)


def _compressed_message(batch: pa.RecordBatch, options: pa.ipc.IpcWriteOptions) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    found: bytes = reader.read_next_message().serialize().to_pybytes()
    return found


def test_another_number_of_rows_is_refused() -> None:
    for array in (NUMBERS, NEAR, CODES, pa.array(np.arange(ROWS) / 3)):
        found = encode(array, schema_of(array), compress=False)
        with pytest.raises(ValueError, match=r"values|indices|numbers"):
            read(found, schema_of(array), ROWS + 50)


def test_formats_follow_the_cluster_version() -> None:
    assert [version_for(n) for n in (0, 1, 2, 3)] == [1, 1, 2, 2]
    assert VERSION == 2
