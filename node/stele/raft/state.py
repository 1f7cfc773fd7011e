"""The state that all roles share: hard state, log, role, leader, the clock reading, the outbox.

Made by `core`, changed by the role that acts and by `any_role`. State that dies with a role is in that role's
object.

Invariants: the term never falls. A vote never changes within a term. The commit index never falls. Only
entries that are committed and durable here are handed out.
"""

from __future__ import annotations

from stele.model.config import Configuration, MemberType
from stele.model.errors import ensure
from stele.model.ids import ReplicaId
from stele.raft.cause import cause_of
from stele.raft.effects import Committed, ConfigChanged, HardState, MessageIgnored, Role, RoleChanged
from stele.raft.events import Event, InitialState
from stele.raft.lease import Promise
from stele.raft.log import LogView
from stele.raft.messages import UpdateRequest
from stele.raft.options import RaftOptions
from stele.raft.outbox import Outbox
from stele.raft.pending import Pending
from stele.raft.ports import Chance
from stele.raft.timer import NEVER_MS, ElectionTimer


class RaftState:
    """The state that all roles share."""

    __slots__ = (
        "all_replicated_index",
        "caught_up_ms",
        "commit_index",
        "event",
        "failed",
        "fit",
        "has_data",
        "heard_ms",
        "leader",
        "log",
        "lost_leader",
        "now_ms",
        "options",
        "outbox",
        "pending",
        "promise",
        "role",
        "self_replica",
        "stalled_until_ms",
        "steady_ms",
        "term",
        "term_leader",
        "timer",
        "voted_for",
        "witness",
    )

    def __init__(
        self,
        options: RaftOptions,
        self_replica: ReplicaId,
        initial: InitialState,
        rng: Chance,
        log_class: type[LogView] = LogView,
        outbox_class: type[Outbox] = Outbox,
    ) -> None:
        self.options = options
        self.self_replica = self_replica
        self.log = log = log_class(
            initial.log_start,
            initial.config,
            initial.entries,
            initial.commit_index,
            options.tail_bytes_max,
            initial.skipped,
        )
        self.outbox = outbox_class(log)
        self.pending = Pending(log, self.outbox)
        self.timer = ElectionTimer(options, rng)
        self.now_ms = 0
        self.steady_ms = 0
        """The owner's steady clock when the turn began; 0: leases are neither asked for nor promised now."""
        self.promise = Promise()
        self.event: Event | None = None
        """The event that is being handled; None between turns, and at the end of a turn."""
        self.term = initial.term
        self.voted_for = initial.voted_for
        self.commit_index = initial.commit_index
        self.all_replicated_index = 0
        """The last index that every voter holds durably, as this replica counted or its leader said."""
        self.role = Role.NON_PARTICIPANT
        self.leader: ReplicaId | None = None
        """The leader, as far as this replica knows; at the start, the replica that is named to lead."""
        self.term_leader: ReplicaId | None = None
        """The replica that was seen to lead this term.

        It stays when `leader` is forgotten: a term has one leader.
        """
        self.lost_leader: ReplicaId | None = None
        """The last leader, if its node failed; None once another leads or it is back."""
        self.heard_ms: int | None = None
        """When a live leader was last heard; None after an election, and after the leader's node failed."""
        self.caught_up_ms: int | None = None
        """A time on the owner's clock. Every entry that the leader had reported as committed by then has been
        handed out."""
        self.failed = initial.failed
        self.has_data = not initial.witness_without_data
        self.fit = True
        self.stalled_until_ms = 0
        self.witness = self._is_witness()
        # The log of a copied tablet may have terms that this new replica never entered.
        if log.last_term > self.term:
            self.enter_term(log.last_term, None)

    # Membership of this replica

    @property
    def config(self) -> Configuration:
        """The active configuration."""
        return self.log.config

    @property
    def committed_config(self) -> Configuration:
        """The last configuration known committed."""
        return self.log.config_at(self.commit_index)

    @property
    def pending_change_index(self) -> int | None:
        """Log index of a membership change that is not known committed."""
        at = self.log.config_index
        return at if at > self.commit_index else None

    @property
    def resting_role(self) -> Role:
        """The role that the configuration gives to a replica that neither leads nor campaigns."""
        me = self.config.peer(self.self_replica)
        if me is None:
            return Role.NON_PARTICIPANT
        return Role.FOLLOWER if me.votes else Role.LEARNER

    @property
    def may_campaign(self) -> bool:
        """Whether this replica is a voter of its own configuration, has not FAILED, and its disk does not
        stall."""
        me = self.config.peer(self.self_replica)
        return me is not None and me.votes and not self.failed and self.now_ms >= self.stalled_until_ms

    @property
    def leads_if_nobody_can(self) -> bool:
        """Whether this replica stands for election only where no other can lead."""
        return self.witness or not self.fit

    def judge_witness(self) -> None:
        """Decide again whether this replica is a witness, which votes without rows.

        If that changed, draw a new election time-out, because a witness has a longer one.
        """
        was, self.witness = self.witness, self._is_witness()
        if self.witness is not was and self.timer.due_ms != NEVER_MS:
            self.draw_election()

    def _is_witness(self) -> bool:
        me = self.config.peer(self.self_replica)
        return not self.has_data or (me is not None and me.member_type is MemberType.WITNESS)

    # Terms, votes and roles

    def enter_term(self, term: int, voted_for: ReplicaId | None, *, promoted: bool = False) -> None:
        """Enter a higher term. No message of that term may leave before the term is durable."""
        if term <= self.term:
            ensure(False, f"raft: term {term} does not rise above {self.term}")
        self.term = term
        self.voted_for = voted_for
        self.term_leader = None
        self.outbox.hard_state = HardState(term, voted_for, promoted)

    def give_vote(self, candidate: ReplicaId) -> None:
        """Give the vote of this term, which must be free."""
        ensure(self.voted_for is None, f"raft: the vote of term {self.term} went to {self.voted_for}")
        self.voted_for = candidate
        self.outbox.hard_state = HardState(self.term, candidate)

    def set_role(self, role: Role, leader: ReplicaId | None, why: str) -> None:
        """Set role and leader, and tell the owner."""
        self.role = role
        self.leader = leader
        if leader is not None:
            self.lost_leader = None
        serves = role is Role.LEADER and not self.witness
        self.outbox.others.append(RoleChanged(role, self.term, leader, self.because(why), serves))

    @property
    def term_committed(self) -> bool:
        """Whether a leader is known, and an entry of its term is known committed.

        Terms in a log never fall, so the term of the last committed entry decides. In term 0 nobody leads:
        `leader` is the replica that is named to lead (`leader_hint`).
        """
        return self.term > 0 and self.leader is not None and self.log.term_at(self.commit_index) == self.term

    # Time

    def advance_clock(self, now_ms: int) -> None:
        """Note a reading of the owner's clock; an older one changes nothing."""
        if now_ms > self.now_ms:
            self.now_ms = now_ms

    def draw_election(self) -> None:
        """Draw when to campaign if no leader is heard until then."""
        self.timer.draw(self.now_ms, patient=self.leads_if_nobody_can)

    def leader_alive(self) -> bool:
        """Whether this replica leads, or heard from a leader within the minimum election timeout."""
        if self.role is Role.LEADER:
            return True
        return self.heard_ms is not None and self.now_ms - self.heard_ms < self.options.election_min_ms

    def follow_word_of(self, leader: ReplicaId) -> None:
        """Note that another replica leads this term."""
        self.term_leader = leader
        self.draw_election()
        self.pending.leader_known(leader)

    def bound(self, released: int = 0) -> bool:
        """Whether a promise forbids this replica to vote now, even for itself. `released`: as in `VoteRequest`."""
        return self.promise.binds(self.now_ms, released)

    def promise_lease(self, request: UpdateRequest) -> int:
        """Promise the lease that the leader asks for. Returns the `lease_sent_ms` for the answer; 0: no promise."""
        if not self.steady_ms or not 0 < request.lease_ms <= self.options.lease_ms:
            return 0
        self.promise.give(self.term, self.now_ms + request.lease_ms)
        return request.lease_sent_ms

    def forget_leader(self, replica_id: ReplicaId) -> None:
        """Note that the node of replica `replica_id` failed. If that replica is the leader, campaign soon."""
        if replica_id == self.leader:
            self.heard_ms = None
            self.lost_leader = replica_id
            self.timer.draw_quick(self.now_ms, patient=self.leads_if_nobody_can)

    # The log

    def commit_to(self, index: int) -> None:
        """Raise the commit index. Entries are handed out once they are durable here, too."""
        if not self.commit_index < index <= self.log.last_index:
            ensure(False, f"raft: commit index {index} is not between {self.commit_index} and the log's end")
        self.commit_index = index

    def config_committed(self, before: int, why: str) -> bool:
        """Note that the commit index rose from `before`. If that committed a configuration, tell the owner and
        answer the change.

        Returns whether the committed configuration changed.
        """
        config = self.committed_config
        changed = config is not self.log.config_at(before)
        if changed:
            cause = self.pending.cause_of_commit(self.commit_index) or cause_of(self.event)
            self.outbox.others.append(ConfigChanged(config, True, f"{cause}: {why}"))
        self.pending.committed(self.commit_index)
        return changed

    def hand_out(self) -> None:
        """Hand out the entries that are committed and durable here."""
        up_to = min(self.commit_index, self.log.durable_index)
        if up_to > self.log.handed_index:
            self.outbox.others.append(Committed(self.log.hand_out(up_to)))

    # Messages

    def ignore(self, sender: ReplicaId, why: str) -> None:
        """Report to the owner a message that no sound replica sends."""
        self.outbox.others.append(MessageIgnored(sender, self.because(why)))

    # Causes

    def because(self, why: str) -> str:
        """Return the `cause` of an effect: the event that is being handled, and why the effect follows from it."""
        return f"{cause_of(self.event)}: {why}"

    def node_id(self) -> str:
        """The node of this replica, as its configuration names it; "" if it is not in the configuration."""
        me = self.config.peer(self.self_replica)
        return me.node_id if me is not None else ""
