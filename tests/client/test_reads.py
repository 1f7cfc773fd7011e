"""Reads of one row: answers that are broken, and answers that take long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.model.errors import Corrupt
from stele.rpc.proto import tserver_pb2
from tests.client.small import ONE, SCHEMA, small_cluster


async def test_an_answer_to_a_read_with_broken_insides_is_an_error(tmp_path: Path) -> None:
    """Its offsets point out of it: Arrow follows them, and ends the program that reads them."""
    async with small_cluster(tmp_path, nodes=1) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        offsets = np.array([0, 4, 1 << 30, 12], np.int32)
        names = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(b"abcd" * 3))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pa.schema([("name", pa.string())])) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays([names], names=["name"]))
        for bad in (sink.getvalue().to_pybytes(), sink.getvalue().to_pybytes()[:-50], b"junk"):
            answer = tserver_pb2.ClientResponse(read=tserver_pb2.ReadResponse(rows=bad))
            cluster.nodes[0]._read = lambda request, answer=answer: answer  # type: ignore[method-assign]
            with pytest.raises(
                Corrupt, match="table t: a node's answer to a read is not an Arrow stream of rows"
            ):
                await table.get(1)


async def test_a_read_that_takes_longer_than_an_attempt_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stele.client.attempts.ATTEMPT_TIMEOUT_S", 0.2)
    async with small_cluster(tmp_path, timeout_s=60) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"id": 1})
        cluster.nodes[0].delay_s = 1.0
        async with asyncio.timeout(60):
            assert await table.get(1, ["id"]) == {"id": 1}
