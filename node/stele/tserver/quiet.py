"""The node's side of quiet groups: idle Raft groups that exchange no heartbeats (CockroachDB calls them
quiescent).

Owned by the messenger; called at each tick and for messages of other nodes. See stele.consensus.quiet.

Instead of one heartbeat per group, two nodes exchange one ping. A ping shows that the node lives, but not
that each replica does. A replica that FAILED, or is gone, would leave the others at rest without a leader. So
a ping carries a digest of the groups that rest at both ends. If the digests differ for an election timeout,
one node asks about each group. It wakes the groups that do not rest at the other node.

Invariant: a replica rests only while the nodes of all its peers were heard within an election timeout. Each
of them must say that its own replica rests in the same term. At worst a change is noticed after the time that
this question takes. However much other nodes ask, one tick handles one slice of their questions, and the
nodes take turns.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from stele.consensus.quiet import begin_quiet, follow_quiet, peer_nodes
from stele.consensus.replica import Replica
from stele.model import bounds
from stele.model.ids import NodeId, ReplicaId, StreamKey
from stele.raft.messages import Message
from stele.raft.options import RaftOptions
from stele.rpc.fair import FairQueue
from stele.rpc.logging import OncePer
from stele.rpc.proto import consensus_pb2
from stele.tserver.replicas import Replicas

log = structlog.get_logger("stele.tserver")

_LOOK_MS = 500
_GROUP = struct.Struct(">16sQ")
_ASKED_MAX = 16_384
"""Groups in one question: 384 KiB, well below a frame. A longer question is not from this program."""
_SLICE = 2_048
"""How many groups of a question or an answer one tick handles: a few milliseconds of work."""
_SLICES_MAX = 64
"""The most slices that wait from one node. Further ones are dropped; the node that sent them asks again."""
_U64 = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class _Rest:
    """A replica at rest. Its term cannot change meanwhile: whatever could change it wakes the replica."""

    nodes: tuple[NodeId, ...]
    group: bytes
    digest: int


@dataclass(slots=True)
class _Shared:
    """The replicas at rest here whose groups have a replica on one other node, too; and the sum of their
    digests.
    """

    keys: dict[StreamKey, None] = field(default_factory=dict)
    digest: int = 0


class QuietGroups:
    """The groups at rest of one node.

    `ping(node_id, resting)` tells another node that this node lives, and which replicas rest here.
    """

    def __init__(
        self,
        replicas: Replicas,
        options: RaftOptions,
        ping: Callable[[NodeId, consensus_pb2.RestingPB], None],
        now_ms: int,
    ) -> None:
        self._replicas = replicas
        self._options = options
        self._ping = ping
        self._now_ms = now_ms
        self._heard_ms: dict[NodeId, int] = {}
        self._resting: dict[StreamKey, _Rest] = {}
        self._shared: dict[NodeId, _Shared] = {}
        # Count and digest of the groups at rest that are shared with a node, as last sent to it.
        self._sums: dict[NodeId, tuple[int, int]] = {}
        self._differs_since_ms: dict[NodeId, int] = {}
        self._greeted: dict[NodeId, None] = {}
        self._by_group: dict[bytes, StreamKey] = {}  # the digest of those at rest
        # What other nodes asked or answered and no tick has handled yet, in slices: (node, whether it asked,
        # groups).
        self._said: FairQueue[tuple[NodeId, bool, bytes]] = FairQueue()
        self._said_by: Counter[NodeId] = Counter()
        self._once = OncePer()
        self._ping_due_ms = 0
        self._look_due_ms = 0

    @property
    def resting(self) -> int:
        """How many replicas rest."""
        return len(self._resting)

    def heard(self, node_id: NodeId) -> None:
        """Note that messages from a node have come in."""
        if self._heard_ms.get(node_id) == self._now_ms:
            return
        self._heard_ms.pop(node_id, None)
        self._heard_ms[node_id] = self._now_ms
        # Any name may be in a message. Those heard longest ago come first, and are forgotten first.
        if len(self._heard_ms) > bounds.PEERS_HEARD_MAX:
            del self._heard_ms[next(iter(self._heard_ms))]

    def lives(self, node_id: NodeId) -> bool:
        """Whether a node was heard within an election timeout."""
        heard = self._heard_ms.get(node_id)
        return heard is not None and self._now_ms - heard <= self._options.election_min_ms

    def take(self, replica: Replica, sender: ReplicaId, message: Message) -> bool:
        """Take a message that is marked quiet. Returns whether the replica rests now, so that the message needs no answer."""
        if not follow_quiet(replica, sender, message, self.lives):
            # Followers send each other nothing while their leader leads. Begin to ping, so that others hear
            # this node next time.
            self._greeted.update(dict.fromkeys(n for n in peer_nodes(replica) if not self.lives(n)))
            return False
        self._rests(replica)
        return True

    def told(self, node_id: NodeId, resting: consensus_pb2.RestingPB) -> None:
        """Take what a node sent about its replicas at rest: its digest, a question, or an answer."""
        if resting.asks:
            self._listen(node_id, True, resting.asks)
        elif resting.awake:
            self._listen(node_id, False, resting.awake)
        elif (resting.count, resting.digest) == self._sums.get(node_id, (0, 0)):
            self._differs_since_ms.pop(node_id, None)
        elif self._now_ms - self._differs_since_ms.setdefault(node_id, self._now_ms) > (
            self._options.election_min_ms
        ):
            # Groups that begin to rest or wake just now make the digests differ. With many groups there always are some.
            del self._differs_since_ms[node_id]
            self._ask(node_id)

    def _listen(self, node_id: NodeId, asks: bool, groups: bytes) -> None:
        if len(groups) > _ASKED_MAX * _GROUP.size:
            event = "dropped a node's message about groups at rest: it is too long"
            self._once.tell(log.warning, event, node_id, "long", peer_node=node_id, bytes=len(groups))
            return
        step = _SLICE * _GROUP.size
        for at in range(0, len(groups), step):
            if self._said_by[node_id] < _SLICES_MAX:
                self._said_by[node_id] += 1
                self._said.push((node_id,), (node_id, asks, groups[at : at + step]))

    def _work_on_what_was_said(self) -> None:
        if not self._said:
            return
        node_id, asks, groups = self._said.pop()
        self._said_by[node_id] -= 1
        if not self._said_by[node_id]:
            del self._said_by[node_id]
        if asks:
            self._answer(node_id, groups)
        else:
            self._wake_groups(node_id, groups)

    def lost(self, node_id: NodeId) -> None:
        """Count the node as not heard: its connection was reset."""
        self._heard_ms.pop(node_id, None)

    def tick(self, now_ms: int) -> None:
        """Take the node's time. Handle a slice of questions, send pings, wake replicas whose peers fell
        silent, and let idle groups rest.
        """
        self._now_ms = now_ms
        self._work_on_what_was_said()
        if now_ms >= self._ping_due_ms:
            self._ping_due_ms = now_ms + self._options.heartbeat_ms
            self._wake_and_ping()
        if now_ms >= self._look_due_ms:
            self._look_due_ms = now_ms + _LOOK_MS
            for replica in self._replicas.awake:
                if begin_quiet(replica, self.lives):
                    self._rests(replica)

    def _rests(self, replica: Replica) -> None:
        tablet = bytes.fromhex(replica.tablet_id)
        digest = (int.from_bytes(tablet[8:], "big") ^ (replica.term * _ODD)) & _U64
        group = _GROUP.pack(tablet, replica.term)
        key = replica.superblock.key
        self.woken(key)
        self._resting[key] = rest = _Rest(peer_nodes(replica), group, digest)
        self._by_group[group] = key
        for node_id in rest.nodes:
            shared = self._shared.setdefault(node_id, _Shared())
            shared.keys[key] = None
            shared.digest = (shared.digest + digest) & _U64

    def woken(self, key: StreamKey) -> None:
        """Note that a replica no longer rests. Does nothing if it did not rest."""
        rest = self._resting.pop(key, None)
        if rest is None:
            return
        if self._by_group.get(rest.group) == key:
            del self._by_group[rest.group]
        for node_id in rest.nodes:
            shared = self._shared[node_id]
            del shared.keys[key]
            shared.digest = (shared.digest - rest.digest) & _U64
            if not shared.keys:
                del self._shared[node_id]

    def _wake_and_ping(self) -> None:
        for node_id, shared in list(self._shared.items()):
            if not self.lives(node_id):
                for key in list(shared.keys):
                    self._wake(key)
        sums = {node_id: (len(shared.keys), shared.digest) for node_id, shared in self._shared.items()}
        wanted = {**dict.fromkeys(sums), **self._greeted}
        self._greeted = {}
        # A node that was heard lately shares groups with this one. Two nodes at rest must not both fall silent.
        for node_id, heard in self._heard_ms.items():
            if self._now_ms - heard <= self._options.election_max_ms:
                wanted[node_id] = None
        self._sums = sums
        for node_id in wanted:
            count, total = sums.get(node_id, (0, 0))
            self._ping(node_id, consensus_pb2.RestingPB(count=count, digest=total))

    def _wake(self, key: StreamKey) -> None:
        """Let a replica's time go on."""
        self.woken(key)
        replica = self._replicas.by_key(key)
        if replica is not None and replica.runtime is not None:
            replica.runtime.wake()

    # --- where two nodes differ

    def _ask(self, node_id: NodeId) -> None:
        """Ask about the groups that rest here. The other node asks about those that rest there."""
        shared = self._shared.get(node_id)
        groups = [self._resting[key].group for key in shared.keys] if shared is not None else []
        for at in range(0, len(groups), _ASKED_MAX):
            asks = b"".join(groups[at : at + _ASKED_MAX])
            self._ping(node_id, consensus_pb2.RestingPB(asks=asks))

    def _answer(self, node_id: NodeId, asked: bytes) -> None:
        awake = b"".join(group for group in _groups(asked) if self._rests_here(group, node_id) is None)
        if awake:
            self._ping(node_id, consensus_pb2.RestingPB(awake=awake))

    def _wake_groups(self, node_id: NodeId, awake: bytes) -> None:
        """Wake these groups. Then a leader's heartbeats show who answers, and a follower without a leader starts an
        election."""
        woken = 0
        for group in _groups(awake):
            replica = self._rests_here(group, node_id)
            if replica is not None and replica.runtime is not None:
                self._wake(replica.superblock.key)
                woken += 1
        if woken:
            event = "groups at rest were woken, because their replicas on a peer do not rest"
            self._once.tell(log.info, event, node_id, "awake", peer_node=node_id, groups=woken)

    def _rests_here(self, group: bytes, node_id: NodeId) -> Replica | None:
        """This node's replica of a group that rests and has a peer on the other node. None: it does not rest,
        or has no peer there.
        """
        key = self._by_group.get(group)
        if key is None or node_id not in self._resting[key].nodes:
            return None
        replica = self._replicas.by_key(key)
        if replica is not None and replica.running and replica.runtime and replica.runtime.quiet:
            return replica
        return None


def _groups(data: bytes) -> list[bytes]:
    """The groups of a question or an answer. Ignores bytes at the end that are no whole group."""
    size = _GROUP.size
    return [data[at : at + size] for at in range(0, len(data) - size + 1, size)]
