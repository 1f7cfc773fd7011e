"""Updates of some columns that wait as patches, against the same updates applied row by row: outcomes, what is read, and
files, byte for byte. And what may wait, and for how long."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from stele.model.block import RowOp, encode_block
from stele.model.predicate import Changes, ScanSpec
from stele.model.rows import batch_from_rows
from stele.model.schema import Schema
from stele.tablet.machine import Lookup, Outcome
from stele.tablet.patches import Patch
from stele.tablet.store import StoreOptions, TabletStore
from tests.model.drawn import VALUES, row, schemas
from tests.tablet.test_memory import put
from tests.tablet.test_rounds import Pair
from tests.tablet.twin import START_US, block_of, compact, flush, new_store, rows_of, write_entry

WIDE = Schema.make([("k", "int64"), *((f"c{n}", "double", True) for n in range(300))], ["k"])
TEXTS = Schema.make([("k", "int64"), ("v", "string", True), ("n", "int64", True)], ["k"])


def patches(store: TabletStore) -> int:
    """How many rows wait as patches."""
    return sum(len(patch.keys) for patch, _ in store._contents.state.active.patches.waiting)


def changes(store: TabletStore, after: int) -> list[dict[str, Any]]:
    with store.view() as view:
        spec = ScanSpec(changes=Changes(after=after, every=True))
        return rows_of(view.scan(spec))


@st.composite
def steps(draw: Callable[..., Any], schema: Schema) -> list[tuple[str, bytes]]:
    """Blocks, most of them updates of some columns, of few keys: so rows are updated again and again. Between them flushes,
    merges and reads."""
    distinct = [row(draw, schema) for _ in range(draw(st.integers(1, 4)))]
    others = [column for column in schema.columns if not schema.is_key(column.id)]
    keys = [column.name for column in schema.key_columns]
    found = [("write", _block(distinct, RowOp.UPSERT, schema))]
    for _ in range(draw(st.integers(1, 12))):
        what = draw(
            st.sampled_from(["update"] * 8 + ["upsert", "delete", "flush", "begin", "end", "merge", "read"])
        )
        chosen = draw(st.lists(st.sampled_from(distinct), min_size=1, max_size=4))
        if what == "update":
            named = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
            values = [
                {c.name: draw(VALUES[c.type] | st.none() if c.nullable else VALUES[c.type]) for c in named}
                for _ in chosen
            ]
            rows = [{name: of[name] for name in keys} | new for of, new in zip(chosen, values)]
            op = draw(st.sampled_from([RowOp.UPDATE, RowOp.UPDATE_IGNORE]))
            found += [("write", _block(rows, op, schema))] * draw(st.sampled_from([1, 1, 2, 40]))
        elif what == "upsert":
            found.append(("write", _block(chosen, RowOp.UPSERT, schema)))
        elif what == "delete":
            rows = [{name: of[name] for name in keys} for of in chosen[:1]]
            found.append(("write", _block(rows, RowOp.DELETE, schema)))
        else:
            found.append((what, b""))
    return found


def _block(rows: list[dict[str, Any]], op: RowOp, schema: Schema) -> bytes:
    batch, column_ids, _, errors = batch_from_rows(rows, schema, op)
    assert not errors
    return encode_block(op, column_ids, batch, schema.version)


def _written(store: TabletStore, at: int | None = None) -> list[bytes]:
    """The rows that a reader sees, bit by bit: NaN, and zeros with a sign, too."""
    with store.view(at) as view:  # type: ignore[arg-type]
        rows = pa.Table.from_batches(view.scan(ScanSpec(ordered=True)), store.schema.to_arrow())
    return [batch.serialize().to_pybytes() for batch in rows.combine_chunks().to_batches()]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_patches_make_the_rows_that_updates_row_by_row_make(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    with tempfile.TemporaryDirectory() as directory:
        pair = Pair(Path(directory), schema)
        for what, body in data.draw(steps(schema)):
            if what == "write":
                pair.write(body)
            for store in pair.stores:
                if what == "flush":
                    flush(store)
                elif what == "begin":
                    store.begin_flush()
                elif what == "end" and (job := store._job) is not None:
                    job.write()
                    store.finish_flush(job)
                elif what == "merge":
                    compact(store)
            if what == "read":
                first, second = map(_written, pair.stores)
                assert first == second
        for at in (None, *pair.times[-4:]):
            first, second = (_written(store, at) for store in pair.stores)
            assert first == second
        for store in pair.stores:
            flush(store)
        first, second = map(_written, pair.stores)
        assert first == second


def _loaded(path: Path, schema: Schema, rows: list[dict[str, Any]]) -> TabletStore:
    store = new_store(path, StoreOptions(flush_bytes=1 << 40), schema)
    put(store, block_of(rows, RowOp.UPSERT, schema))
    return store


def test_updates_wait_for_each_other_and_each_is_seen_at_its_time(tmp_path: Path) -> None:
    store = _loaded(tmp_path / "t", WIDE, [{"k": n} | {f"c{m}": 0.5 for m in range(300)} for n in range(20)])
    begin = store.applied.index
    for n in range(40):
        put(store, block_of([{"k": n % 3, f"c{n % 7}": float(n)}], RowOp.UPDATE, WIDE))
    assert patches(store) == 40
    seen = [(row["k"], [row[f"c{m}"] for m in range(8)]) for row in changes(store, (START_US + begin) << 12)]
    assert patches(store) == 0
    expected: dict[int, list[list[float]]] = {0: [], 1: [], 2: []}
    now = {k: [0.5] * 8 for k in expected}
    for n in range(40):
        now[n % 3][n % 7] = float(n)
        expected[n % 3].append(list(now[n % 3]))
    assert seen == [(k, values) for k in expected for values in expected[k]]


def test_no_more_than_some_dozens_of_rows_wait_and_all_of_them_count(tmp_path: Path) -> None:
    store = _loaded(tmp_path / "t", WIDE, [{"k": n} | {f"c{m}": 0.5 for m in range(300)} for n in range(20)])
    before, most = store.memory_bytes, 0
    for n in range(300):
        put(store, block_of([{"k": n % 20, f"c{n}": 1.5}], RowOp.UPDATE, WIDE))
        most = max(most, patches(store))
        alone = 2_048 if n < 40 else 0  # what the Arrow objects of a block by itself take
        assert store.memory_bytes - before >= (n + 1) * (301 * 8 + alone)
    assert 48 <= most <= 96
    assert store.memory_bytes - before <= 300 * 301 * 8 * 1.5


def test_patches_are_made_whole_in_a_thread_if_only_updates_come(tmp_path: Path) -> None:
    store = _loaded(tmp_path / "t", WIDE, [{"k": n} | {f"c{m}": 0.5 for m in range(300)} for n in range(20)])
    looked_up = 0
    for n in range(200):
        body = block_of([{"k": n % 20, f"c{n}": 1.5}], RowOp.UPDATE, WIDE)
        entry, waiting = write_entry(store.applied.index + 1, body, plain=False), patches(store)
        begun = store.begin(entry)
        if isinstance(begun, Lookup):
            looked_up += 1
            assert waiting >= 48
            assert isinstance(store.begin(entry, begun.run()), Outcome)
            assert patches(store) == 1
    assert 2 <= looked_up <= 4


def test_rows_that_may_be_long_do_not_wait(tmp_path: Path) -> None:
    """Dozens of them are copied in one step, and are counted only then."""
    store = _loaded(tmp_path / "t", TEXTS, [{"k": n, "v": "x" * 3_000, "n": 0} for n in range(4)])
    put(store, block_of([{"k": 1, "n": 1}], RowOp.UPDATE, TEXTS))
    assert patches(store) == 0
    store = _loaded(tmp_path / "u", TEXTS, [{"k": n, "v": "short", "n": 0} for n in range(4)])
    put(store, block_of([{"k": 1, "n": 1}], RowOp.UPDATE, TEXTS))
    assert patches(store) == 1
    for n in range(2, 20):
        put(store, block_of([{"k": 1, "v": "y" * (100 << 10)}], RowOp.UPDATE, TEXTS))
        assert patches(store) == 0
        put(store, block_of([{"k": 1, "n": n}], RowOp.UPDATE, TEXTS))
        assert patches(store) == 0
    assert store.memory_bytes >= 18 * 2 * (100 << 10)


def test_rows_of_many_bytes_wait_for_few_others(tmp_path: Path) -> None:
    """All that wait are copied in one step, at worst in a turn of the loop."""
    names = [f"v{n}" for n in range(25)]
    schema = Schema.make([("k", "int64"), ("n", "int64", True), *((v, "string", True) for v in names)], ["k"])
    rows = [{"k": k, "n": 0} | dict.fromkeys(names, "x" * 2_000) for k in range(32)]
    store = _loaded(tmp_path / "t", schema, rows)
    most = 0
    for n in range(64):
        put(store, block_of([{"k": n % 32, "n": n}], RowOp.UPDATE, schema))
        most = max(most, patches(store))
    assert most == 21  # a MiB
    put(store, block_of([{"k": k, "n": -k} for k in range(32)], RowOp.UPDATE, schema))  # more by itself
    assert patches(store) == 0
    put(store, block_of([{"k": 0} | dict.fromkeys(names, "y" * 2_000)], RowOp.UPDATE, schema))
    assert patches(store) == 1
    every = [{"k": k} | dict.fromkeys(names, "y" * 2_000) for k in range(32)]
    put(store, block_of(every, RowOp.UPDATE, schema))
    assert patches(store) == 0


def test_a_closed_store_with_patches_leaves_memory_at_once(tmp_path: Path) -> None:
    """Not when garbage is looked for: rows of a tablet that is dropped take up to 32 MiB."""
    store = _loaded(tmp_path / "t", TEXTS, [{"k": n, "v": "short", "n": 0} for n in range(4)])
    put(store, block_of([{"k": 1, "n": 1}], RowOp.UPDATE, TEXTS))
    assert patches(store) == 1
    active = weakref.ref(store._contents.state.active)
    gc.disable()
    try:
        store.close()
        assert active() is None
    finally:
        gc.enable()


def test_a_patch_that_a_flush_overtakes_is_planned_anew(tmp_path: Path) -> None:
    """It names its old rows by their places in a memtable that gets no more rows now."""
    pair = Pair(tmp_path, TEXTS)
    keys = np.arange(6_000)
    batch = pa.RecordBatch.from_arrays([keys, pa.array(map(str, keys)), keys], schema=TEXTS.to_arrow())
    pair.write(encode_block(RowOp.UPSERT, TEXTS.column_ids, batch, TEXTS.version))

    def freeze(store: TabletStore) -> None:
        pair.meanwhile = None
        assert store.begin_flush() is not None

    pair.meanwhile = freeze  # the rows are not indexed yet, so they are looked up in a thread
    active = pair.stores[0]._contents.state.active
    pair.write(block_of([{"k": 5, "n": -5}], RowOp.UPDATE, TEXTS))
    assert pair.stores[0]._contents.state.active is not active
    assert pair.lookups == 2, "it is looked up anew in a thread, too"
    pair.write(block_of([{"k": 5, "v": "five"}], RowOp.UPDATE, TEXTS))
    assert patches(pair.stores[0]) == 1
    first, second = map(_written, pair.stores)
    assert first == second
    job = pair.stores[0]._job
    assert job is not None
    job.write()
    pair.stores[0].finish_flush(job)
    first, second = map(_written, pair.stores)
    assert first == second


def test_a_frozen_row_is_not_kept_by_a_patch(tmp_path: Path) -> None:
    """A patch is a change of a row of its own memtable; the first update of another row makes it whole."""
    store = _loaded(tmp_path / "t", TEXTS, [{"k": n, "v": "short", "n": 0} for n in range(4)])
    put(store, block_of([{"k": 1, "n": 1}], RowOp.UPDATE, TEXTS))
    assert store.begin_flush() is not None
    put(store, block_of([{"k": 1, "n": 2}], RowOp.UPDATE, TEXTS))
    assert patches(store) == 0
    put(store, block_of([{"k": 1, "v": "new"}], RowOp.UPDATE, TEXTS))
    [(patch, _)] = store._contents.state.active.patches.waiting
    assert isinstance(patch, Patch) and patch.table == store._contents.state.active.serial
    with store.view() as view:
        assert [(r["n"], r["v"]) for r in rows_of(view.scan(ScanSpec(ordered=True)))] == [
            (0, "short"),
            (2, "new"),
            (0, "short"),
            (0, "short"),
        ]
