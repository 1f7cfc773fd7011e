"""The state machine of one replica: events in, effects out. Entry point of the package.

    core = RaftCore(options, self_replica, initial, rng)
    effects = core.step(Start(now_ms))
    effects = core.step_many(events)  # one turn: one Persist (as a rule) and one message per peer for all of them

Composed of `RaftState`, which all roles share, and `Roles`, which holds the role that acts.

Invariant: the same initial state, random numbers and events give the same effects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import ClassVar

from stele.model.config import Configuration
from stele.model.ids import ReplicaId
from stele.raft.cause import cause_of
from stele.raft.effects import Effect, Role
from stele.raft.events import Event, InitialState
from stele.raft.follower import Follower
from stele.raft.options import RaftOptions
from stele.raft.ports import Chance
from stele.raft.progress import Progress
from stele.raft.roles import Parts, Roles
from stele.raft.state import RaftState
from stele.raft.status import RaftStatus


class RaftCore:
    """One replica of one group. Not thread-safe; `step` never blocks."""

    parts: ClassVar[Parts] = Parts()
    """The classes that a core is made of; a subclass in tests replaces one."""

    def __init__(
        self, options: RaftOptions, self_replica: ReplicaId, initial: InitialState, rng: Chance
    ) -> None:
        self.options = options
        self.self_replica = self_replica
        self.state = RaftState(options, self_replica, initial, rng, self.parts.log, self.parts.outbox)
        """The state that all roles share. An owner reads the properties below; tests and invariants look
        inside."""
        self.log = self.state.log
        self._roles = Roles(self.state, self.parts, initial.leader_hint)

    # Events

    def step(self, event: Event) -> list[Effect]:
        """Handle one event. Returns the effects that the owner must carry out.

        Raises:
            InvariantViolation: the algorithm's own rules are broken; the replica must stop.
        """
        return self.step_many((event,))

    def step_many(self, events: Iterable[Event], steady_ms: int = 0) -> list[Effect]:
        """Handle several events as one turn of the owner's loop. Returns the combined effects of all.

        `steady_ms`: a reading of the node's steady clock before this call. That clock goes on while the machine is
        suspended. 0: no lease is asked for or promised in this turn.

        Raises as `step`.
        """
        self.state.steady_ms = steady_ms
        roles = self._roles
        roles.take(events)
        leader = roles.leader
        if leader is not None:
            leader.end_turn()
        return self.state.outbox.take()

    # Beats: heartbeats without a turn (heartbeats.py)

    def beat(self, now_ms: int, takes_beats: Callable[[ReplicaId], bool]) -> tuple[ReplicaId, ...] | None:
        """In place of a due Tick: choose the peers that are to hear now that this replica leads `term`, and has
        committed up to `commit_index`.

        `takes_beats` says whether a peer's node takes beats. Returns None if the Tick is needed, as it is for all but a leader.
        """
        leader = self._roles.leader
        return None if leader is None else leader.beat(now_ms, takes_beats)

    def take_beat(self, leader: ReplicaId, term: int, commit_index: int, now_ms: int) -> bool:
        """Hear that `leader` leads `term`, and has committed up to `commit_index`.

        Returns False if a heartbeat would say more than that, or this replica does not follow. Then nothing is changed.
        """
        acting = self._roles.acting
        return (
            isinstance(acting, Follower)
            and self.state.term == term
            and acting.take_beat(leader, commit_index, now_ms)
        )

    def beat_answered(self, peer: ReplicaId, term: int, followed: bool, now_ms: int) -> None:
        """A peer answered a beat of this term: it followed, or wants a heartbeat."""
        leader = self._roles.leader
        if leader is not None and self.state.term == term:
            leader.beat_answered(peer, followed, now_ms)

    # What the owner asks

    @property
    def next_deadline_ms(self) -> int:
        """Latest time of the next Tick, on the owner's clock; NEVER_MS if nothing waits for time."""
        leader, transfer = self._roles.leader, self.state.pending.transfer
        due = self.state.timer.due_ms if leader is None else leader.heartbeats.due_ms
        return due if transfer is None else min(due, transfer.due_ms)

    @property
    def cause(self) -> str:
        """The event that is being handled, worded as the `cause` of an effect. After an error, the event that
        failed."""
        return cause_of(self.state.event)

    # What is known

    @property
    def term(self) -> int:
        """The present term."""
        return self.state.term

    @property
    def voted_for(self) -> ReplicaId | None:
        """The replica that this one voted for in the present term; None if it has not voted yet."""
        return self.state.voted_for

    @property
    def role(self) -> Role:
        """The role of this replica in its group."""
        return self.state.role

    @property
    def leader(self) -> ReplicaId | None:
        """The leader, as far as this replica knows."""
        return self.state.leader

    @property
    def commit_index(self) -> int:
        """The highest index known committed."""
        return self.state.commit_index

    @property
    def all_replicated_index(self) -> int:
        """The last index that every voter holds durably, as far as this replica knows."""
        return self.state.all_replicated_index

    @property
    def config(self) -> Configuration:
        """The active configuration: the last one in the log, committed or not."""
        return self.log.config

    @property
    def committed_config(self) -> Configuration:
        """The last configuration known committed."""
        return self.state.committed_config

    @property
    def pending_change_index(self) -> int | None:
        """Log index of a membership change that is not known committed."""
        return self.state.pending_change_index

    @property
    def term_committed(self) -> bool:
        """Whether a leader is known, and an entry of its term is known committed."""
        return self.state.term_committed

    @property
    def failed(self) -> bool:
        """Whether this replica is FAILED. Then it abstains."""
        return self.state.failed

    @property
    def has_data(self) -> bool:
        """Whether it holds the rows, not only the log."""
        return self.state.has_data

    @property
    def is_witness(self) -> bool:
        """Whether this replica votes without rows."""
        return self.state.witness

    @property
    def may_campaign(self) -> bool:
        """Whether this replica is a voter of its own configuration, has not FAILED, and its disk does not
        stall."""
        return self.state.may_campaign

    @property
    def leads_if_nobody_can(self) -> bool:
        """Whether this replica stands for election only where no other can lead.

        True for a witness, and for a replica whose node is unfit.
        """
        return self.state.leads_if_nobody_can

    @property
    def transferring(self) -> bool:
        """Whether leadership is being handed over."""
        return self.state.pending.transfer is not None

    @property
    def caught_up_ms(self) -> int | None:
        """A time on the owner's clock. All entries that were committed by then have been handed out.

        None: since its start, this replica knows no such time.
        """
        return self._roles.acting.caught_up_ms

    @property
    def reads_pending(self) -> bool:
        """Whether a read waits for its answer."""
        leader = self._roles.leader
        return leader is not None and leader.reads.pending

    @property
    def read_point(self) -> tuple[int, int] | None:
        """(term, index) at which this leader may answer all reads that have come so far (Raft §8).

        The index is the commit index, or a higher one up to which callers were answered early (HeldByAll).
        Answer only once `confirmed_by` says that this replica still led after the reads came.

        None: this replica does not lead, has no rows, or has committed nothing in its term yet. Then use
        RequestRead.
        """
        state = self.state
        leader = self._roles.leader
        if leader is None or state.witness or not state.term_committed:
            return None
        return state.term, leader.read_index

    def leased(self, steady_us: int) -> bool:
        """Whether this replica leads and its lease holds at this time of the node's steady clock.

        If so, nobody else can lead. Reads that came before that time may be answered at `read_point` at once."""
        leader = self._roles.leader
        return leader is not None and leader.lease.holds(
            steady_us, leader.peers.voters, self.state.config.majority
        )

    def bound_at(self, now_ms: int) -> bool:
        """Whether a promise to a leader forbids this replica to vote at this time of the owner's clock."""
        return self.state.promise.binds(now_ms, 0)

    def vouches(self, leader: ReplicaId, term: int) -> bool:
        """Whether this voter follows `leader` in `term`, has voted in no later term, and has made its term and
        vote durable."""
        state = self.state
        return (
            state.term == term
            and state.leader == leader
            and state.role is Role.FOLLOWER
            and not state.failed
            and not state.outbox.hard_barrier()
        )

    def confirmed_by(self, term: int, followers: Collection[ReplicaId]) -> bool:
        """Whether this replica leads in `term`, and these followers and itself are a majority of the voters."""
        leader, state = self._roles.leader, self.state
        if leader is None or state.term != term:
            return False
        count = 0
        for voter in leader.peers.voters:
            if voter == state.self_replica or voter in followers:
                count += 1
        return count >= state.config.majority

    @property
    def last_persist_id(self) -> int:
        """Id of the last Persist issued; 0 before the first."""
        return self.state.outbox.persist_id

    @property
    def progress(self) -> tuple[Progress, ...]:
        """What a leader knows of each peer, read-only; empty in every other role."""
        leader = self._roles.leader
        return () if leader is None else tuple(leader.peers.progress.values())

    def status(self) -> RaftStatus:
        """Return a frozen view of this core."""
        state = self.state
        since = state.now_ms - self.options.election_max_ms
        leads = state.role is Role.LEADER
        transfer = state.pending.transfer
        return RaftStatus(
            self_replica=self.self_replica,
            role=state.role,
            term=state.term,
            voted_for=state.voted_for,
            leader=state.leader,
            config=state.config,
            committed_config=state.committed_config,
            pending_change_index=state.pending_change_index,
            last_logged=self.log.last_opid,
            last_durable=self.log.opid_at(self.log.durable_index),
            log_start=self.log.start,
            commit_index=state.commit_index,
            term_committed=state.term_committed,
            serves=leads and state.term_committed and not state.witness,
            failed=state.failed,
            has_data=state.has_data,
            transferring_to=None if transfer is None else transfer.target,
            all_replicated_index=state.all_replicated_index,
            peers=tuple(progress.status(since) for progress in self.progress),
        )
