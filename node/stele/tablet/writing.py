"""What a block does to the rows: presence checks, row errors, and whole rows from partial ones. Called by
store.py.

Changes nothing, so it may run in any thread. block_checks.py says what a block may be. A small block goes row
by row through dicts. A big one goes by columns, with the same result as if each row saw the effects of the
rows before it.

Invariant: the resulting rows and errors depend only on the block and the store's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model import keys as key_bytes
from stele.model.block import DELETES, UPDATES, Block, RowError, RowOp
from stele.model.errors import Code, Rejected
from stele.model.hashing import hash_binary
from stele.model.rows import null_faults
from stele.model.schema import Schema
from stele.tablet.block_checks import (
    UNCHECKED,
    all_unchecked,
    complete,
    key_columns,
    keys_given,
    with_columns,
)
from stele.tablet.memtable import SMALL_ROWS, MemTable
from stele.tablet.patches import Patch
from stele.tablet.sorted_runs import Mask, Positions

U64 = npt.NDArray[np.uint64]

_PRESENT = "the key is present; use upsert to overwrite it"
_ABSENT = "the key is absent"


@dataclass(frozen=True, slots=True)
class Located:
    """Places of the newest versions of some keys. `source`: -1 none, then the memtables, then the files, newest
    first.

    `place`: an ordinal in a memtable, or group << 32 | row in a file."""

    source: Positions
    place: Positions
    live: Mask


class Rows(Protocol):
    """What the write path needs of its store."""

    @property
    def schema(self) -> Schema:
        """The schema of all rows."""

    @property
    def active(self) -> MemTable:
        """The newest memtable, which is source 0 of `locate`."""

    def locate(self, keys: pa.BinaryArray, hashes: U64) -> Located:
        """The newest version of each key."""

    def locate_one(self, key: bytes) -> tuple[int, int, bool] | None:
        """(source, place, live) of the newest version of one key; None if there is none."""

    def written_at(self, keys: pa.BinaryArray, hashes: U64, times: U64) -> Mask:
        """Which keys have a version (a row or a delete) with one of these hybrid times.

        `times`: ascending, at least one."""

    def fetch(self, located: Located) -> pa.RecordBatch:
        """The rows at these places, with all columns, in this order."""


@dataclass(frozen=True, slots=True)
class Put:
    """Rows to add. `deleted`: which are deletes; None: none. `size_bytes`: their size, as the memtable counts it.

    `keys`: a list for a small block; an encoded array or None for a big one."""

    batch: pa.RecordBatch
    deleted: Mask | None
    size_bytes: int
    keys: list[bytes] | pa.BinaryArray | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a block does: the rows to add, in order, and the errors of the other rows. `refused`: why it does
    nothing."""

    puts: tuple[Put | Patch, ...] = ()
    errors: tuple[RowError, ...] = ()
    refused: Rejected | None = None

    def fits(self, active: MemTable) -> bool:
        """Whether it can be applied to this memtable. A patch can only be applied to the one that has its old rows."""
        return all(isinstance(put, Put) or put.table == active.serial for put in self.puts)


def plan_block(store: Rows, block: Block, size_bytes: int, others: U64 | None = None) -> Plan:
    """Return the effect of a block's rows on the store, and the errors of rows that cannot be applied.

    `others`: the hybrid times at which other attempts at the same part wrote. A row whose key has a version from one of
    these times counts as done (jobs.py)."""
    errors = null_faults(block, store.schema)
    rows = np.arange(block.rows, dtype=np.int64)
    if errors:
        rows = np.delete(rows, [e.row for e in errors])
        block = _taken(block, rows)
    if others is not None and len(rows):
        keys = key_bytes.encode_keys(block.batch, store.schema)
        left = np.flatnonzero(~store.written_at(keys, hash_binary(keys), others))
        if len(left) < len(rows):
            block, rows = _taken(block, left), rows[left]
    if len(rows) == 0:
        return Plan((), tuple(errors))
    puts: list[Put | Patch] = []
    plan = _small if len(rows) <= SMALL_ROWS else _big
    found = plan(store, block, rows, size_bytes, puts)
    if found or errors:
        return Plan(tuple(puts), tuple(sorted((*errors, *found), key=lambda e: e.row)))
    return Plan(tuple(puts))


def _taken(block: Block, rows: Positions) -> Block:
    """These rows of the block."""
    ops = None if block.row_ops is None else block.row_ops[rows]
    return replace(block, batch=block.batch.take(pa.array(rows)), row_ops=ops)


def _verdict(op: int, present: bool) -> tuple[bool, Code | None]:
    """(whether to write the row, error code) for an operation on a key that is present or not."""
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
    store: Rows, block: Block, rows: Positions, size_bytes: int, puts: list[Put | Patch]
) -> list[RowError]:
    keys = key_bytes.key_list(keys_given(block, store.schema))
    ops = block.row_ops
    errors: list[RowError] = []
    taken: list[int] = []
    gone: list[bool] = []
    state: dict[bytes, bool] = {}
    partial = len(block.column_ids) != len(store.schema.columns)
    places: dict[
        bytes, tuple[int, int, bool]
    ] = {}  # keys whose stored row this block has not replaced so far
    stored: list[int] = []
    stored_at: list[tuple[int, int, bool]] = []
    for at, key in enumerate(keys):
        op = int(block.op) if block.op is not None else int(ops[at])  # type: ignore[index]
        if len(key) > key_bytes.KEY_BYTES_MAX:
            errors.append(_too_long(int(rows[at]), len(key)))
            continue
        if op not in UNCHECKED:
            present = state.get(key)
            if present is None:
                found = store.locate_one(key)
                present = found is not None and found[2]
                if found is not None:
                    places[key] = found
            write, code = _verdict(op, present)
            if code is not None:
                errors.append(_error(int(rows[at]), code))
            if not write:
                continue
        if op not in UPDATES:
            places.pop(key, None)
        elif partial and key in places:
            stored.append(at)
            stored_at.append(places[key])
        deleted = op in DELETES
        state[key] = not deleted
        taken.append(at)
        gone.append(deleted)
    if not taken:
        return errors
    taken_keys = [keys[at] for at in taken]
    if len(stored) == len(taken) and all(source == 0 for source, _, _ in stored_at):
        base = [place for _, place, _ in stored_at]
        if store.active.may_wait(base, block.batch, size_bytes):
            some = block if len(taken) == len(keys) else _taken(block, np.array(taken))
            columns = tuple(store.schema.places[column_id] for column_id in block.column_ids)
            puts.append(Patch(store.active.serial, base, columns, some.batch, size_bytes, taken_keys))
            return errors
    batch = complete(block, store.schema)
    if stored:
        source, place, live = zip(*stored_at)
        old = store.fetch(Located(np.array(source), np.array(place), np.array(live)))
        batch = _overlay(block, batch, np.array(stored), old, store.schema)
    if len(taken) < len(keys):
        batch = batch.take(pa.array(taken))
    puts.append(Put(batch, np.array(gone) if any(gone) else None, size_bytes, taken_keys))
    return errors


def _overlay(
    block: Block, batch: pa.RecordBatch, at: Positions, old: pa.RecordBatch, schema: Schema
) -> pa.RecordBatch:
    """`batch`, whose rows `at` (rising) get the columns that the block lacks from `old`. `old` has one row for each of
    them."""
    if len(at) == batch.num_rows:
        places = [schema.places[column_id] for column_id in block.column_ids]
        return with_columns(old, {place: batch.column(place) for place in places})
    given = set(block.column_ids)
    index = np.arange(batch.num_rows)
    index[at] = batch.num_rows + np.arange(len(at))
    indices = pa.array(index)
    arrays = []
    for position, column in enumerate(schema.columns):
        if int(column.id) in given:
            array = batch.column(position)
        else:
            array = pa.concat_arrays([batch.column(position), old.column(position)]).take(indices)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _big(
    store: Rows, block: Block, rows: Positions, size_bytes: int, puts: list[Put | Patch]
) -> list[RowError]:
    batch, ops = complete(block, store.schema), block.row_ops
    variable = any(
        pa.types.is_string(a.type) or pa.types.is_binary(a.type) for a in key_columns(batch, store.schema)
    )
    unchecked = all_unchecked(block.op, ops)
    if unchecked and not variable:
        puts.append(Put(batch, _deletes(block, ops, len(rows)), size_bytes, None))
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
        if not len(rows):
            return errors
    if unchecked:
        puts.append(Put(batch, _deletes(block, ops, len(rows)), size_bytes, keys))
        return errors
    hashes = hash_binary(keys)
    each = np.full(len(rows), int(block.op or 0), np.uint8) if ops is None else ops
    found = _checked(store, block, each, keys, hashes)
    errors += [_error(row, Code.ALREADY_PRESENT) for row in rows[found.present].tolist()]
    errors += [_error(row, Code.NOT_FOUND) for row in rows[found.absent].tolist()]
    if len(found.rows):
        _put(store, block, batch, found, each, keys, size_bytes, puts)
    return errors


def _put(
    store: Rows,
    block: Block,
    batch: pa.RecordBatch,
    found: _Checked,
    each: npt.NDArray[np.uint8],
    keys: pa.BinaryArray,
    size_bytes: int,
    puts: list[Put | Patch],
) -> None:
    """Add the final row of each key to `puts`, with stored values for columns that the block leaves out. If
    the completed rows exceed an Arrow array, add each half of them."""
    every = len(found.rows) == batch.num_rows
    whole = batch if every else batch.take(pa.array(found.rows))
    if len(found.stored):
        try:
            whole = _overlay(block, whole, found.stored, store.fetch(found.old), store.schema)
        except (pa.ArrowInvalid, pa.ArrowCapacityError):
            if len(found.rows) == 1:
                raise
            for half in found.halves():
                _put(store, block, batch, half, each, keys, size_bytes, puts)
            return
    if not every:
        keys, size_bytes = keys.take(pa.array(found.rows)), whole.nbytes
    deleted = each[found.rows] >= RowOp.DELETE
    puts.append(Put(whole, deleted if deleted.any() else None, size_bytes, keys))


def _deletes(block: Block, ops: npt.NDArray[np.uint8] | None, rows: int) -> Mask | None:
    if ops is not None:
        deleted = ops >= RowOp.DELETE
        return deleted if deleted.any() else None
    return np.ones(rows, bool) if block.op in DELETES else None


@dataclass(frozen=True, slots=True)
class _Checked:
    """The result for rows that are looked up.

    `present`: inserts that are refused, as the key is present. `absent`: updates and deletes that are refused, as
    it is not. `rows`: the final row of each key, in the order of the block. `stored`: which of these update some
    columns of a stored row. `old`: where those stored rows are."""

    present: Positions
    absent: Positions
    rows: Positions
    stored: Positions
    old: Located

    def halves(self) -> Iterator[_Checked]:
        """Two parts: the first half of `rows`, and the rest."""
        middle = len(self.rows) // 2
        cut = int(np.searchsorted(self.stored, middle))
        for rows, part, before in (
            (self.rows[:middle], slice(0, cut), 0),
            (self.rows[middle:], slice(cut, None), middle),
        ):
            old = Located(self.old.source[part], self.old.place[part], self.old.live[part])
            yield _Checked(self.present, self.absent, rows, self.stored[part] - before, old)


def _checked(
    store: Rows,
    block: Block,
    each: npt.NDArray[np.uint8],
    keys: pa.BinaryArray,
    hashes: U64,
) -> _Checked:
    """Handle all rows at once, even if keys repeat. The result is the same as if they came one after the other.

    Whether a key is present at a row depends on the last earlier row that settles it; all operations but
    updates do. The key is present after an insert, even a refused one, and absent after a delete. All rows of
    an entry have one timestamp, so for each key only the last written row can ever be seen. If that row is an
    update, it gives the same columns as all earlier updates of the block. Its other columns are defaults if the
    block wrote a whole row before it; otherwise they come from the stored row.
    """
    order, begins = _by_key(keys, hashes)
    ops = each[order]
    counts = np.diff(begins, append=len(order))
    begin = np.repeat(begins, counts)  # where the rows of its key begin
    heads = order[begins]
    repeats = len(heads) < len(order)
    located = store.locate(keys.take(pa.array(heads)) if repeats else keys, hashes[heads])

    updates = np.isin(ops, UPDATES)
    live = np.repeat(located.live, counts)
    if repeats:
        settled = _last_before(~updates, begin)
        live = np.where(settled >= 0, ops[settled] < RowOp.UPDATE, live)
    bad_insert, bad_other = (ops == RowOp.INSERT) & live, np.isin(ops, (RowOp.UPDATE, RowOp.DELETE)) & ~live
    skip = bad_insert | bad_other | ((ops == RowOp.INSERT_IGNORE) & live)
    skip |= np.isin(ops, (RowOp.UPDATE_IGNORE, RowOp.DELETE_IGNORE)) & ~live

    last = np.maximum.reduceat(np.where(skip, -1, np.arange(len(order))), begins)
    of_key = np.flatnonzero(last >= 0)
    of_key = of_key[np.argsort(order[last[of_key]])]
    last = last[of_key]
    stored = np.zeros(0, np.int64)
    if len(block.column_ids) != len(store.schema.columns):
        written = _last_before(~skip & ~updates, begin)
        stored = np.flatnonzero(updates[last] & (written[last] < 0))
    at = of_key[stored]
    old = Located(located.source[at], located.place[at], located.live[at])
    return _Checked(order[bad_insert], order[bad_other], order[last], stored, old)


def _by_key(keys: pa.BinaryArray, hashes: U64) -> tuple[Positions, Positions]:
    """(positions of all rows, grouped by key and in order within a key; where each key's group begins)."""
    if len(np.unique(hashes)) == len(hashes):
        return np.arange(len(hashes)), np.arange(len(hashes))
    order = key_bytes.sort_order(keys)
    return order, np.flatnonzero(~key_bytes.same_as_before(keys.take(pa.array(order))))


def _last_before(which: Mask, begin: Positions) -> Positions:
    """For each row, the last earlier row that is in `which`, at or after `begin`; -1 if there is none."""
    last = np.maximum.accumulate(np.where(which, np.arange(len(which)), -1))
    before = np.concatenate(([-1], last[:-1]))
    return np.where(before >= begin, before, -1)
