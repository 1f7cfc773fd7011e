"""The master of a small cluster: tables, their places, and the view of the cluster. No consensus, faults on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stele.model.errors import Code, NotLeader, Rejected, Retryable
from stele.model.ids import new_id
from stele.model.partition import partitions
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.convert_schema import partition_to_pb, partitioning_from_pb, schema_from_pb
from stele.rpc.proto import common_pb2, master_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceServicer
from stele.tablet.keyspace import KeySpace
from stele.tablet.store import TabletStore
from tests.client.small_tablet import Tablet

if TYPE_CHECKING:
    from tests.client.small import SmallCluster


class Master(MasterServiceServicer):
    def __init__(self, cluster: SmallCluster) -> None:
        self.cluster = cluster

    def _leads(self) -> None:
        if self.cluster.not_leading:
            self.cluster.not_leading -= 1
            raise NotLeader("this master does not lead")

    async def ListMasters(self, request: Any, context: Any) -> Any:
        return master_pb2.ListMastersResponse()

    async def CreateTable(self, request: Any, context: Any) -> Any:
        self._leads()
        cluster = self.cluster
        if request.table_id in cluster.removed:
            raise Rejected("made, and removed since", code=Code.TABLET_DELETED)
        if request.name in cluster.tables:
            if cluster.tables[request.name].table_id == request.table_id:
                return master_pb2.CreateTableResponse(table_id=request.table_id)
            raise Rejected(f"table {request.name} is there", code=Code.ALREADY_PRESENT)
        info = master_pb2.TableInfoPB(
            table_id=request.table_id,
            name=request.name,
            state="RUNNING",
            schema=request.schema,
            partitioning=request.partitioning,
            replication_factor=request.replication_factor,
            kind=request.kind or "table",
        )
        schema = schema_from_pb(request.schema) if request.schema.columns else None
        for part in partitions(partitioning_from_pb(request.partitioning)):
            tablet_id = new_id()
            directory = cluster.directory / tablet_id
            if schema is None:
                store: Any = KeySpace.create(directory)
            else:
                store = TabletStore.create(directory, schema)
            cluster.tablets[tablet_id] = Tablet(
                tablet_id, id_from_pb(request.table_id), store, schema, partition_to_pb(part)
            )
            info.tablets += 1
            info.tablets_running += not cluster.unled
        cluster.tables[request.name] = info
        cluster.not_leading, cluster.refuses_then = cluster.refuses_then, 0
        if cluster.deletes_next:
            cluster.deletes_next = False
            await self.DeleteTable(request, context)
            raise Retryable("the answer is lost", code=Code.UNKNOWN_OUTCOME)
        return master_pb2.CreateTableResponse(table_id=request.table_id)

    async def DeleteTable(self, request: Any, context: Any) -> Any:
        if request.table_id not in self.cluster.removed or not self.cluster.unreached:
            info = self._find(request)
            del self.cluster.tables[info.name]
            self.cluster.removed.add(info.table_id)
        if self.cluster.deleted_unheard:
            self.cluster.deleted_unheard -= 1
            raise Retryable("the answer is lost", code=Code.UNKNOWN_OUTCOME)
        if self.cluster.unreached:
            left = self.cluster.unreached.popleft()
            return master_pb2.DeleteTableResponse(unreached=["node-1"] if left else [], tablets_left=left)
        return master_pb2.DeleteTableResponse()

    async def ListTables(self, request: Any, context: Any) -> Any:
        self._leads()
        return master_pb2.ListTablesResponse(tables=self.cluster.tables.values())

    async def GetClusterView(self, request: Any, context: Any) -> Any:
        self._leads()
        cluster = self.cluster
        view = master_pb2.GetClusterViewResponse(settled=True)
        for node in cluster.nodes:
            view.nodes.add(
                node_id=id_to_pb(node.identity.node_id),
                name=cluster.pods.get(node.number, ""),
                registration=master_pb2.NodeRegistrationPB(address=node.address),
                state=master_pb2.ACTIVE,
                heartbeat_age_ms=60_000 if node.number in cluster.silent else 100,
                ever_heard=True,
                formed=True,
            )
        for info in cluster.tables.values():
            for tablet in cluster.tablets_of(info.name):
                self._tell_of(view.tablets.add(table_id=info.table_id, table_name=info.name), tablet)
        return view

    def _tell_of(self, pb: master_pb2.TabletViewPB, tablet: Tablet) -> None:
        pb.tablet_id, pb.state, pb.term = id_to_pb(tablet.tablet_id), "RUNNING", tablet.term
        pb.replication_factor = len(self.cluster.nodes)
        for number, node in enumerate(self.cluster.nodes):
            node_id = id_to_pb(node.identity.node_id)
            pb.committed_config.peers.add(
                node_id=node_id, replica_id=number + 1, member_type=common_pb2.VOTER
            )
            role = common_pb2.LEADER if number == tablet.leader else common_pb2.FOLLOWER
            status = common_pb2.ReplicaStatusPB(
                replica_id=number + 1, state=common_pb2.RUNNING, role=role, term=tablet.term
            )
            pb.replicas.add(node_id=node_id, status=status)
        if tablet.leader >= 0:
            pb.leader_node = id_to_pb(self.cluster.nodes[tablet.leader].identity.node_id)

    async def GetTable(self, request: Any, context: Any) -> Any:
        self._leads()
        return master_pb2.GetTableResponse(table=self._find(request))

    async def GetTableLocations(self, request: Any, context: Any) -> Any:
        self._leads()
        self.cluster.located += 1
        info = self._find(request)
        answer = master_pb2.GetTableLocationsResponse(
            table=info, cluster_version=self.cluster.cluster_version
        )
        for tablet in self.cluster.tablets_of(info.name):
            pb = answer.tablets.add(
                tablet_id=id_to_pb(tablet.tablet_id),
                table_id=info.table_id,
                partition=tablet.partition,
                state="RUNNING",
            )
            for number, node in enumerate(self.cluster.nodes):
                flight = f"127.0.0.1:{node.flight.port}" if node.flight else "127.0.0.1:1"
                pb.replicas.add(
                    peer=common_pb2.PeerPB(
                        node_id=id_to_pb(node.identity.node_id),
                        replica_id=number + 1,
                        address=node.address,
                        member_type=common_pb2.VOTER,
                    ),
                    role=common_pb2.LEADER if number == tablet.leader else common_pb2.FOLLOWER,
                    flight_address=flight,
                    alive=True,
                )
        return answer

    def _find(self, request: Any) -> master_pb2.TableInfoPB:
        for info in self.cluster.tables.values():
            if info.name == request.name or (request.table_id and info.table_id == request.table_id):
                return info
        raise Rejected(f"no table {request.name or request.table_id.hex()}", code=Code.NOT_FOUND)
