"""TabletCopyService: sessions on this node's replicas, for receivers elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from stele.consensus.superblock import encode_superblock
from stele.rpc.convert import config_to_pb, id_from_pb, opid_from_pb, opid_to_pb
from stele.rpc.proto import consensus_pb2 as pb
from stele.rpc.proto.consensus_pb2_grpc import TabletCopyServiceServicer

if TYPE_CHECKING:
    from stele.tserver.node import Node


class TabletCopyService(TabletCopyServiceServicer):
    """Served by every node and master."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def BeginTabletCopySession(self, request: pb.BeginTabletCopySessionRequest, context: Any) -> Any:
        """Flush, link, sum, anchor."""
        replica = self._node.manager.get(id_from_pb(request.tablet_id))
        info = await self._node.sessions.begin(replica, opid_from_pb(request.at_least))
        return pb.BeginTabletCopySessionResponse(
            session_id=info.session_id,
            lease_ms=info.lease_ms,
            files=[pb.CopyFilePB(name=f.name, size=f.size, crc32c=f.crc32c) for f in info.files],
            checkpoint=opid_to_pb(info.checkpoint),
            committed_config=config_to_pb(info.config),
            term=info.term,
            superblock=encode_superblock(info.superblock),
            max_ceiling=info.max_ceiling,
            tablet_incarnation=info.superblock.tablet_incarnation,
        )

    async def FetchData(
        self, request: pb.FetchDataRequest, context: Any
    ) -> AsyncIterator[pb.FetchDataResponse]:
        """Bytes of a file in checked frames."""
        frames = self._node.sessions.fetch(request.session_id, request.name, request.offset, request.length)
        async for offset, data, crc in frames:
            yield pb.FetchDataResponse(offset=offset, data=data, crc32c=crc)

    async def KeepAliveTabletCopySession(
        self, request: pb.KeepAliveTabletCopySessionRequest, context: Any
    ) -> Any:
        """Renew a lease."""
        return pb.KeepAliveTabletCopySessionResponse(
            lease_ms=self._node.sessions.keep_alive(request.session_id)
        )

    async def EndTabletCopySession(self, request: pb.EndTabletCopySessionRequest, context: Any) -> Any:
        """End a session."""
        await self._node.sessions.end(request.session_id)
        return pb.EndTabletCopySessionResponse()
