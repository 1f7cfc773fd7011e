"""The dumb twin: a dict of version lists and a sort. Also the small tools that the store's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stele.model.block import DELETES, UPDATES, RowOp, encode_block
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Rejected
from stele.model.ids import HybridTime, OpId
from stele.model.job import Attempt
from stele.model.predicate import ScanSpec
from stele.model.schema import Schema
from stele.model.writeop import NO_CLIENT, WriteHeader, digest, encode
from stele.tablet.block_checks import check_block
from stele.tablet.compaction import run_job
from stele.tablet.machine import Outcome
from stele.tablet.store import StoreOptions, TabletStore
from stele.tablet.view import View

SCHEMA = Schema.make(
    [
        ("k", "string"),
        ("n", "int32"),
        ("v", "string", True),
        ("w", "int64", False, "7"),
        ("d", "double", True),
    ],
    ["k", "n"],
)
START_US = 1_700_000_000_000_000
JOB = b"j" * 16
FIRST, SECOND = Attempt(JOB, START_US, 0, 1), Attempt(JOB, START_US, 0, 2)
"""Two attempts at one part of a job."""
FOREVER = StoreOptions(history_us=1 << 50)

Row = dict[str, Any]
Key = tuple[str, int]


def header(body: bytes, **change: Any) -> WriteHeader:
    """A write header without exactly-once bookkeeping, unless `change` says so."""
    values = {
        "client_id": NO_CLIENT,
        "sequence": 1,
        "lowest_unfinished": 1,
        "first_attempt_us": START_US,
        "digest": digest(body),
        "schema_version": 1,
    }
    return WriteHeader(**{**values, **change})


def write_entry(index: int, body: bytes, *, term: int = 1, at_us: int | None = None, **change: Any) -> Entry:
    """A WRITE entry whose timestamp follows its index."""
    us = START_US + index if at_us is None else at_us
    change.setdefault("plain", _plain(body))
    return Entry(term, index, EntryKind.WRITE, us << 12, encode(header(body, **change), body))


def _plain(body: bytes) -> bool:
    """What a leader finds out before it proposes; a block that it would refuse is written as it is."""
    try:
        return check_block(body, SCHEMA)
    except Rejected:
        return False


def block_of(rows: Sequence[Row], ops: RowOp | Sequence[RowOp], schema: Schema = SCHEMA) -> bytes:
    """Bytes of a block that has the columns which the rows name (all rows the same)."""
    names = set(rows[0]) if rows else {c.name for c in schema.columns}
    columns = [c for c in schema.columns if c.name in names]
    arrays = [pa.array([r[c.name] for r in rows], c.arrow) for c in columns]
    ids = [int(c.id) for c in columns]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow(ids))
    packed = ops if isinstance(ops, RowOp) else np.array(ops, np.uint8)
    return encode_block(packed, ids, batch, schema.version)


def rows_of(batches: Any) -> list[Row]:
    """Rows of batches as dicts."""
    return [row for batch in batches for row in batch.to_pylist()]


def all_rows(store: TabletStore, snapshot: int | None = None) -> list[Row]:
    """All rows at a snapshot in key order."""
    with store.view(None if snapshot is None else HybridTime(snapshot)) as view:
        return rows_in(view)


def rows_in(view: View) -> list[Row]:
    """All rows of a view in key order; a scan without order must give the same ones."""
    ordered = rows_of(view.scan(ScanSpec(ordered=True)))
    free = rows_of(view.scan())
    assert sorted(free, key=lambda r: (r["k"].encode(), r["n"])) == ordered
    return ordered


def flush(store: TabletStore) -> bool:
    """Flush whatever is new; whether there was anything."""
    job = store.begin_flush()
    if job is None:
        return False
    job.write()
    store.finish_flush(job)
    return True


def compact(store: TabletStore, *, full: bool = True) -> bool:
    """Merge files in this process; whether there was anything to merge."""
    job = store.plan_compaction(full=full)
    if job is None:
        return False
    store.install_compaction(run_job(job))
    return True


class Twin:
    """What the store must be, done the slow way."""

    def __init__(self) -> None:
        self.versions: dict[Key, list[tuple[int, Row | None]]] = {}
        self.entries: list[Entry] = []
        self.idle: set[tuple[Key, int]] = set()
        """Deletes that were to be ignored, of keys that were not there, and their times. The store may keep them."""

    def next_index(self) -> int:
        return len(self.entries) + 1

    def write(self, rows: Sequence[Row], ops: RowOp | Sequence[RowOp]) -> tuple[Entry, dict[int, Code]]:
        """Apply a block; its entry, and the code of each row that must be in error."""
        each = [ops] * len(rows) if isinstance(ops, RowOp) else list(ops)
        entry = write_entry(self.next_index(), block_of(rows, ops))
        self.entries.append(entry)
        errors: dict[int, Code] = {}
        for position, (row, op) in enumerate(zip(rows, each)):
            key = (row["k"], row["n"])
            present = self.now(key)
            if op is RowOp.INSERT and present is not None:
                errors[position] = Code.ALREADY_PRESENT
            elif op in (RowOp.UPDATE, RowOp.DELETE) and present is None:
                errors[position] = Code.NOT_FOUND
            elif (op is RowOp.INSERT_IGNORE and present is not None) or (
                op in (RowOp.UPDATE_IGNORE, RowOp.DELETE_IGNORE) and present is None
            ):
                if op is RowOp.DELETE_IGNORE:
                    self.idle.add((key, entry.timestamp))
            elif op in DELETES:
                self.versions.setdefault(key, []).append((entry.timestamp, None))
            else:
                old = present if op in UPDATES else {"v": None, "w": 7, "d": None}
                self.versions.setdefault(key, []).append((entry.timestamp, {**(old or {}), **row}))
        return entry, errors

    def now(self, key: Key) -> Row | None:
        found = self.versions.get(key)
        return found[-1][1] if found else None

    def at(self, snapshot: int) -> list[Row]:
        """Live rows at a snapshot, in key order."""
        found = []
        for key in sorted(self.versions, key=lambda k: (k[0].encode(), k[1])):
            row = None
            for timestamp, version in self.versions[key]:
                if timestamp <= snapshot:
                    row = version
            if row is not None:
                found.append({name: row[name] for name in ("k", "n", "v", "w", "d")})
        return found

    def replay(self, store: TabletStore) -> None:
        """Apply the entries that the store does not hold."""
        for entry in self.entries[store.applied.index :]:
            store.apply(entry)


def codes(outcome: Outcome) -> dict[int, Code]:
    """Row errors by row."""
    return {e.row: e.code for e in outcome.row_errors}


def new_store(path: Path, options: StoreOptions = FOREVER, schema: Schema = SCHEMA) -> TabletStore:
    """An empty store."""
    store = TabletStore.create(path, schema, options)
    assert store.applied == OpId(0, 0)
    return store
