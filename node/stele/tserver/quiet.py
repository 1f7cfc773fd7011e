"""The node's side of quiet groups: who is heard, who must hear us, which replicas rest and when they wake.

Owned by the node; called by its ticker and for every message that comes in. See stele.consensus.quiet.

Invariant: a replica rests only while the nodes of all its peers have been heard within an election timeout.
"""

from __future__ import annotations

from collections.abc import Callable

from stele.consensus.quiet import begin_quiet, follow_quiet, peer_nodes
from stele.consensus.replica import Replica
from stele.model.ids import NodeId, ReplicaId, StreamKey
from stele.raft.messages import Message
from stele.raft.options import RaftOptions
from stele.tserver.manager import TabletManager

_LOOK_MS = 500


class QuietGroups:
    """`ping(node_id)` tells a node that this one lives."""

    def __init__(
        self, manager: TabletManager, options: RaftOptions, ping: Callable[[NodeId], None], now_ms: int
    ) -> None:
        self._manager = manager
        self._options = options
        self._ping = ping
        self._now_ms = now_ms
        self._heard_ms: dict[NodeId, int] = {}
        self._resting: dict[StreamKey, tuple[NodeId, ...]] = {}
        self._ping_due_ms = 0
        self._look_due_ms = 0

    @property
    def resting(self) -> int:
        """How many replicas rest."""
        return len(self._resting)

    def heard(self, node_id: NodeId) -> None:
        """A message from a node has come in."""
        self._heard_ms[node_id] = self._now_ms

    def lives(self, node_id: NodeId) -> bool:
        """Whether a node was heard within an election timeout."""
        heard = self._heard_ms.get(node_id)
        return heard is not None and self._now_ms - heard <= self._options.election_min_ms

    def take(self, replica: Replica, sender: ReplicaId, message: Message) -> bool:
        """A message marked quiet: whether the replica rests now, so that the message needs no answer."""
        if not follow_quiet(replica, sender, message, self.lives):
            return False
        self._resting[replica.superblock.key] = peer_nodes(replica)
        return True

    def lost(self, node_id: NodeId) -> None:
        """The connection to a node was reset: it counts as not heard."""
        self._heard_ms.pop(node_id, None)

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        self._now_ms = now_ms
        if now_ms >= self._ping_due_ms:
            self._ping_due_ms = now_ms + self._options.heartbeat_ms
            self._wake_and_ping()
        if now_ms >= self._look_due_ms:
            self._look_due_ms = now_ms + _LOOK_MS
            for replica in self._manager:
                if begin_quiet(replica, self.lives):
                    self._resting[replica.superblock.key] = peer_nodes(replica)

    def _wake_and_ping(self) -> None:
        wanted: dict[NodeId, None] = {}
        for key, nodes in list(self._resting.items()):
            replica = self._manager.by_key(key)
            runtime = replica.runtime if replica is not None else None
            if runtime is None or not runtime.quiet:
                del self._resting[key]
                continue
            if not all(self.lives(node_id) for node_id in nodes):
                runtime.wake()
                del self._resting[key]
            for node_id in nodes:
                wanted[node_id] = None
        # A node that was heard lately shares groups with this one; two that both rest must not both fall silent.
        for node_id, heard in self._heard_ms.items():
            if self._now_ms - heard <= self._options.election_max_ms:
                wanted[node_id] = None
        for node_id in wanted:
            self._ping(node_id)
