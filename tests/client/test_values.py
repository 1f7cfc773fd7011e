"""Values that are given as rows, keys and conditions: each means the same wherever it is given, or is refused."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.client import RowErrors
from stele.model.errors import Rejected
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from tests.client.small import ONE, SCHEMA, small_cluster


async def test_a_datetime_without_a_zone_is_utc_wherever_it_is_given(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", Schema.make([("at", "timestamp")], ["at"]))
        naive, aware = datetime(2013, 1, 1, 5), datetime(2013, 1, 1, 5, tzinfo=UTC)
        await table.put({"at": naive})
        assert await table.get(naive) == await table.get(aware) == {"at": aware}
        for predicates in (("at", "=", naive), ("at", "=", aware), "at = '2013-01-01T05:00:00'"):
            assert await table.scan(predicates=predicates).count() == 1
        assert await table.scan(lower=naive, upper=naive.replace(minute=1)).count() == 1


async def test_what_is_no_whole_number_is_not_made_one(tmp_path: Path) -> None:
    """Arrow by itself makes 1 of 1.5, and another row would be written or read."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"id": 1, "n": 2.0})
        for row in ({"id": 1.5}, {"id": 2, "n": 1.5}, {"id": 2, "n": np.float32(0.5)}):
            with pytest.raises(Rejected, match="it is not a whole number"):
                await table.put(row)
        with pytest.raises(Rejected, match="it is not a whole number"):
            await table.get({"id": 1.5})
        with pytest.raises(Rejected, match="it is not a whole number"):
            await table.scan(lower=[0.5]).count()
        with pytest.raises(RowErrors, match="it is not a whole number"):
            await table.write_arrow(pa.table({"id": [1.5, 2.0], "n": [1, 1]}))
        found = await table.scan(["id", "n"], ordered=True).to_table()
        assert found.to_pylist() == [{"id": 1, "n": 2}, {"id": 2, "n": 1}]


FAR_US = 253_402_329_599_000_000
"""9999-12-31 23:59:59 in Los Angeles, which is 10000-01-01 in UTC: to Spark a timestamp as any other, to Python none."""


async def test_a_time_that_python_has_no_value_for_is_its_number(tmp_path: Path) -> None:
    """The caller whose row with such a key was refused was never told; one who read it got an OverflowError."""
    schema = Schema.make([("at", "timestamp"), ("day", "date"), ("n", "int64", True)], ["at", "day"])
    row = {"at": FAR_US, "day": 2**31 - 1, "n": 1}
    async with small_cluster(tmp_path) as (_, client), asyncio.timeout(60):
        table = await client.create_table("t", schema, PartitionSchema((HashPartition((0,), 2),)))
        await table.insert(row)
        with pytest.raises(Rejected, match=f"at={FAR_US}, day={2**31 - 1}: the key is present"):
            await table.insert(row)
        session = table.new_session()
        await session.insert(row)
        with pytest.raises(RowErrors, match=f"at={FAR_US}"):
            await session.flush()
        assert await table.get((FAR_US, 2**31 - 1)) == row
        await table.insert({"at": datetime(2026, 1, 1), "day": 2**31 - 1})
        assert await table.get((datetime(2026, 1, 1), 2**31 - 1)) == {
            "at": datetime(2026, 1, 1, tzinfo=UTC),
            "day": 2**31 - 1,
            "n": None,
        }
        for predicate in (("at", "=", FAR_US), ("at", ">=", FAR_US), ("at", "in", [FAR_US, 5])):
            assert await table.scan(predicates=[predicate]).count() == 1
        assert await table.scan(predicates=[("day", "<", 2**31 - 1)]).count() == 0
        assert await table.scan(lower=(FAR_US,)).count() == 1
        batches = [batch async for batch in table.scan(ordered=True).batches()]
        assert sum(batch.num_rows for batch in batches) == 2


async def test_text_that_is_not_unicode_is_told_by_its_column(tmp_path: Path) -> None:
    """Half of a surrogate pair is a str to Python, and no text: "it is not a string" said the opposite of what is seen."""
    schema = Schema.make([("id", "int64"), ("name", "string", True)], ["id"])
    said = "column name: '\\ud800' is not UTF-8 (it has half of a surrogate pair at position 0)"
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", schema)
        with pytest.raises(Rejected, match=re.escape(said)):
            await table.put({"id": 1, "name": "\ud800"})
        with pytest.raises(RowErrors, match=re.escape(said)):
            async with table.new_session() as session:
                await session.upsert({"id": 1, "name": "\ud800"})
                await session.upsert({"id": 2, "name": "\U0001f600"})
        with pytest.raises(Rejected, match="is not UTF-8"):
            table.scan(predicates=("name", "=", "a\ud800"))
        keyed = await client.create_table("k", Schema.make([("name", "string")], ["name"]))
        with pytest.raises(Rejected, match="is not UTF-8"):
            await keyed.get("\ud800")
        with pytest.raises(Rejected, match="is not UTF-8"):
            keyed.scan(lower=["\ud800"])
        for call in (client.open_table, client.keyspace, client.describe, client.delete_table):
            with pytest.raises(Rejected, match="UTF-8"):
                await call("\ud800")
        with pytest.raises(Rejected, match="UTF-8"):
            await client.create_table("\ud800", schema)
        assert await table.scan().count() == 1
