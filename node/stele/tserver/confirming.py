"""Linearizable reads of many tablets, confirmed by one message to each node instead of one for each tablet
(Raft §8).

Owned by the messenger. In each turn of the loop it collects the tablets for which reads have come. It asks
every other node once: which of these replicas of yours do not follow mine, in these terms? The others are
confirmed. If a node does not answer within a heartbeat, the tablet's core asks by heartbeats. Nodes of
earlier releases are asked by heartbeats alone.

Invariants: an answer counts only for the tablets of the question with its number, so each was given after the
reads came (questions.py). However much a node asks, one turn answers a bounded part of it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

from stele.consensus.ports import Reader
from stele.consensus.read_round import ReadRound
from stele.model.ids import NodeId, ReplicaId
from stele.rpc.convert import whole_records
from stele.rpc.proto import consensus_pb2
from stele.tserver.questions import Questions, Room, places_from_bytes, places_to_bytes
from stele.tserver.replicas import Replicas

_ASK = struct.Struct(">16sQQQQ")
"""The fields of one asked tablet: tablet, its incarnation, who leads, who is asked, the term."""
_ANSWERED_MAX = 4_096
"""The most tablets of one asking node about which one turn answers, some 2 µs each. A node that asks about more gets
no answer. Its cores then ask by heartbeats.
"""

_GREET_MS = 1
"""A node that does not answer such questions yet is greeted once in each tick, if tablets are read."""

_Part = tuple[ReadRound, ReplicaId]


class Confirming:
    """The questions of one node, and its answers to others.

    `send(node_id, confirm)` sends to a node. `first` is a random number. A question is given up after `patience_ms`.
    """

    def __init__(
        self,
        replicas: Replicas,
        send: Callable[[NodeId, consensus_pb2.ConfirmPB], None],
        *,
        first: int,
        patience_ms: int,
        now_ms: int,
    ) -> None:
        self._replicas = replicas
        self._send = send
        self._readers: list[Reader] = []  # of this turn
        self._questions = Questions(
            self._ask, first=first, patience_ms=patience_ms, greet_ms=_GREET_MS, now_ms=now_ms
        )
        event = "dropped a node's question about leaders: too many tablets at once"
        self._room = Room(_ANSWERED_MAX, event)

    def read_came(self, reader: Reader) -> None:
        """As `Host.read_came`."""
        if not self._readers:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._readers.append(reader)

    def _end_turn(self) -> None:
        readers, self._readers = self._readers, []
        wanted: dict[NodeId, list[_Part]] = {}
        answering = self._questions.answering
        for reader in readers:
            begun = reader.begin_round()
            if begun is None:
                continue
            others = [peer for peer in begun.others if peer.node_id in answering]
            for peer in begun.others:
                if peer.node_id not in answering:
                    self._questions.greet(peer.node_id)
                    begun.refuse()
            for peer in others:
                wanted.setdefault(peer.node_id, []).append((begun, peer.replica_id))
        for node_id, parts in wanted.items():
            self._questions.ask(node_id, parts)

    def _ask(self, node_id: NodeId, number: int, parts: list[_Part]) -> None:
        asks = []
        for begun, replica_id in parts:
            standing = begun.standing
            block = standing.superblock
            asks.append(
                _ASK.pack(
                    standing.raw_tablet_id, block.tablet_incarnation, block.replica_id, replica_id, begun.term
                )
            )
        self._send(node_id, consensus_pb2.ConfirmPB(number=number, asks=b"".join(asks)))

    def told(self, node_id: NodeId, confirm: consensus_pb2.ConfirmPB) -> None:
        """Take what a node sent: a question, or an answer."""
        if confirm.answers:
            self._take_answer(node_id, confirm)
        else:
            self._answer(node_id, confirm)

    def _take_answer(self, node_id: NodeId, confirm: consensus_pb2.ConfirmPB) -> None:
        parts = self._questions.answered(node_id, confirm.number)
        if not parts:
            return
        refused = places_from_bytes(confirm.refused)
        for at, (begun, replica_id) in enumerate(parts):
            if at in refused:
                begun.refuse()
            else:
                begun.confirm(replica_id)

    def _answer(self, node_id: NodeId, confirm: consensus_pb2.ConfirmPB) -> None:
        untouched = self._room.untouched
        if not self._room.takes(node_id, len(confirm.asks) // _ASK.size):
            return
        if untouched:
            asyncio.get_running_loop().call_soon(self._room.clear)
        refused = [
            at
            for at, (tablet, incarnation, leader, own, term) in enumerate(whole_records(_ASK, confirm.asks))
            if not self._follows(node_id, tablet, incarnation, ReplicaId(leader), own, term)
        ]
        answer = consensus_pb2.ConfirmPB(
            number=confirm.number, answers=True, refused=places_to_bytes(refused)
        )
        self._send(node_id, answer)

    def _follows(
        self, node_id: NodeId, tablet: bytes, incarnation: int, leader: ReplicaId, own: int, term: int
    ) -> bool:
        replica = self._replicas.route((tablet, own))
        return (
            replica is not None
            and replica.superblock.tablet_incarnation == incarnation
            and replica.vouches(node_id, leader, term)
        )

    def tick(self, now_ms: int) -> None:
        """Give up the questions that were not answered in time."""
        for begun, _ in self._questions.tick(now_ms):
            begun.give_up()

    def lost(self, node_id: NodeId) -> None:
        """Forget that a node answers questions: its connection was reset, and it may come back with another
        release.
        """
        self._questions.lost(node_id)
