"""Who leads a tablet by now, asked of its other replicas while the one that should lead is silent. One per client.

A leader that is cut off or stopped refuses nothing, and its connection stands until its pings go unanswered. The others
have long elected another by then, and whichever of them is asked names it.

Invariant: a search takes up a leader that a replica named itself, or nothing; it ends with `close` at the latest.
"""

from __future__ import annotations

import asyncio

from stele.client.locations import ReplicaPlace, TabletPlace
from stele.model.errors import SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.proto import consensus_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub

_ANSWER_TIMEOUT_S = 1.5


class LeaderSearch:
    """Searches that are under way, one for a tablet at most."""

    def __init__(self, pool: ChannelPool) -> None:
        self._pool = pool
        self._searches: dict[str, asyncio.Task[None]] = {}

    def begin(self, place: TabletPlace, silent: ReplicaPlace) -> None:
        """Ask the tablet's other replicas, unless that is being done. `place` will point elsewhere if one knows better."""
        if place.tablet_id not in self._searches:
            task = asyncio.get_running_loop().create_task(self._search(place, silent))
            self._searches[place.tablet_id] = task
            task.add_done_callback(lambda _: self._searches.pop(place.tablet_id, None))

    async def close(self) -> None:
        """End all."""
        searches = list(self._searches.values())
        for task in searches:
            task.cancel()
        await asyncio.gather(*searches, return_exceptions=True)

    async def _search(self, place: TabletPlace, silent: ReplicaPlace) -> None:
        others = [replica for replica in place.replicas if replica != silent]
        named = await asyncio.gather(*(self._named_by(replica, place.tablet_id) for replica in others))
        # Of several the one of the highest term: the others have not heard of it yet.
        _, leader = max(named, default=(0, ""))
        if leader and leader != silent.node_id and place.target() == silent:
            place.led_by(leader)

    async def _named_by(self, replica: ReplicaPlace, tablet_id: str) -> tuple[int, str]:
        """(term, node id of its leader) as this replica has it; (0, "") if it does not say."""
        request = consensus_pb2.GetConsensusStateRequest(tablet_ids=[id_to_pb(tablet_id)])
        try:
            answer = await self._pool.unary(
                replica.address,
                ConsensusServiceStub,
                "GetConsensusState",
                request,
                timeout_s=_ANSWER_TIMEOUT_S,
            )
        except SteleError:
            return 0, ""
        for status in answer.replicas:
            if status.leader_node:
                return status.term, id_from_pb(status.leader_node)
        return 0, ""
