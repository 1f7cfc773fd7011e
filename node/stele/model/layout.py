"""Reads and makes small blocks of whole rows directly from their bytes, without Arrow objects for each block.

Used by the store, and by the client (see plain.py); opens no files. The bytes before the values are the
block's header and its message's metadata. They are the same in all such blocks of one schema, except for the
number of rows and the places of the buffers. A block with another layout, or with columns of other types, is
left to stele.model.block, which reads any block at several times the cost.

Invariant: what this reads from a block, `decode_block` reads too; what this makes, `encode_block` makes too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model.block import HEADER, RowOp, encode_block
from stele.model.foreign import batch_places
from stele.model.keys import KEY_BYTES_MAX
from stele.model.schema import Schema

ROWS_MAX = 64
"""For more rows, Arrow checks the values at less cost."""

_BYTES_KINDS = (pa.lib.Type_STRING, pa.lib.Type_BINARY)
_KINDS = (
    *_BYTES_KINDS,
    *(pa.lib.Type_INT8, pa.lib.Type_INT16, pa.lib.Type_INT32, pa.lib.Type_INT64),
    *(pa.lib.Type_FLOAT, pa.lib.Type_DOUBLE, pa.lib.Type_DATE32, pa.lib.Type_TIMESTAMP, pa.lib.Type_BOOL),
)
"""Types of columns that a layout can have."""
_CODES = {
    pa.lib.Type_INT8: "b",
    pa.lib.Type_INT16: "h",
    pa.lib.Type_INT32: "i",
    pa.lib.Type_INT64: "q",
    pa.lib.Type_DOUBLE: "d",
}
"""The format characters of `struct` for these types."""
_WORD = struct.Struct("<q")
_OFFSETS = [struct.Struct(f"<{rows + 1}i") for rows in range(ROWS_MAX + 1)]
_ROWS_WORD = 1  # the header's word with the numbers of rows and columns
_INT32_MAX = (1 << 31) - 1

_Ints = npt.NDArray[np.int64]


class _Column:
    __slots__ = ("code", "is_key", "is_text", "node", "nullable", "type", "value_bits", "word")

    def __init__(self, node: int, word: int, field: pa.Field, is_key: bool) -> None:
        """Words are numbered from the block's start. `node`: the word with the column's number of rows; the next
        word has its number of nulls. `word`: the word with the offset of its first buffer, then its length, and
        so on for each buffer."""
        type_ = field.type
        self.node = node
        self.word = word
        self.type = type_
        self.nullable: bool = field.nullable
        self.code = _CODES.get(type_.id, "")
        self.value_bits: int = 0 if type_.id in _BYTES_KINDS else type_.bit_width  # 0: lengths vary
        self.is_text = type_.id == pa.lib.Type_STRING
        self.is_key = is_key


class Layout:
    """The 8-byte words at the front of a schema's blocks. Made by `layout_of`."""

    def __init__(self, schema: Schema, sample: bytes, places: tuple[int, int, int, int], body: int) -> None:
        """`sample`: a block of this layout. `places`: the words in it where the length of its body, its number of
        rows, its field nodes and its buffers begin. `body`: the byte at which its body begins."""
        self._arrow = schema.to_arrow()
        self._front = struct.Struct(f"<{body // 8}q")
        self._size, self._rows, self._nodes, word = places
        self._columns: list[_Column] = []
        for column_id, field in zip(schema.column_ids, self._arrow):
            column = _Column(self._nodes + 2 * len(self._columns), word, field, schema.is_key(column_id))
            self._columns.append(column)
            word += 4 if column.value_bits else 6
        self._nodes_end = self._nodes + 2 * len(self._columns)
        self._buffers, self._buffers_end = places[3], word
        each = [(0, column.value_bits) if column.value_bits else (0, 32, 0) for column in self._columns]
        self._bits = np.array([bits for buffers in each for bits in buffers])  # bits per row in each buffer
        self._validity = [(column.word - places[3]) // 2 for column in self._columns]
        self._nullable = np.array([column.nullable for column in self._columns])
        own = {
            _ROWS_WORD,
            self._size,
            self._rows,
            *range(self._nodes, self._nodes_end),
            *range(self._buffers, self._buffers_end),
        }
        self._common = [at for at in range(body // 8) if at not in own]
        self._common_of = itemgetter(*self._common)
        self._words = self._front.unpack_from(sample)
        self._buffer_words = struct.Struct(f"<{word - places[3]}q")
        self._fronts: dict[tuple[int, int], bytes] = {}
        self._common_words = self._common_of(self._words)

    def is_plain(self, block: bytes) -> bool:
        """Whether the block has this layout and at most `ROWS_MAX` rows, is safe to read, and no row of it can be
        refused.

        After False the block may still be correct: stele.tablet.block_checks decides, as it can for any block."""
        body = self._front.size
        if len(block) < body:
            return False
        words = self._front.unpack_from(block)
        rows, size = words[self._rows], len(block) - body
        if (
            not 0 < rows <= ROWS_MAX
            or words[_ROWS_WORD] != rows | len(self._columns) << 32
            or words[self._size] != size
            or words[self._nodes : self._nodes_end : 2] != (rows,) * len(self._columns)
            or self._common_of(words) != self._common_words
        ):
            return False
        end = key_bytes = 0
        for column in self._columns:
            word, bits = column.word, column.value_bits
            validity, marks, at, length = words[word : word + 4]
            if marks:
                if validity % 8 or validity < end or 8 * marks < rows or validity + marks > size:
                    return False
                end = validity + marks
                octets = block[body + validity : body + validity + (rows + 7) // 8]
                present = (int.from_bytes(octets, "little") & ((1 << rows) - 1)).bit_count()
                if not column.nullable or present + words[column.node + 1] != rows:
                    return False
            elif words[column.node + 1]:
                return False
            if at % 8 or at < end or length < 0 or at + length > size:
                return False
            end = at + length
            if bits:
                if 8 * length < bits * rows or 8 * length % bits:
                    return False
                longest = bits // 8 or 1
            else:
                if length < 4 * (rows + 1) or length % 4:
                    return False
                offsets = _OFFSETS[rows].unpack_from(block, body + at)
                longest = offsets[-1]  # an upper bound: all values together
                at, length = words[word + 4 : word + 6]
                if offsets[0] or sorted(offsets) != list(offsets) or at % 8 or at < end or length < longest:
                    return False
                end = at + length
                if end > size:
                    return False
                if column.is_text and not _are_texts(block[body + at : body + at + longest], offsets):
                    return False
                longest = 2 * longest + 2  # the worst case of escaping
            if column.is_key:
                key_bytes += longest
        return key_bytes <= KEY_BYTES_MAX

    def encode(self, op: RowOp, columns: Sequence[Sequence[Any]]) -> bytes:
        """The block of 1 to `ROWS_MAX` rows with these values, column by column. No value is null, each fits
        its column.

        Only for types that `stele.model.plain` accepts."""
        rows = len(columns[0])
        front = bytearray(self._front_of(op, rows))
        body: list[bytes] = []
        buffers: list[int] = []
        end = 0
        for column, values in zip(self._columns, columns):
            begin = end
            if column.code:
                data = struct.pack(f"<{rows}{column.code}", *values)
                buffers += (begin, 0, begin, len(data))
            else:
                each = [value.encode() for value in values]
                data = b"".join(each)
                offsets = _OFFSETS[rows].pack(0, *accumulate(map(len, each)))
                end += _padded(body, offsets)
                buffers += (begin, 0, begin, len(offsets), end, len(data))
            end += _padded(body, data)
        self._buffer_words.pack_into(front, 8 * self._buffers, *buffers)
        _WORD.pack_into(front, 8 * self._size, end)
        return b"".join((front, *body))

    def _front_of(self, op: RowOp, rows: int) -> bytes:
        """Return the bytes before the body of a block with this many rows. The caller sets the words that depend on
        the lengths of text."""
        found = self._fronts.get((op.value, rows))
        if found is None:
            words = list(self._words)
            words[0] ^= (RowOp.UPSERT ^ op) << 16
            words[_ROWS_WORD] = rows | len(self._columns) << 32
            words[self._rows] = rows
            words[self._nodes : self._nodes_end] = (rows, 0) * len(self._columns)
            found = self._fronts[op.value, rows] = self._front.pack(*words)
        return found

    def rows_of(self, blocks: Sequence[memoryview]) -> pa.RecordBatch | None:
        """Return the rows of several blocks, one block after the other. `is_plain` accepted each before, so text is
        not checked again.

        None: a block has another layout or is damaged, or all rows together do not fit into an Arrow array."""
        raw = b"".join(blocks)
        sizes = np.fromiter(map(len, blocks), np.int64, len(blocks))
        if len(raw) > _INT32_MAX or (sizes % 8).any() or sizes.min() < self._front.size:
            return None
        starts = np.cumsum(sizes) - sizes
        words = np.frombuffer(raw, np.int64)[starts[:, None] // 8 + np.arange(self._front.size // 8)]
        bodies, sizes = starts + self._front.size, sizes - self._front.size
        rows = words[:, self._rows]
        offsets = words[:, self._buffers : self._buffers_end : 2]
        lengths = words[:, self._buffers + 1 : self._buffers_end : 2]
        nulls, marks = words[:, self._nodes + 1 : self._nodes_end : 2], lengths[:, self._validity]
        if (
            (words[:, self._common] != self._common_words).any()
            or rows.min() <= 0
            or rows.max() > ROWS_MAX
            or (words[:, _ROWS_WORD] != rows | len(self._columns) << 32).any()
            or (words[:, self._size] != sizes).any()
            or (words[:, self._nodes : self._nodes_end : 2] != rows[:, None]).any()
            or (nulls < 0).any()
            or (nulls > rows[:, None] * self._nullable).any()
            or ((offsets | lengths) < 0).any()
            or (offsets % 8).any()
            or (lengths > sizes[:, None] - offsets).any()
            or (8 * lengths < rows[:, None] * self._bits).any()
            or ((nulls > 0) != (marks > 0)).any()
            or (8 * marks < rows[:, None] * (nulls > 0)).any()
        ):
            return None
        row = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)  # the row's place in its block
        arrays = []
        for column, first, lacking in zip(self._columns, self._validity, nulls.T):
            begins = bodies + offsets[:, first + 1]
            buffers = [_validity(raw, bodies + offsets[:, first], lacking > 0, rows, row)]
            if column.value_bits:
                buffers.append(_fixed(column, raw, begins, rows, row))
            else:
                data = bodies + offsets[:, first + 2]
                found = _texts(raw, begins, data, lengths[:, first + 1 :], rows, row)
                if found is None:
                    return None
                buffers += found
            arrays.append(pa.Array.from_buffers(column.type, len(row), buffers))
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)


def layout_of(schema: Schema) -> Layout | None:
    """The layout of a schema's blocks, made once. None: the schema has columns of types without such a layout."""
    if "layout" not in schema.derived:  # takes 30 ms for a thousand columns
        schema.derived["layout"] = _made(schema)
    found: Layout | None = schema.derived["layout"]
    return found


def _made(schema: Schema) -> Layout | None:
    arrow = schema.to_arrow()
    if any(field.type.id not in _KINDS for field in arrow):
        return None
    arrays = []
    for field in arrow:
        value = [pa.py_buffer(struct.pack("<ii", 0, 1)), pa.py_buffer(b"x")]
        if field.type.id not in _BYTES_KINDS:
            value = [pa.py_buffer(bytes(8))]
        arrays.append(pa.Array.from_buffers(field.type, 1, [None, *value], 0))
    batch = pa.RecordBatch.from_arrays(arrays, schema=arrow)
    sample = encode_block(RowOp.UPSERT, schema.column_ids, batch, schema.version)
    metadata = HEADER.size + 4 * len(arrow)
    metadata += -metadata % 8 + 8  # after a marker and its length
    body = metadata + int.from_bytes(sample[metadata - 4 : metadata], "little")
    places = [metadata + place for place in batch_places(memoryview(sample)[metadata:body])]
    if any(place % 8 for place in (*places, body)):
        return None  # Arrow uses another layout than today's
    size, rows, nodes, buffers = (place // 8 for place in places)
    return Layout(schema, sample, (size, rows, nodes, buffers), body)


def _padded(body: list[bytes], buffer: bytes) -> int:
    """Append a buffer, padded with zeros to a whole word. Returns its padded length."""
    padding = -len(buffer) % 8
    body.append(buffer)
    if padding:
        body.append(bytes(padding))
    return len(buffer) + padding


def _are_texts(data: bytes, offsets: Sequence[int]) -> bool:
    if data.isascii():
        return True
    try:
        for begin, end in pairwise(offsets):
            data[begin:end].decode()
    except UnicodeDecodeError:
        return False
    return True


def _bits(raw: bytes, begins: _Ints, rows: _Ints, row: _Ints) -> npt.NDArray[np.uint8]:
    """Return one bit for each row, as 0 or 1. Those of a block begin at its byte offset in `begins`.

    `rows`: the number of rows of each block. `row`: for each row, its position in its block."""
    octets = np.frombuffer(raw, np.uint8)[np.repeat(begins, rows) + row // 8]
    found: npt.NDArray[np.uint8] = octets >> (row % 8).astype(np.uint8) & 1
    return found


def _validity(
    raw: bytes, begins: _Ints, lacking: npt.NDArray[np.bool_], rows: _Ints, row: _Ints
) -> pa.Buffer | None:
    """Return the validity bits of a column in all blocks; None if there are no nulls.

    `lacking`: which blocks have nulls. Only these have validity bits, at their `begins`. For the others see `_bits`."""
    if not lacking.any():
        return None
    present = _bits(raw, begins * lacking, rows, row) | ~np.repeat(lacking, rows)
    return pa.py_buffer(np.packbits(present, bitorder="little"))


def _fixed(column: _Column, raw: bytes, begins: _Ints, rows: _Ints, row: _Ints) -> pa.Buffer:
    """Return the values of a column in all blocks. A block's values begin at its byte offset in `begins`."""
    if column.value_bits == 1:
        return pa.py_buffer(np.packbits(_bits(raw, begins, rows, row), bitorder="little"))
    width = column.value_bits // 8
    return pa.py_buffer(np.frombuffer(raw, f"u{width}")[np.repeat(begins // width, rows) + row])


def _texts(
    raw: bytes, offsets_at: _Ints, data_at: _Ints, lengths: _Ints, rows: _Ints, row: _Ints
) -> list[pa.Buffer] | None:
    """As `_fixed`, for values of varying length. `lengths`: of the two buffers, offsets and data, per block.

    None: the offsets do not rise, or point outside their buffer."""
    if (lengths[:, 0] < 4 * (rows + 1)).any():
        return None
    found, first = np.frombuffer(raw, np.int32), offsets_at // 4
    at = np.repeat(first, rows) + row
    each, used = found[at + 1].astype(np.int64) - found[at], found[first + rows]
    if found[first].any() or each.min() < 0 or (used > lengths[:, 1]).any():
        return None
    ends = np.zeros(len(row) + 1, np.int32)
    np.cumsum(each, out=ends[1:])
    data = b"".join([raw[at:end] for at, end in zip(data_at.tolist(), (data_at + used).tolist())])
    return [pa.py_buffer(ends), pa.py_buffer(data)]
