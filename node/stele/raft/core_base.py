"""What every part of the core stands on: hard state, log, role, clock reading, and the outbox of a turn.

The core is one state machine in layers, each a class that knows the layers below and declares what it needs from
those above: base, follower, election, leader, change, handover, core.

Invariants: a term never falls; a vote never changes within a term; nothing that promises hard state leaves before the
Persist that holds it.
"""

from __future__ import annotations

from stele.model.config import Configuration, MemberType
from stele.model.entry import Entry
from stele.model.errors import Code, ensure
from stele.model.ids import ReplicaId
from stele.raft.effects import (
    ChangeCommitted,
    ChangeRefused,
    Committed,
    ConfigChanged,
    Effect,
    HardState,
    MessageIgnored,
    Persist,
    ProposalLost,
    Role,
    RoleChanged,
    Send,
)
from stele.raft.events import InitialState
from stele.raft.log import LogView
from stele.raft.messages import Message
from stele.raft.options import RaftOptions
from stele.raft.ports import Chance

NEVER_MS = 1 << 62


class CoreBase:
    """State of a replica and the ways to change it that all roles share."""

    def __init__(
        self, options: RaftOptions, self_replica: ReplicaId, initial: InitialState, rng: Chance
    ) -> None:
        self.options = options
        self.self_replica = self_replica
        self.term = initial.term
        self.voted_for = initial.voted_for
        self.log = LogView(
            initial.log_start,
            initial.config,
            initial.entries,
            initial.commit_index,
            options.tail_bytes_max,
            initial.skipped,
        )
        # A copied tablet brings entries of terms that its new replica never took part in.
        raised = self.log.last_term > self.term
        if raised:
            self.term, self.voted_for = self.log.last_term, None
        self.commit_index = initial.commit_index
        self.role = Role.NON_PARTICIPANT
        self.leader: ReplicaId | None = None
        self.failed = initial.failed
        self.has_data = not initial.witness_without_data
        self._stalled_until_ms = 0
        self._fit = True
        self._witness = self._is_witness_now()
        self.all_replicated_index = 0
        self._rng = rng
        self._hint = initial.leader_hint
        self._now_ms = 0
        self._heard_ms: int | None = None  # last word of a live leader
        self._told_commit = 0  # what that leader said last is committed
        self._caught_up_ms: int | None = (
            None  # all that was committed then, by the leader's word, was handed out
        )
        self._lost_leader: ReplicaId | None = None  # whose end was seen; None once another leads
        self._term_leader: ReplicaId | None = None  # who has led in this term, as far as it was seen
        self._election_due_ms = NEVER_MS
        self._patience_ms = 0  # as drawn last: how long without a word of a leader before a campaign
        self._change: tuple[int | None, int, int] | None = (
            None  # (context, term, index) of a change this core proposed
        )
        # Outbox of the turn
        self._persists: list[Effect] = []
        self._sends: list[Effect] = []
        self._sends_at_once: list[Effect] = []
        self._out: list[Effect] = []
        self._hard_dirty = raised
        self._persist_id = 0  # the last one issued
        self._persist_durable = 0
        self._hard_persist = 0  # the last one that holds hard state

    # What layers above provide

    def _on_leadership_end(self, code: Code, cause: str) -> None:
        """The leader has become something else: answer whoever waits on it."""
        raise NotImplementedError

    def _on_config(self) -> None:
        """The active configuration has changed, or is committed now."""
        raise NotImplementedError

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
    def term_committed(self) -> bool:
        """Whether there is a leader, and an entry of its term known committed: the last of them, as terms never fall.

        Nobody leads term 0: the leader of then is who is meant to lead (`leader_hint`).
        """
        return self.term > 0 and self.leader is not None and self.log.term_at(self.commit_index) == self.term

    @property
    def may_campaign(self) -> bool:
        """Whether this replica is a sound voter of its own configuration."""
        me = self.config.peer(self.self_replica)
        return me is not None and me.votes and not self.failed and self._now_ms >= self._stalled_until_ms

    @property
    def is_witness(self) -> bool:
        """Whether this replica votes without rows."""
        return self._witness

    @property
    def leads_if_nobody_can(self) -> bool:
        """Whether this replica leaves leading to the others as long as one of them can."""
        return self._witness or not self._fit

    def _is_witness_now(self) -> bool:
        me = self.config.peer(self.self_replica)
        return not self.has_data or (me is not None and me.member_type is MemberType.WITNESS)

    def _judge_witness(self) -> None:
        was, self._witness = self._witness, self._is_witness_now()
        if self._witness is not was and self._election_due_ms != NEVER_MS:
            self._draw_election()  # witnesses have another patience

    def _resting_role(self) -> Role:
        me = self.config.peer(self.self_replica)
        if me is None:
            return Role.NON_PARTICIPANT
        return Role.FOLLOWER if me.votes else Role.LEARNER

    # Roles and terms

    def _set_role(self, role: Role, leader: ReplicaId | None, cause: str) -> None:
        self.role = role
        self.leader = leader
        if leader is not None:
            self._lost_leader = None
        serves = role is Role.LEADER and not self.is_witness
        self._out.append(RoleChanged(role, self.term, leader, cause, serves))

    def _adopt_term(self, term: int, cause: str) -> None:
        """Enter a higher term as a follower of nobody."""
        ensure(term > self.term, f"raft: term {term} does not rise above {self.term}")
        was_leader = self.role is Role.LEADER
        self.term = term
        self.voted_for = None
        self._term_leader = None
        self._hard_dirty = True
        self._rest(None, cause)
        if was_leader:
            self._on_leadership_end(Code.NOT_LEADER, cause)

    def _step_down(self, code: Code, cause: str) -> None:
        """Stop leading within the term."""
        self._rest(None, cause)
        self._on_leadership_end(code, cause)

    def _rest(self, leader: ReplicaId | None, cause: str) -> None:
        """Take the role that the configuration gives to one that neither leads nor campaigns."""
        was_active = self.role in (Role.LEADER, Role.CANDIDATE)
        self._end_campaign()
        self._set_role(self._resting_role(), leader, cause)
        if was_active or self._election_due_ms == NEVER_MS:
            self._draw_election()

    def _end_campaign(self) -> None:
        raise NotImplementedError

    def _draw_election(self, *, quick: bool = False) -> None:
        """Draw when to campaign if no leader is heard until then. `quick`: nobody needs to be waited out."""
        low, high = self.options.election_min_ms, self.options.election_max_ms
        if quick:
            low, high = low // 30, low // 3
        if self.leads_if_nobody_can:
            # A witness leads only where no holder of rows can, and an unfit replica where no fit one can: they give them
            # two time-outs.
            low, high = low + 2 * self.options.election_max_ms, high + 2 * self.options.election_max_ms
        drawn_ms = self._rng.randint(low, high)
        if not quick:
            self._patience_ms = drawn_ms
        self._election_due_ms = self._now_ms + drawn_ms

    def _leader_alive(self) -> bool:
        """Whether this replica leads, or heard from a leader within the minimum election timeout."""
        if self.role is Role.LEADER:
            return True
        return self._heard_ms is not None and self._now_ms - self._heard_ms < self.options.election_min_ms

    # Sending and persisting

    def _hard_barrier(self) -> int:
        """Id of the Persist that must be durable before anything is said in this term."""
        if self._hard_dirty:
            return self._persist_id + 1
        return self._hard_persist if self._hard_persist > self._persist_durable else 0

    def _log_barrier(self) -> int:
        """Id of the Persist that must be durable before the whole log may be vouched for."""
        if self._hard_dirty or self.log.dirty:
            return self._persist_id + 1
        return self._persist_id if self._persist_id > self._persist_durable else 0

    def _ignore(self, sender: ReplicaId, cause: str) -> None:
        self._out.append(MessageIgnored(sender, cause))

    def _send(self, to: ReplicaId, message: Message, after: int) -> None:
        (self._sends if after else self._sends_at_once).append(Send(to, message, after))

    def _emit_persist(self) -> None:
        if not self._hard_dirty and not self.log.dirty:
            return
        self._persist_id += 1
        hard = None
        if self._hard_dirty:
            hard = HardState(self.term, self.voted_for)
            self._hard_dirty = False
            self._hard_persist = self._persist_id
        truncate_from, entries = self.log.take_persist(self._persist_id)
        self._persists.append(Persist(self._persist_id, hard, truncate_from, entries))

    # The log

    def _append(self, entry: Entry, cause: str = "") -> None:
        """Add the next entry. `cause`: why, where this replica leads; else the leader of its term sent it."""
        config = self.log.append(entry)
        if config is not None:
            self._config_changed(cause or f"leader {self.leader} of term {self.term}")

    def _truncate(self, from_index: int, cause: str) -> None:
        """Drop a suffix that lost; a configuration in it is undone."""
        # Answers that vouch for the suffix wait for its Persist, so it must have one before it goes.
        self._emit_persist()
        config_index = self.log.config_index
        for entry in self.log.truncate(from_index):
            self._out.append(ProposalLost(entry.opid))
        change = self._change
        if change is not None and change[2] >= from_index:
            self._change = None
            if change[0] is not None:
                message = (
                    f"the entry {change[1]}.{change[2]} of this change lost to another leader's; ask that one"
                )
                self._out.append(ChangeRefused(change[0], Code.NOT_LEADER, message))
        if config_index >= from_index:
            self._config_changed(f"undone: {cause}")

    def _config_changed(self, cause: str) -> None:
        self._judge_witness()
        self._out.append(ConfigChanged(self.config, False, cause))
        role = self._resting_role()
        if self.role is Role.LEADER:
            ensure(role is Role.FOLLOWER, "raft: a leader must stay a voter of its own configuration")
        elif role is not self.role:
            self._end_campaign()
            self._set_role(role, self.leader, cause)
            self._draw_election()
        self._on_config()

    def _set_commit(self, index: int) -> None:
        """Raise the commit index; entries are handed out when they are durable here as well."""
        before = self.commit_index
        if not before < index <= self.log.last_index:
            ensure(False, f"raft: commit index {index} is not within {before} and the log's end")
        self.commit_index = index
        if before < self.log.config_index:
            self._config_committed(before)

    def _config_committed(self, before: int) -> None:
        config = self.committed_config
        cause = f"leader {self.leader} of term {self.term}"
        if self.role is Role.LEADER:
            cause = f"a majority of {len(self.config.voters)} voters holds it"
        if config is not self.log.config_at(before):
            self._out.append(ConfigChanged(config, True, cause))
            self._on_config()
        change = self._change
        if change is not None and change[2] <= self.commit_index:
            self._change = None
            if change[0] is not None:
                self._out.append(ChangeCommitted(change[0], self.log.config_at(change[2])))

    def _hand_out(self) -> None:
        up_to = min(self.commit_index, self.log.durable_index)
        if up_to > self.log.handed_index:
            self._out.append(Committed(self.log.hand_out(up_to)))
