"""The giving node of a tablet copy as its receiver reaches it: CopySource over gRPC. Holds no state but the address.

Invariant: what comes back is values of ours or a SteleError.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from stele.consensus.copy_source import CopyFile, SessionInfo
from stele.consensus.superblock import decode_superblock
from stele.model.ids import NodeId, OpId, ReplicaId, TabletId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import config_from_pb, id_to_pb, opid_from_pb, opid_to_pb
from stele.rpc.proto import consensus_pb2 as pb
from stele.rpc.proto.consensus_pb2_grpc import TabletCopyServiceStub

_BEGIN_TIMEOUT_S = 120.0
_FETCH_TIMEOUT_S = 60.0


class GrpcCopySource:
    """Sessions at one node."""

    def __init__(self, pool: ChannelPool, address: str, source_node: NodeId, own_node: NodeId) -> None:
        self._pool = pool
        self._address = address
        self._source_node = source_node
        self._own_node = own_node

    async def begin(self, tablet_id: TabletId, replica_id: ReplicaId, at_least: OpId) -> SessionInfo:
        """Open a session."""
        response = await self._pool.unary(
            self._address,
            TabletCopyServiceStub,
            "BeginTabletCopySession",
            pb.BeginTabletCopySessionRequest(
                tablet_id=id_to_pb(tablet_id),
                requestor_node=id_to_pb(self._own_node),
                requestor_replica=replica_id,
                at_least=opid_to_pb(at_least),
            ),
            timeout_s=_BEGIN_TIMEOUT_S,
            to_node=self._source_node,
        )
        return SessionInfo(
            session_id=response.session_id,
            lease_ms=response.lease_ms,
            files=tuple(CopyFile(f.name, f.size, f.crc32c) for f in response.files),
            checkpoint=opid_from_pb(response.checkpoint),
            config=config_from_pb(response.committed_config),
            term=response.term,
            superblock=decode_superblock(response.superblock),
            max_ceiling=response.max_ceiling,
        )

    async def fetch(
        self, session_id: str, name: str, offset: int, length: int
    ) -> AsyncIterator[tuple[int, bytes, int]]:
        """Frames of a file."""
        request = pb.FetchDataRequest(session_id=session_id, name=name, offset=offset, length=length)
        async for frame in self._pool.stream(
            self._address,
            TabletCopyServiceStub,
            "FetchData",
            request,
            timeout_s=_FETCH_TIMEOUT_S,
            to_node=self._source_node,
        ):
            yield frame.offset, frame.data, frame.crc32c

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

    async def end(self, session_id: str, success: bool) -> None:
        """Close the session."""
        await self._pool.unary(
            self._address,
            TabletCopyServiceStub,
            "EndTabletCopySession",
            pb.EndTabletCopySessionRequest(session_id=session_id, success=success),
            to_node=self._source_node,
        )
