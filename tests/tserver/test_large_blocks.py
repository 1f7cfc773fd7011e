"""Blocks that are far more than they look, sent by a stranger: refused before they are proposed, by real nodes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from stele.model.block import RowOp, encode_block
from stele.model.errors import Code, Rejected
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from tests.model.packed import compressed_rows
from tests.tserver.local import LocalCluster, count


async def test_blocks_that_would_end_every_replica_are_refused_before_they_are_proposed(
    cluster: LocalCluster,
) -> None:
    """Two blocks of 34 kB were: each held a gigabyte, and the next insert joined them. So was one of keys alone."""
    default = '"' + "d" * 4_000 + '"'
    schema = Schema.make([("id", "int64"), ("name", "string", False, default), ("n", "int64")], ["id"])
    async with cluster.client() as client:
        table = await client.create_table("t", schema, PartitionSchema())
        row = [pa.array([1]), pa.array(["x" * (16 << 20)]), pa.array([2])]
        batch = pa.RecordBatch.from_arrays(row, schema=schema.to_arrow())
        packed = compressed_rows(RowOp.UPSERT, schema.column_ids, batch, "zstd")
        keys = pa.array(range(100_000))
        some = pa.RecordBatch.from_arrays([keys, keys], schema=schema.to_arrow((0, 2)))
        lacking = pa.RecordBatch.from_arrays([keys[:9]], schema=schema.to_arrow((0,)))
        for block, code, words in (
            (packed, Code.INVALID_ARGUMENT, "compressed"),
            (encode_block(RowOp.UPSERT, (0, 2), some, 1), Code.TOO_LARGE, "send fewer rows"),
            (encode_block(RowOp.INSERT, (0,), lacking, 1), Code.INVALID_ARGUMENT, "column n is missing"),
        ):
            with pytest.raises(Rejected, match=words) as caught:
                await table.tablet(0).write(block, timeout_s=60)
            assert caught.value.code is code
        await table.insert({"id": 1, "name": "after", "n": 1})
        assert await count(client) == 1
        for node in cluster.running.values():
            for replica in node.replicas:
                machine: Any = replica.machine
                if replica.superblock.kind == "table":
                    assert machine.memory_bytes < 1 << 20
