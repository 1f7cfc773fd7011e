"""What rows take in memory is what the store counts, and what it was never meant to hold is refused before it is proposed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.model.block import RowOp, encode_block
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Rejected
from stele.model.predicate import ScanSpec
from stele.model.schema import Schema
from stele.model.writeop import encode
from stele.tablet import exactly_once, flushing
from stele.tablet.block_checks import CHECKED_ROWS_MAX, NULLS_MAX, WHOLE_BYTES_MAX, check_block
from stele.tablet.exactly_once import ExactlyOnce
from stele.tablet.keyspace import KeySpace
from stele.tablet.store import StoreOptions, TabletStore
from tests.model.packed import compressed_rows
from tests.tablet.test_keyspace import replace_entry
from tests.tablet.twin import FOREVER, START_US, block_of, flush, header, new_store

WIDE = Schema.make([("k", "int64"), *((f"c{n}", "double", True) for n in range(200))], ["k"])
NUMBERS = Schema.make([("k", "int64"), ("v", "double", True)], ["k"])
NAMES = Schema.make([("k", "int64"), ("v", "string")], ["k"])


def keys_only(schema: Schema, first: int, rows: int, op: RowOp = RowOp.UPSERT) -> bytes:
    batch = pa.RecordBatch.from_arrays([pa.array(range(first, first + rows))], schema=schema.to_arrow([0]))
    return encode_block(op, [0], batch, 1)


def entry_of(index: int, block: bytes, *, plain: bool) -> Entry:
    payload = encode(header(block, plain=plain), block)
    return Entry(1, index, EntryKind.WRITE, (START_US + index) << 12, payload)


def put(store: TabletStore, block: bytes) -> None:
    plain = store.check_block(block)
    outcome = store.apply(entry_of(store.applied.index + 1, block, plain=plain))
    assert not outcome.row_errors and outcome.code is Code.OK


def long_default(length: int, columns: int = 1) -> Schema:
    default = '"' + "d" * length + '"'
    return Schema.make(
        [("k", "int64"), *((f"c{n}", "string", False, default) for n in range(columns))], ["k"]
    )


@pytest.mark.parametrize("op", [RowOp.UPSERT, RowOp.INSERT, RowOp.DELETE_IGNORE], ids=lambda op: op.name)
def test_what_rows_take_with_the_columns_they_did_not_give_is_counted(tmp_path: Path, op: RowOp) -> None:
    """Eight bytes in the log, 1.6 kB of each node's memory: 11 MB that were counted had taken 3 GB."""
    options = StoreOptions(flush_bytes=32 << 20)
    store = new_store(tmp_path / "t", options, WIDE)
    before = pa.total_allocated_bytes()
    blocks = 0
    while not store.should_flush():
        put(store, keys_only(WIDE, 8_192 * blocks, 8_192, op))
        blocks += 1
    assert blocks == 3 and store.memory_bytes >= blocks * 8_192 * 200 * 8
    assert pa.total_allocated_bytes() - before < 2 << 20, "columns that were not given share their nulls"


def test_small_blocks_that_lack_columns_are_counted_too(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t", StoreOptions(), WIDE)
    for number in range(200):
        put(store, keys_only(WIDE, 32 * number, 32))
    assert store.memory_bytes >= 200 * 32 * 200 * 8


def test_a_block_that_its_defaults_make_too_large_is_refused(tmp_path: Path) -> None:
    """Applied it was more than an array holds: each replica ended, and again at each start."""
    schema = long_default(300_000)
    store = new_store(tmp_path / "t", StoreOptions(), schema)
    with pytest.raises(Rejected, match="send fewer rows") as caught:
        check_block(keys_only(schema, 0, 8_192), schema)
    assert caught.value.code is Code.TOO_LARGE
    for op in (RowOp.DELETE, RowOp.DELETE_IGNORE):
        check_block(keys_only(schema, 0, 8_192, op), schema)
    fitting = WHOLE_BYTES_MAX // 300_100
    put(store, keys_only(schema, 0, fitting))
    assert store.memory_bytes > fitting * 300_000


def test_8192_rows_of_the_widest_table_may_come_without_values() -> None:
    schema = Schema.make([("k", "int64"), *((f"c{n}", "decimal(38,2)", True) for n in range(999))], ["k"])
    assert not check_block(keys_only(schema, 0, 8_192), schema)


def large_rows(first: int, rows: int, size: int, op: RowOp = RowOp.UPSERT) -> bytes:
    """A small block that is large once it is read: 33 kB may be a gigabyte."""
    batch = pa.RecordBatch.from_arrays(
        [pa.array(range(first, first + rows)), pa.array(["x" * size] * rows)], schema=NAMES.to_arrow()
    )
    return compressed_rows(op, NAMES.column_ids, batch, "zstd")


def test_compressed_blocks_are_refused_but_those_in_a_log_are_applied_and_counted(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t", StoreOptions(), NAMES)
    with pytest.raises(Rejected, match="compressed"):
        store.check_block(large_rows(0, 1, 100))
    for index in range(1, 11):
        store.apply(entry_of(index, large_rows(index, 1, 4 << 20), plain=True))
    put(store, block_of([{"k": 0, "v": "y"}], RowOp.INSERT, NAMES))
    assert store.memory_bytes >= 40 << 20 and store.should_flush()
    with store.view() as view:
        assert sum(batch.num_rows for batch in view.scan()) == 11


def test_rows_that_are_large_together_are_not_joined(tmp_path: Path) -> None:
    """More than an array holds ended each replica, though each block by itself was read."""
    store = new_store(tmp_path / "t", StoreOptions(flush_bytes=1 << 40), NAMES)
    for number in range(200):
        value = "x" * (512 << 10)
        if number % 2:
            put(store, block_of([{"k": number, "v": value}], RowOp.UPSERT, NAMES))
        else:
            put(store, block_of([{"k": number, "v": value}], RowOp.INSERT, NAMES))
    sizes = [chunk.batch.nbytes for chunk in store._contents.state.active.chunks]
    assert max(sizes) <= 33 << 20
    with store.view() as view:
        assert sum(batch.num_rows for batch in view.scan()) == 200


def test_a_flush_takes_no_more_memory_than_it_puts_in_order_at_a_time(tmp_path: Path) -> None:
    """Rows that share their nulls take little until they are written: joined for it they were all there at once."""
    store = new_store(tmp_path / "t", StoreOptions(flush_bytes=1 << 40), WIDE)
    for number in range(40):
        put(store, keys_only(WIDE, 4_096 * number, 8_192))
    job = store.begin_flush()
    assert job is not None and store.memory_bytes > 500 << 20
    peak = peak_of(job.write)
    store.finish_flush(job)
    assert peak < 256 << 20
    assert len(store.files) == 1
    keys = []
    with store.view() as view:
        for batch in view.scan(ScanSpec(column_ids=(0,))):
            keys += batch.column(0).to_pylist()
    assert sorted(keys) == list(range(4_096 * 41))


def peak_of(call: Callable[[], None]) -> int:
    """The most that Arrow had allocated above what it has now."""
    before, peak, done = pa.total_allocated_bytes(), 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, pa.total_allocated_bytes() - before)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        call()
    finally:
        done.set()
        looking.join()
    return peak


def test_a_block_that_lacks_a_required_column_is_refused_whole() -> None:
    """A million rows of 4 bytes were a million errors: 13 s and 0.9 GB of each node, and kept for retries."""
    schema = Schema.make([("k", "int64"), ("a", "int64"), ("b", "string"), ("c", "int64", True)], ["k"])
    lacking = "block: columns a, b are missing and have no default; expected an int64, a string"
    for op in (RowOp.INSERT, RowOp.INSERT_IGNORE, RowOp.UPSERT):
        with pytest.raises(Rejected, match=lacking) as caught:
            check_block(keys_only(schema, 0, 3, op), schema)
        assert caught.value.code is Code.INVALID_ARGUMENT
    for op in (RowOp.UPDATE, RowOp.UPDATE_IGNORE, RowOp.DELETE, RowOp.DELETE_IGNORE):
        assert not check_block(keys_only(schema, 0, 3, op), schema)
    keys = pa.RecordBatch.from_arrays([pa.array([1, 2])], schema=schema.to_arrow([0]))
    for second, refused in ((RowOp.UPDATE, False), (RowOp.INSERT, True)):
        block = encode_block(np.array([RowOp.DELETE, second], np.uint8), [0], keys, 1)
        if refused:
            with pytest.raises(Rejected, match=lacking):
                check_block(block, schema)
        else:
            assert not check_block(block, schema)


@pytest.mark.parametrize("op", list(RowOp), ids=lambda op: op.name)
def test_rows_that_may_each_be_refused_are_bounded(op: RowOp) -> None:
    block = keys_only(WIDE, 0, CHECKED_ROWS_MAX + 1, op)
    if op in (RowOp.UPSERT, RowOp.DELETE_IGNORE):
        check_block(keys_only(NUMBERS, 0, 1 << 20, op), NUMBERS)
        return
    with pytest.raises(Rejected, match="8193 rows whose keys must be looked up; at most 8192") as caught:
        check_block(block, WIDE)
    assert caught.value.code is Code.TOO_LARGE


def test_nulls_that_are_each_an_error_are_bounded() -> None:
    def nulls(rows: int, op: RowOp | np.ndarray) -> bytes:
        columns = [pa.array(range(rows)), pa.nulls(rows, pa.string())]
        batch = pa.RecordBatch.from_arrays(columns, schema=NAMES.to_arrow())
        return encode_block(op, NAMES.column_ids, batch, 1)

    assert not check_block(nulls(NULLS_MAX, RowOp.UPSERT), NAMES)
    with pytest.raises(Rejected, match="8193 nulls in columns that are not nullable"):
        check_block(nulls(NULLS_MAX + 1, RowOp.UPSERT), NAMES)
    check_block(nulls(NULLS_MAX + 1, RowOp.DELETE_IGNORE), NAMES)
    mixed = np.full(NULLS_MAX + 1, RowOp.UPSERT, np.uint8)
    mixed[0] = RowOp.DELETE_IGNORE
    assert not check_block(nulls(NULLS_MAX + 1, mixed), NAMES)


LACKING = """
import resource, sys
from pathlib import Path
from stele.tablet.store import TabletStore
from tests.tablet.test_memory import NAMES, entry_of
kind, room, *blocks = sys.argv[1:]
entries = [entry_of(n, Path(b).read_bytes(), plain=kind == "plain") for n, b in enumerate(blocks, 1)]
store = TabletStore.create(Path(blocks[0] + ".store"), NAMES)
pages = int(Path("/proc/self/statm").read_text().split()[0])
most = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + int(room), most))
try:
    outcomes = [store.apply(entry) for entry in entries]
    assert kind == "plain", outcomes
    store.view()
except MemoryError:
    print("raised")
resource.setrlimit(resource.RLIMIT_AS, (most, most))
if kind == "plain":  # they still wait
    print(sum(batch.num_rows for batch in store.view().scan()), "rows")
"""


@pytest.mark.parametrize(
    ("kind", "room_mib"),
    [
        pytest.param("plain", 64, id="read later"),
        pytest.param("plain", 480, id="joined later"),
        pytest.param("looked up", 64, id="looked up"),
    ],
)
def test_what_one_replica_lacks_memory_for_is_no_outcome(tmp_path: Path, kind: str, room_mib: int) -> None:
    """Others have written the rows: refused here they would be missing, and nobody would know."""
    paths = [tmp_path / "first", tmp_path / "second"]
    for number, path in enumerate(paths):
        op = RowOp.UPSERT if kind == "plain" else RowOp.INSERT
        path.write_bytes(large_rows(number, 1, 128 << 20, op))
    command = [sys.executable, "-c", LACKING, kind, str(room_mib << 20), *map(str, paths)]
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = ["raised", "2 rows"] if kind == "plain" else ["raised"]
    assert ran.stdout.splitlines() == lines, ran.stderr


def lack_once(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
    """There is no memory for this, the next time it is called."""
    real = getattr(where, name)

    def lacking(*args: object, **named: object) -> object:
        monkeypatch.setattr(where, name, real)
        raise MemoryError

    monkeypatch.setattr(where, name, lacking)


def test_a_flush_that_cannot_begin_for_want_of_memory_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one took the place of rows that nobody had written, and the log let them go."""
    store = new_store(tmp_path / "t", schema=NUMBERS)
    put(store, keys_only(NUMBERS, 0, 50))
    lack_once(monkeypatch, ExactlyOnce, "frozen")
    with pytest.raises(MemoryError):
        store.begin_flush()
    put(store, keys_only(NUMBERS, 50, 50))
    assert flush(store)
    with TabletStore.open(tmp_path / "t", FOREVER).view() as view:
        assert sum(batch.num_rows for batch in view.scan()) == 100


@pytest.mark.parametrize("kind", ["table", "keyspace"])
def test_a_flush_that_lacks_memory_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """That of a key space seemed to go on for ever: none was begun again before the next start."""
    store: TabletStore | KeySpace
    if kind == "table":
        store = new_store(tmp_path / "t", schema=NUMBERS)
        put(store, keys_only(NUMBERS, 0, 50))
    else:
        store = KeySpace.create(tmp_path / "t")
        store.apply(replace_entry(1, b"a", b"1"))
    job = store.begin_flush()
    assert job is not None
    lack_once(monkeypatch, exactly_once, "encode")
    with pytest.raises(MemoryError):
        job.write()
    if isinstance(store, TabletStore):
        lack_once(monkeypatch, flushing, "Kept")
        with pytest.raises(MemoryError):
            job.write()
        assert not [*store.directory.glob("once-*")]  # each try left one, and part of the rows
    again = store.begin_flush()
    assert again is not None
    again.write()
    store.finish_flush(again)
    assert store.flushed == store.applied
