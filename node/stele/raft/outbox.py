"""Collects the effects of one turn, and knows which Persist a message must wait for. Shared by all roles.

Invariants: effects are given out in the order that `effects` states. A message that promises a term, a vote
or an entry names the Persist that holds it.
"""

from __future__ import annotations

from stele.model.ids import ReplicaId
from stele.raft.effects import Effect, HardState, Persist, Send
from stele.raft.log import LogView
from stele.raft.messages import Message


class Outbox:
    """The effects since the last `take`. Persist ids count from 1; a Send with `after` 0 waits for none."""

    __slots__ = (
        "_at_once",
        "_hard_id",
        "_log",
        "_persists",
        "_waiting",
        "durable_id",
        "early",
        "hard_state",
        "others",
        "persist_id",
    )

    def __init__(self, log: LogView) -> None:
        self._log = log
        self.hard_state: HardState | None = None
        """Term and vote to write with the next Persist; None if neither has changed since the last one."""
        self.early = False
        """Whether the owner shall report when the next Persist is in the log's file, before it is durable."""
        self.persist_id = 0
        """Id of the last Persist issued."""
        self.durable_id = 0
        """Id of the last Persist known durable."""
        self._hard_id = 0  # of the last Persist that holds hard state
        self._at_once: list[Effect] = []
        self._persists: list[Effect] = []
        self._waiting: list[Effect] = []
        self.others: list[Effect] = []
        """All effects but Send and Persist, in order. The parts of the core append to it."""

    def hard_barrier(self) -> int:
        """Id of the Persist that must be durable before a message of this term may leave."""
        if self.hard_state is not None:
            return self.persist_id + 1
        return self._hard_id if self._hard_id > self.durable_id else 0

    def log_barrier(self) -> int:
        """Id of the Persist that must be durable before the whole log may be acknowledged."""
        if self.hard_state is not None or self._log.dirty:
            return self.persist_id + 1
        return self.persist_id if self.persist_id > self.durable_id else 0

    def send(self, to: ReplicaId, message: Message, after: int) -> None:
        """Send `message` once the Persist `after` is durable.

        Use 0 only for a message that promises nothing.
        """
        (self._waiting if after else self._at_once).append(Send(to, message, after))

    def send_once_written(self, to: ReplicaId, message: Message) -> None:
        """Send `message` once the log's new entries are written to its file. The message may claim no more than
        that."""
        self.early = True
        self._waiting.append(Send(to, message, self.persist_id + 1, True))

    def persist(self) -> None:
        """Issue a Persist of all changes since the last one, if there are any."""
        hard = self.hard_state
        if hard is None and not self._log.dirty:
            return
        self.persist_id += 1
        if hard is not None:
            self.hard_state = None
            self._hard_id = self.persist_id
        truncate_from, entries = self._log.take_persist(self.persist_id)
        self._persists.append(Persist(self.persist_id, hard, truncate_from, entries, self.early))
        self.early = False

    def take(self) -> list[Effect]:
        """Give out the turn's effects in their order."""
        self.persist()
        effects = self._at_once
        effects += self._persists
        effects += self._waiting
        effects += self.others
        self._at_once, self._persists, self._waiting, self.others = [], [], [], []
        return effects
