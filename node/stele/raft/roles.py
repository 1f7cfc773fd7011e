"""Holds the role that acts, changes it, and gives it the events and messages, by the table.

    NON_PARTICIPANT, LEARNER, FOLLOWER = Follower ──campaign, stand──▶ Candidate ──lead──▶ Leader
                                            ▲                              │                 │
                                            └──────── follow, adopt_term ──┴─────────────────┘      any ──fail──▶ Failed

Invariant: one role acts at a time. When another one begins, the old role object is dropped with all its
state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stele.model.errors import Code, ensure
from stele.model.ids import ReplicaId
from stele.raft import table
from stele.raft.candidate import Candidate
from stele.raft.changes import Changes
from stele.raft.effects import Role
from stele.raft.events import Event, Received
from stele.raft.failed import Failed
from stele.raft.follower import Follower
from stele.raft.leader import Leader
from stele.raft.log import LogView
from stele.raft.messages import Message, TimeoutNow
from stele.raft.outbox import Outbox
from stele.raft.state import RaftState
from stele.raft.timer import NEVER_MS


class Parts(NamedTuple):
    """The classes that a core is made of. Tests replace one by a class with a planted fault."""

    log: type[LogView] = LogView
    outbox: type[Outbox] = Outbox
    follower: type[Follower] = Follower
    leader: type[Leader] = Leader
    changes: type[Changes] = Changes


class Roles:
    """Implements `Switch`."""

    __slots__ = ("_handlers", "_hint", "_parts", "_started", "acting", "leader", "state")

    def __init__(self, state: RaftState, parts: Parts, leader_hint: ReplicaId | None) -> None:
        self.state = state
        self._parts = parts
        self._hint = leader_hint
        self._started = False
        self.acting: Follower | Candidate | Leader | Failed
        if state.failed:
            self._act(Failed(state, self), table.FAILED)
        else:
            self._act(parts.follower(state, self), table.FOLLOWER)

    def take(self, events: Iterable[Event]) -> None:
        """Give each event to the role of that moment. An event may change the role that gets the next one."""
        state = self.state
        for event in events:
            state.event = event
            if type(event) is Received:
                if event.now_ms > state.now_ms:
                    state.now_ms = event.now_ms
                self._handlers.messages[type(event.message)](self.acting, event.sender, event.message)
            else:
                self._handlers.events[type(event)](self.acting, event)
        state.event = None  # it may hold entries

    def receive(self, sender: ReplicaId, message: Message) -> None:
        """As `Switch.receive`."""
        self._handlers.messages[type(message)](self.acting, sender, message)

    def _act(self, role: Follower | Candidate | Leader | Failed, handlers: table.Handlers) -> None:
        self.acting = role
        self._handlers = handlers
        self.leader = (
            role if isinstance(role, Leader) else None
        )  # the same, with the type looked up for each turn

    # Switch

    def start(self, now_ms: int) -> None:
        """As `Switch.start`."""
        ensure(not self._started, "raft: Start came twice")
        self._started = True
        state, acting = self.state, self.acting
        state.now_ms = now_ms
        promised_ms = state.options.promised_ms
        if promised_ms and state.term:  # in term 0 there was no leader to promise anything to
            state.promise.wait_out(state.term, now_ms + promised_ms)
        hinted = self._hint == state.self_replica
        state.set_role(state.resting_role, None if hinted else self._hint, "started")
        state.draw_election()
        single = len(state.config.voters) == 1
        if isinstance(acting, Follower) and state.may_campaign and ((hinted and state.fit) or single):
            acting.campaign("named to lead" if hinted else "the only voter")

    def adopt_term(self, term: int, why: str) -> None:
        """As `Switch.adopt_term`."""
        self.state.enter_term(term, None)
        self.follow(None, why)

    def follow(self, leader: ReplicaId | None, why: str, code: Code = Code.NOT_LEADER) -> None:
        """As `Switch.follow`. A new Follower does not know yet how much of its log matches the leader's."""
        self._follow(leader, why, code)

    def campaign(self, why: str) -> None:
        """As `Switch.campaign`."""
        self._follow(None, why, Code.NOT_LEADER).ask_around(why)

    def _follow(self, leader: ReplicaId | None, why: str, code: Code) -> Follower:
        state, was = self.state, self.acting
        follower = self._parts.follower(state, self)
        self._act(follower, table.FOLLOWER)
        state.set_role(state.resting_role, leader, why)
        if not isinstance(was, Follower) or state.timer.due_ms == NEVER_MS:
            state.draw_election()
        if leader is not None:
            state.follow_word_of(leader)
        if isinstance(was, Leader):
            was.end(code, why)
        return follower

    def stand(self, why: str, *, ignore_live_leader: bool, promoted: bool = False, released: int = 0) -> None:
        """As `Switch.stand`."""
        state = self.state
        if state.bound(released):
            return
        state.enter_term(state.term + 1, state.self_replica, promoted=promoted)
        state.heard_ms = None
        candidate = Candidate(state, self, ignore_live_leader=ignore_live_leader, released=released)
        self._act(candidate, table.CANDIDATE)
        state.set_role(Role.CANDIDATE, None, why)
        state.draw_election()
        candidate.ballot.ask()

    def lead(self, why: str) -> None:
        """As `Switch.lead`."""
        leader = self._parts.leader(self.state, self, self._parts.changes)
        self._act(leader, table.LEADER)
        self.state.timer.unanswered = 0
        leader.begin(why)

    def fail(self, reason: str) -> None:
        """As `Switch.fail`. A leader also asks a successor to stand for election, because its silence may go
        unnoticed.

        In a group at rest the peers listen to its node, which is alive.
        """
        state, was = self.state, self.acting
        state.failed = True
        if isinstance(was, Leader):
            heir = was.handover.best_successor()
            self.follow(None, f"this replica has FAILED: {reason}", Code.STEPPING_DOWN)
            if heir is not None:
                asks = TimeoutNow(state.term, lease_given_up=was.lease.give_up())
                state.outbox.send(heir, asks, state.outbox.hard_barrier())
        elif isinstance(was, Candidate):
            self.follow(None, f"this replica has FAILED: {reason}")
        self._act(Failed(state, self), table.FAILED)
        state.timer.due_ms = NEVER_MS
