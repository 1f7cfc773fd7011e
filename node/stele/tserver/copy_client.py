"""How the receiver of a tablet copy reaches the node that gives it (CopySource): sessions over gRPC, files over Arrow Flight.

Invariant: every call ends with a value or a SteleError, also if the source falls silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from threading import Event

import pyarrow as pa

from stele.consensus.copy_source import CopyFile, SessionInfo
from stele.consensus.superblock import decode_superblock
from stele.model.bounds import cut
from stele.model.errors import Retryable
from stele.model.ids import NodeId, OpId, ReplicaId, TabletId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import config_from_pb, id_to_pb, opid_from_pb, opid_to_pb
from stele.rpc.copy_frames import frame_from_batch
from stele.rpc.flight_client import FlightConnections, FlightStream
from stele.rpc.identity import PROTOCOL_VERSION
from stele.rpc.proto import consensus_pb2 as pb
from stele.rpc.proto.consensus_pb2_grpc import TabletCopyServiceStub
from stele.rpc.ticket import CopyTicket
from stele.tserver.maintenance import give_memory_back

FLIGHT_OPTIONS: tuple[tuple[str, int], ...] = (
    # How many bytes may be in flight on a stream. By default gRPC raises it until it takes some hundred MB of
    # a node's memory.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),
)
_BEGIN_TIMEOUT_S = 30.0
"""The time limit for opening a session, which takes a flush and hard links."""


class RemoteFrames:
    """A part of a file that is being fetched (CopyFrames)."""

    def __init__(self, connections: FlightConnections, address: str, ticket: CopyTicket, stop: Event) -> None:
        self._connections = connections
        self._address = address
        self._stream = FlightStream(connections, address, ticket.encode(), stop)

    def cancel(self) -> None:
        """Cancel a read that waits for the source."""
        self._stream.cancel()

    def __iter__(self) -> Iterator[tuple[int, pa.Buffer, int]]:
        """Yield the frames of the copy, as they arrive. Raises SteleError."""
        try:
            for batch in self._stream:
                yield frame_from_batch(batch)
        except Retryable:
            self._connections.drop(self._address)
            raise


class CopySources:
    """Makes the sources of copies to this node."""

    def __init__(self, pool: ChannelPool, flight: FlightConnections) -> None:
        self._pool = pool
        self._flight = flight

    def at(self, node_id: NodeId, address: str) -> RemoteCopySource:
        """Sessions at the node `node_id`, whose gRPC server is at `address`."""
        return RemoteCopySource(self._pool, self._flight, address, node_id)


class RemoteCopySource:
    """Sessions at one node."""

    def __init__(
        self, pool: ChannelPool, flight: FlightConnections, address: str, source_node: NodeId
    ) -> None:
        self._pool = pool
        self._flight = flight
        self._address = address
        self._source_node = source_node
        self._flight_address = ""

    async def begin(self, tablet_id: TabletId, replica_id: ReplicaId, at_least: OpId) -> SessionInfo:
        """Open a session."""
        response = await self._pool.unary(
            self._address,
            TabletCopyServiceStub,
            "BeginTabletCopySession",
            pb.BeginTabletCopySessionRequest(
                tablet_id=id_to_pb(tablet_id),
                requestor_node=id_to_pb(self._pool.identity.node_id),
                requestor_replica=replica_id,
                at_least=opid_to_pb(at_least),
            ),
            timeout_s=_BEGIN_TIMEOUT_S,
            to_node=self._source_node,
        )
        self._flight_address = response.flight_address
        return SessionInfo(
            session_id=response.session_id,
            lease_ms=response.lease_ms,
            files=tuple(CopyFile(f.name, f.size) for f in response.files),
            checkpoint=opid_from_pb(response.checkpoint),
            config=config_from_pb(response.committed_config),
            term=response.term,
            superblock=decode_superblock(response.superblock),
            max_ceiling=response.max_ceiling,
        )

    def fetch(self, session_id: str, name: str, offset: int, length: int, stop: Event) -> RemoteFrames:
        """Frames of a file."""
        identity = self._pool.identity
        ticket = CopyTicket(
            cluster_id=identity.cluster_id,
            session_id=session_id,
            name=name,
            offset=offset,
            length=length,
            from_node=identity.node_id,
            from_incarnation=identity.incarnation,
            to_node=self._source_node,
            protocol_version=PROTOCOL_VERSION,
            fork_id=identity.fork_id,
        )
        return RemoteFrames(self._flight, self._flight_address, ticket, stop)

    async def keep_alive(self, session_id: str) -> int:
        """Renew the lease."""
        response = await self._pool.unary(
            self._address,
            TabletCopyServiceStub,
            "KeepAliveTabletCopySession",
            pb.KeepAliveTabletCopySessionRequest(session_id=session_id),
            to_node=self._source_node,
        )
        return int(response.lease_ms)

    async def end(self, session_id: str, success: bool, damage: str) -> None:
        """Close the session, and give back the memory that the copy took."""
        asyncio.get_running_loop().run_in_executor(None, give_memory_back)
        await self._pool.unary(
            self._address,
            TabletCopyServiceStub,
            "EndTabletCopySession",
            pb.EndTabletCopySessionRequest(session_id=session_id, success=success, damage=cut(damage)),
            to_node=self._source_node,
        )
