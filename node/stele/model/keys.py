"""Order-preserving key bytes: comparing encoded keys byte by byte compares the keys column by column.

Per column:

- bool: one byte.
- int8…int64, date (days) and timestamp (microseconds): big-endian with the sign bit flipped.
- decimal: sixteen bytes big-endian, sign bit flipped.
- string and binary: raw in the last column. Elsewhere 00 is written as 00 01, and 00 00 ends the value. 00 00
  sorts before 00 01 and before every other byte, so a prefix sorts first.

Vectorised. Only batches of a few rows go through Python values, because numpy costs more there.

Invariant: encoding is one-to-one for given column types, so equal bytes mean equal keys.
"""

from __future__ import annotations

import decimal
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stele.model.errors import Corrupt, Rejected
from stele.model.schema import Schema

U64 = npt.NDArray[np.uint64]

KEY_BYTES_MAX = 8192
"""The longest encoded key, so that index and footers stay small. A longer key is a row error."""

_TINY_ROWS = 8
_TERMINATOR = b"\x00\x00"
_SIGNED = {
    width: (np.dtype(f"u{width}"), np.dtype(f">u{width}"), np.dtype(f"u{width}").type(1 << (8 * width - 1)))
    for width in (1, 2, 4, 8)
}
"""By width in bytes: the type in memory, the type in a key, the sign bit."""
_PACK = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I"), 8: struct.Struct(">Q")}
_INT_WIDTHS = {
    pa.lib.Type_INT8: 1,
    pa.lib.Type_INT16: 2,
    pa.lib.Type_INT32: 4,
    pa.lib.Type_INT64: 8,
    pa.lib.Type_DATE32: 4,
    pa.lib.Type_TIMESTAMP: 8,
}
_TIME_KINDS = (pa.lib.Type_DATE32, pa.lib.Type_TIMESTAMP)
_BYTES_KINDS = (pa.lib.Type_STRING, pa.lib.Type_BINARY)
_INT_OF_WIDTH = {1: pa.int8(), 2: pa.int16(), 4: pa.int32(), 8: pa.int64()}


def encode_keys(batch: pa.RecordBatch, schema: Schema) -> pa.BinaryArray:
    """Encoded primary keys of the rows of `batch`. Finds columns by name.

    Raises:
        Rejected: a key column is missing, has the wrong type, or has nulls.
    """
    return encode_columns(batch, schema, schema.key_column_ids)


def encode_columns(batch: pa.RecordBatch, schema: Schema, column_ids: Sequence[int]) -> pa.BinaryArray:
    """Encoded bytes of these columns for each row, in this order.

    Raises:
        Rejected: a column is missing, has the wrong type, or has nulls.
    """
    return encode_arrays(_columns(batch, schema, column_ids))


def column_list(batch: pa.RecordBatch, schema: Schema, column_ids: Sequence[int]) -> list[bytes]:
    """As `encode_columns`, but returns a list of `bytes`. Use it for up to some dozens of rows.

    Raises:
        Rejected: see `encode_columns`.
    """
    arrays = _columns(batch, schema, column_ids)
    for array in arrays:
        if array.null_count:
            raise Rejected("a key column has nulls; keys must not be null")
    return _encode_tiny(arrays)


def fixed_rows(
    batch: pa.RecordBatch, schema: Schema, column_ids: Sequence[int]
) -> npt.NDArray[np.uint8] | None:
    """As `encode_columns`, but the rows of a matrix; None if the types do not give rows of equal length.

    Raises:
        Rejected: see `encode_columns`.
    """
    arrays = _columns(batch, schema, column_ids)
    for array in arrays:
        if _is_bytes(array.type):
            return None
        if array.null_count:
            raise Rejected("a key column has nulls; keys must not be null")
    return _side_by_side([_fixed_bytes(array) for array in arrays])


def _columns(batch: pa.RecordBatch, schema: Schema, column_ids: Sequence[int]) -> list[pa.Array]:
    arrays = []
    for column_id in column_ids:
        column = schema.by_id[column_id]
        position = batch.schema.get_field_index(column.name)
        if position < 0:  # missing, or there twice because the caller asked for it twice
            named = batch.schema.get_all_field_indices(column.name)
            if not named:
                raise Rejected(f"key column {column.name} is missing from the batch")
            position = named[0]
        array = batch.column(position)
        if array.type != column.arrow:
            raise Rejected(f"key column {column.name} has type {array.type}; expected {column.arrow}")
        arrays.append(array)
    return arrays


def encode_arrays(arrays: Sequence[pa.Array]) -> pa.BinaryArray:
    """Encoded bytes of rows given column by column, as the module's docstring says.

    Raises:
        Rejected: a value is null, or a type cannot be part of a key.
    """
    for array in arrays:
        if array.null_count:
            raise Rejected("a key column has nulls; keys must not be null")
    if len(arrays[0]) <= _TINY_ROWS:
        return pa.array(_encode_tiny(arrays), pa.binary())
    pieces: list[Any] = []
    fixed: list[npt.NDArray[np.uint8]] = []
    last = len(arrays) - 1
    for position, array in enumerate(arrays):
        if _is_bytes(array.type):
            if fixed:
                pieces.append(_from_matrix(fixed))
                fixed = []
            pieces.append(_as_binary(array) if position == last else _escape(array))
            if position != last:
                pieces.append(_TERMINATOR)
        else:
            fixed.append(_fixed_bytes(array))
    if fixed:
        pieces.append(_from_matrix(fixed))
    if len(pieces) == 1:
        return pieces[0]
    return pc.binary_join_element_wise(*pieces, b"")


def encode_tuple(values: Sequence[Any], types: Sequence[pa.DataType]) -> bytes:
    """Encoded bytes of one row given as Python values.

    Raises:
        Rejected: a value does not fit its type.
    """
    try:
        arrays = [pa.array([value], type_) for value, type_ in zip(values, types, strict=True)]
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
        raise Rejected(f"key {tuple(values)!r} does not fit {[str(t) for t in types]}: {exc}") from exc
    found: bytes = encode_arrays(arrays)[0].as_py()
    return found


def key_list(arrays: Sequence[pa.Array]) -> list[bytes]:
    """As `encode_arrays`, but a list of bytes. For a handful of rows."""
    if len(arrays[0]) <= _TINY_ROWS:
        return _encode_tiny(arrays)
    found: list[bytes] = encode_arrays(arrays).to_pylist()
    return found


def length_bound(arrays: Sequence[pa.Array]) -> int:
    """An upper bound of the bytes of an encoded row of these key columns. It assumes the worst case of
    escaping."""
    bound = 0
    for array in arrays:
        if _is_bytes(array.type):
            offsets, _ = binary_parts(_as_binary(array))
            bound += 2 * int(np.diff(offsets).max(initial=0)) + 2
        else:
            bound += max(1, array.type.bit_width // 8)
    return bound


def _is_bytes(type_: pa.DataType) -> bool:
    return type_.id in _BYTES_KINDS


def _as_binary(array: pa.Array) -> pa.BinaryArray:
    if array.type.id == pa.lib.Type_BINARY:
        return array
    return pa.Array.from_buffers(pa.binary(), len(array), array.buffers(), array.null_count, array.offset)


def _escape(array: pa.Array) -> pa.BinaryArray:
    raw = _as_binary(array)
    offsets, data = binary_parts(raw)
    if (data[int(offsets[0]) : int(offsets[-1])] == 0).any():
        return pc.replace_substring(raw, b"\x00", b"\x00\x01")
    return raw


def _fixed_bytes(array: pa.Array) -> npt.NDArray[np.uint8]:
    """(rows, width) big-endian bytes that sort as the values do."""
    type_, rows = array.type, len(array)
    if pa.types.is_boolean(type_):
        bits: npt.NDArray[np.uint8] = np.asarray(array.cast(pa.uint8()))
        return bits.reshape(rows, 1)
    if pa.types.is_decimal128(type_):
        raw = np.frombuffer(array.buffers()[1], np.uint8)[array.offset * 16 : (array.offset + rows) * 16]
        turned: npt.NDArray[np.uint8] = raw.reshape(rows, 16)[:, ::-1].copy()
        turned[:, 0] ^= 0x80
        return turned
    if type_.id not in _INT_WIDTHS:
        raise Rejected(f"a column of type {type_} cannot be part of a key")
    width = type_.bit_width // 8
    native, big_endian, sign = _SIGNED[width]
    raw_ints = np.frombuffer(array.buffers()[1], native, array.offset + rows)[array.offset :]
    big: npt.NDArray[np.uint8] = (raw_ints ^ sign).astype(big_endian).view(np.uint8)
    return big.reshape(rows, width)


def _side_by_side(parts: list[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _from_matrix(parts: list[npt.NDArray[np.uint8]]) -> pa.BinaryArray:
    matrix = _side_by_side(parts)
    rows, width = matrix.shape
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(width)
    data = np.ascontiguousarray(matrix)
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)], 0)


def _encode_tiny(arrays: Sequence[pa.Array]) -> list[bytes]:
    encoded: list[bytes] = []
    last = len(arrays) - 1
    for position, array in enumerate(arrays):
        kind = array.type.id
        width = _INT_WIDTHS.get(kind)
        if width is not None:
            ints = array.view(_INT_OF_WIDTH[width]) if kind in _TIME_KINDS else array
            values = _encoded_ints(ints.to_pylist(), width)
        elif kind in _BYTES_KINDS:
            values = _as_binary(array).to_pylist()
            if position != last:
                values = _escaped(values)
        elif kind == pa.lib.Type_BOOL:
            values = [b"\x01" if v else b"\x00" for v in array.to_pylist()]
        else:
            values = [row.tobytes() for row in _fixed_bytes(array)]
        encoded = values if position == 0 else [a + b for a, b in zip(encoded, values)]
    return encoded


def encode_values(columns: Sequence[tuple[int, Sequence[Any]]]) -> list[bytes]:
    """Encoded bytes of some dozens of rows of Python values, column by column. Each value must fit its
    column.

    Each column is given as (the width of its integers in bytes, or 0 for text; its values)."""
    encoded: list[bytes] = []
    last = len(columns) - 1
    for position, (width, column) in enumerate(columns):
        if width:
            values = _encoded_ints(column, width)
        else:
            values = [v.encode() for v in column]
            if position != last:
                values = _escaped(values)
        encoded = values if position == 0 else [a + b for a, b in zip(encoded, values)]
    return encoded


def _encoded_ints(values: Sequence[int], width: int) -> list[bytes]:
    bias, pack = 1 << (width * 8 - 1), _PACK[width].pack
    return [pack(v + bias) for v in values]


def _escaped(values: Sequence[bytes]) -> list[bytes]:
    return [v.replace(b"\x00", b"\x00\x01") + _TERMINATOR for v in values]


def escaped(value: bytes) -> bytes:
    """A string or binary value as it stands in a key before other columns."""
    return value.replace(b"\x00", b"\x00\x01") + _TERMINATOR


def decode_key(key: bytes, types: Sequence[pa.DataType]) -> tuple[Any, ...]:
    """The values of one encoded key: ints (dates in days, timestamps in microseconds), str, bytes, bool,
    Decimal.

    Raises:
        Corrupt: the bytes are not such a key.
    """
    values: list[Any] = []
    at, last = 0, len(types) - 1
    for position, type_ in enumerate(types):
        if _is_bytes(type_):
            raw, at = (key[at:], len(key)) if position == last else _unescape(key, at)
            values.append(_text(key, position, raw) if type_.id == pa.lib.Type_STRING else raw)
            continue
        width = 1 if pa.types.is_boolean(type_) else type_.bit_width // 8
        if at + width > len(key):
            raise Corrupt(f"encoded key {key.hex()}: it ends within column {position}")
        number = int.from_bytes(key[at : at + width], "big")
        at += width
        if pa.types.is_boolean(type_):
            values.append(bool(number))
            continue
        number -= 1 << (8 * width - 1)
        values.append(_to_decimal(number, type_.scale) if pa.types.is_decimal128(type_) else number)
    if at != len(key):
        raise Corrupt(f"encoded key {key.hex()}: {len(key) - at} bytes left over")
    return tuple(values)


def _text(key: bytes, position: int, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        raise Corrupt(f"encoded key {key.hex()}: column {position} is not UTF-8: {exc.reason}") from exc


def _to_decimal(unscaled: int, scale: int) -> decimal.Decimal:
    sign, digits = int(unscaled < 0), tuple(int(d) for d in str(abs(unscaled)))
    return decimal.Decimal((sign, digits, -scale))


def _unescape(key: bytes, start: int) -> tuple[bytes, int]:
    out = bytearray()
    at = start
    while True:
        zero = key.find(b"\x00", at)
        if zero < 0 or zero + 1 >= len(key):
            raise Corrupt(f"encoded key {key.hex()}: it has no terminator after byte {start}")
        out += key[at:zero]
        if key[zero + 1] == 0:
            return bytes(out), zero + 2
        if key[zero + 1] != 1:
            raise Corrupt(f"encoded key {key.hex()}: byte {zero + 1} is not an escape")
        out.append(0)
        at = zero + 2


# --- encoded keys as numpy arrays


def binary_parts(keys: pa.BinaryArray) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """(offsets, bytes) of a binary or string array. `offsets` has one more element than the array."""
    _, offsets_buffer, data_buffer = keys.buffers()
    if offsets_buffer is None or not offsets_buffer.size:
        offsets = np.zeros(1, np.int32)
    else:  # an array from outside may end with stray bytes
        offsets = np.frombuffer(offsets_buffer, np.int32, keys.offset + len(keys) + 1)[keys.offset :]
    data = np.zeros(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)
    return offsets, data


_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(8)] + [(1 << 64) - 1], dtype=np.uint64)


def words(keys: pa.BinaryArray, least: int = 0) -> tuple[list[U64], npt.NDArray[np.int64]]:
    """Each key's bytes as little-endian 64-bit words, zero padded: (one array per word position, lengths).

    There are at least `least` word positions, and as many as the longest key needs.
    """
    offsets, data = binary_parts(keys)
    begin, end = int(offsets[0]), int(offsets[-1])
    starts = offsets[:-1].astype(np.int64) - begin
    lengths = np.diff(offsets).astype(np.int64)
    longest = int(lengths.max()) if len(lengths) else 0
    count = max((longest + 7) // 8, least)
    # Reads go up to eight bytes past a key; the padding keeps them inside the buffer.
    padded = np.zeros(end - begin + 8 * count + 8, np.uint8)
    padded[: end - begin] = data[begin:end]
    every = np.ndarray((len(padded) - 7,), "<u8", padded.data, strides=(1,))
    found: list[U64] = []
    for position in range(count):
        # np.take would copy the overlapping words first: eight times the bytes.
        word = every[starts + 8 * position]
        left = np.clip(lengths - 8 * position, 0, 8)
        if not (left == 8).all():
            word &= np.take(_MASKS, left)
        found.append(word)
    return found, lengths


WORDS_MAX = 16
"""The longest key that is put into a matrix of words. In a matrix, every row takes as much memory as the
longest key."""


def sort_order(keys: pa.BinaryArray, tie: npt.NDArray[Any] | None = None) -> npt.NDArray[np.int64]:
    """Stable order of encoded keys; `tie` (ascending) breaks ties. Releases the interpreter lock while it
    sorts."""
    offsets, _ = binary_parts(keys)
    longest = int(np.diff(offsets).max()) if len(keys) else 0
    if longest > 8 * WORDS_MAX:
        ranks = np.asarray(pc.rank(keys, tiebreaker="dense")).astype(np.uint64)
        return np.lexsort((ranks,) if tie is None else (tie, ranks))
    columns, lengths = words(keys)
    sort_keys: list[npt.NDArray[Any]] = [column.byteswap() for column in reversed(columns)]
    if len(lengths) and lengths.min() != lengths.max():
        sort_keys.insert(0, lengths)  # a key plus zero bytes pads to the same words as that key
    if tie is not None:
        sort_keys.insert(0, tie)
    if not sort_keys:
        return np.arange(len(keys))
    return np.lexsort(tuple(sort_keys))


def longest(keys: pa.BinaryArray) -> int:
    """Length in bytes of the longest key; 0 if there are none."""
    offsets, _ = binary_parts(keys)
    return int(np.diff(offsets).max()) if len(keys) else 0


def same_as_before(keys: pa.BinaryArray) -> npt.NDArray[np.bool_]:
    """For sorted keys, return whether each key equals the one before it; False for the first key."""
    found = np.zeros(len(keys), bool)
    if len(keys) > 1:
        found[1:] = np.asarray(pc.equal(keys.slice(1), keys.slice(0, len(keys) - 1)))
    return found
