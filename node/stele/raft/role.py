"""The ports of a role: the state that all roles share, and the `Switch` by which a role asks for another one.

Invariant: a role that has asked its `Switch` for another role does nothing more. The next message goes to the
new one.
"""

from __future__ import annotations

from typing import Protocol

from stele.model.errors import Code
from stele.model.ids import ReplicaId
from stele.raft.messages import Message
from stele.raft.state import RaftState


class Switch(Protocol):
    """How a role hands over to another role. `why` is put into RoleChanged."""

    def start(self, now_ms: int) -> None:
        """Begin in the role that the configuration gives.

        Campaign at once if named to lead, or if no other replica votes.
        """

    def adopt_term(self, term: int, why: str) -> None:
        """Enter a higher term as a follower that knows no leader."""

    def follow(self, leader: ReplicaId | None, why: str, code: Code = Code.NOT_LEADER) -> None:
        """Stop leading or campaigning within the term. A leader refuses the requests that wait for it, with `code`."""

    def campaign(self, why: str) -> None:
        """Forget the leader, and ask who would vote for this replica."""

    def stand(self, why: str, *, ignore_live_leader: bool, promoted: bool = False, released: int = 0) -> None:
        """Raise the term and ask for votes in it, unless a promise forbids it. `promoted`: an administrator asked for it.
        `released`: as in `VoteRequest`."""

    def lead(self, why: str) -> None:
        """Become the leader: a majority has voted for this replica."""

    def fail(self, reason: str) -> None:
        """Abstain until the owner makes a new core."""

    def receive(self, sender: ReplicaId, message: Message) -> None:
        """Give a message to the role that acts now."""


class Acting(Protocol):
    """What the code shared by all roles (`any_role`) needs from a role."""

    @property
    def state(self) -> RaftState:
        """What all roles share."""

    @property
    def switch(self) -> Switch:
        """The Switch by which this role asks for another one."""
