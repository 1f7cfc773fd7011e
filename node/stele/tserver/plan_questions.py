"""A plan's questions to the leaders of a table's tablets: their sizes, a prepared snapshot, keys to cut them
at.

Used by plans.py, on the event loop. Invariant: nothing here fails. If a leader does not answer, the plan does
without its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stele.model.errors import SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import common_pb2, consensus_pb2, master_pb2, tserver_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

_STATISTICS_TIMEOUT_S = 2.0
_PREPARE_TIMEOUT_S = 2.0
_SPLIT_TIMEOUT_S = 2.0
_PREPARED_AT_ONCE = 500
_SPLIT_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Leader:
    """A node that is said to lead some tablets."""

    address: str
    node_id: str


Tablets = Sequence[master_pb2.TabletLocationsPB]


class PlanQuestions:
    """Asks masters and nodes for what a plan needs, like a client."""

    def __init__(self, pool: ChannelPool) -> None:
        self._pool = pool

    async def sizes(self, tablets: Tablets | None) -> tuple[int, int]:
        """(rows, bytes of files), as the leaders say. Both are -1 if a leader does not answer, or if
        `tablets` is None."""
        if tablets is None:
            return -1, -1
        led = _by_leader(tablets)
        answers = await asyncio.gather(*(self._statuses(*each) for each in led.items()))
        found = {
            status.tablet_id: status
            for statuses in answers
            for status in statuses
            if status.role == common_pb2.LEADER
        }
        if len(found) < len(tablets):
            return -1, -1
        return sum(s.rows_estimate for s in found.values()), sum(s.bytes_on_disk for s in found.values())

    async def prepare(self, tablets: Tablets, snapshot: int) -> dict[bytes, int]:
        """By tablet: the log index that a replica needs to serve this snapshot. It holds for any replica of
        the known incarnation.
        """
        incarnations = {pb.tablet_id: pb.tablet_incarnation for pb in tablets}
        parts = [
            (leader, ids[at : at + _PREPARED_AT_ONCE])
            for leader, ids in _by_leader(tablets).items()
            for at in range(0, len(ids), _PREPARED_AT_ONCE)
        ]
        answers = await asyncio.gather(*(self._prepared(leader, ids, snapshot) for leader, ids in parts))
        return {
            pb.tablet_id: pb.index
            for answer in answers
            for pb in answer
            if pb.index and pb.tablet_incarnation == incarnations.get(pb.tablet_id)
        }

    async def split_keys(self, tablets: Tablets, part_bytes: int) -> dict[bytes, Sequence[bytes]]:
        """By tablet: ascending keys that cut its files into parts of about `part_bytes` bytes."""
        incarnations = {pb.tablet_id: pb.tablet_incarnation for pb in tablets}
        places = asyncio.Semaphore(_SPLIT_AT_ONCE)

        found: dict[bytes, Sequence[bytes]] = {}

        async def of_tablet(leader: Leader, tablet_id: bytes) -> None:
            request = tserver_pb2.SplitKeysRequest(
                tablet_id=tablet_id,
                tablet_incarnation=incarnations[tablet_id],
                bytes=part_bytes,
            )
            async with places:
                answer = await self._ask(
                    leader, TabletServerServiceStub, "SplitKeys", request, _SPLIT_TIMEOUT_S
                )
            if answer is not None:
                found[tablet_id] = tuple(answer.keys)

        asked = [
            of_tablet(leader, tablet_id) for leader, ids in _by_leader(tablets).items() for tablet_id in ids
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SPLIT_TIMEOUT_S):  # of all: many tablets wait for places
                await asyncio.gather(*asked)
        return found

    async def _statuses(self, leader: Leader, ids: list[bytes]) -> Iterable[common_pb2.ReplicaStatusPB]:
        request = consensus_pb2.GetConsensusStateRequest(tablet_ids=ids)
        answer = await self._ask(
            leader, ConsensusServiceStub, "GetConsensusState", request, _STATISTICS_TIMEOUT_S
        )
        return () if answer is None else answer.replicas

    async def _prepared(
        self, leader: Leader, ids: list[bytes], snapshot: int
    ) -> Iterable[tserver_pb2.PreparedTabletPB]:
        request = tserver_pb2.PrepareSnapshotRequest(
            snapshot=snapshot, tablet_ids=ids, deadline_ms=int(_PREPARE_TIMEOUT_S * 1_000)
        )
        answer = await self._ask(
            leader, TabletServerServiceStub, "PrepareSnapshot", request, _PREPARE_TIMEOUT_S
        )
        return () if answer is None else answer.tablets

    async def _ask(self, leader: Leader, stub: Any, method: str, request: Any, timeout_s: float) -> Any:
        """A node's answer; None if it does not answer."""
        try:
            return await self._pool.unary(
                leader.address, stub, method, request, timeout_s=timeout_s, to_node=leader.node_id
            )
        except SteleError:
            return None


def _by_leader(tablets: Tablets) -> dict[Leader, list[bytes]]:
    """The ids of tablets by the nodes that lead them, as the masters know it."""
    led = defaultdict[Leader, list[bytes]](list)
    for pb in tablets:
        for replica in pb.replicas:
            if replica.role == common_pb2.LEADER and replica.alive:
                led[Leader(replica.peer.address, id_from_pb(replica.peer.node_id))].append(pb.tablet_id)
    return led
