"""What a block does to the rows: presence checks, row errors, whole rows out of partial ones. Called by store.apply;
writes only to the memtable.

A small block goes row by row through dicts; a big one by columns. Rows of a big block that name the same key are
taken in rounds, so each sees what the one before it did.

Invariant: the rows and errors that come out depend on the block and the store's rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model import keys as key_bytes
from stele.model.block import DELETES, UPDATES, Block, RowError, RowOp, decode_block
from stele.model.errors import Code, Rejected
from stele.model.hashing import hash_binary
from stele.model.rows import missing_fault, null_faults
from stele.model.schema import Schema
from stele.tablet.memtable import SMALL_ROWS
from stele.tablet.runs import Mask, Positions, concat_batches

U64 = npt.NDArray[np.uint64]

_PRESENT = "the key is present; use upsert to overwrite it"
_ABSENT = "the key is absent"
_UNCHECKED = (RowOp.UPSERT, RowOp.DELETE_IGNORE)

WHOLE_BYTES_MAX = 128 << 20
"""A block whose rows take more once they have all columns is refused: 8,192 rows of the widest table without a value have
room. An array of Arrow's holds 2 GiB."""
CHECKED_ROWS_MAX = 8_192
"""Rows of a block each of which may be refused by itself: what becomes of them is kept for retries."""
NULLS_MAX = 8_192
"""Of a block, in columns that are not nullable, for the same reason."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where the newest versions of some keys are. `source` -1: nowhere; 0: active memtable; 1: frozen; 2 + i: file i.
    `place`: an ordinal, or group << 32 | row."""

    source: Positions
    place: Positions
    live: Mask


class Rows(Protocol):
    """What the write path asks of its store."""

    @property
    def schema(self) -> Schema:
        """The schema of all rows."""

    def locate(self, keys: pa.BinaryArray, hashes: U64) -> Located:
        """Newest version of each key."""

    def locate_one(self, key: bytes) -> tuple[int, int, bool] | None:
        """(source, place, live) of the newest version of one key."""

    def fetch(self, located: Located) -> pa.RecordBatch:
        """The rows at these places, all columns, in this order."""

    def put(self, batch: pa.RecordBatch, time: int, deleted: Mask | None, size: int, keys: object) -> None:
        """Add rows; `keys` a list of bytes for a small block, an encoded array or None for a big one."""


def write_block(store: Rows, block: Block, time: int, size_bytes: int) -> tuple[RowError, ...]:
    """Write the rows of a block that are not at fault; the faults of the others, by row."""
    errors = null_faults(block, store.schema)
    batch = complete(block, store.schema)
    rows = np.arange(block.rows, dtype=np.int64)
    ops = block.row_ops
    if errors:
        rows = np.delete(rows, [e.row for e in errors])
        batch = batch.take(pa.array(rows))
        ops = None if ops is None else ops[rows]
    if len(rows) == 0:
        return tuple(errors)
    if len(rows) <= SMALL_ROWS:
        found = _small(store, block, batch, rows, ops, time, size_bytes)
    else:
        found = _big(store, block, batch, rows, ops, time, size_bytes)
    if found or errors:
        return tuple(sorted((*errors, *found), key=lambda e: e.row))
    return ()


def vet(data: bytes | memoryview, schema: Schema) -> bool:
    """Check a block that comes from outside, before it is proposed.

    Returns: whether it is plain: upserts of whole rows, none of which can be refused, whatever the store holds.

    Raises:
        Rejected: as `decode_block` of untrusted bytes; a required column that rows to insert lack; TOO_LARGE, what it
            would take to apply it.
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
    """How many values are null that must not be."""
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
    if block.rows > CHECKED_ROWS_MAX and not _all_unchecked(block.op, block.row_ops):
        faults.append(f"{block.rows} rows that are looked up; at most {CHECKED_ROWS_MAX}")
    if nulls > NULLS_MAX:
        faults.append(
            f"{nulls} nulls in columns that are not nullable; at most {NULLS_MAX} are told one by one"
        )
    if len(block.column_ids) != len(schema.columns):
        size = block.batch.nbytes + block.rows * _lacking_bits(block, schema) // 8
        if size > WHOLE_BYTES_MAX:
            faults.append(f"{size} bytes with the columns that it lacks; at most {WHOLE_BYTES_MAX}")
    if faults:
        raise Rejected(f"block: {'; '.join(faults)}: send fewer rows", code=Code.TOO_LARGE)


def _all_unchecked(op: RowOp | None, ops: npt.NDArray[np.uint8] | None) -> bool:
    return op in _UNCHECKED if ops is None else bool(np.isin(ops, _UNCHECKED).all())


def _lacking_bits(block: Block, schema: Schema) -> int:
    """What the columns that a block lacks take for each of its rows, once it is whole."""
    given = set(block.column_ids)
    bits = 0
    for column in schema.columns:
        if int(column.id) in given:
            continue
        bits += 1  # whether it is null
        if not (pa.types.is_string(column.arrow) or pa.types.is_binary(column.arrow)):
            bits += column.arrow.bit_width
            continue
        bits += 32
        if column.default is not None and block.op not in DELETES:
            value = column.default_scalar()
            bits += 8 * value.as_buffer().size if value.is_valid else 0
    return bits


def complete(block: Block, schema: Schema) -> pa.RecordBatch:
    """The block's rows with all columns of the schema, in its order; columns it lacks hold defaults or nulls, where those
    of one type share their memory."""
    if block.column_ids == schema.column_ids:
        return block.batch
    place = {column_id: at for at, column_id in enumerate(block.column_ids)}
    nulls: dict[pa.DataType, pa.Array] = {}
    arrays = []
    for column in schema.columns:
        at = place.get(int(column.id))
        if at is not None:
            arrays.append(block.batch.column(at))
            continue
        scalar = column.default_scalar() if column.default is not None and block.op not in DELETES else None
        if scalar is not None:
            arrays.append(pa.repeat(scalar, block.rows))
            continue
        if column.arrow not in nulls:
            nulls[column.arrow] = pa.nulls(block.rows, column.arrow)
        arrays.append(nulls[column.arrow])
    return pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow())


def _verdict(op: int, present: bool) -> tuple[bool, Code | None]:
    """(write the row, error code) of an operation on a key that is present or not."""
    if op == RowOp.INSERT:
        return not present, Code.ALREADY_PRESENT if present else None
    if op == RowOp.INSERT_IGNORE:
        return not present, None
    if op in (RowOp.UPDATE, RowOp.DELETE):
        return present, None if present else Code.NOT_FOUND
    if op in (RowOp.UPDATE_IGNORE, RowOp.DELETE_IGNORE):
        return present, None
    return True, None


def _error(row: int, code: Code) -> RowError:
    return RowError(row, code, _PRESENT if code is Code.ALREADY_PRESENT else _ABSENT)


def _too_long(row: int, length: int) -> RowError:
    return RowError(row, Code.TOO_LARGE, f"the key takes {length} bytes; at most {key_bytes.KEY_BYTES_MAX}")


def _small(
    store: Rows,
    block: Block,
    batch: pa.RecordBatch,
    rows: Positions,
    ops: npt.NDArray[np.uint8] | None,
    time: int,
    size_bytes: int,
) -> list[RowError]:
    keys = key_bytes.key_list(key_columns(batch, store.schema))
    errors: list[RowError] = []
    taken: list[int] = []
    taken_keys: list[bytes] = []
    gone: list[bool] = []
    state: dict[bytes, bool] = {}
    partial = len(block.column_ids) != len(store.schema.columns)
    changed: dict[bytes, int] = {}
    for at, key in enumerate(keys):
        op = int(block.op) if block.op is not None else int(ops[at])  # type: ignore[index]
        if len(key) > key_bytes.KEY_BYTES_MAX:
            errors.append(_too_long(int(rows[at]), len(key)))
            continue
        if op not in _UNCHECKED:
            present = state.get(key)
            if present is None:
                found = store.locate_one(key)
                present = found is not None and found[2]
            write, code = _verdict(op, present)
            if code is not None:
                errors.append(_error(int(rows[at]), code))
            if not write:
                continue
            if op in UPDATES and partial:
                batch = _merge_one(store, block, batch, at, key, changed)
                changed[key] = at
        if op not in UPDATES:
            changed[key] = at
        deleted = op in DELETES
        state[key] = not deleted
        taken.append(at)
        taken_keys.append(key)
        gone.append(deleted)
    if not taken:
        return errors
    if len(taken) < len(keys):
        batch = batch.take(pa.array(taken))
    store.put(batch, time, np.array(gone) if any(gone) else None, size_bytes, taken_keys)
    return errors


def _merge_one(
    store: Rows, block: Block, batch: pa.RecordBatch, at: int, key: bytes, changed: dict[bytes, int]
) -> pa.RecordBatch:
    """`batch` with row `at`, a partial update, made whole from the row it changes."""
    earlier = changed.get(key)
    if earlier is not None:
        old = batch.slice(earlier, 1)
    else:
        source, place, _ = store.locate_one(key) or (-1, -1, False)
        old = store.fetch(Located(np.array([source]), np.array([place]), np.ones(1, bool)))
    return _overlay(block, batch, np.array([at]), old, store.schema)


def _overlay(
    block: Block, batch: pa.RecordBatch, at: Positions, old: pa.RecordBatch, schema: Schema
) -> pa.RecordBatch:
    """`batch` where rows `at` take the columns that the block lacks from `old`, which has one row for each."""
    given = set(block.column_ids)
    index = np.arange(batch.num_rows)
    index[at] = batch.num_rows + np.arange(len(at))
    indices = pa.array(index)
    arrays = []
    for position, column in enumerate(schema.columns):
        array = batch.column(position)
        if int(column.id) not in given:
            array = pa.concat_arrays([array, old.column(position)]).take(indices)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def key_columns(batch: pa.RecordBatch, schema: Schema) -> list[pa.Array]:
    """The key columns of a whole batch."""
    return [batch.column(position) for position in schema.key_positions]


def _big(
    store: Rows,
    block: Block,
    batch: pa.RecordBatch,
    rows: Positions,
    ops: npt.NDArray[np.uint8] | None,
    time: int,
    size_bytes: int,
) -> list[RowError]:
    variable = any(
        pa.types.is_string(a.type) or pa.types.is_binary(a.type) for a in key_columns(batch, store.schema)
    )
    unchecked = _all_unchecked(block.op, ops)
    if unchecked and not variable:
        store.put(batch, time, _deletes(block, ops, len(rows)), size_bytes, None)
        return []
    keys = key_bytes.encode_keys(batch, store.schema)
    errors: list[RowError] = []
    if key_bytes.longest(keys) > key_bytes.KEY_BYTES_MAX:
        lengths = np.diff(key_bytes.binary_parts(keys)[0])
        bad = lengths > key_bytes.KEY_BYTES_MAX
        errors = [_too_long(int(rows[at]), int(lengths[at])) for at in np.flatnonzero(bad).tolist()]
        kept = np.flatnonzero(~bad)
        batch, keys, rows = batch.take(pa.array(kept)), keys.take(pa.array(kept)), rows[kept]
        ops = None if ops is None else ops[kept]
    if unchecked:
        store.put(batch, time, _deletes(block, ops, len(rows)), size_bytes, keys)
        return errors
    hashes = hash_binary(keys)
    for members in _rounds(keys, hashes):
        whole = len(members) == len(rows)
        part = batch if whole else batch.take(pa.array(members))
        part_keys = keys if whole else keys.take(pa.array(members))
        part_ops = None if ops is None else ops[members]
        share = size_bytes * len(members) // max(1, len(rows))
        errors += _round(store, block, part, rows[members], part_ops, part_keys, hashes[members], time, share)
    return errors


def _deletes(block: Block, ops: npt.NDArray[np.uint8] | None, rows: int) -> Mask | None:
    if ops is not None:
        deleted = ops >= RowOp.DELETE
        return deleted if deleted.any() else None
    return np.ones(rows, bool) if block.op in DELETES else None


def _rounds(keys: pa.BinaryArray, hashes: U64) -> list[Positions]:
    """Positions of the first row of every key, then of the second ones, and so on."""
    if len(np.unique(hashes)) == len(hashes):
        return [np.arange(len(hashes))]
    order = key_bytes.sort_order(keys)
    same = key_bytes.same_as_before(keys.take(pa.array(order)))
    begins = np.flatnonzero(~same)
    counts = np.diff(np.append(begins, len(order)))
    rank = np.arange(len(order)) - np.repeat(begins, counts)
    by_rank = np.argsort(rank, kind="stable")
    bounds = np.searchsorted(rank[by_rank], np.arange(1, int(rank.max()) + 1))
    return [np.sort(order[part]) for part in np.split(by_rank, bounds)]


def _round(
    store: Rows,
    block: Block,
    batch: pa.RecordBatch,
    rows: Positions,
    ops: npt.NDArray[np.uint8] | None,
    keys: pa.BinaryArray,
    hashes: U64,
    time: int,
    size_bytes: int,
) -> list[RowError]:
    """One round: every key once."""
    each = np.full(len(rows), int(block.op or 0), np.uint8) if ops is None else ops
    located = store.locate(keys, hashes)
    live = located.live
    bad_insert, bad_other = (each == RowOp.INSERT) & live, np.isin(each, (RowOp.UPDATE, RowOp.DELETE)) & ~live
    skip = bad_insert | bad_other | ((each == RowOp.INSERT_IGNORE) & live)
    skip |= np.isin(each, (RowOp.UPDATE_IGNORE, RowOp.DELETE_IGNORE)) & ~live
    errors = [_error(row, Code.ALREADY_PRESENT) for row in rows[bad_insert].tolist()]
    errors += [_error(row, Code.NOT_FOUND) for row in rows[bad_other].tolist()]
    updates = np.flatnonzero(np.isin(each, UPDATES) & ~skip)
    if len(updates) and len(block.column_ids) != len(store.schema.columns):
        old = store.fetch(Located(located.source[updates], located.place[updates], live[updates]))
        batch = _overlay(block, batch, updates, old, store.schema)
    kept = np.flatnonzero(~skip)
    if len(kept) == 0:
        return errors
    if len(kept) < len(rows):
        batch, keys = batch.take(pa.array(kept)), keys.take(pa.array(kept))
        size_bytes = batch.nbytes
    deleted = each[kept] >= RowOp.DELETE
    store.put(batch, time, deleted if deleted.any() else None, size_bytes, keys)
    return errors


def gather(parts: list[tuple[Positions, pa.RecordBatch]]) -> pa.RecordBatch:
    """Batches whose rows belong at the given positions, as one batch in order."""
    back = np.argsort(np.concatenate([places for places, _ in parts]))
    return concat_batches([batch for _, batch in parts]).take(pa.array(back))
