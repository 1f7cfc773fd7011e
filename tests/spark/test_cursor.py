"""The cursor of a stream: a hold that keeps history until Spark has committed what was read. On real nodes."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pyarrow as pa
import pytest

from stele.model.errors import Code, Rejected
from stele.tserver import holds as node_holds
from stele.tserver import maintenance
from tests.consensus.cluster import wait_until
from tests.spark.streaming import Streams, call, held
from tests.tserver.history import settled, without_history
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, fill


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes look at holds all the time."""
    monkeypatch.setattr(maintenance, "COLLECT_S", 0.05)
    monkeypatch.setattr(node_holds, "MEASURE_MS", 50)


@pytest.mark.usefixtures("soon")
async def test_a_cursor_moves_one_batch_late_and_outlasts_the_stream(
    cluster: LocalCluster, streams: Streams
) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 10)
        await without_history(cluster, table)
        query = await streams.query(cluster, cursor="c")
        assert await held(table) is None, "load() holds nothing"
        end = await call(query.plan)
        since = json.loads(end)["ts"]
        assert (await held(table)).since == since, "held before Spark writes the offset down"
        await fill(client, 10)
        await settled(cluster, table)
        assert len(await call(query.rows, end)) == 10
        first, query.at = end, end
        await table.put({"id": 1, "name": "second"})
        second = await call(query.plan)
        await call(query.reader.commit, json.loads(first))  # Spark has written down the second by now
        assert (await held(table)).since == since
        await call(query.reader.stop)

        # The next run finds the second batch without a commit, and the hold where it was.
        await fill(client, 10)
        await settled(cluster, table)
        again = await streams.query(cluster, at=first, cursor="c", cursorExpiresInS="3600")
        rows = await call(again.rows, second)
        assert [row["name"] for row in rows if row["id"] == 1][-1] == "second" and len(rows) == 11
        assert (await held(table)).since == since
        again.at = second
        third = await call(again.plan)
        await call(again.reader.commit, json.loads(second))
        assert (await held(table)).since == json.loads(second)["ts"]
        assert len(await call(again.rows, third)) == 10
        assert 3_500 < (await held(table)).expires.timestamp() - client.now() / 4096e6 < 3_700


@pytest.mark.usefixtures("soon")
async def test_a_cursor_is_renewed_while_a_batch_takes_long(cluster: LocalCluster, streams: Streams) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        query = await streams.query(cluster, startingSnapshot="latest", cursor="c", cursorExpiresInS="4")
        expires = (await held(table)).expires
        await asyncio.sleep(5)
        assert (await held(table)).expires > expires
        await table.put({"id": 1, "name": "x"})
        assert len(await call(query.batch)) == 1


@pytest.mark.usefixtures("soon")
async def test_a_stream_that_is_too_slow_is_told_what_to_do(cluster: LocalCluster, streams: Streams) -> None:
    """In the driver before it plans, and in a task whose rows are gone since."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 10)
        plain = await streams.query(cluster, startingSnapshot="latest")
        await fill(client, 10)
        end = await call(plain.plan)
        tasks = await call(plain.reader.partitions, json.loads(plain.at), json.loads(end))
        stores = await without_history(cluster, table)
        await fill(client, 10)
        await settled(cluster, table)
        with pytest.raises(
            Rejected, match=r'too slow.*new checkpoint.*"cursor", or .* longer history'
        ) as caught:
            await call(plain.plan)
        assert caught.value.code is Code.CURSOR_LOST
        with pytest.raises(Rejected, match=r"too slow.*new checkpoint") as caught:
            await call(lambda: [*plain.reader.read(tasks[0])])
        assert caught.value.code is Code.CURSOR_LOST

        kept = await streams.query(
            cluster, startingSnapshot="latest", cursor="c", cursorMaxBytes=str(1 << 20)
        )
        rng = np.random.default_rng(1)
        for _ in range(3):
            text = [rng.bytes(2_000).hex() for _ in range(1_500)]
            await table.write_arrow(pa.table({"id": np.arange(1_500), "name": text}))
            await settled(cluster, table)
        await wait_until(lambda: any(hold.broken for store in stores for hold in store.held.holds))
        await settled(cluster, table)
        with pytest.raises(Rejected, match=r'raise "cursorMaxBytes" \(1,048,576 now\)') as caught:
            await call(kept.plan)
        assert caught.value.code is Code.CURSOR_LOST
        again = await streams.query(cluster, cursor="c", cursorMaxBytes=str(1 << 20))
        assert len(await call(again.batch)) == 1_500, "begun again"
        assert not (await held(table)).broken
