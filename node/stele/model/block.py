"""Packed column blocks: rows as they travel from the client through the log into the store. Opens no files.

Layout, little-endian:
    u8 format version (1), u8 flags (1: an op per row), u8 op for all rows (0 if per row), u8 zero,
    u32 schema version, u32 rows, u16 columns, u16 zero, then u32 per column id, then (flag 1) u8 per row,
    zero padding to eight bytes, then one Arrow IPC record batch message without its schema. Buffers are read in place. In
a log they may be compressed (LZ4, ZSTD), as they were once taken; nobody's are now.

Invariant: `decode_block` of untrusted bytes yields a batch whose memory is safe to read and no more than the block's,
or raises.
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
"""The same bytes, the first four as one."""
VERSION = 1
ROWS_MAX = 1 << 20
_FLAG_ROW_OPS = 1


class RowOp(IntEnum):
    """What is done with a row. Numbers are on disk and on the wire.

    insert and upsert write whole rows: a column the block lacks takes its default, else null. update changes only the
    columns that the block has. insert fails (ALREADY_PRESENT) where the key is present, update and delete
    (NOT_FOUND) where it is not; the _ignore forms do nothing there instead.
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
        """How many rows the block has."""
        return int(self.batch.num_rows)


def encode_block(
    ops: RowOp | npt.NDArray[np.uint8],
    column_ids: Sequence[int],
    batch: pa.RecordBatch,
    schema_version: int,
) -> bytes:
    """Bytes of a block. `ops`: one for all rows, or one byte per row. Columns of `batch` stand as in `column_ids`.

    Raises:
        Rejected: sizes that do not agree, or too many rows.
    """
    rows = batch.num_rows
    if rows > ROWS_MAX:
        raise Rejected(f"block of {rows} rows; at most {ROWS_MAX}", code=Code.TOO_LARGE)
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
    """The block in `data`, whose memory it goes on using.

    `trusted`: the bytes were checked before (they come from our own log), so values are not walked again.

    Raises:
        Rejected: no block, an unknown version (UNSUPPORTED_VERSION), columns the schema does not have
            (SCHEMA_MISMATCH), or a block that lacks key columns; all faults of the header together.
    """
    if len(data) < HEADER.size:
        raise Rejected(f"block of {len(data)} bytes; expected at least {HEADER.size}")
    version, flags, op, zero, schema_version, rows, columns, zeros = HEADER.unpack_from(data)
    if version != VERSION or flags & ~_FLAG_ROW_OPS or zero or zeros:
        raise Rejected(
            f"block version {version}, flags {flags}, reserved bytes {zero} and {zeros}; this program reads version "
            f"{VERSION}, flag {_FLAG_ROW_OPS}, zeros",
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
        raise Rejected(f"block of {len(data)} bytes ends within its header of {at}")
    column_ids: tuple[int, ...] = struct.unpack_from(f"<{columns}I", data, HEADER.size)
    _check_header(schema, schema_version, column_ids, op, row_ops, rows)
    arrow = schema.to_arrow(column_ids)
    body = pa.py_buffer(data).slice(at)
    batch = _checked_rows(body, arrow) if trusted else read_batch(body, arrow, "block")
    if batch.num_rows != rows:
        raise Rejected(f"block: its header says {rows} rows, its message has {batch.num_rows}")
    return Block(schema_version, column_ids, batch, RowOp(op) if row_ops is None else None, row_ops)


def of_schema(data: bytes | memoryview, schema: Schema) -> bool:
    """Whether a block of this version was made with this version of the schema."""
    return bool(data[0] == VERSION and HEADER.unpack_from(data)[4] == schema.version)


def size_told(data: bytes | memoryview) -> tuple[int, int]:
    """How many rows and columns a block says it has; 0 where it has no header."""
    if len(data) < HEADER.size:
        return 0, 0
    _, _, _, _, _, rows, columns, _ = HEADER.unpack_from(data)
    return rows, columns


def plain_rows(data: bytes | memoryview) -> int:
    """How many rows a block of upserts says it has, where its leader said that it is plain.

    Raises:
        Rejected: UNSUPPORTED_VERSION, it is none that this program calls so.
    """
    opening, _, rows, _, zeros = _PLAIN.unpack_from(data)
    if opening != _PLAIN_OPENING or zeros:
        raise Rejected(
            f"plain block that begins with {opening.hex()}, reserved bytes {zeros}; this program reads "
            f"{_PLAIN_OPENING.hex()}, 0",
            code=Code.UNSUPPORTED_VERSION,
        )
    return int(rows)


def checked_rows(data: bytes | memoryview, schema: Schema) -> pa.RecordBatch:
    """The rows of a block that has all columns of `schema` and one operation for all rows, and was decoded before.

    Raises:
        Rejected: it is not what was checked.
    """
    at = HEADER.size + 4 * len(schema.columns)
    at += -at % 8
    return _checked_rows(pa.py_buffer(data).slice(at), schema.to_arrow())


def _checked_rows(body: pa.Buffer, arrow: pa.Schema) -> pa.RecordBatch:
    """Rows that were checked when they were taken. A lack of memory is no fault of theirs, and is raised as it is."""
    try:
        return pa.ipc.read_record_batch(body, arrow)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError) as exc:
        raise Rejected(f"block: its rows are no longer the message that was checked: {exc}") from exc


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
    if schema_version != schema.version:
        raise Rejected(
            f"block was made with schema version {schema_version}, the table has {schema.version}; read it again",
            code=Code.SCHEMA_MISMATCH,
        )
    if rows > ROWS_MAX:
        faults.append(f"{rows} rows; at most {ROWS_MAX}")
    unknown = [i for i in column_ids if i not in schema.by_id]
    if unknown:
        faults.append(f"column ids {unknown} are not in schema version {schema.version}")
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
