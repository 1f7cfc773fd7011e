"""TabletServerAdminService: the masters' orders to a node, to create, alter, delete and flush replicas."""

from __future__ import annotations

from typing import Any

from stele.consensus.superblock import DataState, Superblock
from stele.model.alter import follows
from stele.model.errors import Code, Rejected
from stele.model.ids import NodeId, ReplicaId, TableId, TabletId
from stele.model.writeop import schema_change
from stele.rpc.client_stream import WRITE_DEADLINE_MS
from stele.rpc.convert import config_from_pb, id_from_pb, opid_from_pb, opid_to_pb
from stele.rpc.convert_schema import schema_from_pb
from stele.rpc.proto import tserver_pb2 as pb
from stele.rpc.proto.tserver_pb2_grpc import TabletServerAdminServiceServicer
from stele.tserver.fences import Fences
from stele.tserver.manager import TabletManager
from stele.tserver.reads import check_tablet, store_of
from stele.tserver.replicas import Replicas


class AdminService(TabletServerAdminServiceServicer):
    """Served by every node and master."""

    def __init__(self, node_id: NodeId, replicas: Replicas, manager: TabletManager, fences: Fences) -> None:
        self._node_id = node_id
        self._replicas = replicas
        self._manager = manager
        self._fences = fences

    async def CreateTablet(self, request: pb.CreateTabletRequest, context: Any) -> pb.CreateTabletResponse:
        """Make this node's replica of a new tablet."""
        tablet_id = TabletId(id_from_pb(request.tablet_id))
        order = self._fences.of_catalog(tablet_id, opid_from_pb(request.catalog_opid))
        config = config_from_pb(request.config)
        mine = config.peer_on(self._node_id)
        if mine is None:
            raise Rejected(f"the configuration does not name this node, {self._node_id[:8]}")
        kind = request.kind or "table"
        hint = config.peer_on(id_from_pb(request.leader_hint)) if request.leader_hint else None
        superblock = Superblock(
            tablet_id=tablet_id,
            replica_id=mine.replica_id,
            table_id=TableId(id_from_pb(request.table_id)),
            table_name=request.table_name,
            kind=kind,
            data_state=DataState.READY,
            schema=schema_from_pb(request.schema).to_json() if kind == "table" else "",
            partitioning=request.partitioning.SerializeToString(),
            partition=request.partition.SerializeToString(),
            tablet_incarnation=request.tablet_incarnation,
            leader_hint=hint.replica_id if hint is not None else None,
        )
        with order:
            if await self._manager.create(superblock, config):
                await order.carried_out()
        return pb.CreateTabletResponse()

    async def DeleteTablet(self, request: pb.DeleteTabletRequest, context: Any) -> pb.DeleteTabletResponse:
        """Tombstone or remove a replica."""
        try:
            target = DataState(request.target)
        except ValueError:
            raise Rejected(f"data state {request.target}; expected TOMBSTONED or DELETED") from None
        tablet_id = TabletId(id_from_pb(request.tablet_id))
        with self._fences.of_catalog(tablet_id, opid_from_pb(request.catalog_opid)) as order:
            if await self._manager.delete(
                tablet_id,
                ReplicaId(request.replica_id),
                target,
                request.cas_config_opid_index_less_or_equal,
                request.reason,
                incarnation=request.tablet_incarnation,
                erases=order.erases,
            ):
                await order.carried_out()
            else:
                order.found_nothing()
        return pb.DeleteTabletResponse()

    async def AlterTablet(self, request: pb.AlterTabletRequest, context: Any) -> pb.AlterTabletResponse:
        """Give a tablet that this node leads a newer schema. The other replicas get it through the log."""
        tablet_id = TabletId(id_from_pb(request.tablet_id))
        with self._fences.of_catalog(tablet_id, opid_from_pb(request.catalog_opid)) as order:
            replica = self._replicas.get(tablet_id)
            check_tablet(replica, "table", request.tablet_incarnation)
            replica.check_leader()
            machine, schema = store_of(replica), schema_from_pb(request.schema)
            if machine.schema.version < schema.version:
                skips = (
                    schema.version > machine.schema.version + 1 and not replica.superblock.tablet_incarnation
                )
                if skips or not follows(schema, machine.schema):
                    raise Rejected(
                        f"schema version {schema.version} does not follow version {machine.schema.version} "
                        f"of tablet {tablet_id[:8]}: expected the next version, the same key, the same types",
                        code=Code.SCHEMA_MISMATCH,
                    )
                outcome = await replica.writes.propose(schema_change(schema), WRITE_DEADLINE_MS)
                if (error := outcome.error()) is not None:
                    raise error
            await order.carried_out()
        return pb.AlterTabletResponse(schema_version=machine.schema.version)

    async def FlushTablet(self, request: pb.FlushTabletRequest, context: Any) -> pb.FlushTabletResponse:
        """Flush rows in memory to files."""
        flushed = await self._replicas.get(id_from_pb(request.tablet_id)).storage.flush()
        return pb.FlushTabletResponse(flushed=opid_to_pb(flushed))
