"""The state machine of one replica: events in, effects out. Entry point of the package; its layers are its neighbours.

    core = RaftCore(options, self_replica, initial, rng)
    effects = core.step(Start(now_ms))
    effects = core.step_many(events)  # one turn: one Persist (as a rule) and one message per peer for all of them

Invariant: the same initial state, chance and events give the same effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stele.model.errors import Code, ensure
from stele.model.ids import ReplicaId
from stele.raft.core_base import NEVER_MS
from stele.raft.core_handover import HandoverPart
from stele.raft.effects import Effect, Role
from stele.raft.events import (
    Compacted,
    DataArrived,
    Event,
    Fitness,
    InitialState,
    LogRead,
    PeerFailed,
    Persisted,
    Propose,
    ProposeChange,
    Received,
    ReportFailed,
    RequestRead,
    Start,
    SyncStalled,
    Tick,
    TransferLeadership,
)
from stele.raft.messages import TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.raft.options import RaftOptions
from stele.raft.ports import Chance
from stele.raft.reads import ReadRounds
from stele.raft.status import RaftStatus


class RaftCore(HandoverPart):
    """One replica of one group. Not thread-safe; `step` never blocks."""

    def __init__(
        self, options: RaftOptions, self_replica: ReplicaId, initial: InitialState, rng: Chance
    ) -> None:
        super().__init__(options, self_replica, initial, rng)
        self._progress = {}
        self._reads = ReadRounds()
        self._init_handover()
        self._started = False
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Start: self._on_start,
            Tick: self._on_tick,
            Received: self._on_received,
            Propose: self._on_propose,
            ProposeChange: self._on_propose_change,
            TransferLeadership: self._on_transfer_event,
            Persisted: self._on_persisted,
            LogRead: self._on_log_read,
            RequestRead: self._on_request_read,
            DataArrived: self._on_data_arrived,
            PeerFailed: self._on_peer_failed,
            Compacted: self._on_compacted,
            ReportFailed: self._on_report_failed,
            SyncStalled: self._on_sync_stalled,
            Fitness: self._on_fitness,
        }
        self._receivers: dict[type[Any], Callable[[ReplicaId, Any], None]] = {
            UpdateRequest: self._on_update_request,
            UpdateResponse: self._on_update_response,
            VoteRequest: self._on_vote_request,
            VoteResponse: self._on_vote_response,
            TimeoutNow: self._on_timeout_now,
        }

    def step(self, event: Event) -> list[Effect]:
        """Take one event; what to do about it.

        Raises:
            InvariantViolation: the algorithm's own rules are broken; the replica must stop.
        """
        self._handlers[type(event)](event)
        return self._end_turn()

    def step_many(self, events: Iterable[Event]) -> list[Effect]:
        """Take several events as one turn of the owner's loop; the effects of all, coalesced."""
        handlers = self._handlers
        for event in events:
            handlers[type(event)](event)
        return self._end_turn()

    def note(self, event: Event) -> None:
        """Take an event from which nothing follows by itself, as `awaits_disk` and `awaits_answer` say: what it adds to counts
        with the next turn."""
        self._handlers[type(event)](event)

    @property
    def next_deadline_ms(self) -> int:
        """When the next Tick is due at the latest, on the owner's clock; far away if nothing waits for time."""
        due = self._heartbeat_due_ms if self.role is Role.LEADER else self._election_due_ms
        if self._transfer is not None:
            due = min(due, self._transfer.due_ms)
        return due

    @property
    def awaits_disk(self) -> bool:
        """Whether something may follow from Persisted by itself: to commit, to hand out or to elect. Else it needs no turn."""
        if self.commit_index > self.log.handed_index:
            return True
        if self.role is Role.LEADER:
            # Its own copy commits nothing that no other voter has, where there are others.
            for progress in self._progress.values():
                if progress.match > self.commit_index:
                    return True
            return len(self._voter_ids) == 1
        return self.role is not Role.FOLLOWER

    def awaits_answer(self, sender: ReplicaId, answer: UpdateResponse) -> bool:
        """Whether something may follow from an answer by itself. Else it needs no turn: where it acknowledges nothing that waits
        to be committed, of a peer for which nothing waits to be sent."""
        progress = self._progress.get(sender)
        return (
            progress is None
            or answer.last_received.index > self.commit_index
            or self.role is not Role.LEADER
            or not progress.settled(self.log.last_index)
            or not answer.success
            or answer.failed
            or answer.term != self.term
            or self._reads.pending
            or self._transfer is not None
            or self._witness
        )

    def status(self) -> RaftStatus:
        """A frozen view."""
        since = self._now_ms - self.options.election_max_ms
        leads = self.role is Role.LEADER
        peers = tuple(p.status(since) for p in self._progress.values()) if leads else ()
        return RaftStatus(
            self_replica=self.self_replica,
            role=self.role,
            term=self.term,
            voted_for=self.voted_for,
            leader=self.leader,
            config=self.config,
            committed_config=self.committed_config,
            pending_change_index=self.pending_change_index,
            last_logged=self.log.last_opid,
            last_durable=self.log.opid_at(self.log.durable_index),
            log_start=self.log.start,
            commit_index=self.commit_index,
            term_committed=self.term_committed,
            serves=leads and self.term_committed and not self.is_witness,
            failed=self.failed,
            has_data=self.has_data,
            transferring_to=None if self._transfer is None else self._transfer.target,
            all_replicated_index=self.all_replicated_index,
            peers=peers,
        )

    def _end_turn(self) -> list[Effect]:
        if self.role is Role.LEADER:
            self._lead_turn()
        self._emit_persist()
        effects = self._sends_at_once
        effects += self._persists
        effects += self._sends
        effects += self._out
        self._sends_at_once, self._persists, self._sends, self._out = [], [], [], []
        return effects

    def _lead_turn(self) -> None:
        self._commit_turn()
        if self._promote_due:
            self._consider_promotion()
            # A new voter may make a majority of what was held already.
            self._commit_turn()
        if self._transfer is not None or self._witness:
            self._consider_transfer()
        reads = self._reads
        self._replicate_to_all(bool(reads.asked or reads.waiting) and self._serve_reads())

    def _commit_turn(self) -> None:
        """Commit what the answers, the own disk or another quorum have made possible since it was looked at last."""
        if self._match_dirty:
            self._match_dirty = False
            self._advance_commit()
            if self.commit_index > self.log.handed_index:
                self._hand_out()

    def _advance_clock(self, now_ms: int) -> None:
        if now_ms > self._now_ms:
            self._now_ms = now_ms

    # Events

    def _on_start(self, event: Start) -> None:
        ensure(not self._started, "raft: Start came twice")
        self._started = True
        self._now_ms = event.now_ms
        hinted = self._hint == self.self_replica
        leader = None if hinted else self._hint
        self._set_role(self._resting_role(), leader, "started")
        self._draw_election()
        if self.may_campaign and ((hinted and self._fit) or len(self.config.voters) == 1):
            self._campaign("named to lead" if hinted else "the only voter")

    def _on_tick(self, event: Tick) -> None:
        self._advance_clock(event.now_ms)
        self._tick_transfer()
        if self.role is Role.LEADER:
            self._tick_leader()
        else:
            self._tick_election()

    def _on_received(self, event: Received) -> None:
        if event.now_ms > self._now_ms:
            self._now_ms = event.now_ms
        if self.failed:
            self._abstain(event)
        else:
            self._receivers[type(event.message)](event.sender, event.message)

    def _on_persisted(self, event: Persisted) -> None:
        persist_id = event.persist_id
        if persist_id > self._persist_id:
            ensure(False, f"raft: Persist {persist_id} was never asked for")
        self._stalled_until_ms = 0
        if persist_id > self._persist_durable:
            self._persist_durable = persist_id
        if self.log.persisted(persist_id):
            self._match_dirty = True
            if self.commit_index > self.log.handed_index:
                self._hand_out()
        if self._campaign_round is not None:
            self._own_vote_durable()

    def _on_transfer_event(self, event: TransferLeadership) -> None:
        self._advance_clock(event.now_ms)
        self._on_transfer(event)

    def _on_data_arrived(self, event: DataArrived) -> None:
        self.has_data = True
        self._judge_witness()

    def _on_compacted(self, event: Compacted) -> None:
        self.log.compact(event.opid)

    def _on_report_failed(self, event: ReportFailed) -> None:
        self.failed = True
        self._end_campaign()
        if self.role is Role.LEADER:
            # Its silence may not be noticed: the peers of a group at rest listen to its node, which lives.
            heir = self._best_successor()
            self._step_down(Code.STEPPING_DOWN, f"this replica has FAILED: {event.reason}")
            if heir is not None:
                self._send(heir, TimeoutNow(self.term), self._hard_barrier())
        elif self.role is Role.CANDIDATE:
            self._rest(None, f"this replica has FAILED: {event.reason}")
        self._election_due_ms = NEVER_MS

    def _on_sync_stalled(self, event: SyncStalled) -> None:
        self._advance_clock(event.now_ms)
        self._stalled_until_ms = self._now_ms + self.options.election_max_ms
        if self.role is Role.LEADER:
            self._step_down(Code.STEPPING_DOWN, "a sync of its own log stalls for an election timeout")

    def _on_fitness(self, event: Fitness) -> None:
        if event.fit == self._fit:
            return
        self._fit = event.fit
        if self.role is not Role.LEADER and self._election_due_ms != NEVER_MS:
            self._draw_election()

    def _abstain(self, event: Received) -> None:
        """A FAILED replica promises nothing, and says so under the asker's own term so that it is heard."""
        message = event.message
        if isinstance(message, UpdateRequest):
            if message.term >= self.term and self.leader != event.sender:
                self._set_role(
                    self._resting_role(), event.sender, f"heard from the leader of term {message.term}"
                )
            answer = UpdateResponse(
                message.term,
                False,
                sent_ms=message.sent_ms,
                has_data=False,
                failed=True,
                preceding_index=message.preceding.index,
            )
            self._send(event.sender, answer, 0)
        elif isinstance(message, VoteRequest):
            refusal = VoteResponse(
                message.term, False, message.pre_vote, message.term, not self._leader_alive(), True
            )
            # A pre-vote names a term that nobody has yet; the answer must not raise it.
            self._send(event.sender, refusal, 0)
