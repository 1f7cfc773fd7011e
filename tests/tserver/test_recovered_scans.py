"""A tablet that was recovered after a lost majority: its rows say of which incarnation they are, and whoever names another is
refused."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest

from stele.model.errors import Code, Rejected
from stele.model.incarnation import raised, recoveries
from stele.rpc.flight_client import FlightStream
from stele.rpc.ticket import Ticket, incarnation_of
from stele.tserver.offline import rewrite
from tests.consensus.cluster import wait_until
from tests.tserver.local import SCHEMA, LocalCluster, master_of

NODES = 1


async def test_rows_name_their_incarnation_and_no_other_is_served(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, replication_factor=1)
        await table.put({"id": 1, "name": "kept"})
        plan = table.scan(["id"]).plan
        (place,) = table.locations.tablets

        def read(incarnation: int) -> tuple[list[int], int]:
            ticket = Ticket(
                plan.cluster_id,
                place.tablet_id,
                0,
                plan.schema.version,
                plan.spec.to_json(plan.schema),
                fork_id=plan.fork_id,
                incarnation=incarnation,
            )
            address = place.target().flight_address
            batches = list(FlightStream(client._flight.connections, address, ticket.encode(), Event()))
            told = {incarnation_of(batch.schema) for batch in batches}
            return [n for batch in batches for n in batch["id"].to_pylist()], told.pop()

        assert await asyncio.to_thread(read, 0) == ([1], 0)
        await cluster.stop("node-0")
        rewrite(cluster.directory / "node-0", place.tablet_id, "now", "ann@desk")
        await cluster.launch("node-0")
        catalog = master_of(cluster.running["master"]).catalog
        await wait_until(lambda: recoveries(catalog.tablets[place.tablet_id].incarnation) == 1)
        incarnation = catalog.tablets[place.tablet_id].incarnation
        await table.put({"id": 2, "name": "new"})
        for named in (0, incarnation):
            assert await asyncio.to_thread(read, named) == ([1, 2], incarnation)
        for other in (raised(0), raised(incarnation)):
            with pytest.raises(Rejected) as refused:
                await asyncio.to_thread(read, other)
            assert refused.value.code is Code.STALE_INCARNATION
