"""Many keys of one point read: each row as a model has it, from memory and from several files, at any snapshot."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from stele.model import keys
from stele.model.block import RowOp, encode_block
from stele.model.errors import Code, Rejected
from stele.model.ids import HybridTime
from stele.model.schema import Schema
from stele.tablet import colfile, colwriter
from stele.tablet.view import View
from tests.tablet.test_lookups import _apply
from tests.tablet.twin import FOREVER, START_US, compact, flush, new_store

SCHEMAS = {
    "one length": Schema.make([("k", "int64"), ("t", "string", True), ("n", "int64", True)], ["k"]),
    "texts": Schema.make([("k", "string"), ("t", "string", True), ("n", "int64", True)], ["k"]),
}
LONG = "x" * 5_000


def _key(schema: Schema, number: int) -> int | str:
    """Integers; or texts of one to a dozen letters, which sort in another order."""
    return (
        number if str(schema.columns[0].arrow) == "int64" else f"{number * 7919 % 1000}-" + "z" * (number % 4)
    )


def _encoded(schema: Schema, wanted: list[int]) -> pa.BinaryArray:
    column = pa.array([_key(schema, n) for n in wanted], schema.columns[0].arrow)
    return keys.encode_keys(pa.RecordBatch.from_arrays([column], names=["k"]), schema)


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("seed", range(3))
def test_many_keys_have_the_rows_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    monkeypatch.setattr(colwriter, "GROUP_ROWS", 50)
    schema, chance = SCHEMAS[kind], random.Random(seed)
    store = new_store(tmp_path / "t", FOREVER, schema)
    model: dict[int, tuple[str, int]] = {}
    states = [dict(model)]
    for index in range(1, 9):
        chosen = sorted(chance.sample(range(600), 250), key=lambda n: _key(schema, n))
        ids = [int(c.id) for c in schema.columns]
        column = pa.array([_key(schema, n) for n in chosen], schema.columns[0].arrow)
        if index % 4 == 3:
            batch = pa.RecordBatch.from_arrays([column], schema=schema.to_arrow(ids[:1]))
            _apply(store, index, encode_block(RowOp.DELETE, ids[:1], batch, 1))
            for n in chosen:
                model.pop(n, None)
        else:
            # Group by group, values are long, short or repeated.
            texts = [LONG if n % 97 == 0 and index > 4 else f"{n}-{index}" for n in chosen]
            arrays = [column, pa.array(texts), pa.array([n * index for n in chosen], pa.int64())]
            batch = pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow(ids))
            _apply(store, index, encode_block(RowOp.UPSERT, ids, batch, 1))
            model.update({n: (text, n * index) for n, text in zip(chosen, texts)})
        states.append(dict(model))
        if index in (2, 4, 7):
            flush(store)
    for index, state in enumerate(states):
        with store.view(HybridTime((START_US + index) << 12)) as view:
            for count in (1, 20, 40, 300, 700):
                wanted = chance.sample(range(700), count)
                rows, places = view.get(_encoded(schema, wanted))
                found = {wanted[at]: row for at, row in zip(places, rows.to_pylist())}
                there = {
                    n: {"k": _key(schema, n), "t": state[n][0], "n": state[n][1]}
                    for n in wanted
                    if n in state
                }
                assert found == there and len(places) == len(there)
                encoded = _encoded(schema, wanted).to_pylist()
                assert [encoded[at] for at in places] == sorted(encoded[at] for at in places)


def test_rows_that_are_copied_together_count_towards_the_size_of_an_answer(tmp_path: Path) -> None:
    schema = SCHEMAS["one length"]
    store = new_store(tmp_path / "t", FOREVER, schema)
    ids = [int(c.id) for c in schema.columns]
    arrays = [
        pa.array(range(1000), pa.int64()),
        pa.array([f"{n:01000d}" for n in range(1000)]),
        pa.nulls(1000, pa.int64()),
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow(ids))
    _apply(store, 1, encode_block(RowOp.UPSERT, ids, batch, 1))
    flush(store)
    with store.view() as view:
        assert len(view.get(_encoded(schema, list(range(90))), bytes_max=100_000)[1]) == 90
        with pytest.raises(Rejected) as caught:
            view.get(_encoded(schema, list(range(120))), bytes_max=100_000)
        assert caught.value.code is Code.TOO_LARGE


READ_BYTES_MAX = 8_000_000


def _got(view: View, wanted: pa.BinaryArray, bytes_max: int | None = None) -> pa.RecordBatch:
    """The rows. No read through here may take more of Arrow's memory than READ_BYTES_MAX: the pool has one peak for all."""
    usual, counted = pa.default_memory_pool(), pa.system_memory_pool()
    assert usual.backend_name != counted.backend_name, "this pool would have the peak of everything else, too"
    pa.set_memory_pool(counted)
    try:
        return view.get(wanted, bytes_max=bytes_max)[0]
    finally:
        pa.set_memory_pool(usual)
        assert counted.max_memory() < READ_BYTES_MAX


@pytest.mark.parametrize("count", [20, 40])
def test_rows_of_many_compressed_groups_keep_few_of_them_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Each row was a part of its decompressed group until the last one was found: 48 keys of 48 groups took 790 MB."""
    monkeypatch.setattr(colwriter, "GROUP_ROWS", 500)
    monkeypatch.setattr(colfile, "_inflated", colfile._Kept(100, 0))
    schema = SCHEMAS["one length"]
    store = new_store(tmp_path / "t", FOREVER, schema)
    ids, rows = [int(c.id) for c in schema.columns], 20_000
    texts = pa.array([f"{n:06d}" + "x" * 994 for n in range(rows)])
    arrays = [pa.array(range(rows), pa.int64()), texts, pa.nulls(rows, pa.int64())]
    for index, start in enumerate((0, rows // 2), 1):
        half = [array.slice(start, rows // 2) for array in arrays]
        batch = pa.RecordBatch.from_arrays(half, schema=schema.to_arrow(ids))
        _apply(store, index, encode_block(RowOp.UPSERT, ids, batch, 1))
        flush(store)
    assert compact(store)
    with store.view() as view:
        found = _got(view, _encoded(schema, list(range(0, rows, rows // count))))
    assert found.column("t").to_pylist() == texts.to_pylist()[:: rows // count]


def test_rows_that_are_too_large_together_are_not_all_copied(tmp_path: Path) -> None:
    """Their size was looked at after all had been copied."""
    schema = Schema.make([("k", "int64"), *((f"t{n}", "string") for n in range(20))], ["k"])
    store = new_store(tmp_path / "t", FOREVER, schema)
    ids, rows = [int(c.id) for c in schema.columns], 1_000
    arrays = [
        pa.array(range(rows), pa.int64()),
        *(pa.array([f"{n:01000d}" for n in range(rows)]) for _ in ids[1:]),
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow(ids))
    _apply(store, 1, encode_block(RowOp.UPSERT, ids, batch, 1))
    flush(store)
    with store.view() as view, pytest.raises(Rejected) as caught:
        _got(view, _encoded(schema, list(range(rows))), bytes_max=1_000_000)
    assert caught.value.code is Code.TOO_LARGE
