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
from stele.tablet import colwriter
from tests.tablet.test_lookups import _apply
from tests.tablet.twin import FOREVER, START_US, flush, new_store

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
