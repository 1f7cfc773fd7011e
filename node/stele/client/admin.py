"""What an administrator asks of masters and nodes: form first masters, see the cluster, ask a node for its replicas.

Used by the command line, the test harness and the operator's demo. Changes no configuration; that is the driver's.
"""

from __future__ import annotations

from collections.abc import Sequence

from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import ClusterId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.identity import Identity
from stele.rpc.masters import Masters, parse_masters
from stele.rpc.proto import common_pb2, master_pb2, tserver_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub


async def form_masters(addresses: Sequence[str], *, cluster_id: str = "") -> str:
    """Tell each first master who the others are, once all have formatted their volumes. Returns the cluster id.

    Idempotent. `cluster_id` "": whatever they say, if they agree.

    Raises:
        Retryable: while one of them does not answer (UNAVAILABLE) or has not formatted its volume yet (NOT_READY).
        Rejected: if they belong to different clusters or to another than `cluster_id`, or were formed otherwise.
    """
    pool = ChannelPool(Identity())
    try:
        request = master_pb2.ConfirmFormationRequest()
        for address in parse_masters(list(addresses)):
            status = await node_status(pool, address)
            if not cluster_id:
                cluster_id = id_from_pb(status.cluster_id)
            if id_from_pb(status.cluster_id) != cluster_id:
                raise Rejected(
                    f"{address} belongs to cluster {id_from_pb(status.cluster_id)}, expected {cluster_id}",
                    code=Code.WRONG_CLUSTER,
                )
            if status.role != "master":
                raise Rejected(f"{address} is no master but a {status.role or 'process'}")
            if not status.format_id:
                raise Retryable(
                    f"master {address} has not formatted its volume: it asks the other first masters, all of which must "
                    "be started",
                    code=Code.NOT_READY,
                )
            request.masters.add(node_id=status.node_id, format_id=status.format_id, address=status.address)
        request.cluster_id = id_to_pb(cluster_id)
        pool.identity.cluster_id = ClusterId(cluster_id)
        for address in parse_masters(list(addresses)):
            await pool.unary(address, MasterServiceStub, "ConfirmFormation", request)
        return cluster_id
    finally:
        await pool.close()


async def node_status(pool: ChannelPool, address: str) -> tserver_pb2.GetNodeStatusResponse:
    """What the node or master at `address` says of itself. Raises SteleError."""
    answer: tserver_pb2.GetNodeStatusResponse = await pool.unary(
        address, TabletServerServiceStub, "GetNodeStatus", tserver_pb2.GetNodeStatusRequest(), timeout_s=3.0
    )
    return answer


async def list_replicas(pool: ChannelPool, address: str) -> list[common_pb2.ReplicaStatusPB]:
    """All replicas of the node at `address`. Raises SteleError."""
    answer = await pool.unary(
        address, TabletServerServiceStub, "ListTablets", tserver_pb2.ListTabletsRequest(), timeout_s=3.0
    )
    return list(answer.replicas)


async def cluster_view(masters: Masters, *, timeout_s: float = 10.0) -> master_pb2.GetClusterViewResponse:
    """Nodes, tablets, intents and tables in one view from the leader master.

    Raises:
        SteleError: if no master leads within `timeout_s`.
    """
    answer: master_pb2.GetClusterViewResponse = await masters.call(
        "GetClusterView", master_pb2.GetClusterViewRequest(), timeout_s=timeout_s
    )
    return answer
