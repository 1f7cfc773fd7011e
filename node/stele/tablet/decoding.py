"""Reads the parts of column files of format 2 and later: layouts, and codecs. Opens no files; called by colfile.py.

README.md beside it has the layouts byte by byte. encoding.py writes them, and imports from here what both need.

Invariants: a part from outside takes at most RAW_BYTES_MAX more memory than its own bytes and its rows. No array points
outside its memory.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model.errors import Rejected
from stele.model.foreign import read_batch
from stele.tablet.colformat import DICTIONARY, FIXED, GROUP_ROWS, NARROW, PLAIN

RAW_BYTES_MAX = 32 << 20
"""A part is compressed only if it has at most this many bytes uncompressed."""
LZ4, ZSTD = 1, 2
"""Codecs, the second byte of a form. 0: not compressed."""
CODECS = {LZ4: pa.Codec("lz4_raw"), ZSTD: pa.Codec("zstd", 1)}

COMPRESSED = struct.Struct("<QII")
"""The header of a compressed part: the length and the CRC-32C of the uncompressed bytes, and zero."""
INDEXED = struct.Struct("<IIII")
"""The header of a dictionary, before its indices: the width of an index, the number of values, which one is null,
where they begin."""
NO_NULL = 0xFFFF_FFFF
OF_ONE_LENGTH = struct.Struct("<I12x")
"""The header of values of one length: that length."""
NARROWED = struct.Struct("<Iq4x")
"""The header of narrow numbers: the width of each, and the lowest value, which is added to it."""
INDEX_BITS = 8
"""An index has at least this many bits. So a dictionary saves nothing for values that have no more."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """A column of values that repeat: each distinct value once, and for each row the index of its value."""

    values: pa.Array
    indices: npt.NDArray[np.unsignedinteger[Any]]
    null: int
    """Which of the values is null; NO_NULL: none."""
    cells: npt.NDArray[Any] | None
    """The bytes of each value; None if the values differ in length."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return int(self.values.nbytes + self.indices.nbytes)

    def whole(self) -> pa.Array:
        """The column."""
        if self.cells is None:
            return self.values.take(pa.array(self.indices))
        rows, kind = len(self.indices), self.values.type
        data = pa.py_buffer(self.cells.take(self.indices))
        known = None
        if self.null != NO_NULL:
            known = pa.py_buffer(np.packbits(self.indices != self.null, bitorder="little"))
        if not is_text(kind):
            return pa.Array.from_buffers(kind, rows, [known, data])
        return pa.Array.from_buffers(kind, rows, [known, _offsets(self.cells.itemsize, rows), data])


@dataclass(frozen=True, slots=True)
class Narrow:
    """A column of whole numbers: the lowest one, and how far each is above it."""

    kind: pa.DataType
    low: int
    above: npt.NDArray[np.unsignedinteger[Any]]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return int(self.above.nbytes)

    def at(self, row: int) -> pa.Array:
        """The number in one row. An array of numpy would cost three times as much."""
        number = (self.low + self.above.item(row)).to_bytes(self.kind.bit_width // 8, "little", signed=True)
        return pa.Array.from_buffers(self.kind, 1, [None, pa.py_buffer(number)])

    def of(self, above: npt.NDArray[np.unsignedinteger[Any]]) -> pa.Array:
        """Return numbers, given how far each is above the lowest one."""
        numbers = above.astype(f"<i{self.kind.bit_width // 8}")
        numbers += numbers.dtype.type(self.low)
        return pa.Array.from_buffers(self.kind, len(numbers), [None, pa.py_buffer(numbers)])


Column: TypeAlias = "pa.Array | Indexed | Narrow"
"""A column as it is stored in a part."""


def whole(column: Column) -> pa.Array:
    """All rows."""
    if isinstance(column, Indexed):
        return column.whole()
    return column.of(column.above) if isinstance(column, Narrow) else column


def one(column: Column, row: int) -> pa.Array:
    """One row. Long values are not copied."""
    if isinstance(column, Indexed):
        return column.values.slice(column.indices.item(row), 1)
    return column.at(row) if isinstance(column, Narrow) else column.slice(row, 1)


def some(column: Column, rows: npt.NDArray[np.int64]) -> pa.Array:
    """A copy of some rows."""
    if isinstance(column, Indexed):
        return column.values.take(pa.array(column.indices[rows]))
    return column.of(column.above[rows]) if isinstance(column, Narrow) else column.take(pa.array(rows))


def values_of(column: Column) -> pa.Array:
    """An array that contains every value of the column; empty for narrow numbers, of which none is long."""
    if isinstance(column, Indexed):
        return column.values
    return pa.array([], column.kind) if isinstance(column, Narrow) else column


def is_compressed(form: int) -> bool:
    """Whether a part of this form takes memory of its own when it is read."""
    return form >> 8 != 0


def decode(form: int, data: npt.NDArray[np.uint8], schema: pa.Schema, rows: int) -> Column:
    """The column in a part. It uses the memory of `data`, unless that is compressed.

    Raises:
        ValueError, pa.ArrowException, OSError: the part is no such column, or has another number of rows.
    """
    codec, layout = form >> 8, form & 0xFF
    buffer = pa.py_buffer(data) if codec == 0 else _inflated(codec, data)
    if layout == DICTIONARY:
        return _indexed(buffer, schema.field(0).type, rows)
    if layout == FIXED:
        return _of_one_length(buffer, schema.field(0).type, rows)
    if layout == NARROW:
        return _narrowed(buffer, schema.field(0).type, rows)
    if layout != PLAIN:
        raise ValueError(f"its form {form:#x} is unknown")
    if codec == 0:
        array = pa.ipc.read_record_batch(buffer, schema).column(0)
    else:
        array = _inflated_message(buffer, schema)
    if len(array) != rows:
        raise ValueError(f"it has {len(array)} values for {rows} rows")
    return array


def _inflated(codec: int, data: npt.NDArray[np.uint8]) -> pa.Buffer:
    if codec not in CODECS or len(data) < COMPRESSED.size:
        raise ValueError(
            f"codec {codec} in {len(data)} bytes: the codec is unknown, or the header is cut off"
        )
    size, crc, _ = COMPRESSED.unpack_from(data.data)
    if size > RAW_BYTES_MAX:
        raise ValueError(f"its header says {size} bytes uncompressed, more than {RAW_BYTES_MAX}")
    found = CODECS[codec].decompress(pa.py_buffer(data[COMPRESSED.size :]), size)
    # Arrow does not tell how many bytes came out, so the checksum also finds a length that is not true.
    if google_crc32c.value(read_only(memoryview(found))) != crc:
        raise ValueError("its checksum is different after decompression")
    return found


def _inflated_message(buffer: pa.Buffer, schema: pa.Schema) -> pa.Array:
    """The column in a decompressed Arrow message. The message itself must not be compressed."""
    try:
        return read_batch(buffer, schema, "it").column(0)
    except Rejected as exc:
        raise ValueError(str(exc.args[0])) from exc


def _indexed(buffer: pa.Buffer, kind: pa.DataType, rows: int) -> Indexed:
    if buffer.size < INDEXED.size:
        raise ValueError(f"its dictionary is cut off after {buffer.size} bytes")
    width, count, null, begin = INDEXED.unpack_from(buffer)
    if (
        width not in (1, 2)
        or not 0 < count <= 1 << 8 * width
        or not INDEXED.size + width * rows <= begin <= buffer.size
    ):
        raise ValueError(
            f"its dictionary of {buffer.size} bytes cannot have {rows} indices of {width} bytes, and "
            f"{count} values at {begin}"
        )
    if null != NO_NULL and null >= count:
        raise ValueError(f"its header says that value {null} of {count} is null")
    indices = np.frombuffer(buffer, f"<u{width}", rows, INDEXED.size)
    if int(indices.max()) >= count:
        raise ValueError(f"its dictionary has an index of {int(indices.max())} into {count} values")
    known, cells = None, None
    if null != NO_NULL:
        known = pa.py_buffer(np.packbits(np.arange(count) != null, bitorder="little"))
    if is_text(kind):
        offsets, data = _texts(buffer.slice(begin), count)
        lengths = np.diff(offsets)
        if null == NO_NULL and lengths[0] and (lengths == lengths[0]).all():
            cells = np.frombuffer(data, f"V{lengths[0]}", count)
        buffers = [known, pa.py_buffer(offsets), data]
    else:
        width = kind.bit_width // 8
        if kind.bit_width % 8 or buffer.size - begin != width * count:
            raise ValueError(f"its dictionary has {buffer.size - begin} bytes for {count} values of {kind}")
        cells = np.frombuffer(buffer, f"V{width}", count, begin)
        buffers = [known, buffer.slice(begin)]
    return Indexed(pa.Array.from_buffers(kind, count, buffers), indices, null, cells)


def _texts(buffer: pa.Buffer, count: int) -> tuple[npt.NDArray[np.int32], pa.Buffer]:
    """The offsets of `count` texts, and their bytes."""
    size = np.dtype(np.int32).itemsize * (count + 1)
    if buffer.size < size:
        raise ValueError(f"the offsets of {count} values are cut off after {buffer.size} bytes")
    offsets = np.frombuffer(buffer, np.int32, count + 1)
    if offsets[0] or (offsets[1:] < offsets[:-1]).any() or offsets[-1] != buffer.size - size:
        raise ValueError(f"the offsets of {count} values do not fit their {buffer.size - size} bytes")
    return offsets, buffer.slice(size)


def _narrowed(buffer: pa.Buffer, kind: pa.DataType, rows: int) -> Narrow:
    if numbers(kind) is None:
        raise ValueError(f"it is laid out as narrow numbers, but {kind} is no type of whole numbers")
    if buffer.size < NARROWED.size:
        raise ValueError(f"the header of narrow numbers is cut off after {buffer.size} bytes")
    width, low = NARROWED.unpack_from(buffer)
    if width not in (1, 2, 4) or NARROWED.size + width * rows != buffer.size:
        raise ValueError(f"its {buffer.size} bytes cannot have {rows} numbers of {width} bytes")
    above, least = np.frombuffer(buffer, f"<u{width}", rows, NARROWED.size), -(1 << kind.bit_width - 1)
    if low < least or low + int(above.max()) >= -least:
        raise ValueError(f"{kind} cannot have values of {low} and {int(above.max())} above it")
    return Narrow(kind, low, above)


def _of_one_length(buffer: pa.Buffer, kind: pa.DataType, rows: int) -> pa.Array:
    if not is_text(kind):
        raise ValueError(f"it is laid out as text of one length, but {kind} is no type of text")
    if buffer.size < OF_ONE_LENGTH.size:
        raise ValueError(f"the header of values of one length is cut off after {buffer.size} bytes")
    (length,) = OF_ONE_LENGTH.unpack_from(buffer)
    size = length * rows
    if not length or OF_ONE_LENGTH.size + size != buffer.size or size > np.iinfo(np.int32).max:
        raise ValueError(f"its {buffer.size} bytes cannot have {rows} values of {length} bytes")
    data = buffer.slice(OF_ONE_LENGTH.size)
    return pa.Array.from_buffers(kind, rows, [None, _offsets(length, rows), data])


def _offsets(length: int, rows: int) -> pa.Buffer:
    """The offsets of values of one length. Full groups of all files share them."""
    return _full_offsets(length) if rows == GROUP_ROWS else _new_offsets(length, rows)


def _new_offsets(length: int, rows: int) -> pa.Buffer:
    return pa.py_buffer(np.arange(0, length * (rows + 1), length, dtype=np.int64).astype(np.int32))


@functools.lru_cache(maxsize=64)
def _full_offsets(length: int) -> pa.Buffer:
    return _new_offsets(length, GROUP_ROWS)


def numbers(kind: pa.DataType) -> np.dtype[Any] | None:
    """The numpy type of whole numbers of this type; None for other types, and for numbers of one byte."""
    if pa.types.is_signed_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        return np.dtype(f"<i{kind.bit_width // 8}") if kind.bit_width > INDEX_BITS else None
    return None


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are text or binary, which differ in length."""
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def read_only(data: memoryview) -> npt.NDArray[np.uint8]:
    """The bytes, as an array that a checksum does not copy."""
    raw = np.frombuffer(data, np.uint8)
    raw.flags.writeable = False
    return raw
