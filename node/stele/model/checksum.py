"""A checksum of rows that does not depend on their order. Clients, replicas and backups compare with it.
Opens no files.

Per row: 64 bits mixed from each column's id and value (null has a value of its own). The checksum is the sum
over all rows, modulo 2^64.

Invariant: equal sets of rows have equal checksums, whatever batches, slices or replicas they came in.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stele.model.column import Column
from stele.model.hashing import fmix, hash_binary
from stele.model.schema import Schema

U64 = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0x6E756C6C6E756C6C)
MASK = (1 << 64) - 1


def row_hashes(batch: pa.RecordBatch, schema: Schema) -> U64:
    """64 bits for each row of a batch with all columns of the schema (found by name)."""
    total = np.zeros(batch.num_rows, np.uint64)
    for column in schema.columns:
        array = batch.column(batch.schema.get_field_index(column.name))
        total = fmix(total * _STEP + _values(array, column))
    return total


def checksum(batch: pa.RecordBatch, schema: Schema) -> int:
    """The sum of the row hashes modulo 2^64. The sums of parts add up to that of the whole."""
    return int(row_hashes(batch, schema).sum(dtype=np.uint64))


def _values(array: pa.Array, column: Column) -> U64:
    salt = np.full(1, int(column.id) + 1, np.uint64)
    type_ = array.type
    if pa.types.is_string(type_) or pa.types.is_binary(type_):
        found = hash_binary(array, int(column.id) + 1)
    elif pa.types.is_decimal128(type_):
        raw = np.frombuffer(array.buffers()[1], "<u8", (array.offset + len(array)) * 2)[array.offset * 2 :]
        found = fmix(fmix(raw[::2] + salt) * _STEP + raw[1::2])
    else:
        found = fmix(_bits(array) + salt * _STEP)
    # A null's slot holds an arbitrary value. It is hashed too, and then replaced.
    return np.where(np.asarray(array.is_null()), fmix(salt + _NULL), found) if array.null_count else found


def _bits(array: pa.Array) -> U64:
    type_ = array.type
    if pa.types.is_boolean(type_):
        bits: U64 = np.asarray(pc.fill_null(array, False).cast(pa.uint8())).astype(np.uint64)
        return bits
    width = type_.bit_width // 8
    if pa.types.is_floating(type_):
        values = np.frombuffer(array.buffers()[1], f"f{width}", array.offset + len(array))[array.offset :]
        zero = values.dtype.type(0)
        # One form of NaN and of zero.
        values = np.where(np.isnan(values), values.dtype.type(np.nan), values + zero)
        floats: U64 = values.view(f"u{width}").astype(np.uint64)
        return floats
    raw = np.frombuffer(array.buffers()[1], f"i{width}", array.offset + len(array))[array.offset :]
    wide: U64 = raw.astype(np.int64).view(np.uint64)
    return wide
