"""What a simulated node says to the others, and hears from them, in one life. As `stele.tserver.messenger`, over the world's network.

Made by the node at each boot. Invariant: a node whose program is older neither sends nor hears beats and questions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

from stele.consensus import incarnations
from stele.consensus.replica import Replica
from stele.model.ids import NodeId, ReplicaId, StreamKey
from stele.raft.messages import Message
from stele.rpc.proto.consensus_pb2 import BeatPB, ConfirmPB, FollowPB, RestingPB
from stele.tserver.beating import Beating
from stele.tserver.confirming import Confirming
from stele.tserver.following import LeaderQuestions
from stele.tserver.quiet import QuietGroups
from stele.tserver.replicas import Replicas

if TYPE_CHECKING:
    from tests.sim.node import SimNode

Said = Message | RestingPB | BeatPB | ConfirmPB | FollowPB
"""What nodes tell each other."""


def node_of(replica_id: int) -> NodeId:
    """Every replica has a node of its own."""
    return NodeId(f"{replica_id:032x}")


class SimMessenger:
    """The messages of one life of a node."""

    def __init__(self, node: SimNode, replica: Replica, now_ms: int) -> None:
        self._node = node
        self._world = node.world
        self._replica = replica
        options = node.world.plan.options
        replicas = one_replica(replica)
        self.beating = Beating(
            replicas,
            self._beat,
            first=self._first("beats"),
            patience_ms=options.election_max_ms,
            now_ms=now_ms,
        )
        self.confirming = Confirming(
            replicas,
            self._confirm,
            first=self._first("questions"),
            patience_ms=options.heartbeat_ms,
            now_ms=now_ms,
        )
        self.following = LeaderQuestions(
            replicas, self._follow, first=self._first("followers"), now_ms=now_ms
        )
        self._quiet: QuietGroups | None = None
        if node.world.plan.rest_after_ms is not None:
            self._quiet = QuietGroups(replicas, options, self._ping, now_ms)

    def _first(self, of: str) -> int:
        node = self._node
        return random.Random(f"{of}/{self._world.plan.seed}/{node.replica_id}/{node.life}").getrandbits(32)

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        if self._quiet is not None:
            self._quiet.tick(now_ms)
        self.beating.tick(now_ms)
        self.confirming.tick(now_ms)
        self.following.tick(now_ms)

    def woken(self, key: StreamKey) -> None:
        """The replica rests no more."""
        if self._quiet is not None:
            self._quiet.woken(key)

    def lost(self, node_id: NodeId) -> None:
        """The connection to another node was reset."""
        self.beating.lost(node_id)
        self.confirming.lost(node_id)
        self.following.lost(node_id)
        if self._quiet is not None:
            self._quiet.lost(node_id)

    def received(self, sender: ReplicaId, message: Said, quiet: bool, incarnation: int) -> None:
        """A message has arrived. `incarnation`: its sender's, of the tablet."""
        replica, node_id = self._replica, node_of(sender)
        if isinstance(message, BeatPB):
            if not self._node.older:
                self.beating.told(node_id, message)
            return
        if isinstance(message, ConfirmPB):
            if not self._node.older:
                self.confirming.told(node_id, message)
            return
        if isinstance(message, FollowPB):
            if not self._node.older:
                self.following.told(node_id, message)
            return
        if not incarnations.same_incarnation(replica, node_id, sender, incarnation):
            return
        if self._quiet is not None:
            self._quiet.heard(node_id)
            if isinstance(message, RestingPB):
                self._quiet.told(node_id, message)
                return
            if quiet and replica.core is not None and self._quiet.take(replica, sender, message):
                return
        assert not isinstance(message, RestingPB)
        replica.on_message(node_id, sender, message)

    def _beat(self, node_id: NodeId, beat: BeatPB) -> None:
        if self._node.older:
            return
        self._world.met["heartbeats sent as beats"] += len(beat.beats) // 56
        self._world.met["beats refused"] += len(beat.refused) // 2
        self._send(node_id, beat)

    def _confirm(self, node_id: NodeId, confirm: ConfirmPB) -> None:
        if self._node.older:
            return
        self._world.met["tablets asked about, beside their cores"] += len(confirm.asks) // 48
        self._send(node_id, confirm)

    def _follow(self, node_id: NodeId, follow: FollowPB) -> None:
        if not self._node.older:
            self._send(node_id, follow)

    def _ping(self, node_id: NodeId, told: RestingPB) -> None:
        self._send(node_id, told)

    def _send(self, node_id: NodeId, said: Said) -> None:
        self._world.send(self._node.replica_id, ReplicaId(int(node_id, 16)), said)


class _OneReplica:
    """The only replica of its node, in the form that quiet groups and the log's keeper need."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def __iter__(self) -> Iterator[Replica]:
        yield self._replica

    @property
    def awake(self) -> tuple[Replica]:
        return (self._replica,)

    def stirring(self) -> Callable[[], dict[StreamKey, Replica]]:
        return lambda: {self._replica.superblock.key: self._replica}

    def keys(self) -> tuple[StreamKey]:
        return (self._replica.superblock.key,)

    def route(self, to: tuple[bytes, int]) -> Replica | None:
        block = self._replica.superblock
        return self._replica if to == (bytes.fromhex(block.tablet_id), block.replica_id) else None

    def by_key(self, key: StreamKey) -> Replica | None:
        return self._replica if key == self._replica.superblock.key else None


def one_replica(replica: Replica) -> Replicas:
    """The replicas of a node that has one."""
    return cast(Replicas, _OneReplica(replica))
