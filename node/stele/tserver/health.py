"""What probes and /identity answer for a node. Asks nobody and waits for nothing.

Invariant: liveness never depends on quorum, peers or disks, so that a sick cluster is not restarted in circles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stele.consensus.replica import ReplicaState

if TYPE_CHECKING:
    from stele.tserver.node import Node

READY_AFTER_MS = 30_000
"""A replica that finds no leader for so long no longer keeps a started node from being ready."""


class NodeHealth:
    """Health of one node. `extra_ready` says "" or why not ready; a master adds its own."""

    def __init__(self, node: Node, extra_ready: Callable[[], str]) -> None:
        self._node = node
        self._extra_ready = extra_ready
        self._caught_up = False

    def live(self) -> str:
        """The event loop answers."""
        return ""

    def started(self) -> str:
        """Whether replay is done."""
        return "" if self._node.replicas.opened else "replicas are being opened"

    def ready(self) -> str:
        """Serving and caught up."""
        node = self._node
        if node.stopping:
            return "stopping"
        if node.failed.done():
            return str(node.failed.result())
        if not node.replicas.opened:
            return "replicas are being opened"
        if not node.formed:
            return "formation is not confirmed"
        why = "" if self._caught_up else self._behind()
        self._caught_up = not why
        return why or self._extra_ready()

    def _behind(self) -> str:
        node = self._node
        starting = (ReplicaState.BOOTSTRAPPING, ReplicaState.CONFIGURING)
        waiting = [r for r in node.replicas if r.state in starting]
        if waiting and node.now_ms() - node.opened_ms < READY_AFTER_MS:
            return f"{len(waiting)} replicas have not caught up"
        if node.options.role == "node" and node.options.masters and not node.heartbeater.leader_heard:
            return "no leader master has heard this node yet"
        return ""

    def identity(self) -> Mapping[str, Any]:
        """What /identity shows."""
        node = self._node
        return {
            "cluster_id": node.cluster_id,
            "node_id": node.node_id,
            "incarnation": node.incarnation,
            "role": node.options.role,
            "format_id": node.volume.record.format_id,
            "formed": node.formed,
            "address": node.address,
            "flight_address": node.flight_address,
        }
