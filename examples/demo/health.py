"""Whether a cluster is whole again, judged from the masters' view and not from what the operator says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stele.client import AsyncClient
from stele.client.admin import cluster_view
from stele.model.errors import SteleError
from stele.rpc.proto import common_pb2, master_pb2

_SILENT_MS = 3_000


class Checker:
    """Asks the masters, over and over. `masters` gives their addresses of the moment."""

    def __init__(self, masters: Callable[[], str]) -> None:
        self._masters = masters
        self.summary = ""
        self.faults: list[str] = []

    def healed(self, lost_machine: str) -> bool:
        """Whether every tablet, the catalog too, has all its voters on live machines, and no other members."""
        try:
            view = asyncio.run(self._view())
        except SteleError as exc:
            self.faults = [str(exc)]
            return False
        self.faults = [
            fault for tablet in view.tablets for fault in tablet_faults(tablet, view, lost_machine)
        ]
        voters = sum(len(t.committed_config.peers) for t in view.tablets if t.state == "RUNNING")
        self.summary = f"{len(view.tablets)} tablets, {voters} voters, none on {lost_machine}"
        return not self.faults

    async def _view(self) -> master_pb2.GetClusterViewResponse:
        async with AsyncClient(self._masters()) as client:
            return await cluster_view(client.masters, timeout_s=3.0)


def tablet_faults(
    tablet: master_pb2.TabletViewPB, view: master_pb2.GetClusterViewResponse, lost_machine: str
) -> list[str]:
    """Why a tablet is not whole, a sentence each."""
    if tablet.state in ("REPLACED", "DELETED"):
        return []
    nodes = {node.node_id: node for node in view.nodes}
    running = {
        (r.node_id, r.status.replica_id) for r in tablet.replicas if r.status.state == common_pb2.RUNNING
    }
    name = tablet.tablet_id.hex()[:8]
    faults = [] if tablet.leader_node else [f"{name} has no leader"]
    peers = tablet.committed_config.peers
    if len(peers) != tablet.replication_factor:
        faults.append(f"{name} has {len(peers)} members, not {tablet.replication_factor}")
    for peer in peers:
        node = nodes.get(peer.node_id)
        if peer.member_type != common_pb2.VOTER:
            faults.append(f"{name}/{peer.replica_id} is no voter")
        elif node is None or node.heartbeat_age_ms > _SILENT_MS or node.registration.machine == lost_machine:
            faults.append(f"{name}/{peer.replica_id} is on a lost node")
        elif (peer.node_id, peer.replica_id) not in running:
            faults.append(f"{name}/{peer.replica_id} does not run")
    return faults
