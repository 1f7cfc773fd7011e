"""Makes a block again if columns of it were dropped while it was on its way. Used by tablet.py.

A node refuses a block that names a dropped column (SCHEMA_MISMATCH), as Kudu does. Whole rows name every column
of the schema that their client knew, also those that the caller did not give. If the caller gave no value for it,
the block is made again without the column. Invariant: a value that a caller gave is never dropped without an error.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from stele.model.block import INSERTS, RowOp, decode_block, encode_block
from stele.model.column import Column
from stele.model.errors import Code, Rejected
from stele.model.schema import Schema


def reshaped(block: bytes, made_with: Schema, newest: Schema) -> bytes:
    """Return the block without the columns that were dropped. `made_with`: the schema that the block was made
    with.

    Raises:
        Rejected: SCHEMA_MISMATCH: no such column was dropped, or the rows have values for one.
    """
    found = decode_block(block, made_with, trusted=True)
    dropped = [made_with.by_id[i] for i in found.column_ids if i not in newest.by_id]
    whole = found.op in INSERTS or (found.row_ops is not None and bool((found.row_ops <= RowOp.UPSERT).all()))
    given = [
        column.name
        for column in dropped
        if not whole or not _is_default(found.batch.column(found.column_ids.index(int(column.id))), column)
    ]
    if given or not dropped:
        what = f"columns {', '.join(given)} were dropped" if given else "its schema has changed"
        raise Rejected(
            f"{what}: the table has schema version {newest.version} now; write rows without them",
            code=Code.SCHEMA_MISMATCH,
        )
    kept = [at for at, column_id in enumerate(found.column_ids) if column_id in newest.by_id]
    ops = found.op if found.op is not None else found.row_ops
    assert ops is not None  # a block has one of them
    column_ids = [found.column_ids[at] for at in kept]
    return encode_block(ops, column_ids, found.batch.select(kept), newest.version)


def _is_default(values: pa.Array, column: Column) -> bool:
    """Whether every value equals the column's default, or null if it has none."""
    if values.null_count == len(values):
        return column.default is None
    if values.null_count or column.default is None:
        return False
    return bool(pc.all(pc.equal(values, column.default_scalar())).as_py())
