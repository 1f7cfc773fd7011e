"""Do all replicas of a table hold the same rows? Each sums up its own at one snapshot. Used by `stele table verify`.

The leaders prepare the snapshot, so that followers can answer for it. No row leaves a node. Invariant: a tablet counts as equal only
if all replicas that the masters name gave the same answer for one snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from stele.client.async_client import AsyncClient
from stele.client.locations import ReplicaPlace, TabletPlace
from stele.client.preparing import prepare
from stele.client.table import AsyncTable
from stele.client.tablet_scan import Prepared
from stele.model.errors import SteleError
from stele.model.ids import OpId
from stele.rpc.convert import id_to_pb, opid_from_pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

TIMEOUT_S = 600.0
"""The time limit for the sum of one replica. A node reads some million rows a second."""
_AT_ONCE = 4
_TRIES = 3
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaSum:
    """What one replica said. `applied`: its last applied entry. `error`: why it said nothing."""

    node_id: str
    rows: int = 0
    checksum: int = 0
    applied: OpId | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class TabletSums:
    """What the replicas of a tablet said of one snapshot."""

    tablet_id: str
    snapshot: int
    replicas: tuple[ReplicaSum, ...]

    @property
    def rows(self) -> int:
        """The number of its rows, by the first replica that answered."""
        return next((each.rows for each in self.replicas if not each.error), 0)

    @property
    def differs(self) -> bool:
        """Whether two replicas hold other rows."""
        return len({(each.rows, each.checksum) for each in self.replicas if not each.error}) > 1

    @property
    def equal(self) -> bool:
        """Whether all replicas answered, and alike."""
        return bool(self.replicas) and not self.differs and not any(each.error for each in self.replicas)


async def compare_replicas(
    client: AsyncClient, table: AsyncTable, *, timeout_s: float = TIMEOUT_S
) -> list[TabletSums]:
    """Have each replica of each tablet of a table sum up its rows at the present snapshot.

    A tablet whose replicas do not agree is asked up to three times: a replica may be moving, and columns may change meanwhile.

    Raises:
        SteleError: the table or its tablets cannot be found.
    """
    found: dict[str, TabletSums] = {}
    for attempt in range(_TRIES):
        if attempt:
            await asyncio.sleep(_AGAIN_S)
        await table.locations.refresh()
        plan = table.scan(snapshot=int(client.now())).plan
        await prepare(client.pool, plan)
        left = [t for t in plan.tablets if t.tablet_id not in found or not found[t.tablet_id].equal]
        free = asyncio.Semaphore(_AT_ONCE)
        sums = await asyncio.gather(
            *(
                _of_tablet(client, t, plan.snapshot, plan.prepared.get(t.tablet_id), free, timeout_s)
                for t in left
            )
        )
        found |= {each.tablet_id: each for each in sums}
        found = {tablet.tablet_id: found[tablet.tablet_id] for tablet in plan.tablets}
        if all(each.equal for each in found.values()):
            break
    return list(found.values())


async def _of_tablet(
    client: AsyncClient,
    tablet: TabletPlace,
    snapshot: int,
    prepared: Prepared | None,
    free: asyncio.Semaphore,
    timeout_s: float,
) -> TabletSums:
    request = tserver_pb2.ChecksumRequest(tablet_id=id_to_pb(tablet.tablet_id), snapshot=snapshot)
    if prepared is not None:
        request.index, request.tablet_incarnation = prepared.index, prepared.incarnation

    async def one(place: ReplicaPlace) -> ReplicaSum:
        async with free:
            try:
                answer = await client.pool.unary(
                    place.address,
                    TabletServerServiceStub,
                    "Checksum",
                    request,
                    timeout_s=timeout_s,
                    to_node=place.node_id,
                )
            except SteleError as exc:
                return ReplicaSum(place.node_id, error=str(exc.args[0]))
        return ReplicaSum(place.node_id, answer.rows, answer.checksum, opid_from_pb(answer.applied))

    replicas: Sequence[ReplicaSum] = await asyncio.gather(*(one(place) for place in tablet.replicas))
    return TabletSums(tablet.tablet_id, snapshot, tuple(replicas))
