"""Schemas that change under a store: rows of all ages against a dumb twin, through flushes, merges and restarts."""

from __future__ import annotations

import base64
import json
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stele.model import writeop
from stele.model.alter import altered
from stele.model.block import DELETES, UPDATES, RowOp, encode_block
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Rejected
from stele.model.ids import HybridTime
from stele.model.keys import encode_keys
from stele.model.predicate import Predicate, ScanSpec
from stele.model.schema import Schema
from stele.model.steps import AddColumn, ChangeDefault, DropColumn, RenameColumn, Step
from stele.model.writeop import NO_CLIENT, WriteHeader, digest, encode
from stele.tablet.block_checks import check_block
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.twin import FOREVER, START_US, compact, flush

BASE = Schema.make([("k", "int64"), ("a", "string", True), ("b", "int32", False, "5")], key=["k"])
TYPES = {
    "bool": ("true", True, False),
    "int8": ("-3", -3, 9),
    "int16": ("300", 300, -9),
    "int32": ("70000", 70000, 1),
    "int64": ("5000000000", 5_000_000_000, 2),
    "float": ("0.5", 0.5, 1.5),
    "double": ("0.1", 0.1, 2.5),
    "decimal(9,2)": ('"1.25"', Decimal("1.25"), Decimal("7.00")),
    "string": ('"ü"', "ü", "other"),
    "binary": ('"AQI="', b"\x01\x02", b""),
    "date": ('"2024-05-01"', date(2024, 5, 1), date(1969, 1, 1)),
    "timestamp": (
        '"2024-05-01T00:00:00+00:00"',
        datetime(2024, 5, 1, tzinfo=UTC),
        datetime(1969, 1, 1, tzinfo=UTC),
    ),
}
"""For each type: a default as JSON, its value, another value."""
Cells = dict[int, Any]
"""A row by column ids."""


def alter_entry(index: int, schema: Schema) -> Entry:
    return Entry(1, index, EntryKind.WRITE, (START_US + index) << 12, writeop.schema_change(schema))


def block(rows: list[Cells], op: RowOp, schema: Schema, ids: list[int]) -> bytes:
    arrays = [pa.array([row[i] for row in rows], schema.by_id[i].arrow) for i in ids]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow(ids))
    return encode_block(op, ids, batch, int(schema.version))


def entry_of(index: int, body: bytes, checked_with: Schema) -> Entry:
    """As a leader with this schema would propose it."""
    plain = check_block(body, checked_with)
    head = WriteHeader(NO_CLIENT, 1, 1, START_US, digest(body), int(checked_with.version), plain=plain)
    return Entry(1, index, EntryKind.WRITE, (START_US + index) << 12, encode(head, body))


class Twin:
    """Versions of each key by column id, and the schema."""

    def __init__(self) -> None:
        self.schema = BASE
        self.schemas = [BASE]
        self.versions: dict[int, list[tuple[int, Cells | None]]] = {}

    def read(self, cells: Cells) -> Cells:
        return {
            int(c.id): cells[int(c.id)] if int(c.id) in cells else c.read_scalar().as_py()
            for c in self.schema.columns
        }

    def at(self, key: int, time: int) -> Cells | None:
        found = [cells for when, cells in self.versions.get(key, []) if when <= time]
        return None if not found or found[-1] is None else self.read(found[-1])

    def write(self, time: int, op: RowOp, rows: list[Cells], ids: list[int]) -> set[int]:
        """The places of rows that are refused."""
        refused = set()
        for place, row in enumerate(rows):
            old = self.at(row[0], time)
            if op in (RowOp.INSERT, RowOp.INSERT_IGNORE) and old is not None:
                if op is RowOp.INSERT:
                    refused.add(place)
                continue
            if op in UPDATES + DELETES and old is None:
                if op in (RowOp.UPDATE, RowOp.DELETE):
                    refused.add(place)
                continue
            new: Cells | None = {i: row[i] for i in ids}
            if op in DELETES:
                new = None
            elif op in UPDATES:
                new = {**(old or {}), **row}
            else:
                for column in self.schema.columns:
                    if int(column.id) not in ids:
                        new[int(column.id)] = column.default_scalar().as_py()
            self.versions.setdefault(row[0], []).append((time, new))
        return refused

    def rows(self, time: int) -> list[dict[str, Any]]:
        found = []
        for key in sorted(self.versions):
            cells = self.at(key, time)
            if cells is not None:
                found.append({c.name: cells[int(c.id)] for c in self.schema.columns})
        return found


def check(store: TabletStore, twin: Twin, time: int) -> None:
    assert store.schema == twin.schema
    with store.view(HybridTime(time)) as view:
        ordered = [row for batch in view.scan(ScanSpec(ordered=True)) for row in batch.to_pylist()]
        free = [row for batch in view.scan() for row in batch.to_pylist()]
        wanted = twin.rows(time)
        assert ordered == wanted
        assert sorted(free, key=lambda row: row[twin.schema.key_columns[0].name]) == wanted
        name = twin.schema.key_columns[0].name
        keys = pa.record_batch([pa.array([row[name] for row in wanted], "int64")], names=[name])
        last = int(twin.schema.columns[-1].id)
        got = view.get(encode_keys(keys, twin.schema), [last, 0])[0].to_pylist()
        shown = twin.schema.by_id[last].name
        assert got == [{shown: row[shown], name: row[name]} for row in wanted]


def random_step(rng: random.Random, schema: Schema, number: int) -> list[Step]:
    values = [c for c in schema.columns if not schema.is_key(c.id)]
    kind = rng.choice(["add", "add", "drop", "rename", "default"])
    if kind == "drop" and len(values) > 1:
        return [DropColumn(rng.choice(values).name)]
    if kind == "rename":
        return [RenameColumn(rng.choice(schema.columns).name, f"r{number}")]
    if kind == "default":
        column = rng.choice(values)
        text, _, _ = TYPES[column.type]
        # As some column that was there from the start has no read default, only new writes differ.
        return [ChangeDefault(column.name, rng.choice([text, None]) if column.nullable else text)]
    type_ = rng.choice(list(TYPES))
    nullable = rng.random() < 0.5
    default = TYPES[type_][0] if not nullable or rng.random() < 0.5 else None
    return [AddColumn(f"c{number}", type_, nullable, default)]


@pytest.mark.parametrize("seed", range(12))
def test_any_change_at_any_time(tmp_path: Path, seed: int) -> None:
    """Writes of the newest and of older schemas, changes, flushes that take long, merges, and restarts that apply
    the log again."""
    rng = random.Random(seed)
    store = TabletStore.create(tmp_path / "t", BASE, FOREVER)
    twin, log, job, times = Twin(), [], None, []
    for number in range(60):
        index = len(log) + 1
        action = rng.choice(["write"] * 6 + ["alter", "alter", "flush", "begin", "end", "merge", "restart"])
        if action == "alter":
            new = altered(twin.schema, random_step(rng, twin.schema, number))
            log.append(alter_entry(index, new))
            assert store.apply(log[-1]).schema_version == new.version
            log.append(alter_entry(index + 1, new))  # a repeated order
            assert store.apply(log[-1]).schema_version == 0
            twin.schema = new
            twin.schemas.append(new)
        elif action == "write":
            made = twin.schemas[-1 - min(rng.choice([0, 0, 0, 1, 2]), len(twin.schemas) - 1)]
            op = rng.choice(list(RowOp))
            ids = [int(c.id) for c in made.columns]
            if op in UPDATES:
                ids = [0, *rng.sample(ids[1:], rng.randint(0, len(ids) - 1))]
            keys = rng.sample(range(80), rng.choice([1, 2, 3, 50]))
            rows = [{i: _value(rng, made, i) if i else key for i in ids} for key in keys]
            body = block(rows, op, made, ids)
            entry = entry_of(index, body, made)
            log.append(entry)
            outcome = store.apply(entry)
            if any(i not in twin.schema.by_id for i in ids):
                assert outcome.code is Code.SCHEMA_MISMATCH
                continue
            assert outcome.code is Code.OK, outcome
            bad = twin.write(entry.timestamp, op, rows, ids)
            assert {error.row for error in outcome.row_errors} == bad
            times.append(entry.timestamp)
        elif action == "flush" and job is None:
            flush(store)
        elif action == "begin" and job is None:
            job = store.begin_flush()
            if job is not None and rng.random() < 0.5:
                job.write()
        elif action == "end" and job is not None:
            job.write()
            store.finish_flush(job)
            job = None
        elif action == "merge" and job is None:
            compact(store, full=rng.random() < 0.5)
        elif action == "restart":
            if job is not None and rng.random() < 0.5:
                job.write()
            job = None
            store.close()
            store = TabletStore.open(tmp_path / "t", FOREVER)
            for entry in log[store.flushed.index :]:
                store.apply(entry)
        if times and rng.random() < 0.5:
            check(store, twin, times[-1])
            check(store, twin, rng.choice(times))


def _value(rng: random.Random, schema: Schema, column_id: int) -> Any:
    column = schema.by_id[column_id]
    if column.nullable and rng.random() < 0.3:
        return None
    return rng.choice(TYPES[column.type][1:])


@pytest.mark.parametrize("type_", sorted(TYPES))
@pytest.mark.parametrize("where", ["memory", "file", "merged"])
def test_old_rows_have_the_default_of_the_time_when_the_column_was_added(
    tmp_path: Path, type_: str, where: str
) -> None:
    store = TabletStore.create(tmp_path / "t", BASE, FOREVER)
    store.apply(entry_of(1, block([{0: 1, 1: "x", 2: 2}], RowOp.UPSERT, BASE, [0, 1, 2]), BASE))
    if where != "memory":
        flush(store)
    text, value, other = TYPES[type_]
    added = altered(BASE, [AddColumn("c", type_, False, text), AddColumn("n", type_, True)])
    store.apply(alter_entry(2, added))
    if where == "merged":
        store.apply(entry_of(3, block([{0: 2, 1: "y", 2: 3}], RowOp.UPSERT, BASE, [0, 1, 2]), added))
        flush(store)
        assert compact(store)
    # A later default counts for later rows only.
    later = altered(
        added, [DropColumn("a"), ChangeDefault("c", None), ChangeDefault("c", _json(type_, other))]
    )
    store.apply(alter_entry(store.applied.index + 1, later))
    index = store.applied.index + 1
    store.apply(entry_of(index, block([{0: 9, 2: 1}], RowOp.UPSERT, later, [0, 2]), later))
    with store.view() as view:
        rows = {row["k"]: row for batch in view.scan() for row in batch.to_pylist()}
    assert rows[1] == {"k": 1, "b": 2, "c": value, "n": None}
    assert rows[9] == {"k": 9, "b": 1, "c": other, "n": None}


def _json(type_: str, value: Any) -> str:
    if type_ == "binary":
        return json.dumps(base64.b64encode(value).decode())
    if type_ in ("date", "timestamp"):
        return json.dumps(value.isoformat())
    return json.dumps(str(value)) if type_.startswith("decimal") else json.dumps(value)


def test_a_change_that_does_not_follow_is_refused_alike_everywhere(tmp_path: Path) -> None:
    store = TabletStore.create(tmp_path / "t", BASE, FOREVER)
    other = Schema.make([("k", "string")], key=["k"], version=7)
    outcome = store.apply(alter_entry(1, other))
    assert outcome.code is Code.SCHEMA_MISMATCH and "does not follow" in outcome.message
    assert store.schema == BASE and outcome.schema_version == 0


def test_a_block_that_has_grown_too_large_is_refused_alike_everywhere(tmp_path: Path) -> None:
    """Its leader checked it before the change; a replica must not run out of memory over it."""
    store = TabletStore.create(tmp_path / "t", BASE, FOREVER)
    many = 1 << 20
    ids = [0, 2]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(np.arange(many)), pa.nulls(many, "int32").fill_null(1)], schema=BASE.to_arrow(ids)
    )
    body = encode_block(RowOp.UPSERT, ids, batch, 1)
    entry = entry_of(2, body, BASE)
    wide = altered(BASE, [AddColumn(f"c{n}", "string", False, '"' + "x" * 200 + '"') for n in range(2)])
    store.apply(alter_entry(1, wide))
    outcome = store.apply(entry)
    assert outcome.code is Code.TOO_LARGE and "columns that were added meanwhile" in outcome.message
    with store.view() as view:
        assert not list(view.scan())


def test_a_retry_of_a_write_from_before_the_change_gets_its_outcome(tmp_path: Path) -> None:
    store = TabletStore.create(tmp_path / "t", BASE, FOREVER)
    client = b"c" * 16
    body = block([{0: 1, 1: "x", 2: 2}], RowOp.INSERT, BASE, [0, 1, 2])
    head = WriteHeader(client, 1, 1, START_US, digest(body), 1)
    first = Entry(1, 1, EntryKind.WRITE, (START_US + 1) << 12, encode(head, body))
    outcome = store.apply(first)
    dropped = altered(BASE, [DropColumn("a")])
    store.apply(alter_entry(2, dropped))
    with pytest.raises(Rejected):
        store.check_block(body)
    assert store.may_know(client, 1, START_US) and not store.may_know(client, 2, START_US)
    again = store.apply(Entry(1, 3, EntryKind.WRITE, (START_US + 3) << 12, encode(head, body)))
    assert again.duplicate and again.timestamp == outcome.timestamp and again.code is Code.OK


def test_predicates_see_read_defaults(tmp_path: Path) -> None:
    store = TabletStore.create(tmp_path / "t", BASE, StoreOptions(history_us=1 << 50))
    store.apply(entry_of(1, block([{0: 1, 1: "x", 2: 2}], RowOp.UPSERT, BASE, [0, 1, 2]), BASE))
    flush(store)
    added = altered(BASE, [AddColumn("c", "int8", False, "4")])
    store.apply(alter_entry(2, added))
    store.apply(entry_of(3, block([{0: 2, 1: "y", 2: 2, 3: 5}], RowOp.UPSERT, added, [0, 1, 2, 3]), added))
    with store.view() as view:
        spec = ScanSpec(column_ids=(0,), predicates=(Predicate(3, "=", 4),))
        assert [row for batch in view.scan(spec) for row in batch.to_pylist()] == [{"k": 1}]
