"""Packed column blocks: rows as they travel from the client through the log into the store. Opens no files.

Layout, little-endian:

- u8 format version (1), u8 flags (1: an op per row), u8 op for all rows (0 if per row), u8 zero
- u32 schema version, u32 rows, u16 columns, u16 zero
- a u32 column id for each column
- with flag 1: a u8 op for each row
- zero padding to eight bytes
- one Arrow IPC record batch message without its schema

Buffers are read in place. Blocks in old logs may be compressed (LZ4, ZSTD); new ones never are.

Invariant: `decode_block` of untrusted bytes either raises, or yields a batch that is safe to read and takes
no more memory than the block.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model.errors import Code, Rejected
from stele.model.foreign import read_batch
from stele.model.schema import Schema

HEADER = struct.Struct("<BBBBIIHH")
_PLAIN = struct.Struct("<4sIIHH")
"""The same bytes as HEADER. The first four are read as one string, so that one comparison checks them."""
VERSION = 1
ROWS_MAX = 1 << 20
_FLAG_ROW_OPS = 1


class RowOp(IntEnum):
    """What is done with a row. The numbers are on disk and on the wire.

    INSERT and UPSERT write whole rows: a column that the block lacks gets its default, else null. UPDATE
    changes only the columns that the block has. INSERT fails (ALREADY_PRESENT) if the key is present. UPDATE
    and DELETE fail (NOT_FOUND) if it is absent. The IGNORE forms skip such a row instead of failing.
    """

    INSERT = 1
    INSERT_IGNORE = 2
    UPSERT = 3
    UPDATE = 4
    UPDATE_IGNORE = 5
    DELETE = 6
    DELETE_IGNORE = 7


DELETES = (RowOp.DELETE, RowOp.DELETE_IGNORE)
UPDATES = (RowOp.UPDATE, RowOp.UPDATE_IGNORE)
INSERTS = (RowOp.INSERT, RowOp.INSERT_IGNORE, RowOp.UPSERT)


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one row was not written. `row` is its position in the block.

    Example:
        >>> result = table.write_arrow(table.scan().to_table(), "insert", raise_row_errors=False)
        >>> result.row_errors[0].row, result.row_errors[0].code.name
        (0, 'ALREADY_PRESENT')
    """

    row: int
    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class Block:
    """A decoded block. Exactly one of `op` (for all rows) and `row_ops` is set."""

    schema_version: int
    column_ids: tuple[int, ...]
    batch: pa.RecordBatch
    op: RowOp | None
    row_ops: npt.NDArray[np.uint8] | None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.batch.num_rows)


def encode_block(
    ops: RowOp | npt.NDArray[np.uint8],
    column_ids: Sequence[int],
    batch: pa.RecordBatch,
    schema_version: int,
) -> bytes:
    """Return the bytes of a block.

    `ops`: one operation for all rows, or an array with one byte per row. `column_ids`: the id of each column
    of `batch`.

    Raises:
        Rejected: the sizes do not agree. TOO_LARGE: there are too many rows.
    """
    rows = batch.num_rows
    if rows > ROWS_MAX:
        raise Rejected(f"the block has {rows} rows; at most {ROWS_MAX} are allowed", code=Code.TOO_LARGE)
    if batch.num_columns != len(column_ids):
        raise Rejected(f"block: {batch.num_columns} columns for {len(column_ids)} column ids")
    if isinstance(ops, RowOp):
        flags, op, row_ops = 0, int(ops), b""
    else:
        flags, op, row_ops = _FLAG_ROW_OPS, 0, ops.astype(np.uint8, copy=False).tobytes()
        if len(row_ops) != rows:
            raise Rejected(f"block: {len(row_ops)} row operations for {rows} rows")
    head = HEADER.pack(VERSION, flags, op, 0, schema_version, rows, len(column_ids), 0)
    ids = struct.pack(f"<{len(column_ids)}I", *column_ids)
    front = head + ids + row_ops
    return b"".join((front, bytes(-len(front) % 8), batch.serialize()))


def decode_block(data: bytes | memoryview, schema: Schema, *, trusted: bool = False) -> Block:
    """Decode a block without copying: the result uses the memory of `data`.

    `trusted`: the bytes come from our own log and were checked before, so values are not checked again. A
    block made with an older version of the schema is read by its column ids, and may lack newer columns.

    Raises:
        Rejected: the bytes are not a block, or key columns are missing. UNSUPPORTED_VERSION: the format's
            version is unknown. SCHEMA_MISMATCH: the block has columns that the schema lacks, such as dropped
            ones, or was made with a newer schema. All faults of the header are reported together.
    """
    if len(data) < HEADER.size:
        raise Rejected(f"the block has {len(data)} bytes; expected at least {HEADER.size}")
    version, flags, op, zero, schema_version, rows, columns, zeros = HEADER.unpack_from(data)
    if version != VERSION or flags & ~_FLAG_ROW_OPS or zero or zeros:
        raise Rejected(
            f"block version {version}, flags {flags}, reserved bytes {zero} and {zeros}; this program reads version "
            f"{VERSION}, flag {_FLAG_ROW_OPS}, zeros; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    at = HEADER.size + 4 * columns
    row_ops = None
    if flags & _FLAG_ROW_OPS:
        row_ops = (
            np.frombuffer(data, np.uint8, min(rows, max(0, len(data) - at)), at) if at <= len(data) else None
        )
        at += rows
    at += -at % 8
    if at > len(data):
        raise Rejected(f"the block has {len(data)} bytes, fewer than its header of {at}")
    column_ids: tuple[int, ...] = struct.unpack_from(f"<{columns}I", data, HEADER.size)
    _check_header(schema, schema_version, column_ids, op, row_ops, rows)
    arrow = schema.to_arrow(column_ids)
    body = pa.py_buffer(data).slice(at)
    batch = _checked_rows(body, arrow) if trusted else read_batch(body, arrow, "block")
    if batch.num_rows != rows:
        raise Rejected(f"block: its header says {rows} rows, its message has {batch.num_rows}")
    return Block(schema_version, column_ids, batch, RowOp(op) if row_ops is None else None, row_ops)


def version_told(data: bytes | memoryview) -> int:
    """Return the schema version in the block's header; 0 if the header is not of this format."""
    return int(HEADER.unpack_from(data)[4]) if len(data) >= HEADER.size and data[0] == VERSION else 0


def of_schema(data: bytes | memoryview, schema: Schema) -> bool:
    """Whether the block has this program's format version, and was made with this version of the schema."""
    return bool(data[0] == VERSION and HEADER.unpack_from(data)[4] == schema.version)


def size_told(data: bytes | memoryview) -> tuple[int, int]:
    """Return the numbers of rows and columns in the block's header; (0, 0) if it is too short for one."""
    if len(data) < HEADER.size:
        return 0, 0
    _, _, _, _, _, rows, columns, _ = HEADER.unpack_from(data)
    return rows, columns


def plain_rows(data: bytes | memoryview) -> int:
    """Return the number of rows of a plain block, from its header. `stele.model.writeop` says what is plain.

    Raises:
        Rejected: UNSUPPORTED_VERSION: the header is not that of a plain block.
    """
    opening, _, rows, _, zeros = _PLAIN.unpack_from(data)
    if opening != _PLAIN_OPENING or zeros:
        raise Rejected(
            f"plain block that begins with {opening.hex()}, reserved bytes {zeros}; this program reads "
            f"{_PLAIN_OPENING.hex()}, 0; upgrade it",
            code=Code.UNSUPPORTED_VERSION,
        )
    return int(rows)


def checked_rows(data: bytes | memoryview, schema: Schema) -> pa.RecordBatch:
    """Return the rows of a block that was checked before. It must have all columns of `schema`, and one
    operation for all rows.

    Raises:
        Rejected: the bytes are not those that were checked.
    """
    at = HEADER.size + 4 * len(schema.columns)
    at += -at % 8
    return _checked_rows(pa.py_buffer(data).slice(at), schema.to_arrow())


def _checked_rows(body: pa.Buffer, arrow: pa.Schema) -> pa.RecordBatch:
    """Read rows that were checked when they were accepted. A MemoryError is raised unchanged, because it does
    not mean that the rows are damaged."""
    try:
        return pa.ipc.read_record_batch(body, arrow)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError) as exc:
        raise Rejected(f"block: its rows have changed since they were checked: {exc}") from exc


_OPS = frozenset(int(op) for op in RowOp)
_PLAIN_OPENING = bytes((VERSION, 0, RowOp.UPSERT, 0))


def _check_header(
    schema: Schema,
    schema_version: int,
    column_ids: tuple[int, ...],
    op: int,
    row_ops: npt.NDArray[np.uint8] | None,
    rows: int,
) -> None:
    faults = []
    if schema_version > schema.version:
        raise Rejected(
            f"block was made with schema version {schema_version}, the tablet has {schema.version}; send it again",
            code=Code.SCHEMA_MISMATCH,
        )
    if rows > ROWS_MAX:
        faults.append(f"{rows} rows; at most {ROWS_MAX}")
    unknown = [i for i in column_ids if i not in schema.by_id]
    if unknown:
        gone = schema_version < schema.version and all(i < schema.next_column_id for i in unknown)
        what = "were dropped before" if gone else "are not in"
        faults.append(f"column ids {unknown} {what} schema version {schema.version}")
    if len(set(column_ids)) != len(column_ids):
        faults.append("a column id stands twice")
    missing = [c.name for c in schema.key_columns if c.id not in column_ids]
    if missing:
        faults.append(f"key columns {missing} are missing")
    if row_ops is None:
        if op not in _OPS:
            faults.append(f"operation {op} is unknown")
    elif rows and (int(row_ops.min()) < RowOp.INSERT or int(row_ops.max()) > RowOp.DELETE_IGNORE):
        faults.append("a row operation is unknown")
    if faults:
        code = Code.SCHEMA_MISMATCH if unknown else Code.INVALID_ARGUMENT
        raise Rejected("block: " + "; ".join(faults), code=code)
