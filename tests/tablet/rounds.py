"""What a big block does to the rows, key by key in rounds: the first row of every key, then the second ones, and so on.
Each round is one block without a key that repeats, so it is easy to see that it is right; a key that repeats ten thousand
times takes as many rounds. Likewise a small block, row by row. The write path did so until it had a closed form; replicas of
both programs apply one entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model import keys as key_bytes
from stele.model.block import DELETES, UPDATES, Block, RowError, RowOp, decode_block
from stele.model.entry import Entry
from stele.model.errors import Code, Rejected
from stele.model.hashing import hash_binary
from stele.model.rows import null_faults
from stele.model.schema import Schema
from stele.model.writeop import WriteHeader
from stele.tablet.applying import Applying
from stele.tablet.block_checks import complete, key_columns
from stele.tablet.locate import StoreRows
from stele.tablet.machine import Outcome
from stele.tablet.memtable import SMALL_ROWS
from stele.tablet.sorted_runs import Mask, Positions
from stele.tablet.writing import U64, Located, _verdict

_PRESENT = "the key is present; use upsert to overwrite it"
_ABSENT = "the key is absent"
_UNCHECKED = (RowOp.UPSERT, RowOp.DELETE_IGNORE)


class WrittenRows(StoreRows):
    """Rows that are changed while they are looked at."""

    def put(self, batch: pa.RecordBatch, time: int, deleted: Mask | None, size: int, keys: Any) -> None:
        """Add rows."""
        if keys is None or isinstance(keys, list):
            self.memory[0].append(batch, time, deleted, size, keys)
        else:
            self.memory[0].append_keyed(batch, time, deleted, size, keys)


class ApplyingByRounds(Applying):
    """Writes big blocks in rounds, and small ones row by row."""

    def _look_up(self, header: WriteHeader, body: memoryview, *, brief: bool = False) -> Any:
        try:
            return decode_block(body, self._schema, trusted=True)
        except Rejected:
            return super()._look_up(header, body, brief=brief)

    def _write(self, entry: Entry, plan: Any) -> Outcome:
        if not isinstance(plan, Block):
            return super()._write(entry, plan)
        state = self._contents.state
        rows = WrittenRows(self._schema, (state.active, *state.frozen), state.files)
        return Outcome(entry.timestamp, write_block(rows, plan, entry.timestamp, len(entry.payload)))


def write_block(store: WrittenRows, block: Block, time: int, size_bytes: int) -> tuple[RowError, ...]:
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
    write = _small if len(rows) <= SMALL_ROWS else _big
    found = write(store, block, batch, rows, ops, time, size_bytes)
    return tuple(sorted((*errors, *found), key=lambda e: e.row))


def _error(row: int, code: Code) -> RowError:
    return RowError(row, code, _PRESENT if code is Code.ALREADY_PRESENT else _ABSENT)


def _too_long(row: int, length: int) -> RowError:
    return RowError(row, Code.TOO_LARGE, f"the key takes {length} bytes; at most {key_bytes.KEY_BYTES_MAX}")


def _small(
    store: WrittenRows,
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
    store: WrittenRows, block: Block, batch: pa.RecordBatch, at: int, key: bytes, changed: dict[bytes, int]
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


def _big(
    store: WrittenRows,
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
    unchecked = block.op in _UNCHECKED if ops is None else bool(np.isin(ops, _UNCHECKED).all())
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
    store: WrittenRows,
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
