"""Linearizable reads of many tablets, confirmed by one message to each node instead of one for each tablet
(Raft §8).

Owned by the messenger. In each turn of the loop it collects the tablets for which reads have come. It asks
every other node once: which of these replicas of yours do not follow mine, in these terms? The others are
confirmed. If a node does not answer within a heartbeat, the tablet's core asks by heartbeats. Nodes of
earlier releases are asked by heartbeats alone.

Invariants: an answer counts only for the tablets of the question with its number, so each was given after the
reads came. A process begins at a random number, and never repeats a number. However much other nodes ask, one
turn answers a bounded part.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import NamedTuple

import structlog

from stele.consensus.ports import Reader
from stele.consensus.read_round import ReadRound
from stele.model import bounds
from stele.model.ids import NodeId, ReplicaId
from stele.rpc.convert import whole_records
from stele.rpc.logging import OncePer
from stele.rpc.proto import consensus_pb2
from stele.tserver.replicas import Replicas

log = structlog.get_logger("stele.tserver")

_ASK = struct.Struct(">16sQQQQ")
"""The fields of one asked tablet: tablet, its incarnation, who leads, who is asked, the term."""
_PLACE = struct.Struct(">H")
ASKS_MAX = 1_024
"""The most tablets in one question. An answer takes some 2 µs for each."""
_ANSWERED_MAX = 4_096
"""The most tablets about which one turn answers. A node that asks about more gets no answer. Its cores then
ask by heartbeats.
"""


class _Question(NamedTuple):
    """What a node was asked, and when."""

    node_id: NodeId
    asked_ms: int
    parts: list[tuple[ReadRound, ReplicaId]]


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
        self._number = first
        self._patience_ms = patience_ms
        self._now_ms = now_ms
        self._readers: list[Reader] = []  # of this turn
        self._questions: dict[int, _Question] = {}  # by number, the oldest first
        self._able: dict[NodeId, None] = {}  # the nodes that answer such questions
        self._greeted: dict[NodeId, None] = {}  # since the last tick
        self._answered = 0  # in this turn
        self._once = OncePer()

    def read_came(self, reader: Reader) -> None:
        """As `Host.read_came`."""
        if not self._readers:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._readers.append(reader)

    def _end_turn(self) -> None:
        readers, self._readers = self._readers, []
        wanted: dict[NodeId, list[tuple[ReadRound, ReplicaId]]] = {}
        for reader in readers:
            begun = reader.begin_round()
            if begun is None:
                continue
            others = [peer for peer in begun.others if peer.node_id in self._able]
            for peer in begun.others:
                if peer.node_id not in self._able:
                    self._greet(peer.node_id)
                    begun.refuse()
            for peer in others:
                wanted.setdefault(peer.node_id, []).append((begun, peer.replica_id))
        for node_id, parts in wanted.items():
            for start in range(0, len(parts), ASKS_MAX):
                self._ask(node_id, parts[start : start + ASKS_MAX])

    def _greet(self, node_id: NodeId) -> None:
        """Send an empty question, to find out whether a node answers questions."""
        if node_id not in self._greeted:
            self._greeted[node_id] = None
            self._send(node_id, consensus_pb2.ConfirmPB())

    def _ask(self, node_id: NodeId, parts: list[tuple[ReadRound, ReplicaId]]) -> None:
        self._number += 1
        self._questions[self._number] = _Question(node_id, self._now_ms, parts)
        asks = []
        for begun, replica_id in parts:
            standing = begun.standing
            block = standing.superblock
            asks.append(
                _ASK.pack(
                    standing.raw_tablet_id, block.tablet_incarnation, block.replica_id, replica_id, begun.term
                )
            )
        self._send(node_id, consensus_pb2.ConfirmPB(number=self._number, asks=b"".join(asks)))

    def told(self, node_id: NodeId, confirm: consensus_pb2.ConfirmPB) -> None:
        """Take what a node sent: a question, or an answer."""
        if confirm.answers:
            self._able[node_id] = self._able.pop(node_id, None)  # the one heard longest ago comes first
            if len(self._able) > bounds.PEERS_HEARD_MAX:
                del self._able[next(iter(self._able))]
            self._take_answer(node_id, confirm)
        else:
            self._answer(node_id, confirm)

    def _take_answer(self, node_id: NodeId, confirm: consensus_pb2.ConfirmPB) -> None:
        question = self._questions.get(confirm.number)
        if question is None or question.node_id != node_id:
            return
        del self._questions[confirm.number]
        refused = frozenset(at for (at,) in whole_records(_PLACE, confirm.refused))
        for at, (begun, replica_id) in enumerate(question.parts):
            if at in refused:
                begun.refuse()
            else:
                begun.confirm(replica_id)

    def _answer(self, node_id: NodeId, confirm: consensus_pb2.ConfirmPB) -> None:
        count = len(confirm.asks) // _ASK.size
        if count > ASKS_MAX or self._answered + count > _ANSWERED_MAX:
            event = "dropped a node's question about leaders: too many tablets at once"
            self._once.tell(log.warning, event, node_id, "long", peer_node=node_id, tablets=count)
            return
        if not self._answered:
            asyncio.get_running_loop().call_soon(self._rest)
        self._answered += count
        refused = [
            _PLACE.pack(at)
            for at, (tablet, incarnation, leader, own, term) in enumerate(whole_records(_ASK, confirm.asks))
            if not self._follows(node_id, tablet, incarnation, ReplicaId(leader), own, term)
        ]
        answer = consensus_pb2.ConfirmPB(number=confirm.number, answers=True, refused=b"".join(refused))
        self._send(node_id, answer)

    def _rest(self) -> None:
        self._answered = 0

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
        self._now_ms = now_ms
        self._greeted.clear()
        while self._questions:
            number, question = next(iter(self._questions.items()))
            if now_ms - question.asked_ms < self._patience_ms:
                return
            del self._questions[number]
            for begun, _ in question.parts:
                begun.give_up()

    def lost(self, node_id: NodeId) -> None:
        """Forget that a node answers questions: its connection was reset, and it may come back with another
        release.
        """
        self._able.pop(node_id, None)
