"""Heartbeats of many tablets in one message to each node, for groups whose heartbeats would say nothing new.

Owned by the messenger. At each tick of its node, leaders whose heartbeats are due add a beat here (`RaftCore.beat`). The tick's
end sends each other node its beats, and that node answers which of them it refuses. Their leaders then send heartbeats. Without
this, a thousand groups that are written to now and then cost 26,000 heartbeats and as many answers a second. That
is more than two processors can do, and then groups lose leaders that are well.

Invariants: an answer counts only for the beats of the message with its number, in the term that they were sent in (questions.py).
However much a node sends, one tick takes a bounded part of it, and as much of what others send.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from stele.consensus.ports import HostedReplica
from stele.model.ids import NodeId, ReplicaId, StreamKey
from stele.rpc.convert import whole_records
from stele.rpc.proto import consensus_pb2
from stele.tserver.questions import Questions, Room, places_from_bytes, places_to_bytes
from stele.tserver.replicas import Replicas

_BEAT = struct.Struct(">16sQQQQQ")
"""Tablet, its incarnation, who leads, who is told, the term, the commit index."""
_TAKEN_MAX = 16_384
"""The most beats of one node that one tick takes, some 2 µs each. A node with more gets no answer, and its leaders send
heartbeats after 200 ms."""
_GREET_MS = 1_000
"""How often a node is asked whether it takes beats. Releases before 0.2.0 do not answer."""


class _Told(NamedTuple):
    """One beat: its bytes, and what its sender remembers."""

    packed: bytes
    key: StreamKey
    to: ReplicaId
    term: int


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
        self._now_ms = now_ms
        self._due: dict[NodeId, list[_Told]] = {}  # to send at the end of this tick
        self._questions = Questions(
            self._tell, first=first, patience_ms=patience_ms, greet_ms=_GREET_MS, now_ms=now_ms
        )
        self._room = Room(_TAKEN_MAX, "dropped a node's beats: too many tablets at once")

    def takes_beats(self, node_id: NodeId) -> bool:
        """As `Host.takes_beats`. A node that has not answered yet is asked."""
        if node_id in self._questions.answering:
            return True
        self._questions.greet(node_id)
        return False

    def beat(
        self, replica: HostedReplica, node_id: NodeId, to: ReplicaId, term: int, commit_index: int
    ) -> None:
        """As `Host.beat`."""
        block = replica.superblock
        packed = _BEAT.pack(
            replica.raw_tablet_id, block.tablet_incarnation, block.replica_id, to, term, commit_index
        )
        self._due.setdefault(node_id, []).append(_Told(packed, block.key, to, term))

    def tick(self, now_ms: int) -> None:
        """Time has passed, and leaders have added their beats: send them."""
        self._now_ms = now_ms
        self._room.clear()
        self._questions.tick(now_ms)
        due, self._due = self._due, {}
        for node_id, beats in due.items():
            self._questions.ask(node_id, beats)

    def _tell(self, node_id: NodeId, number: int, beats: list[_Told]) -> None:
        packed = b"".join([told.packed for told in beats])
        self._send(node_id, consensus_pb2.BeatPB(number=number, beats=packed))

    def told(self, node_id: NodeId, beat: consensus_pb2.BeatPB) -> None:
        """Take what a node sent: beats, or an answer."""
        if beat.answers:
            self._take_answer(node_id, beat)
        else:
            self._answer(node_id, beat)

    def _take_answer(self, node_id: NodeId, beat: consensus_pb2.BeatPB) -> None:
        beats = self._questions.answered(node_id, beat.number)
        if not beats:
            return
        refused = places_from_bytes(beat.refused)
        by_key, now_ms = self._replicas.by_key, self._now_ms
        for at, told in enumerate(beats):
            replica = by_key(told.key)
            if replica is not None:
                replica.beat_answered(told.to, told.term, at not in refused, now_ms)

    def _answer(self, node_id: NodeId, beat: consensus_pb2.BeatPB) -> None:
        if not self._room.takes(node_id, len(beat.beats) // _BEAT.size):
            return
        refused = [
            at
            for at, (tablet, incarnation, leader, own, term, commit_index) in enumerate(
                whole_records(_BEAT, beat.beats)
            )
            if not self._follows(node_id, tablet, incarnation, ReplicaId(leader), own, term, commit_index)
        ]
        answer = consensus_pb2.BeatPB(number=beat.number, answers=True, refused=places_to_bytes(refused))
        self._send(node_id, answer)

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
        self._questions.lost(node_id)
