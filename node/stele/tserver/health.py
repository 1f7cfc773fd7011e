"""What probes and /identity answer for a node. Asks nobody and waits for nothing.

Invariant: liveness never depends on quorum, peers or disks, so that a cluster in trouble is not restarted
again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stele.consensus.replica import Replica, ReplicaState
from stele.model.config import MemberType
from stele.tserver.description import NodeDescription
from stele.tserver.heartbeater import Heartbeater
from stele.tserver.replicas import Replicas
from stele.tserver.startup import Startup

READY_AFTER_MS = 30_000
"""How long replicas that lag, or have no leader, may keep a node from being ready after its start."""


class NodeHealth:
    """The health of one node. `ending()`: why the node no longer serves; "" while it does. `extra_ready()`:
    why its extension is not ready; "" if it is.
    """

    def __init__(
        self,
        description: NodeDescription,
        replicas: Replicas,
        heartbeater: Heartbeater,
        startup: Startup,
        now_ms: Callable[[], int],
        *,
        ending: Callable[[], str],
        extra_ready: Callable[[], str],
    ) -> None:
        self._description = description
        self._replicas = replicas
        self._heartbeater = heartbeater
        self._startup = startup
        self._now_ms = now_ms
        self._ending = ending
        self._extra_ready = extra_ready
        self._caught_up = False

    def live(self) -> str:
        """Always "". Any answer shows that the event loop runs."""
        return ""

    def started(self) -> str:
        """Why the start is not done; "" once the replicas on the volume are open."""
        return "" if self._replicas.opened else "replicas are being opened"

    def ready(self) -> str:
        """Why the node does not serve, or has not caught up; "" if it is ready."""
        if ending := self._ending():
            return ending
        if self._replicas.fenced:
            return "the node is fenced, so it serves nobody; `stele node unfence` ends that"
        if not self._replicas.opened:
            return "replicas are being opened"
        if not self._description.formed:
            return "formation is not confirmed"
        why = "" if self._caught_up else self._behind()
        self._caught_up = not why
        return why or self._extra_ready()

    def _behind(self) -> str:
        waiting = [r for r in self._replicas if _starts(r)]
        if waiting and self._now_ms() - self._startup.opened_ms < READY_AFTER_MS:
            return f"{len(waiting)} replicas have not caught up"
        options = self._description.options
        if options.role == "node" and options.masters and not self._heartbeater.leader_heard:
            return "no leading master has received this node's heartbeat yet"
        return ""

    def identity(self) -> Mapping[str, Any]:
        """What /identity shows."""
        return self._description.shown()


def _starts(replica: Replica) -> bool:
    """Whether the replica is still opening, looks for a leader, or lacks entries that were committed while
    its node was away.

    A replica that its own configuration does not name does not count, because it hears from no leader. It is
    a copy that is not added yet, or was removed.
    """
    peer = replica.config.peer(replica.replica_id)
    if replica.state is ReplicaState.CONFIGURING:
        return peer is not None
    if replica.state is ReplicaState.RUNNING:
        return peer is not None and peer.member_type is MemberType.VOTER and not replica.caught_up
    return replica.state is ReplicaState.BOOTSTRAPPING
