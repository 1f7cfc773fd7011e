"""Requests of administrators to masters and nodes: form a cluster, see it, ask nodes for their replicas.

Used by the command line, the test harness and the operator's demo. Changes no configuration; only a driver
does that. The requests about single nodes are in nodes.py, and can be imported from here, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stele.client.health import NodeHealth
from stele.client.nodes import (
    Answer,
    NodeStatus,
    cluster_view,
    drain_node,
    fence_node,
    forget_node,
    list_nodes,
    node_called,
    node_status_of,
    park_node,
    retire_node,
    undrain_node,
    unfence_node,
    unpark_node,
    what_drain_waits_for,
)
from stele.client.versions import cluster_versions, finalize_version
from stele.driver.versions import ClusterVersions
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import ClusterId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.identity import Identity
from stele.rpc.masters import parse_masters
from stele.rpc.proto import common_pb2, consensus_pb2, master_pb2, tserver_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

__all__ = [
    "Answer",
    "ClusterVersions",
    "NodeStatus",
    "cluster_versions",
    "cluster_view",
    "drain_node",
    "forget_node",
    "form_masters",
    "list_nodes",
    "list_replicas",
    "node_called",
    "node_status",
    "node_status_of",
    "fence_node",
    "finalize_version",
    "park_node",
    "retire_node",
    "tablet_called",
    "tablet_now",
    "undrain_node",
    "unfence_node",
    "unpark_node",
    "what_drain_waits_for",
]

_ASK_TIMEOUT_S = 3.0


async def form_masters(addresses: Sequence[str], *, cluster_id: str = "") -> tuple[str, str]:
    """Tell each first master who the others are, once all have formatted their volumes.

    Returns (cluster id, fork id); fork id "" means none. Idempotent. `cluster_id`: the cluster that all of
    them must belong to; "": that of the first one.

    Raises:
        Retryable: UNAVAILABLE: a master does not answer. NOT_READY: a master has not formatted its volume
            yet.
        Rejected: they belong to different clusters, or to another one than `cluster_id`, or were formed
            with other masters.
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
                    f"{address} belongs to cluster {id_from_pb(status.cluster_id)[:8]}; expected "
                    f"{cluster_id[:8]}; give the addresses of one cluster's masters",
                    code=Code.WRONG_CLUSTER,
                )
            if pool.identity.fork_id != status.fork_id:
                raise Rejected(
                    f"{address} runs under fork id {status.fork_id[:8] or '(none)'}, but others under "
                    f"{(pool.identity.fork_id or '(none)')[:8]}; start all masters of a cluster with the same "
                    f"--fork-id",
                    code=Code.WRONG_CLUSTER,
                )
            if status.role != "master":
                raise Rejected(
                    f"{address} is not a master but a {status.role or 'process'}; give addresses of masters only"
                )
            if not status.format_id:
                raise Retryable(
                    f"master {address} has not formatted its volume: it waits for the other first masters; "
                    "start all of them",
                    code=Code.NOT_READY,
                )
            request.masters.add(node_id=status.node_id, format_id=status.format_id, address=status.address)
        request.cluster_id = id_to_pb(cluster_id)
        pool.identity = replace(pool.identity, cluster_id=ClusterId(cluster_id))
        for address in parse_masters(list(addresses)):
            await pool.unary(address, MasterServiceStub, "ConfirmFormation", request)
        return cluster_id, pool.identity.fork_id or ""
    finally:
        await pool.close()


async def node_status(pool: ChannelPool, address: str) -> tserver_pb2.GetNodeStatusResponse:
    """The status of the node or master at `address`. Raises SteleError."""
    answer: tserver_pb2.GetNodeStatusResponse = await pool.unary(
        address,
        TabletServerServiceStub,
        "GetNodeStatus",
        tserver_pb2.GetNodeStatusRequest(),
        timeout_s=_ASK_TIMEOUT_S,
    )
    return answer


async def list_replicas(pool: ChannelPool, address: str) -> list[common_pb2.ReplicaStatusPB]:
    """All replicas of the node at `address`. Raises SteleError."""
    answer = await pool.unary(
        address,
        TabletServerServiceStub,
        "ListTablets",
        tserver_pb2.ListTabletsRequest(),
        timeout_s=_ASK_TIMEOUT_S,
    )
    return list(answer.replicas)


async def tablet_now(
    pool: ChannelPool, tablet: master_pb2.TabletViewPB, known: Mapping[str, NodeHealth]
) -> master_pb2.TabletViewPB:
    """Return a copy of `tablet` with fresh reports of its replicas (`age_ms` 0), for which it asks their
    nodes.

    Nodes report changes of roles and configurations to the masters, but not the present numbers of bytes and
    entries. If a node is not alive according to `known`, or gives no answer, the last report to the masters
    stays, with its age.
    """
    ids = [p.node_id for p in tablet.committed_config.peers] + [r.node_id for r in tablet.replicas]
    nodes = [node for raw in dict.fromkeys(ids) if (node := known.get(id_from_pb(raw))) is not None]
    alive = [node for node in nodes if node.state == "alive"]
    answers = await asyncio.gather(*(_replicas_on(pool, node, tablet.tablet_id) for node in alive))
    reports = {(r.node_id, r.status.replica_id): r for r in tablet.replicas}
    for node, statuses in zip(alive, answers):
        for status in statuses:
            report = master_pb2.ReplicaReportPB(node_id=id_to_pb(node.node_id), status=status)
            reports[report.node_id, status.replica_id] = report
    now = master_pb2.TabletViewPB()
    now.CopyFrom(tablet)
    del now.replicas[:]
    now.replicas.extend(reports.values())
    return now


async def _replicas_on(
    pool: ChannelPool, node: NodeHealth, tablet_id: bytes
) -> list[common_pb2.ReplicaStatusPB]:
    """The replicas on a node; empty if the node gives no answer."""
    request = consensus_pb2.GetConsensusStateRequest(tablet_ids=[tablet_id])
    try:
        answer = await pool.unary(
            node.address,
            ConsensusServiceStub,
            "GetConsensusState",
            request,
            timeout_s=_ASK_TIMEOUT_S,
            to_node=node.node_id,
        )
    except SteleError:
        return []
    return list(answer.replicas)


def tablet_called(given: str, view: master_pb2.GetClusterViewResponse) -> master_pb2.TabletViewPB:
    """Return the tablet whose id begins with these digits. Raises Rejected NOT_FOUND if no id or several
    begin so."""
    found = [t for t in view.tablets if given and t.tablet_id.hex().startswith(given.lower())]
    if len(found) != 1:
        raise Rejected(
            f"{len(found)} tablets begin with {given}; `stele tablet list` shows all", code=Code.NOT_FOUND
        )
    return found[0]
