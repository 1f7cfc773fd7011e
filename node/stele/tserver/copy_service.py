"""TabletCopyService: copy sessions on this node's replicas for receivers elsewhere, and their files over Arrow Flight.

The event loop only checks the caller's rights; Flight's threads read the bytes. Invariant: a ticket
is checked as strictly as the metadata of a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from stele.consensus.copy_source import CopySessions
from stele.consensus.superblock import encode_superblock
from stele.rpc.convert import config_to_pb, id_from_pb, opid_from_pb, opid_to_pb
from stele.rpc.copy_frames import frame_to_batch
from stele.rpc.identity import Caller, Identity, PeerBook, check
from stele.rpc.proto import consensus_pb2 as pb
from stele.rpc.proto.consensus_pb2_grpc import TabletCopyServiceServicer
from stele.rpc.ticket import CopyTicket
from stele.tserver.description import NodeDescription
from stele.tserver.replicas import Replicas
from stele.tserver.threads import on_loop

_ADMIT_TIMEOUT_S = 5.0


class TabletCopyService(TabletCopyServiceServicer):
    """Served by every node and master."""

    def __init__(self, description: NodeDescription, replicas: Replicas, sessions: CopySessions) -> None:
        self._description = description
        self._replicas = replicas
        self._sessions = sessions

    async def BeginTabletCopySession(self, request: pb.BeginTabletCopySessionRequest, context: Any) -> Any:
        """Flush the replica, link its files, and keep its log from that point on."""
        replica = self._replicas.get(id_from_pb(request.tablet_id))
        info = await self._sessions.begin(replica, opid_from_pb(request.at_least))
        return pb.BeginTabletCopySessionResponse(
            session_id=info.session_id,
            lease_ms=info.lease_ms,
            files=[pb.CopyFilePB(name=f.name, size=f.size) for f in info.files],
            checkpoint=opid_to_pb(info.checkpoint),
            committed_config=config_to_pb(info.config),
            term=info.term,
            superblock=encode_superblock(info.superblock),
            max_ceiling=info.max_ceiling,
            tablet_incarnation=info.superblock.tablet_incarnation,
            flight_address=self._description.flight_address,
        )

    async def KeepAliveTabletCopySession(
        self, request: pb.KeepAliveTabletCopySessionRequest, context: Any
    ) -> Any:
        """Renew a lease."""
        return pb.KeepAliveTabletCopySessionResponse(lease_ms=self._sessions.keep_alive(request.session_id))

    async def EndTabletCopySession(self, request: pb.EndTabletCopySessionRequest, context: Any) -> Any:
        """End a session."""
        await self._sessions.end(request.session_id, request.damage)
        return pb.EndTabletCopySessionResponse()


class CopyFiles:
    """The CopyProvider of a node."""

    def __init__(self, identity: Identity, book: PeerBook, sessions: CopySessions) -> None:
        self._identity = identity
        self._book = book
        self._sessions = sessions
        self._loop = asyncio.get_running_loop()

    def fetch(self, ticket: CopyTicket) -> Iterable[pa.RecordBatch]:
        """Checked frames of a session's file."""
        frames = on_loop(self._loop, self._admit(ticket), _ADMIT_TIMEOUT_S)
        return (frame_to_batch(*frame) for frame in frames)

    async def _admit(self, ticket: CopyTicket) -> Iterator[tuple[int, bytes, int]]:
        caller = Caller(
            cluster_id=ticket.cluster_id,
            protocol_version=ticket.protocol_version,
            from_node=ticket.from_node,
            to_node=ticket.to_node,
            from_incarnation=ticket.from_incarnation,
            to_incarnation=0,
            fork_id=ticket.fork_id,
        )
        check(self._identity, self._book, caller)
        return self._sessions.fetch(ticket.session_id, ticket.name, ticket.offset, ticket.length)
