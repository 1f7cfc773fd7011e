"""Leading one term: answers, proposals, reads, the commit rule, the end of each turn.

A Leader is made when it wins an election, and dropped when it steps down. Its parts: `peers`, `replication`,
`heartbeats`, `handover`, `changes`, `lease` and `reads`.

Invariants: a leader never drops its own entries. It counts copies only for an entry of its own term; that
commits all entries before it, too (Raft §5.4.2). Its own copy counts only as far as it is durable. Each
proposal is answered by Proposed or ProposalRefused.
"""

from __future__ import annotations

from collections.abc import Callable

from stele.model.config import encode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code
from stele.model.ids import OpId, ReplicaId
from stele.raft.any_role import answer_vote_request, note_persisted, refuse_old_term, take_vote_response
from stele.raft.changes import Changes
from stele.raft.effects import (
    HeldByAll,
    PeerForgot,
    ProposalRefused,
    Proposed,
    ReadReady,
    ReadRefused,
    Role,
)
from stele.raft.events import (
    LogRead,
    LogWritten,
    PeerFailed,
    Persisted,
    Propose,
    ProposeChange,
    RequestRead,
    SyncStalled,
    Tick,
    TransferLeadership,
)
from stele.raft.handover import Handover
from stele.raft.heartbeats import Heartbeats
from stele.raft.lease import Lease
from stele.raft.messages import UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.raft.peers import Peers
from stele.raft.progress import Progress
from stele.raft.reads import ReadRounds
from stele.raft.replication import Replication
from stele.raft.role import Switch
from stele.raft.state import RaftState
from stele.raft.status import PeerState
from stele.raft.timer import NEVER_MS


class Leader:
    """The leader of one term."""

    __slots__ = (
        "changes",
        "handover",
        "heartbeats",
        "held_index",
        "lease",
        "peers",
        "reads",
        "replication",
        "state",
        "switch",
    )

    def __init__(self, state: RaftState, switch: Switch, changes_class: type[Changes] = Changes) -> None:
        self.state = state
        self.switch = switch
        self.held_index = 0
        """Up to this index the owner was told that every voter has the log in its file (HeldByAll). No commit
        depends on it."""
        self.reads = ReadRounds()
        self.peers = Peers(state)
        self.lease = Lease(state.self_replica, state.options.lease_ms)
        self.replication = Replication(state, self.peers, self.reads, self.lease)
        self.heartbeats = Heartbeats(state, self.peers, self.replication)
        self.handover = Handover(state, self.peers, self.lease)
        self.changes = changes_class(state, self.peers, self.handover)

    # The beginning and the end

    def begin(self, why: str) -> None:
        """Tell the owner that this replica leads, and append an entry of this term."""
        state = self.state
        state.pending.end_transfer(Code.UNAVAILABLE, f"replica {state.self_replica} was elected again")
        state.set_role(Role.LEADER, state.self_replica, why)
        state.term_leader = state.self_replica
        state.heard_ms = None
        state.timer.due_ms = NEVER_MS
        # The entry repeats the configuration under its old opid_index. Older entries commit with it (Raft
        # §5.4.2, §8).
        payload = encode_configuration(state.config)
        state.log.append(Entry(state.term, state.log.last_index + 1, EntryKind.NOOP, 0, payload))

    def end(self, code: Code, why: str) -> None:
        """Leadership is over: refuse the proposals that were held back, the reads and the transfer."""
        others = self.state.outbox.others
        for event in self.handover.release():
            message = f"leadership ended before it was proposed: {why}"
            others.append(ProposalRefused(event.context, code, message))
        for context in self.reads.abandon():
            others.append(ReadRefused(context, code, f"leadership ended: {why}"))
        self.handover.end(code, why)

    @property
    def caught_up_ms(self) -> int | None:
        """As `Follower.caught_up_ms`. Nobody can have replaced this leader earlier than one election timeout
        ago."""
        state = self.state
        return state.now_ms - state.options.election_max_ms if state.term_committed else None

    # Proposals

    def on_propose(self, event: Propose) -> None:
        """Append the entry, hold it back during a transfer, or say why not."""
        state = self.state
        if event.kind not in (EntryKind.WRITE, EntryKind.CEILING):
            self._refuse(event, Code.INVALID_ARGUMENT, f"callers cannot propose {event.kind.name} entries")
        elif state.witness:
            self._refuse(
                event,
                Code.NOT_LEADER,
                "this leader is a witness without rows, and hands over; try again soon",
            )
        elif state.log.unhanded_bytes + self.handover.held_bytes > state.options.uncommitted_bytes_max:
            message = f"{state.log.unhanded_bytes} bytes of entries are not committed yet; try again later"
            self._refuse(event, Code.THROTTLED, message)
        elif state.pending.transfer is not None:
            self.handover.hold(event)
        else:
            index = state.log.last_index + 1
            state.log.append(Entry(state.term, index, event.kind, event.timestamp, event.payload))
            state.outbox.others.append(Proposed(event.context, OpId(state.term, index)))
            if event.early:
                self.replication.early_index = index
                state.outbox.early = True

    def _refuse(self, event: Propose, code: Code, message: str) -> None:
        self.state.outbox.others.append(ProposalRefused(event.context, code, message))

    def on_propose_change(self, event: ProposeChange) -> None:
        """Change one member."""
        self.changes.on_propose_change(event)

    def on_transfer(self, event: TransferLeadership) -> None:
        """Hand leadership over."""
        self.state.advance_clock(event.now_ms)
        self.handover.on_transfer(event)

    # Reads

    def on_request_read(self, event: RequestRead) -> None:
        """Keep the read for the next ReadIndex round."""
        if self.state.witness:
            message = "this leader is a witness without rows, and hands over; try again soon"
            self.state.outbox.others.append(ReadRefused(event.context, Code.NOT_LEADER, message))
        else:
            self.reads.waiting.append(event.context)

    def serve_reads(self) -> bool:
        """Answer confirmed reads, and begin the next round.

        Returns whether peers must be asked to confirm it.
        """
        state, reads = self.state, self.reads
        self._answer_confirmed()
        # Until an entry of this term is committed, the commit index may be too low (Raft §8).
        if not reads.waiting or reads.asked or not state.term_committed:
            return False
        reads.begin(self.read_index)
        self._answer_confirmed()
        return bool(reads.asked)

    @property
    def read_index(self) -> int:
        """The index that a read which comes now must see: all that is committed, and all that callers were
        told early (HeldByAll)."""
        return max(self.state.commit_index, self.held_index)

    def _answer_confirmed(self) -> None:
        state, reads = self.state, self.reads
        for context in reads.confirmed(self.peers.voters, state.self_replica, state.config.majority):
            state.outbox.others.append(ReadReady(context, reads.index))

    # Answers

    def on_update_response(self, sender: ReplicaId, response: UpdateResponse) -> None:
        """Note what the peer holds, that it answers, and whether it is sound. `end_turn` acts on it."""
        state = self.state
        if response.term > state.term:
            self.switch.adopt_term(response.term, f"replica {sender} is at term {response.term}")
            return
        if response.term < state.term:
            return
        peers = self.peers
        progress = peers.progress.get(sender)
        if progress is None:
            return
        if not (response.success or response.failed or response.conflict_index):
            # It refused a message of an older term, in which this replica led, too. `preceding_index` refers
            # to the log of that time, which may have been longer.
            return
        last_index = state.log.last_index
        if response.preceding_index > last_index or (
            response.success and max(response.last_received.index, response.written_index) > last_index
        ):
            state.ignore(sender, f"it acknowledges more than this log, which ends at {state.log.last_opid}")
            return
        progress.connected = True
        progress.beat_refused = False
        progress.heard_ms = state.now_ms
        if progress.failed is not response.failed:
            peers.tell_sound(progress, not response.failed)
        if progress.unreached:
            peers.tell_reached(progress, True, "it answers")
        if response.failed:
            # It abstains: nothing else that it says counts.
            return
        progress.has_data = response.has_data
        if response.lease_sent_ms:
            self._note_promise(sender, response.lease_sent_ms)
        if response.read_context and self.reads.acknowledge(sender, response.read_context):
            peers.recount = True
        if response.success:
            if response.written_index > progress.written:
                progress.written = response.written_index
            if progress.accepted(response, state.now_ms):
                peers.recount = True
            if progress.promotes:
                self.changes.candidate_moved(progress)
        else:
            self._on_gap(progress, response)

    def _note_promise(self, sender: ReplicaId, sent_ms: int) -> None:
        state = self.state
        if sent_ms > state.steady_ms:
            state.ignore(
                sender,
                f"it promises a lease for a message sent at {sent_ms} ms, but this node's clock is only at "
                f"{state.steady_ms} ms",
            )
        else:
            self.lease.promised(sender, sent_ms)

    def _on_gap(self, progress: Progress, response: UpdateResponse) -> None:
        """The peer's log does not match: choose where to probe next (Raft §5.3, last part).

        Ignore old answers.
        """
        at = response.preceding_index
        if at <= progress.match:
            if response.sent_ms <= progress.moved_ms:
                return
            # The message left after the peer had acknowledged this. No sound replica drops within a term what
            # it has acknowledged.
            self._forgot(progress, response)
        elif progress.state is PeerState.SNAPSHOT or (
            progress.state is PeerState.PROBE and at != progress.next - 1
        ):
            return
        progress.written = min(progress.written, at - 1)
        next_index = min(response.conflict_index, at)
        if response.conflict_term:
            mine = self.state.log.last_of_term(response.conflict_term, at - 1)
            if mine is not None:
                next_index = max(next_index, mine + 1)
        progress.probe_from(max(next_index, 1))

    def _forgot(self, progress: Progress, response: UpdateResponse) -> None:
        why = (
            f"it acknowledged entries up to {progress.match}, and refuses what follows "
            f"{response.preceding_index}: its log ends at {response.last_received}"
        )
        self.state.outbox.others.append(PeerForgot(progress.replica_id, self.state.because(why)))
        progress.forgot(self.state.now_ms)

    # Other replicas' messages

    def on_update_request(self, sender: ReplicaId, request: UpdateRequest) -> None:
        """Follow the leader of a later term.

        Refuse the leader of an older term. No other replica can lead this term.
        """
        state = self.state
        if request.term < state.term:
            refuse_old_term(state, sender, request)
        elif request.term > state.term:
            self.switch.adopt_term(request.term, f"replica {sender} is at term {request.term}")
            self.switch.receive(sender, request)
        else:
            state.ignore(
                sender, f"it leads term {state.term}, as {state.term_leader} does: a term has one leader"
            )

    def on_vote_request(self, sender: ReplicaId, request: VoteRequest) -> None:
        """Answer as every role does. A lost peer that asks is back, and misses its leader: probe it at once."""
        answer_vote_request(self, sender, request)
        progress = self.peers.progress.get(sender)
        if progress is not None and not progress.connected:
            progress.probe_sent = False

    def on_vote_response(self, sender: ReplicaId, response: VoteResponse) -> None:
        """A vote came after the election: only its term counts."""
        take_vote_response(self, sender, response)

    # What the owner reports

    def on_persisted(self, event: Persisted) -> None:
        """Count more of this leader's own copy, which is durable now."""
        state = self.state
        if note_persisted(state, event.persist_id):
            self.peers.recount = True
            if state.commit_index > state.log.handed_index:
                state.hand_out()

    def on_log_written(self, event: LogWritten) -> None:
        """Note that more of this leader's own copy is in its log's file. It counts for no commit."""
        self.state.log.written(event.persist_id)

    def on_sync_stalled(self, event: SyncStalled) -> None:
        """Step down, because this leader's disk does not make entries durable."""
        state = self.state
        state.advance_clock(event.now_ms)
        state.stalled_until_ms = state.now_ms + state.options.election_max_ms
        why = "a sync of its own log stalls for an election timeout"
        self.switch.follow(None, why, Code.STEPPING_DOWN)

    def on_log_read(self, event: LogRead) -> None:
        """Send a slow peer the entries that the owner has read for it."""
        progress = self.peers.progress.get(event.to)
        if progress is not None:
            self.replication.send_read(progress, event)

    def on_peer_failed(self, event: PeerFailed) -> None:
        """Messages on their way to the peer are lost: probe again."""
        progress = self.peers.progress.get(event.replica_id)
        if progress is not None:
            progress.connected = False
            if progress.state is not PeerState.SNAPSHOT:
                progress.probe_from(progress.match + 1)

    # The end of a turn

    def end_turn(self) -> None:
        """Act on the turn's events: commit, promote, hand over, serve reads, replicate."""
        state = self.state
        self._commit_turn()
        if self.changes.promotion_due:
            self.changes.consider_promotion()
            # With the new configuration, a majority may hold more.
            self._commit_turn()
        if self.replication.early_index > state.commit_index:
            self._hold_turn()
        if state.pending.transfer is not None or state.witness:
            self.handover.end_turn()
        reads = self.reads
        self.replication.to_all(bool(reads.asked or reads.waiting) and self.serve_reads())

    def _commit_turn(self) -> None:
        """Count the copies if anything changed since the last count. Commit and hand out what a majority holds."""
        if self.peers.recount:
            self.peers.recount = False
            self._advance_commit()
            if self.state.commit_index > self.state.log.handed_index:
                self.state.hand_out()

    def _hold_turn(self) -> None:
        """Report with HeldByAll the index up to which every voter has early proposals in its file. README.md says
        why callers may be answered then.

        Do nothing while members change: then other voters may elect the next leader.
        """
        state = self.state
        log = state.log
        if state.pending_change_index is not None:
            return
        held = self.peers.held_by_all(log.written_index)
        held = min(held, self.replication.early_index)
        if held > self.read_index and log.term_at(held) == state.term:
            self.held_index = held
            state.outbox.others.append(HeldByAll(held))

    def _advance_commit(self) -> None:
        """Commit what a majority of the voters holds, and note what all of them hold."""
        state = self.state
        matches = self.peers.matches(self.own_match())
        if matches[0] > state.all_replicated_index:
            state.all_replicated_index = matches[0]
        index = matches[len(matches) - len(matches) // 2 - 1]
        before = state.commit_index
        if index > before and self.may_commit(index):
            state.commit_to(index)
            if before < state.log.config_index:
                why = f"a majority of {len(self.peers.voters)} voters holds it"
                if state.config_committed(before, why):
                    self.peers.follow_config()

    def own_match(self) -> int:
        """Up to which index the leader's own copy counts."""
        return self.state.log.durable_index

    def may_commit(self, index: int) -> bool:
        """Whether copies of this entry count: only for an entry of this leader's own term (Raft §5.4.2,
        figure 8)."""
        return self.state.log.term_at(index) == self.state.term

    # Time

    def on_tick(self, event: Tick) -> None:
        """Step down without a majority; look at each peer; send the heartbeats that are due."""
        state = self.state
        state.advance_clock(event.now_ms)
        self._tick_transfer()
        heartbeats = self.heartbeats
        if state.now_ms < heartbeats.due_ms:
            return
        why = heartbeats.without_majority()
        if why:
            self.switch.follow(None, why, Code.NO_QUORUM)
        else:
            heartbeats.send()

    def beat(self, now_ms: int, takes_beats: Callable[[ReplicaId], bool]) -> tuple[ReplicaId, ...] | None:
        """As `RaftCore.beat`, while this replica leads."""
        state = self.state
        if (
            state.pending.transfer is not None
            or state.pending_change_index is not None
            or state.witness
            or state.options.lease_ms
            or self.reads.asked
        ):
            return None
        state.advance_clock(now_ms)
        return self.heartbeats.beat(state.now_ms, takes_beats)

    def beat_answered(self, peer: ReplicaId, followed: bool, now_ms: int) -> None:
        """As `RaftCore.beat_answered`, while this replica leads."""
        state = self.state
        progress = self.peers.progress.get(peer)
        if progress is None or not progress.connected or progress.failed or progress.unreached:
            return
        state.advance_clock(now_ms)
        if followed:
            progress.heard_ms = state.now_ms
        else:
            progress.beat_refused = True
            progress.updated_ms = state.now_ms - state.options.heartbeat_ms
            self.heartbeats.due_ms = state.now_ms

    def _tick_transfer(self) -> None:
        pending = self.state.pending
        if pending.transfer_times_out(self.state.now_ms):
            for event in self.handover.release():
                self.on_propose(event)
        elif pending.transfer is not None and pending.transfer.sent:
            pending.transfer.sent = False  # TimeoutNow may have been lost; the turn's end sends it again
