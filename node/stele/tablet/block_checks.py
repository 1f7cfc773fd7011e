"""Checks a block before it is proposed, and gives a block's rows all columns of their table.

Called by store.check_block, which the leader uses, and by writing.py. Invariant: applying a block that
passed takes each replica a bounded amount of memory and time, now and again at each start.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model import keys as key_bytes
from stele.model.block import DELETES, Block, RowOp, decode_block
from stele.model.column import Column
from stele.model.errors import Code, Rejected
from stele.model.rows import missing_fault
from stele.model.schema import Schema

UNCHECKED = (RowOp.UPSERT, RowOp.DELETE_IGNORE)
"""Operations that do the same whether or not the key is present."""

WHOLE_BYTES_MAX = 128 << 20
"""A block is refused if its rows take more than this once they have all columns. 8,192 rows of the widest
table without values fit. An Arrow array holds at most 2 GiB."""
CHECKED_ROWS_MAX = 8_192
"""The most rows in a block whose keys must be looked up. Each may be refused, and the errors are kept for
retries."""
NULLS_MAX = 8_192
"""The most nulls that a block may have in columns that are not nullable. Their errors are kept for retries, too."""
_FEW_COLUMNS = 8
_BLANK_ROWS = 32


def check_block(data: bytes | memoryview, schema: Schema) -> bool:
    """Check a block from outside before it is proposed.

    Returns: whether the block is plain: it only upserts whole rows, and no stored row can make it fail.

    Raises:
        Rejected: see `decode_block` for untrusted bytes; also if inserted rows lack a required column.
            TOO_LARGE: applying it would take too much memory.
    """
    block = decode_block(data, schema)
    whole = block.column_ids == schema.column_ids
    nulls = _nulls(block, schema)
    _refuse_large(block, schema, nulls)
    if not whole and (fault := missing_fault(block, schema)):
        raise Rejected(f"block: {fault}")
    if block.op is not RowOp.UPSERT or not block.rows or not whole or nulls:
        return False
    return key_bytes.length_bound(key_columns(block.batch, schema)) <= key_bytes.KEY_BYTES_MAX


def _nulls(block: Block, schema: Schema) -> int:
    """The number of nulls in columns that are not nullable."""
    found = 0
    for position, column_id in enumerate(block.column_ids):
        if schema.by_id[column_id].nullable:
            continue
        array = block.batch.column(position)
        if not array.null_count:
            continue
        if schema.is_key(column_id):
            found += array.null_count
        elif block.row_ops is not None:
            found += int(np.count_nonzero(np.asarray(array.is_null()) & (block.row_ops < RowOp.DELETE)))
        elif block.op not in DELETES:
            found += array.null_count
    return found


def _refuse_large(block: Block, schema: Schema, nulls: int) -> None:
    faults = []
    if block.rows > CHECKED_ROWS_MAX and not all_unchecked(block.op, block.row_ops):
        faults.append(
            f"{block.rows} rows whose keys must be looked up; at most {CHECKED_ROWS_MAX} are allowed"
        )
    if nulls > NULLS_MAX:
        faults.append(f"{nulls} nulls in columns that are not nullable; at most {NULLS_MAX} are allowed")
    if len(block.column_ids) != len(schema.columns):
        size = block.batch.nbytes + block.rows * _lacking_bits(block, schema) // 8
        if size > WHOLE_BYTES_MAX:
            faults.append(
                f"{size} bytes once it has all columns of the table; at most {WHOLE_BYTES_MAX} are allowed"
            )
    if faults:
        raise Rejected(f"block: {'; '.join(faults)}: send fewer rows", code=Code.TOO_LARGE)


def grown_too_large(block: Block, schema: Schema) -> Rejected | None:
    """Why a block of an older schema is refused when it is applied; None if it is not. Columns that were added
    since would take too much memory. Part of a write's outcome, so its rule and its words must never change."""
    size = block.rows * _lacking_bits(block, schema) // 8
    if size <= WHOLE_BYTES_MAX:
        return None
    return Rejected(
        f"block: columns that were added meanwhile take {size} bytes; at most {WHOLE_BYTES_MAX} are allowed: send "
        "fewer rows",
        code=Code.TOO_LARGE,
    )


def all_unchecked(op: RowOp | None, ops: npt.NDArray[np.uint8] | None) -> bool:
    """Whether no row's key needs to be looked up."""
    return op in UNCHECKED if ops is None else bool(np.isin(ops, UNCHECKED).all())


def _lacking_bits(block: Block, schema: Schema) -> int:
    """Bits per row that the missing columns take once they are filled in."""
    name = "bits in deletes" if block.op in DELETES else "bits"
    if name not in schema.derived:
        schema.derived[name] = {
            int(c.id): _filled_bits(c, deletes=block.op in DELETES) for c in schema.columns
        }
    bits: dict[int, int] = schema.derived[name]
    return sum(bits.values()) - sum(bits[column_id] for column_id in block.column_ids)


def _filled_bits(column: Column, *, deletes: bool) -> int:
    """Bits of the value that fills the column in, and the validity bit."""
    if not (pa.types.is_string(column.arrow) or pa.types.is_binary(column.arrow)):
        return 1 + int(column.arrow.bit_width)
    value = column.default_scalar() if column.default is not None and not deletes else None
    return 33 + (8 * int(value.as_buffer().size) if value is not None and value.is_valid else 0)


def complete(block: Block, schema: Schema) -> pa.RecordBatch:
    """The block's rows with all columns of the schema, in its order. Missing columns get their default, else
    null."""
    if block.column_ids == schema.column_ids:
        return block.batch
    given = {
        schema.places[column_id]: block.batch.column(at) for at, column_id in enumerate(block.column_ids)
    }
    return with_columns(_blank(schema, block.rows, deletes=block.op in DELETES), given)


def with_columns(batch: pa.RecordBatch, arrays: Mapping[int, pa.Array]) -> pa.RecordBatch:
    """The batch with other values in some columns. Keys of `arrays` are positions."""
    if len(arrays) > _FEW_COLUMNS:
        all_arrays = [arrays.get(at, old) for at, old in enumerate(batch.columns)]
        return pa.RecordBatch.from_arrays(all_arrays, schema=batch.schema)
    for at, array in arrays.items():  # spares the Python objects of all other columns
        batch = batch.set_column(at, batch.schema.field(at), array)
    return batch


def _blank(schema: Schema, rows: int, *, deletes: bool) -> pa.RecordBatch:
    """Rows with the default of each column, or null where it has none. In deletes every column is null. A few rows
    are made once for each schema, and kept."""
    if rows > _BLANK_ROWS:
        return _made_blank(schema, rows, deletes=deletes)
    name = "blank of deletes" if deletes else "blank"
    if name not in schema.derived:
        schema.derived[name] = _made_blank(schema, _BLANK_ROWS, deletes=deletes)
    return schema.derived[name].slice(0, rows)


def _made_blank(schema: Schema, rows: int, *, deletes: bool) -> pa.RecordBatch:
    """As `_blank`. Null columns of one type share their memory."""
    nulls: dict[pa.DataType, pa.Array] = {}
    arrays = []
    for column in schema.columns:
        if column.default is not None and not deletes:
            arrays.append(pa.repeat(column.default_scalar(), rows))
            continue
        if column.arrow not in nulls:
            nulls[column.arrow] = pa.nulls(rows, column.arrow)
        arrays.append(nulls[column.arrow])
    return pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow())


def keys_given(block: Block, schema: Schema) -> list[pa.Array]:
    """The key columns of a block. It may lack other columns."""
    if len(block.column_ids) == len(schema.columns) and block.column_ids == schema.column_ids:
        return key_columns(block.batch, schema)
    return [block.batch.column(block.column_ids.index(int(i))) for i in schema.key_column_ids]


def key_columns(batch: pa.RecordBatch, schema: Schema) -> list[pa.Array]:
    """The key columns of a batch that has all columns."""
    return [batch.column(position) for position in schema.key_positions]
