"""Do all replicas of a table hold the same rows? Asks every one of them, and believes none."""

from __future__ import annotations

import asyncio

from stele.client import AsyncClient, AsyncTable
from stele.client.locations import TabletPlace
from stele.model.errors import SteleError
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub


async def rows_that_all_replicas_hold(
    client: AsyncClient, table: AsyncTable, replicas: int = 3, timeout_s: float = 120.0
) -> int:
    """How many rows there are, once every tablet's replicas have the same checksum at one snapshot.

    A follower knows no snapshot before it has applied an entry since its start: write something first.

    Raises:
        AssertionError: replicas that differ at a snapshot.
        TimeoutError: some did not answer in time.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                await table.locations.refresh()
                return sum([await rows_of_tablet(client, t, replicas) for t in table.locations.tablets])
            except SteleError:
                await asyncio.sleep(0.2)


async def rows_of_tablet(client: AsyncClient, tablet: TabletPlace, replicas: int) -> int:
    """As `rows_that_all_replicas_hold`, of one tablet, once. Raises SteleError while one of them cannot say."""
    first = await _ask(client, tablet, tablet.target().address, 0)
    found = {
        place.address: await _ask(client, tablet, place.address, first.snapshot) for place in tablet.replicas
    }
    if len(found) != replicas:
        raise SteleError(f"tablet {tablet.tablet_id} has {len(found)} replicas")
    same = {(answer.checksum, answer.rows) for answer in found.values()}
    assert len(same) == 1, {address: (a.checksum, a.rows) for address, a in found.items()}
    return int(first.rows)


async def _ask(
    client: AsyncClient, tablet: TabletPlace, address: str, snapshot: int
) -> tserver_pb2.ChecksumResponse:
    request = tserver_pb2.ChecksumRequest(tablet_id=id_to_pb(tablet.tablet_id), snapshot=snapshot)
    answer: tserver_pb2.ChecksumResponse = await client.pool.unary(
        address, TabletServerServiceStub, "Checksum", request
    )
    return answer
