"""Big blocks at once, against the same blocks in rounds: outcomes, what is read, and files, byte for byte. Replicas of two
versions of the program apply the same entry, the one so and the other so."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stele.model.block import RowOp, encode_block
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Rejected
from stele.model.predicate import ScanSpec
from stele.model.schema import Schema
from stele.model.writeop import encode
from stele.tablet.block_checks import check_block
from stele.tablet.locate import StoreRows
from stele.tablet.machine import Lookup, Outcome
from stele.tablet.manifest import NAME as MANIFEST
from stele.tablet.store import TabletStore
from stele.tablet.writing import Located
from tests.tablet.rounds import ApplyingByRounds
from tests.tablet.twin import FOREVER, SCHEMA, START_US, compact, flush, header, new_store, rows_of

NUMBERED = Schema.make(
    [("n", "int32"), ("v", "string", True), ("w", "int64", False, "7"), ("d", "double", True, "0.5")], ["n"]
)
WORDS = ["", "\x00", "a", "a\x00", "ab", "ü", "x" * 130, "x" * 131, "y" * 8_190, "z" * 9_000]
CLIENT = b"a client of ours"
OPS = list(RowOp)


class Pair:
    """Two stores that are given the same entries. The first looks up at length in a thread, as a replica does."""

    def __init__(self, home: Path, schema: Schema) -> None:
        self.schema = schema
        self.stores = [new_store(home / name, FOREVER, schema) for name in ("at-once", "in-rounds")]
        self.stores[1]._applying.__class__ = ApplyingByRounds
        self.index = 0
        self.times: list[int] = []
        self.meanwhile: Callable[[TabletStore], object] | None = (
            None  # done to the first between lookup and apply
        )
        self.lookups = 0

    def write(self, body: bytes, sequence: int = 0) -> Outcome:
        """Apply a block to both; what both say of it."""
        self.index += 1
        try:
            plain = check_block(body, self.schema)
        except Rejected:
            plain = False
        about = header(body, client_id=CLIENT, sequence=sequence or self.index, plain=plain)
        at = (START_US + self.index) << 12
        entry = Entry(1, self.index, EntryKind.WRITE, at, encode(about, body))
        first, second = self._begin(entry), self.stores[1].apply(entry)
        assert first == second
        assert self.stores[0].exactly_once_checksum() == self.stores[1].exactly_once_checksum()
        self.times.append(at)
        return first

    def _begin(self, entry: Entry) -> Outcome:
        store = self.stores[0]
        begun = store.begin(entry)
        with ThreadPoolExecutor(1) as threads:
            while isinstance(begun, Lookup):
                self.lookups += 1
                found = threads.submit(begun.run).result()
                if self.meanwhile is not None:
                    self.meanwhile(store)
                begun = store.begin(entry, found)
        return begun

    def compare(self) -> None:
        """What readers see at every time, and what comes to the disk."""
        for at in (None, *self.times[-3:]):
            first, second = (read(store, at) for store in self.stores)
            assert first == second
        for store in self.stores:
            flush(store)
        first, second = (sorted(map(Path.read_bytes, files_of(store))) for store in self.stores)
        assert first == second


def files_of(store: TabletStore) -> list[Path]:
    """But for the manifest, which has names of merged files, and these have something random in them."""
    return [path for path in store.directory.iterdir() if path.name != MANIFEST]


def read(store: TabletStore, at: int | None) -> tuple[list[dict[str, Any]], int]:
    with store.view(at) as view:  # type: ignore[arg-type]
        return rows_of(view.scan(ScanSpec(ordered=True))), view.checksum().checksum


def block(rng: random.Random, schema: Schema) -> bytes:
    """Some rows of few or many keys; one operation or one for each row; all columns or some, with nulls."""
    rows = rng.choice([1, 33, 34, 60, 200])
    keys = rng.choice([1, 2, 5, 30, 1_000])
    unchecked = [RowOp.UPSERT, RowOp.DELETE_IGNORE]
    among = rng.choice([[op] for op in OPS] + [OPS, OPS, unchecked, [RowOp.UPDATE, RowOp.INSERT_IGNORE]])
    ops: Any = among[0]
    if len(among) > 1 or rng.random() < 0.2:
        ops = np.array([rng.choice(among) for _ in range(rows)], np.uint8)
    some = rng.random() < 0.6
    names = [c.name for c in schema.columns if schema.is_key(c.id) or not some or rng.random() < 0.5]
    nulls = rng.choice([0.0, 0.0, 0.3])
    values: dict[str, list[Any]] = {
        "k": [rng.choice(WORDS) for _ in range(rows)],
        "n": [rng.randrange(-1, keys) for _ in range(rows)],
        "v": [None if rng.random() < 0.3 else f"v{rng.randrange(99)}" for _ in range(rows)],
        "w": [None if rng.random() < nulls else rng.randrange(1 << 40) for _ in range(rows)],
        "d": [None if rng.random() < 0.3 else rng.random() for _ in range(rows)],
    }
    columns = [c for c in schema.columns if c.name in names]
    ids = [int(c.id) for c in columns]
    arrays = [pa.array(values[c.name], c.arrow) for c in columns]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow(ids))
    return encode_block(ops, ids, batch, schema.version)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("schema", [SCHEMA, NUMBERED], ids=["text-keys", "number-keys"])
def test_blocks_at_once_do_what_rounds_do(tmp_path: Path, schema: Schema, seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(tmp_path, schema)
    for _ in range(12):
        body = block(rng, schema)
        outcome = pair.write(body)
        if rng.random() < 0.2:
            assert pair.write(body, sequence=pair.index) == replace(outcome, duplicate=True)  # a retry
        if rng.random() < 0.3:
            pair.compare()
        if rng.random() < 0.1:
            for store in pair.stores:
                compact(store)
    pair.compare()


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_move_to_files_between_lookup_and_apply_are_the_same_rows(
    tmp_path: Path, seed: int
) -> None:
    """A flush, or a merge, ends while the entry is looked up. Its rows go to the memtable that is there by then."""
    rng = random.Random(seed)
    pair = Pair(tmp_path, SCHEMA)

    def move(store: TabletStore) -> None:
        applied, seen = store.applied, read(store, None)
        flush(store) if rng.random() < 0.7 else store.begin_flush()
        if rng.random() < 0.3:
            compact(store)
        assert (store.applied, read(store, None)) == (applied, seen)  # nothing of the entry is there yet
        if rng.random() < 0.5:
            job = store._job
            if job is not None:
                job.write()
                store.finish_flush(job)

    pair.meanwhile = move
    for _ in range(15):
        pair.write(block(rng, SCHEMA))
    first, second = (read(store, None) for store in pair.stores)
    assert first == second
    again = TabletStore.open(pair.stores[0].directory, FOREVER)
    assert again.applied <= pair.stores[0].applied


@pytest.mark.parametrize("op", [*OPS, None], ids=[*(op.name.lower() for op in OPS), "mixed"])
def test_a_key_that_repeats_ten_thousand_times_is_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: RowOp | None
) -> None:
    """One look for each repetition took the event loops of all replicas for seconds, and for minutes in a larger block."""
    located: list[int] = []
    locate = StoreRows.locate

    def counted(self: StoreRows, keys: Any, hashes: Any) -> Any:
        located.append(len(keys))
        return locate(self, keys, hashes)

    monkeypatch.setattr(StoreRows, "locate", counted)
    store, rows = new_store(tmp_path / "t", FOREVER, NUMBERED), 10_000
    ops = op or np.resize(np.array(OPS, np.uint8), rows)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(np.arange(rows) % 2, pa.int32()), pa.array(map(str, range(rows)))],
        schema=NUMBERED.to_arrow([0, 1]),
    )
    body = encode_block(ops, [0, 1], batch, NUMBERED.version)
    entry = Entry(1, 1, EntryKind.WRITE, START_US << 12, encode(header(body), body))
    store.apply(entry)
    assert located in ([], [2])


def test_updates_of_rows_that_no_array_holds_together_are_written_by_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small updates of large rows, with 2 GiB in a column of theirs, ended the tablet on all replicas: no array holds
    more. Here none of the one store holds more than 10 rows."""
    pair = Pair(tmp_path, NUMBERED)
    rng = random.Random(0)

    def write(op: RowOp, keys: list[int], column: str, values: list[Any]) -> None:
        columns = [c for c in NUMBERED.columns if c.name in ("n", column)]
        ids = [int(c.id) for c in columns]
        arrays = [pa.array(keys, columns[0].arrow), pa.array(values, columns[1].arrow)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=NUMBERED.to_arrow(ids))
        pair.write(encode_block(op, ids, batch, NUMBERED.version))

    write(RowOp.UPSERT, list(range(90)), "v", [f"text {n}" for n in range(90)])
    write(RowOp.DELETE_IGNORE, list(range(0, 90, 4)), "v", [None] * 23)
    fetch = StoreRows.fetch
    fetched: list[int] = []

    def bounded(self: StoreRows, located: Located) -> pa.RecordBatch:
        if self.memory[0] is pair.stores[0]._contents.state.active:
            fetched.append(len(located.place))
            if fetched[-1] > 10:
                raise pa.ArrowInvalid("offset overflow while concatenating arrays")
        return fetch(self, located)

    monkeypatch.setattr(StoreRows, "fetch", bounded)
    for op in (RowOp.UPDATE, RowOp.UPDATE_IGNORE):
        write(op, [rng.randrange(100) for _ in range(120)], "d", [float(n) for n in range(120)])
    assert max(fetched) > 10
    assert sum(size for size in fetched if size <= 10) > 10
    pair.compare()
