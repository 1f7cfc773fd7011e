"""What `stele table describe` says of a table's size: nodes as they run, in one event loop."""

from __future__ import annotations

import json

import pytest

from stele.client.admin import cluster_view
from stele.client.health import examine
from stele.client.sizes import Size, size_of
from stele.model.amounts import byte_size
from stele.model.schema import Schema
from tests.client.commands import runner
from tests.tserver.local import HASHED, LocalCluster

SCHEMA = Schema.make([("id", "int64"), ("name", "string", True)], ["id"])


async def test_the_size_of_a_table_is_what_its_leaders_hold_now(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        for number in range(50):
            await table.put({"id": number, "name": "x"})
        health = examine(await cluster_view(client.masters))
        known = {node.node_id: node for node in health.nodes}
        tablets = [tablet for tablet in health.tablets if tablet.table_id == table.info.table_id]
        found = await size_of(client.pool, tablets, known)
        assert (found.rows, found.unknown) == (50, 0)
        assert await size_of(client.pool, tablets, {}) == Size(0, 0, len(tablets)), "no answer is not empty"
        run = runner(cluster, monkeypatch)
        _, out, _ = await run("table", "describe", "t")
        assert f"about 50 rows now, and {byte_size(found.bytes_on_disk)} of files in each replica\n" in out
        _, out, _ = await run("table", "describe", "t", "--json")
        size = json.loads(out)["size"]
        assert size == {"rowsEstimate": 50, "bytesOnDisk": found.bytes_on_disk, "tabletsUnknown": 0}
