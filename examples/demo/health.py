"""Whether a cluster is whole again, judged from the masters' view and not from what the operator says of itself."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

import stele
from stele.client.admin import cluster_view
from stele.rpc.proto import common_pb2, master_pb2

_SILENT_MS = 3_000
_VIEW_EVERY_S = 0.3
_VIEW_TIMEOUT_S = 3.0


class Checker:
    """Asks the masters, over and over, in a thread of its own. `masters` gives their addresses of the moment.

    `with Checker(...) as checker: checker.healed(machine)` answers at once, from the last view that it got.
    """

    def __init__(self, masters: Callable[[], str]) -> None:
        self._masters = masters
        self._view: master_pb2.GetClusterViewResponse | None = None
        self._seen = 0
        self._incarnations: dict[bytes, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="health", daemon=True)
        self.faults = ["the masters have not been asked yet"]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(2 * _VIEW_TIMEOUT_S)

    @property
    def seen(self) -> int:
        """How many views have been got."""
        return self._seen

    def healed(self, lost_machine: str) -> bool:
        """Whether every tablet, the catalog too, has all its voters on live machines, and no other members."""
        view = self._view
        if view is None:
            return False
        self.faults = [
            fault for tablet in view.tablets for fault in tablet_faults(tablet, view, lost_machine)
        ]
        return not self.faults

    def replicas_by_machine(self) -> dict[str, int]:
        """How many voters each machine carries, the catalog's too; in order of name, none that carries none."""
        view = self._view
        if view is None:
            return {}
        machines = {node.node_id: node.registration.machine for node in view.nodes}
        carried = Counter(
            machines[peer.node_id]
            for tablet in view.tablets
            if tablet.state not in ("REPLACED", "DELETED")
            for peer in tablet.committed_config.peers
        )
        return dict(sorted(carried.items()))

    def incarnation(self, node_id: str) -> int:
        """The latest start of a node or master that the masters were ever seen to hear; 0 if none was."""
        return self._incarnations.get(bytes.fromhex(node_id), 0)

    def retired(self, node_id: str) -> bool:
        """Whether nothing counts on a node or master any more: another has taken its place."""
        nodes = self._view.nodes if self._view is not None else ()
        return any(n.node_id.hex() == node_id and n.state == master_pb2.RETIRED for n in nodes)

    def summary(self) -> str:
        """The last view in a few words."""
        if self._view is None:
            return "nothing is known"
        tablets = [t for t in self._view.tablets if t.state == "RUNNING"]
        voters = sum(len(t.committed_config.peers) for t in tablets)
        return f"{len(tablets)} tablets, the catalog among them, {voters} voters on live machines"

    def _look(self) -> None:
        while not self._stop.wait(_VIEW_EVERY_S):
            try:
                with stele.connect(self._masters()) as client:
                    while not self._stop.wait(_VIEW_EVERY_S):
                        self._take(
                            client.run(cluster_view(client.asynchronous.masters, timeout_s=_VIEW_TIMEOUT_S))
                        )
            except stele.SteleError as exc:
                self._view = None
                self.faults = [str(exc)]

    def _take(self, view: master_pb2.GetClusterViewResponse) -> None:
        for node in view.nodes:
            known = self._incarnations.get(node.node_id, 0)
            self._incarnations[node.node_id] = max(known, node.incarnation)
        self._view = view
        self._seen += 1


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
