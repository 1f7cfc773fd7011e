"""Heartbeats of many tablets in one message to each node, for groups whose heartbeats would say nothing new.

Owned by the messenger. At each tick of its node, leaders whose heartbeats are due add a beat here (`RaftCore.beat`). The tick's
end sends each other node its beats, and that node answers which of them it refuses. Their leaders then send heartbeats. Without
this, a thousand groups that are written to now and then cost 26,000 heartbeats and as many answers a second. That
is more than two processors can do, and then groups lose leaders that are well.

Invariants: an answer counts only for the beats of the message with its number, in the term that they were sent in. A process never
repeats a number, and begins at a random one. However much other nodes send, one tick takes a bounded part.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import structlog

from stele.consensus.ports import HostedReplica
from stele.model import bounds
from stele.model.ids import NodeId, ReplicaId, StreamKey
from stele.rpc.convert import whole_records
from stele.rpc.logging import OncePer
from stele.rpc.proto import consensus_pb2
from stele.tserver.replicas import Replicas

log = structlog.get_logger("stele.tserver")

_BEAT = struct.Struct(">16sQQQQQ")
"""Tablet, its incarnation, who leads, who is told, the term, the commit index."""
_PLACE = struct.Struct(">H")
BEATS_MAX = 1_024
"""The most beats in one message: 56 KiB. Taking one costs some 2 µs."""
_TAKEN_MAX = 32_768
"""The most beats that one tick takes, from all nodes. A node with more gets no answer, and its leaders send heartbeats after
200 ms."""
_GREET_MS = 1_000
"""How often a node is asked whether it takes beats. Releases before 0.2.0 do not answer."""


class _Told(NamedTuple):
    """One beat, as its sender remembers it."""

    key: StreamKey
    to: ReplicaId
    term: int


class _Sent(NamedTuple):
    """What a node was sent, and when."""

    node_id: NodeId
    sent_ms: int
    beats: list[_Told]


class Beating:
    """The beats of one node, and its answers to others.

    `send(node_id, beat)` sends to a node. `first` is a random number. A message is forgotten after `patience_ms`.
    """

    def __init__(
        self,
        replicas: Replicas,
        send: Callable[[NodeId, consensus_pb2.BeatPB], None],
        *,
        first: int,
        patience_ms: int,
        now_ms: int,
    ) -> None:
        self._replicas = replicas
        self._send = send
        self._number = first
        self._patience_ms = patience_ms
        self._now_ms = now_ms
        self._due: dict[NodeId, tuple[list[bytes], list[_Told]]] = {}  # to send at the end of this tick
        self._sent: dict[int, _Sent] = {}  # by number, the oldest first
        self._able: dict[NodeId, None] = {}  # the nodes that answer
        self._greeted_ms: dict[NodeId, int] = {}
        self._taken = 0  # since the last tick
        self._once = OncePer()

    def takes_beats(self, node_id: NodeId) -> bool:
        """As `Host.takes_beats`. A node that has not answered yet is asked."""
        if node_id in self._able:
            return True
        if self._now_ms - self._greeted_ms.get(node_id, -_GREET_MS) >= _GREET_MS:
            self._greeted_ms[node_id] = self._now_ms
            self._send(node_id, consensus_pb2.BeatPB())
        return False

    def beat(
        self, replica: HostedReplica, node_id: NodeId, to: ReplicaId, term: int, commit_index: int
    ) -> None:
        """As `Host.beat`."""
        packed, told = self._due.setdefault(node_id, ([], []))
        block = replica.superblock
        packed.append(
            _BEAT.pack(
                replica.raw_tablet_id, block.tablet_incarnation, block.replica_id, to, term, commit_index
            )
        )
        told.append(_Told(block.key, to, term))

    def tick(self, now_ms: int) -> None:
        """Time has passed, and leaders have added their beats: send them."""
        self._now_ms = now_ms
        self._taken = 0
        while self._sent:
            number, sent = next(iter(self._sent.items()))
            if now_ms - sent.sent_ms < self._patience_ms:
                break
            del self._sent[number]
        due, self._due = self._due, {}
        for node_id, (packed, told) in due.items():
            for start in range(0, len(packed), BEATS_MAX):
                self._number += 1
                self._sent[self._number] = _Sent(node_id, now_ms, told[start : start + BEATS_MAX])
                beats = b"".join(packed[start : start + BEATS_MAX])
                self._send(node_id, consensus_pb2.BeatPB(number=self._number, beats=beats))

    def told(self, node_id: NodeId, beat: consensus_pb2.BeatPB) -> None:
        """Take what a node sent: beats, or an answer."""
        if beat.answers:
            self._able[node_id] = self._able.pop(node_id, None)  # the one heard longest ago comes first
            if len(self._able) > bounds.PEERS_HEARD_MAX:
                del self._able[next(iter(self._able))]
            self._take_answer(node_id, beat)
        else:
            self._answer(node_id, beat)

    def _take_answer(self, node_id: NodeId, beat: consensus_pb2.BeatPB) -> None:
        sent = self._sent.get(beat.number)
        if sent is None or sent.node_id != node_id:
            return
        del self._sent[beat.number]
        refused = frozenset(at for (at,) in whole_records(_PLACE, beat.refused))
        by_key, now_ms = self._replicas.by_key, self._now_ms
        for at, (key, to, term) in enumerate(sent.beats):
            replica = by_key(key)
            if replica is not None:
                replica.beat_answered(to, term, at not in refused, now_ms)

    def _answer(self, node_id: NodeId, beat: consensus_pb2.BeatPB) -> None:
        count = len(beat.beats) // _BEAT.size
        if count > BEATS_MAX or self._taken + count > _TAKEN_MAX:
            event = "dropped a node's beats: too many tablets at once"
            self._once.tell(log.warning, event, node_id, "long", peer_node=node_id, tablets=count)
            return
        self._taken += count
        refused = [
            _PLACE.pack(at)
            for at, (tablet, incarnation, leader, own, term, commit_index) in enumerate(
                whole_records(_BEAT, beat.beats)
            )
            if not self._follows(node_id, tablet, incarnation, ReplicaId(leader), own, term, commit_index)
        ]
        self._send(node_id, consensus_pb2.BeatPB(number=beat.number, answers=True, refused=b"".join(refused)))

    def _follows(
        self,
        node_id: NodeId,
        tablet: bytes,
        incarnation: int,
        leader: ReplicaId,
        own: int,
        term: int,
        commit_index: int,
    ) -> bool:
        replica = self._replicas.route((tablet, own))
        return (
            replica is not None
            and replica.superblock.tablet_incarnation == incarnation
            and replica.take_beat(node_id, leader, term, commit_index, self._now_ms)
        )

    def lost(self, node_id: NodeId) -> None:
        """The connection to a node was reset. The node that answers next may run another release."""
        self._able.pop(node_id, None)
        self._greeted_ms.pop(node_id, None)
