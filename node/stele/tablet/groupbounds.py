"""The part of a column file that has, by group and column, the lowest value, the highest value and the number of nulls.
Opens no files.

colwriter.py fills it, colfile.py reads it, skipping.py compares it with predicates.

README.md beside it has the layout. Invariant: each value of a group that is neither null nor NaN is between its two
bounds, as `ordered` orders them. A bound that was not kept is None.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stele.model import keys
from stele.model.column import Column
from stele.tablet.decoding import is_text, numbers

TEXT_BYTES_MAX = 32
"""The most bytes of a bound. Longer text is cut: a lower bound stays below it, an upper one is rounded up."""
_UNKNOWN = 255
_HEAD = struct.Struct("<II")
_NULLS = np.dtype("<u4")
_REAL = struct.Struct(">d")
_REAL_BYTES = 8
_MANY_TEXTS, _WORD = 1_024, np.dtype("<u8")
_FLOATS: dict[pa.DataType, np.dtype[Any]] = {pa.float32(): np.dtype("<f4"), pa.float64(): np.dtype("<f8")}
_SIGN, _ALL = 1 << 63, (1 << 64) - 1


def ordered(values: pa.Array) -> list[bytes]:
    """Bytes that compare as these values do; NaN is left out, because no value equals it. No value may be null."""
    if not len(values):
        return []
    if pa.types.is_floating(values.type):
        return [_real(value) for value in values.to_pylist() if value == value]
    return keys.key_list([values])


def _real(value: float) -> bytes:
    bits = int.from_bytes(_REAL.pack(value + 0.0))  # the sum makes 0.0 of -0.0, which equals it
    return (bits ^ (_ALL if bits & _SIGN else _SIGN)).to_bytes(_REAL_BYTES)


def _width(kind: pa.DataType) -> int | None:
    """How many bytes `ordered` gives for each value; None if they have no common length."""
    if is_text(kind):
        return None
    return _REAL_BYTES if pa.types.is_floating(kind) else max(1, kind.bit_width // 8)


def _ends(values: pa.Array) -> tuple[bytes | None, bytes | None]:
    """The bounds of these values; None: not known. Some values may be null or NaN."""
    number: np.dtype[Any] | None = numbers(values.type) or _FLOATS.get(values.type)
    if number is not None and not values.null_count:
        raw = np.frombuffer(values.buffers()[1], number, len(values), values.offset * number.itemsize)
        if number.kind == "f":  # for each float Arrow takes ten times as long
            with np.errstate(invalid="ignore"):
                low, high = float(np.fmin.reduce(raw)), float(np.fmax.reduce(raw))
            return (_real(low), _real(high)) if low == low else (None, None)
        bias, width = 1 << 8 * number.itemsize - 1, number.itemsize
        return (int(raw.min()) + bias).to_bytes(width), (int(raw.max()) + bias).to_bytes(width)
    if is_text(values.type) and (short := _short_ends(values)) is not None:
        return short
    both = pc.min_max(values)
    lowest, highest = both["min"], both["max"]
    if not lowest.is_valid:
        return None, None
    if number is not None and number.kind == "f":
        low, high = lowest.as_py(), highest.as_py()
        return (_real(low), _real(high)) if low == low else (None, None)
    lower, upper = ordered(pa.array([lowest, highest], values.type))
    return lower[:TEXT_BYTES_MAX], _rounded_up(upper)


def _short_ends(values: pa.Array) -> tuple[bytes | None, bytes | None] | None:
    """Bounds of many texts by their first eight bytes; None where these tell too little.

    Arrow compares text by text, which takes two to three times as long."""
    size = _WORD.itemsize
    if len(values) < _MANY_TEXTS or values.null_count:
        return None
    offsets, data = keys.binary_parts(values)
    if len({data[at : at + size].tobytes() for at in offsets[: -1 : len(values) // 4].tolist()}) == 1:
        return None
    lengths = np.diff(offsets)
    shortest = int(lengths.min())
    if shortest < size:
        return None
    if shortest == int(lengths.max()):
        begin = np.ndarray((len(values),), _WORD, data.data, int(offsets[0]), (shortest,))
    else:
        begin = np.ndarray((len(data) - size + 1,), _WORD, data.data, 0, (1,))[offsets[:-1]]
    begin = begin.byteswap()
    low, high = int(begin.min()).to_bytes(size), int(begin.max()).to_bytes(size)
    return None if low == high else (low, _next(high))


def _rounded_up(value: bytes) -> bytes | None:
    """An upper bound of `value` in few bytes: `value` itself, or bytes above all values with the same beginning. None:
    there are no such bytes."""
    return value if len(value) <= TEXT_BYTES_MAX else _next(value[:TEXT_BYTES_MAX])


def _next(value: bytes) -> bytes | None:
    """Bytes that compare above all values that begin with `value`, and are not longer than it. None: there are none."""
    stem = value.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


class BoundsWriter:
    """Collects the bounds of one file, group by group: some 20 bytes for each column of a group."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._blocks = [(int(column.id), array("I"), bytearray(), bytearray()) for column in columns]

    def add(self, place: int, values: pa.Array, distinct: pa.Array | None) -> None:
        """Add the next group of the column at this position. `distinct`: its distinct values, if they are known."""
        _, nulls, lengths, ends = self._blocks[place]
        nulls.append(values.null_count)
        for end in _ends(values if distinct is None else distinct):
            lengths.append(_UNKNOWN if end is None else len(end))
            ends += end or b""

    def part(self) -> bytes:
        """The bytes of the part."""
        blocks = [
            (column_id, np.array(nulls, _NULLS).tobytes() + lengths + ends)
            for column_id, nulls, lengths, ends in self._blocks
        ]
        groups = len(self._blocks[0][1])
        heads = [_HEAD.pack(len(blocks), groups), *(_HEAD.pack(i, len(block)) for i, block in blocks)]
        return b"".join((*heads, *(block for _, block in blocks)))


_Ends = tuple[bytes | None, bytes | None]
"""A lower and an upper bound."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a file says of one column, group by group. `values` has the lower and the upper bound of each group, one
    after the other. `cuts` says where each ends; `known`, whether it was kept."""

    rows: Sequence[int]
    nulls: npt.NDArray[np.uint32]
    known: npt.NDArray[np.bool_]
    cuts: npt.NDArray[np.int64]
    values: npt.NDArray[np.uint8]

    def has_null(self, group: int) -> bool:
        """Whether a row of the group is null."""
        return bool(self.nulls[group])

    def has_value(self, group: int) -> bool:
        """Whether a row of the group is not null."""
        return int(self.nulls[group]) != self.rows[group]

    def ends(self, group: int) -> _Ends:
        """The bounds of the group; None: not known."""
        return self._end(2 * group), self._end(2 * group + 1)

    def _end(self, at: int) -> bytes | None:
        if not self.known[at]:
            return None
        return self.values[self.cuts[at - 1] if at else 0 : self.cuts[at]].tobytes()


def of_default(value: pa.Scalar, rows: Sequence[int]) -> Bounds:
    """The bounds of a column that a file lacks: all rows of the file have this value."""
    groups = len(rows)
    end = ordered(pa.array([value], value.type)) if value.is_valid else []
    data = np.frombuffer(b"".join(end), np.uint8)
    return Bounds(
        rows,
        np.zeros(groups, _NULLS) if value.is_valid else np.array(rows, _NULLS),
        np.full(2 * groups, bool(end)),
        np.arange(1, 2 * groups + 1) * len(data),
        np.tile(data, 2 * groups),
    )


def read(data: npt.NDArray[np.uint8], column: Column, rows: Sequence[int]) -> Bounds | None:
    """The bounds of a column, from the bytes of the part; None if the part has none for this column. `rows`: the number
    of rows of each group.

    Raises:
        ValueError: the part cannot be that of a file with these groups. struct.error: it is too short.
    """
    raw = data.data
    columns, groups = _HEAD.unpack_from(raw)
    at = _HEAD.size * (1 + columns)
    if groups != len(rows) or at > len(raw):
        raise ValueError(
            f"group bounds: {groups} groups and {columns} columns stated, the file has {len(rows)} groups, in {len(raw)} bytes"
        )
    for column_id, size in _HEAD.iter_unpack(raw[_HEAD.size : at]):
        if column_id == column.id:
            if at + size > len(raw):
                raise ValueError(f"group bounds: {size} bytes are needed, {len(raw) - at} are there")
            return _block(data[at : at + size], column.arrow, rows)
        at += size
    return None


def _block(data: npt.NDArray[np.uint8], kind: pa.DataType, rows: Sequence[int]) -> Bounds:
    groups = len(rows)
    begin = (_NULLS.itemsize + 2) * groups
    if len(data) < begin:
        raise ValueError(f"group bounds: {begin} bytes are needed, {len(data)} are there")
    nulls = np.frombuffer(data, _NULLS, groups)
    lengths = data[_NULLS.itemsize * groups : begin]
    known = lengths != _UNKNOWN
    width = _width(kind)
    told = lengths[known]
    if (told > TEXT_BYTES_MAX if width is None else told != width).any():
        raise ValueError(
            f"group bounds: they have {told.min()} to {told.max()} bytes, which do not fit type {kind}"
        )
    cuts = np.cumsum(lengths * known, dtype=np.int64)
    if begin + int(cuts[-1]) != len(data):
        raise ValueError(f"group bounds: {int(cuts[-1])} bytes are stated, {len(data) - begin} are there")
    if (nulls > np.array(rows)).any():
        raise ValueError("group bounds: more nulls than rows")
    return Bounds(rows, nulls, known, cuts, data[begin:])
