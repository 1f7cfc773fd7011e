"""Questions about many tablets that a node sends to another in one message: their numbers, their answers, their bounds.

Owned by beating.py, confirming.py and following.py, which know what is asked and how it is packed. Knows no tablets.

Invariants: a process never repeats a number, and begins at a random one. An answer counts only for the question with its number, and
for the node that was asked. It says that the node answers only if the node was asked since its connection was last reset.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection
from typing import Generic, NamedTuple, Protocol, TypeVar

import structlog

from stele.model import bounds
from stele.model.ids import NodeId
from stele.rpc.convert import whole_records
from stele.rpc.logging import OncePer

log = structlog.get_logger("stele.tserver")

TABLETS_MAX = 1_024
"""The most tablets in one question."""
_PLACE = struct.Struct(">H")

Part = TypeVar("Part")
"""What its owner remembers of one tablet in a question."""


class Send(Protocol[Part]):
    """Packs a question and sends it to a node, without waiting. A question without parts is a greeting."""

    def __call__(self, node_id: NodeId, number: int, parts: list[Part], /) -> None:
        """`number`: the answer must carry it."""


class Question(NamedTuple, Generic[Part]):
    """What a node was asked, and when."""

    node_id: NodeId
    asked_ms: int
    parts: list[Part]


class Questions(Generic[Part]):
    """The questions of one kind that this process asks. `first` is a random number.

    A question is overdue after `patience_ms`. A node is greeted once in `greet_ms` at most.
    """

    def __init__(self, send: Send[Part], *, first: int, patience_ms: int, greet_ms: int, now_ms: int) -> None:
        self.answering: dict[NodeId, None] = {}
        """The nodes that answer such questions. Nodes of earlier releases do not."""
        self.unanswered: dict[int, Question[Part]] = {}
        """By number, the oldest first."""
        self._send = send
        self._number = first
        self._patience_ms = patience_ms
        self._greet_ms = greet_ms
        self._now_ms = now_ms
        self._first_since: dict[NodeId, int] = {}  # the first number sent to a node since it was lost
        self._greeted_ms: dict[NodeId, int] = {}

    def greet(self, node_id: NodeId) -> None:
        """Find out whether a node answers, by a question about nothing."""
        if self._now_ms - self._greeted_ms.get(node_id, self._now_ms - self._greet_ms) >= self._greet_ms:
            self._greeted_ms[node_id] = self._now_ms
            self._send(node_id, self._next(node_id), [])

    def ask(self, node_id: NodeId, parts: list[Part]) -> None:
        """Ask a node about all of these, in as few questions as hold them."""
        for start in range(0, len(parts), TABLETS_MAX):
            number, some = self._next(node_id), parts[start : start + TABLETS_MAX]
            self.unanswered[number] = Question(node_id, self._now_ms, some)
            self._send(node_id, number, some)

    def _next(self, node_id: NodeId) -> int:
        self._number += 1
        self._first_since.setdefault(node_id, self._number)
        return self._number

    def asked(self, node_id: NodeId, number: int) -> list[Part]:
        """What this node was asked by that number. Empty: nothing, or it was answered, or is overdue."""
        question = self.unanswered.get(number)
        return [] if question is None or question.node_id != node_id else question.parts

    def answered(self, node_id: NodeId, number: int) -> list[Part]:
        """As `asked`, when a node has answered the whole question: no other answer to it counts."""
        first = self._first_since.get(node_id)
        if first is not None and first <= number <= self._number:
            # The node heard longest ago comes first.
            self.answering[node_id] = self.answering.pop(node_id, None)
            if len(self.answering) > bounds.PEERS_HEARD_MAX:
                del self.answering[next(iter(self.answering))]
        parts = self.asked(node_id, number)
        if parts:
            del self.unanswered[number]
        return parts

    def tick(self, now_ms: int) -> list[Part]:
        """Time has passed. Returns what the questions were about that are overdue now."""
        self._now_ms = now_ms
        overdue: list[Part] = []
        while self.unanswered:
            number, question = next(iter(self.unanswered.items()))
            if now_ms - question.asked_ms < self._patience_ms:
                break
            del self.unanswered[number]
            overdue += question.parts
        return overdue

    def lost(self, node_id: NodeId) -> None:
        """The connection to a node was reset. The node that answers next may run another release."""
        self.answering.pop(node_id, None)
        self._first_since.pop(node_id, None)
        self._greeted_ms.pop(node_id, None)

    def give_up(self, node_id: NodeId) -> list[Part]:
        """Take back all that a node was asked, and return it."""
        taken: list[Part] = []
        for number, question in list(self.unanswered.items()):
            if question.node_id == node_id:
                del self.unanswered[number]
                taken += question.parts
        return taken


class Room:
    """How many tablets each node may ask about until the next `clear`. A node that asks about more gets no answer.

    `of_one`: the most for one node. A node leaves the others their room, however much it asks. `event`: what is logged of it.
    """

    def __init__(self, of_one: int, event: str) -> None:
        self._of_one = of_one
        self._event = event
        self._taken: Counter[NodeId] = Counter()
        self._once = OncePer()

    @property
    def untouched(self) -> bool:
        """Whether nothing was taken since the last `clear`."""
        return not self._taken

    def takes(self, node_id: NodeId, tablets: int) -> bool:
        """Whether a node's question about so many tablets is answered. It then counts."""
        if tablets > TABLETS_MAX or self._taken[node_id] + tablets > self._of_one:
            self._once.tell(log.warning, self._event, node_id, "long", peer_node=node_id, tablets=tablets)
            return False
        self._taken[node_id] += tablets
        return True

    def clear(self) -> None:
        """All have their whole room again."""
        self._taken.clear()


def places_to_bytes(places: Collection[int]) -> bytes:
    """The tablets that an answer refuses, by their places in the question."""
    return b"".join(map(_PLACE.pack, places))


def places_from_bytes(data: bytes) -> frozenset[int]:
    """The places in an answer. Any may be there, also those that the question does not have."""
    return frozenset(place for (place,) in whole_records(_PLACE, data))
