"""What a column file says of its groups: lowest and highest values, and nulls. Predicates are judged by it as by the rows."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stele.model.alter import altered
from stele.model.block import RowOp
from stele.model.errors import Corrupt
from stele.model.predicate import Predicate, ScanSpec
from stele.model.schema import Schema
from stele.model.steps import AddColumn
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import PART_BOUNDS, TAIL, padded
from stele.tablet.colwriter import Format, write_column_file
from stele.tablet.files import FILES
from stele.tablet.filters import Filter
from stele.tablet.groupbounds import TEXT_BYTES_MAX, BoundsWriter, ordered, read
from stele.tablet.skipping import Wanted
from stele.tablet.sorted_runs import Run
from tests.tablet.test_encodings import columns
from tests.tablet.twin import block_of, flush, new_store, write_entry

OPS = ("=", "!=", "<", "<=", ">", ">=", "in", "is_null", "is_not_null")
NAMES = {
    pa.bool_(): "bool",
    pa.int8(): "int8",
    pa.int32(): "int32",
    pa.int64(): "int64",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.decimal128(12, 2): "decimal(12,2)",
    pa.date32(): "date",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.string(): "string",
    pa.binary(): "binary",
}


def schema_with(kind: pa.DataType) -> Schema:
    return Schema.make([("id", "int64"), ("x", NAMES[kind], True)], ["id"])


def file_of(schema: Schema, parts: Sequence[pa.Array], home: Path, wanted: Format = Format()) -> ColumnFile:  # noqa: B008 (immutable)
    """A file with a group for each of these arrays."""
    runs, start = [], 0
    for part in parts:
        numbers = pa.array(range(start, start + len(part)))
        start += len(part)
        batch = pa.RecordBatch.from_arrays([numbers, part], schema=schema.to_arrow())
        keys = pa.array([n.to_bytes(8, "big") for n in numbers.to_pylist()], pa.binary())
        runs.append(Run(batch, keys, np.full(len(part), 9, np.uint64), None))
    write_column_file(FILES, home / "rows-00000001", schema, iter(runs), wanted)
    return ColumnFile(home / "rows-00000001")


NANS = (pa.float32(), pa.float64())


def _only_nan(part: pa.Array) -> bool:
    return all(v is None or v != v for v in part.to_pylist())


@settings(max_examples=120, deadline=None)
@given(columns(), st.data())
def test_a_group_is_passed_over_just_where_no_row_can_be_wanted(array: pa.Array, data: Any) -> None:
    """All types, with nulls, NaN, and zeros of both signs. Ranges are judged exactly, as long as values are short."""
    schema = schema_with(array.type)
    cut = data.draw(st.integers(0, len(array)))
    parts = [part for part in (array.slice(0, cut), array.slice(cut)) if len(part)]
    values = [v for v in array.unique().to_pylist() if v is not None]
    with tempfile.TemporaryDirectory(prefix="stele-bounds-") as home:
        file = file_of(schema, parts, Path(home), Format(compress=data.draw(st.booleans())))
        for op in OPS:
            if not values and op not in ("is_null", "is_not_null"):
                continue
            chosen = tuple(data.draw(st.lists(st.sampled_from(values), max_size=3))) if op == "in" else None
            if op not in ("in", "is_null", "is_not_null"):
                chosen = data.draw(st.sampled_from(values))
            predicate = Predicate(1, op, chosen)
            may_hold, filter_ = Wanted([predicate], schema), Filter([predicate], schema)
            for group, part in enumerate(parts):
                batch = pa.RecordBatch.from_arrays([pa.nulls(len(part), pa.int64()), part], ["id", "x"])
                mask = filter_.mask(batch)
                assert mask is not None
                some = mask.true_count > 0
                if not some and array.type in NANS and _only_nan(part):
                    continue  # no bound is known
                if some or op in ("<", "<=", ">", ">=", "is_null", "is_not_null"):
                    assert may_hold(file, group) == some, (predicate, part)


def bounds_of(array: pa.Array) -> tuple[bytes | None, bytes | None]:
    """What a file with one group of these values says."""
    column = schema_with(array.type).by_name["x"]
    writer = BoundsWriter([column])
    writer.add(0, array, None)
    found = read(np.frombuffer(writer.part(), np.uint8), column, [len(array)])
    assert found is not None and found.nulls[0] == array.null_count
    return found.ends(0)


@pytest.mark.parametrize(
    ("values", "kind", "ends"),
    [
        (["b", None, "a", "é"], pa.string(), (b"a", "é".encode())),
        ([""], pa.string(), (b"", b"")),
        (["a" * 31, "a" * 32], pa.string(), (b"a" * 31, b"a" * 32)),
        (["a" * 33, "b" * 33], pa.string(), (b"a" * 32, b"b" * 31 + b"c")),
        ([b"\xff" * 33], pa.binary(), (b"\xff" * 32, None)),
        ([b"a\xff" + b"\xff" * 40], pa.binary(), (b"a" + b"\xff" * 31, b"b")),
        ([None, None], pa.string(), (None, None)),
        ([float("nan")], pa.float64(), (None, None)),
        ([float("nan"), 1.5, None], pa.float64(), (ordered(pa.array([1.5]))[0],) * 2),
        ([-0.0], pa.float32(), (ordered(pa.array([0.0]))[0],) * 2),
    ],
)
def test_bounds_are_short_and_hold_every_value(values: list[Any], kind: pa.DataType, ends: Any) -> None:
    found = bounds_of(pa.array(values, kind))
    assert found == ends
    assert all(end is None or len(end) <= TEXT_BYTES_MAX for end in found)


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.integers(7, 14),
    st.sampled_from(["", "a", "same begin", "\xff" * 9]),
    st.integers(1_024, 2_000),
)
def test_bounds_of_many_texts_hold_every_value(data: Any, longest: int, begin: str, count: int) -> None:
    """They are compared by their first eight bytes, where these tell enough."""
    seed, letters, least = (
        data.draw(st.integers(0, 99)),
        data.draw(st.integers(1, 26)),
        data.draw(st.sampled_from([0, 7, 8, 9, 14])),
    )
    rng = np.random.default_rng(seed)
    texts = [
        begin
        + "".join(
            chr(97 + n) for n in rng.integers(0, letters, rng.integers(min(least, longest), longest + 1))
        )
        for _ in range(count)
    ]
    lowest, highest = min(text.encode() for text in texts), max(text.encode() for text in texts)
    array = pa.array(["x", *texts]).slice(1)
    lower, upper = found = bounds_of(array)
    assert found == bounds_of(array.cast(pa.binary()))
    assert lower is not None and lower[:8] == lowest[:8] and lower <= lowest
    assert upper is None or (upper >= highest and (upper == highest or len(upper) <= 8))
    if lowest[:8] == highest[:8]:
        assert found == (lowest, highest), "eight bytes tell nothing"


@pytest.mark.parametrize("width", [32, 64])
@given(data=st.data())
def test_bytes_of_floats_compare_as_the_floats_do(width: Literal[32, 64], data: Any) -> None:
    kind = pa.float32() if width == 32 else pa.float64()
    one, other = pa.array([data.draw(st.floats(width=width)) for _ in range(2)], kind)
    left, right = ordered(pa.array([one], kind)), ordered(pa.array([other], kind))
    one, other = one.as_py(), other.as_py()
    if one != one or other != other:
        assert not (left and right)
    else:
        assert (left < right, left == right) == (one < other, one == other)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), st.binary(max_size=40))
def test_long_values_are_never_outside_their_bounds(values: list[bytes], other: bytes) -> None:
    """Cut or rounded up, in binary and in predicates that are longer than any bound."""
    low, high = bounds_of(pa.array(values, pa.binary()))
    assert low is not None and all(low <= value for value in values)
    assert high is None or all(value <= high for value in values)
    schema = schema_with(pa.binary())
    with tempfile.TemporaryDirectory(prefix="stele-bounds-") as home:
        file = file_of(schema, [pa.array(values, pa.binary())], Path(home))
        for value in (*values, other):
            some = {
                "=": value in values,
                "<": min(values) < value,
                "<=": min(values) <= value,
                ">": max(values) > value,
                ">=": max(values) >= value,
            }
            for op, found in some.items():
                assert not found or Wanted([Predicate(1, op, value)], schema)(file, 0), (op, value)


def test_a_file_of_format_1_says_nothing(tmp_path: Path) -> None:
    schema = schema_with(pa.int64())
    file = file_of(schema, [pa.array([1, 2])], tmp_path, Format(1))
    assert file.bounds(schema.by_name["x"]) is None
    assert Wanted([Predicate(1, "=", 9)], schema)(file, 0)


@pytest.mark.parametrize(
    ("default", "wanted"), [("7", {"=": True, ">": False}), (None, {"=": False, ">": False})]
)
def test_a_column_that_a_file_lacks_is_its_default_in_each_group(
    tmp_path: Path, default: str | None, wanted: dict[str, bool]
) -> None:
    schema = schema_with(pa.int64())
    file = file_of(schema, [pa.array([1, 2]), pa.array([3])], tmp_path)
    later = altered(schema, [AddColumn("y", "int32", True, default)])
    for group in (0, 1):
        for op, found in wanted.items():
            assert Wanted([Predicate(2, op, 7)], later)(file, group) == found
        assert Wanted([Predicate(2, "is_null")], later)(file, group) == (default is None)


def test_a_part_of_bounds_is_small(tmp_path: Path) -> None:
    """Open files keep only where it is."""
    schema = schema_with(pa.int64())
    file = file_of(schema, [pa.array(range(5))] * 200, tmp_path)
    _, length, _ = file._parts[PART_BOUNDS, 0]
    assert length == 8 + 2 * 8 + 2 * 200 * (4 + 2 + 16)
    before = pa.total_allocated_bytes()
    assert file.bounds(schema.by_name["x"]) is not None
    assert pa.total_allocated_bytes() == before


# --- from anybody

MADE_UP: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("nothing", lambda d: b"", "requires a buffer"),
    (
        "a column too many",
        lambda d: struct.pack("<II", 2**32 - 1, 2) + d[8:],
        "2 groups and 4294967295 columns stated",
    ),
    (
        "a group too many",
        lambda d: struct.pack("<II", 1, 3) + d[8:],
        "3 groups and 1 columns stated, the file has 2",
    ),
    (
        "a block that is longer",
        lambda d: d[:12] + struct.pack("<I", 99) + d[16:],
        "99 bytes are needed, ",
    ),
    (
        "a block that is shorter",
        lambda d: d[:12] + struct.pack("<I", 5) + d[16:],
        "12 bytes are needed, 5 are there",
    ),
    ("cut off", lambda d: d[:-1], "bytes are needed, "),
    ("more nulls than rows", lambda d: d[:16] + struct.pack("<I", 4) + d[20:], "more nulls"),
    ("a bound of seven bytes", lambda d: d[:24] + b"\7" + d[25:], "they have 7 to 8 bytes"),
    ("a bound too few", lambda d: d[:24] + b"\xff" + d[25:], "24 bytes are stated, 32 are there"),
]


@pytest.mark.parametrize(
    ("change", "told"), [each[1:] for each in MADE_UP], ids=[each[0] for each in MADE_UP]
)
def test_what_is_made_up_is_one_clear_error(change: Callable[[bytes], bytes], told: str) -> None:
    column = schema_with(pa.int64()).by_name["x"]
    writer = BoundsWriter([column])
    for values in ([1, 2, 3], [4, None, 6]):
        writer.add(0, pa.array(values), None)
    good = writer.part()
    assert read(np.frombuffer(good, np.uint8), column, [3, 3]) is not None
    with pytest.raises((ValueError, struct.error), match=told):
        read(np.frombuffer(change(good), np.uint8), column, [3, 3])


def test_a_long_bound_of_text_is_refused() -> None:
    column = schema_with(pa.string()).by_name["x"]
    raw = struct.pack("<IIIII", 1, 1, 1, 6 + 2 * 33, 0) + bytes([33, 33]) + b"a" * 66
    with pytest.raises(ValueError, match="they have 33"):
        read(np.frombuffer(raw, np.uint8), column, [1])


def test_bounds_that_lie_are_found_by_their_checksum(tmp_path: Path) -> None:
    """Otherwise a scan would pass over rows that are there."""
    store = new_store(tmp_path / "t")
    rows = [{"k": "k", "n": n, "v": "v", "w": n, "d": None} for n in range(9)]
    store.apply(write_entry(1, block_of(rows, RowOp.UPSERT)))
    flush(store)
    path = store.directory / store.files[0]
    offset, length, _ = ColumnFile(path)._parts[PART_BOUNDS, 0]
    raw = bytearray(path.read_bytes())
    raw[offset + length - 1] ^= 1
    path.unlink()  # the open store still maps it
    path.write_bytes(raw)
    spec = ScanSpec(predicates=(Predicate(int(store.schema.by_name["w"].id), "=", 8),))
    store = type(store).open(store.directory)
    with store.view() as view, pytest.raises(Corrupt, match=f"part {PART_BOUNDS:#x}"):
        list(view.scan(spec))
    with pytest.raises(Corrupt, match=f"part {PART_BOUNDS:#x}"):
        store.verify()


def test_made_up_bounds_are_damage_of_their_file(tmp_path: Path) -> None:
    """With checksums that are right: they tell of one group more than there is."""
    schema = schema_with(pa.int64())
    file = file_of(schema, [pa.array([1])], tmp_path)
    raw = bytearray(file.path.read_bytes())
    offset, length, _ = file._parts[PART_BOUNDS, 0]
    raw[offset + 4] += 1
    size, _, magic = TAIL.unpack(raw[-TAIL.size :])
    footer = raw[-TAIL.size - size : -TAIL.size]
    at = footer.index(struct.pack("<II", PART_BOUNDS, 0))
    part = bytes(raw[offset : offset + padded(length)])
    struct.pack_into("<I", footer, at + 24, google_crc32c.value(part))
    body = bytes(footer)
    file.path.unlink()
    file.path.write_bytes(raw[: -TAIL.size - size] + body + TAIL.pack(size, google_crc32c.value(body), magic))
    file = ColumnFile(file.path)
    file.verify()
    with pytest.raises(
        Corrupt,
        match=r"rows-00000001: the bounds of column 1 cannot be decoded: group bounds: 2 groups and 2 columns stated",
    ):
        file.bounds(schema.by_name["x"])
