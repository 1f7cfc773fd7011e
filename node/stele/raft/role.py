"""What a role is to its neighbours: the shared state it acts on, and the ways in which it gives way to another role.

Invariant: a role that has asked its `Switch` for another role does nothing more; the next message goes to the new one.
"""

from __future__ import annotations

from typing import Protocol

from stele.model.errors import Code
from stele.model.ids import ReplicaId
from stele.raft.messages import Message
from stele.raft.state import RaftState


class Switch(Protocol):
    """Changes of role. `why` is told in the cause of RoleChanged."""

    def start(self, now_ms: int) -> None:
        """Begin in the role that the configuration gives. Campaign at once where named to lead, or where nobody else votes."""

    def adopt_term(self, term: int, why: str) -> None:
        """Enter a higher term as a follower of nobody."""

    def follow(self, leader: ReplicaId | None, why: str, code: Code = Code.NOT_LEADER) -> None:
        """Stop leading or campaigning within the term. `code` answers whoever waits for a leader that ends."""

    def campaign(self, why: str) -> None:
        """Follow nobody, and ask who would vote for this replica."""

    def stand(self, why: str, *, ignore_live_leader: bool) -> None:
        """Raise the term and ask for votes in it."""

    def lead(self, why: str) -> None:
        """A majority has voted for this replica."""

    def fail(self, reason: str) -> None:
        """Abstain from now on, until the owner makes a new core."""

    def receive(self, sender: ReplicaId, message: Message) -> None:
        """Give a message to the role that acts now."""


class Acting(Protocol):
    """A role, as handlers that serve several roles see it."""

    @property
    def state(self) -> RaftState:
        """What all roles share."""

    @property
    def switch(self) -> Switch:
        """How this role ends."""
