"""Keys of any table as plain values and in Arrow: the same tablets, the same messages, and nothing that Arrow refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stele.client.lookup import key_row
from stele.client.plain_keys import KEYS_MAX, message_of, plain_keys
from stele.model.block import RowOp
from stele.model.partition import HashPartition, PartitionSchema, RangePartition, assign
from stele.model.rows import batch_from_rows
from stele.model.schema import Schema
from tests.model.drawn import row, schemas

ODD = st.sampled_from([None, "odd", "\ud800", 3, True, 1 << 63, 2.5, b"raw", [3], (1, 2), {"k": 1}])
"""Values that most key columns refuse."""


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_keys_are_the_same_as_plain_values_and_in_arrow(data: Any) -> None:
    schema = data.draw(schemas())
    partitioning = data.draw(
        st.sampled_from(
            [PartitionSchema(), PartitionSchema((HashPartition((schema.key_column_ids[0],), 5, 7),))]
        )
    )
    names = [column.name for column in schema.key_columns]
    rows = [row(data.draw, schema) for _ in range(data.draw(st.sampled_from([1, 3, 70])))]
    keys: list[Any] = [tuple(each[name] for name in names) for each in rows]
    if len(names) == 1 and data.draw(st.booleans()):
        keys = [key[0] for key in keys]
    if data.draw(st.booleans()):
        keys[-1] = data.draw(ODD)
    plain = plain_keys(schema)
    values = None if plain is None else plain.values(keys)
    if plain is None or values is None:
        return
    batch, _, _, errors = batch_from_rows([key_row(schema, key) for key in keys], schema, RowOp.DELETE)
    assert not errors
    assert plain.encode(values) == message_of(batch) and plain.batch(values).equals(batch)
    assert plain.assign(values, partitioning) == assign(batch, schema, partitioning).tolist()


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        (["id"], [1, -(1 << 63), (1 << 63) - 1]),
        (["name"], ["", "a\x00b", "ü"]),
        (["name", "id"], [("a", 1), ("b\x00", 2)]),
    ],
)
def test_common_keys_need_no_arrow(key: list[str], keys: list[Any]) -> None:
    schema = Schema.make([("id", "int64"), ("name", "string"), ("n", "int32")], key)
    plain = plain_keys(schema)
    assert plain is not None
    values = plain.values(keys)
    assert values is not None
    batch, _, _, errors = batch_from_rows([key_row(schema, each) for each in keys], schema, RowOp.DELETE)
    assert not errors and plain.encode(values) == message_of(batch)
    ranges = PartitionSchema(range=RangePartition((schema.key_column_ids[0],), ()))
    assert plain.assign(values, ranges) == assign(batch, schema, ranges).tolist()
    many = plain.values(keys * KEYS_MAX)
    assert many == values * KEYS_MAX and plain.batch(many).slice(0, len(keys)).equals(batch)
    assert plain.assign(many, ranges) == plain.assign(values, ranges) * KEYS_MAX
    for odd in (None, 1.5, True, 1 << 63, "\ud800", ("a",), ("a", "b"), {"id": 1}, [1]):
        assert plain.values([*keys, odd]) is None, odd
    assert plain_keys(Schema.make([("day", "date"), ("n", "int32")], ["day"])) is None
