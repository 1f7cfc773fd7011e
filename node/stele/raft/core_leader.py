"""Leading: replication with pipelining and flow control, the commit rule, heartbeats, the check for a majority.

Invariants: a leader never drops its own entries; only an entry of its own term is committed by counting, and what lies
before it with it (Raft §5.4.2); its own copy counts only as far as it is durable.
"""

from __future__ import annotations

from stele.model.config import MemberType, encode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code
from stele.model.ids import ReplicaId
from stele.raft.core_base import NEVER_MS
from stele.raft.core_election import ElectionPart
from stele.raft.effects import PeerForgot, PeerNeedsCopy, PeerReached, PeerSound, ReadLog, Role
from stele.raft.events import LogRead, PeerFailed
from stele.raft.messages import ENTRY_MESSAGE_BYTES, UpdateRequest, UpdateResponse
from stele.raft.progress import Progress
from stele.raft.reads import ReadRounds
from stele.raft.status import PeerState


class LeaderPart(ElectionPart):
    """Sends UpdateRequest and counts the answers."""

    _progress: dict[int, Progress]
    _reads: ReadRounds
    _heartbeat_due_ms = NEVER_MS
    _match_dirty = False
    _voter_ids: tuple[ReplicaId, ...] = ()
    _request: UpdateRequest | None = None
    """With entries, made for a peer in this turn's end: the next one is sent the same where it stands at the same place."""

    def _become_leader(self, cause: str) -> None:
        self._set_role(Role.LEADER, self.self_replica, cause)
        self._term_leader = self.self_replica
        self._heard_ms = None
        self._election_due_ms = NEVER_MS
        self._heartbeat_due_ms = self._now_ms + self.options.heartbeat_ms
        self._reads = ReadRounds()
        self._progress = {}
        self._follow_config()
        # Repeats the configuration under its old opid_index; nothing older commits before it (Raft §5.4.2, §8).
        payload = encode_configuration(self.config)
        self._append(Entry(self.term, self.log.last_index + 1, EntryKind.NOOP, 0, payload), cause)
        self._match_dirty = True

    def _follow_config(self) -> None:
        """Keep a Progress per peer; a removed one is told of its removal for a while."""
        config = self.config
        self._voter_ids = tuple(p.replica_id for p in config.voters)
        now = self._now_ms
        for peer in config.peers:
            if peer.replica_id != self.self_replica and peer.replica_id not in self._progress:
                self._progress[peer.replica_id] = Progress(
                    peer.replica_id, self.log.last_index + 1, now, self.options.inflight_bytes_max
                )
        pending_index = self.log.config_index
        before = self.log.config_at(pending_index - 1) if pending_index > self.commit_index else config
        for progress in self._progress.values():
            now_is = config.peer(progress.replica_id)
            if now_is is not None:
                progress.departing_until_ms = None
            elif progress.departing_until_ms is None:
                progress.departing_until_ms = now + 2 * self.options.election_max_ms
            # Whoever stops being a voter hears of it once it is committed. Before, it could come to hold the longest
            # log, which it may not campaign with, while the voters still need its vote: nobody could lead.
            was = before.peer(progress.replica_id)
            leaving = was is not None and was.votes and (now_is is None or not now_is.votes)
            progress.hold_from = pending_index if leaving else None
            progress.promotes = now_is is not None and (
                now_is.member_type is MemberType.WITNESS
                or (now_is.promote and now_is.member_type is not MemberType.VOTER)
            )

    def _last_for(self, progress: Progress) -> int:
        """The last index that may be sent to this peer now."""
        return self.log.last_index if progress.hold_from is None else progress.hold_from - 1

    def _on_config(self) -> None:
        if self.role is Role.LEADER:
            self._follow_config()
            self._match_dirty = True

    # Sending

    def _update_after(self, preceding_index: int, entries: tuple[Entry, ...]) -> UpdateRequest:
        return UpdateRequest(
            self.term,
            self.log.opid_at(preceding_index),
            entries,
            self.commit_index,
            self._reads.round_id if self._reads.asked else 0,
            self._now_ms,
            self.all_replicated_index,
        )

    def _update(self, progress: Progress, request: UpdateRequest) -> None:
        progress.updated_ms = self._now_ms
        self._send(progress.replica_id, request, 0)

    def _heartbeat(self, progress: Progress) -> None:
        """An empty message that cannot be refused, unless the peer needs a copy: it ends where the logs surely meet.

        So one that overtakes entries on another stream is not taken for a gap.
        """
        self._update(progress, self._update_after(max(progress.match, self.log.start.index), ()))

    def _replicate_to_all(self, ask: bool) -> None:
        """Send to each peer what it lacks; where they are to be asked (a ReadIndex round), a heartbeat in the place of nothing."""
        last_index = self.log.last_index
        for progress in self._progress.values():
            if progress.state is PeerState.REPLICATE:
                sent = progress.next <= last_index and not progress.failed and self._stream(progress)
            else:
                sent = self._probe(progress)
            if ask and not sent:
                self._heartbeat(progress)
        self._request = None

    def _probe(self, progress: Progress) -> bool:
        """Send one message to a peer whose log is not yet known, and no more until it has answered; whether anything was sent."""
        if progress.state is not PeerState.PROBE or progress.probe_sent:
            return False
        if progress.next <= self.log.start.index:
            self._needs_copy(progress)
            return False
        entries: tuple[Entry, ...] = ()
        last = self._last_for(progress)
        if self.log.tail_first <= progress.next <= last and not progress.failed:
            entries = self.log.entries_from(progress.next, self.options.probe_bytes_max, last)
        self._update(progress, self._update_after(progress.next - 1, entries))
        progress.sent(progress.next - 1, 0, self._now_ms)
        return True

    def _stream(self, progress: Progress) -> bool:
        """Send what the peer lacks as far as its window allows; whether anything was sent."""
        sent = False
        last = self.log.last_index if progress.hold_from is None else progress.hold_from - 1
        while progress.next <= last and progress.inflight_bytes < progress.window_bytes:
            request = self._request
            if (
                request is None
                or request.preceding.index + 1 != progress.next
                or request.entries[-1].index > last
            ):
                if progress.next < self.log.tail_first:
                    self._read_for(progress)
                    break
                entries = self.log.entries_from(progress.next, self.options.batch_bytes_max, last)
                request = self._request = self._update_after(progress.next - 1, entries)
            self._send_entries(progress, request)
            sent = True
        return sent

    def _read_for(self, progress: Progress) -> None:
        """What it lacks is not in memory."""
        if progress.next <= self.log.start.index:
            self._needs_copy(progress)
        elif not progress.reading:
            progress.reading = progress.next
            self._out.append(ReadLog(progress.replica_id, progress.next, self.options.batch_bytes_max))

    def _send_entries(self, progress: Progress, request: UpdateRequest) -> None:
        progress.updated_ms = self._now_ms
        self._send(progress.replica_id, request, 0)
        size = 0
        for entry in request.entries:
            size += len(entry.payload) + ENTRY_MESSAGE_BYTES
        progress.sent(request.entries[-1].index, size, self._now_ms)

    def _needs_copy(self, progress: Progress) -> None:
        progress.needs_copy(self.log.start.index + 1)
        progress.moved_ms = self._now_ms
        cause = f"it has nothing after {progress.match} that matches; this log begins after {self.log.start}"
        self._out.append(PeerNeedsCopy(progress.replica_id, cause))

    def _on_log_read(self, event: LogRead) -> None:
        progress = self._progress.get(event.to) if self.role is Role.LEADER else None
        if progress is None or progress.reading != event.first_index:
            return
        progress.reading = 0
        if progress.state is not PeerState.REPLICATE or progress.next != event.first_index:
            return
        # The log may have gone up to what was read, while it was read: then nobody can tell what comes before it.
        if not event.entries or self.log.term_at(event.first_index - 1) is None:
            self._needs_copy(progress)
            return
        # The owner read its disk while the core went on; only what is still this log may leave.
        last = self._last_for(progress)
        entries = tuple(e for e in event.entries if e.index <= last)
        if entries and all(self.log.term_at(e.index) == e.term for e in entries):
            self._send_entries(progress, self._update_after(progress.next - 1, entries))

    def _on_peer_failed(self, event: PeerFailed) -> None:
        if self.role is Role.LEADER:
            progress = self._progress.get(event.replica_id)
            if progress is not None:
                progress.connected = False
                if progress.state is not PeerState.SNAPSHOT:
                    progress.probe_from(progress.match + 1)
        elif event.replica_id == self.leader:
            self._heard_ms = None
            self._lost_leader = event.replica_id
            due = self._election_due_ms
            self._draw_election(quick=True)
            self._election_due_ms = min(due, self._election_due_ms)

    # Answers

    def _on_update_response(self, sender: ReplicaId, response: UpdateResponse) -> None:
        if response.term > self.term:
            self._adopt_term(response.term, f"{sender} is at term {response.term}")
            return
        if self.role is not Role.LEADER or response.term < self.term:
            return
        progress = self._progress.get(sender)
        if progress is None:
            return
        if not (response.success or response.failed or response.conflict_index):
            # It refused a message of an older term, which this replica led too. Only that old log, which may have been
            # longer, is what `preceding_index` speaks of.
            return
        last_index = self.log.last_index
        if response.preceding_index > last_index or (
            response.success and response.last_received.index > last_index
        ):
            self._ignore(sender, f"it acknowledges more than this log, which ends at {self.log.last_opid}")
            return
        progress.connected = True
        progress.heard_ms = self._now_ms
        if progress.failed is not response.failed:
            self._tell_sound(progress, not response.failed)
        if progress.unreached:
            self._tell_reached(progress, True)
        if response.failed:
            # It abstains: neither its copy nor its word counts any more.
            return
        progress.has_data = response.has_data
        if response.read_context and self._reads.acknowledge(sender, response.read_context):
            self._match_dirty = True
        if response.success:
            if progress.accepted(response, self._now_ms):
                self._match_dirty = True
            if progress.promotes:
                self._on_candidate_moved(progress)
        else:
            self._on_gap(progress, response)

    def _tell_sound(self, progress: Progress, sound: bool) -> None:
        progress.failed = not sound
        self._match_dirty = True  # its copy counts again, also where it acknowledges nothing new
        self._out.append(PeerSound(progress.replica_id, sound))

    def _tell_reached(self, progress: Progress, reached: bool) -> None:
        progress.unreached = not reached
        self._out.append(PeerReached(progress.replica_id, reached))

    def _on_candidate_moved(self, progress: Progress) -> None:
        """A peer that waits to become a voter has answered."""
        raise NotImplementedError

    def _on_gap(self, progress: Progress, response: UpdateResponse) -> None:
        """Choose where to probe next (Raft §5.3, last part); answers to older messages say nothing new."""
        at = response.preceding_index
        if at <= progress.match:
            if response.sent_ms <= progress.moved_ms:
                return
            # It was asked after it had acknowledged this. Within a term no sound replica drops what it acknowledged.
            self._forgot(progress, response)
        elif progress.state is PeerState.SNAPSHOT or (
            progress.state is PeerState.PROBE and at != progress.next - 1
        ):
            return
        next_index = min(response.conflict_index, at)
        if response.conflict_term:
            mine = self.log.last_of_term(response.conflict_term, at - 1)
            if mine is not None:
                next_index = max(next_index, mine + 1)
        progress.probe_from(max(next_index, 1))

    def _forgot(self, progress: Progress, response: UpdateResponse) -> None:
        cause = (
            f"it acknowledged entries up to {progress.match}, and refuses what follows {response.preceding_index}: its log "
            f"ends at {response.last_received}"
        )
        self._out.append(PeerForgot(progress.replica_id, cause))
        progress.forgot(self._now_ms)

    # Commit

    def _own_match(self) -> int:
        """How far the leader's own copy counts."""
        return self.log.durable_index

    def _advance_commit(self) -> None:
        """Commit what a majority holds, and note what all hold."""
        matches = []  # how far each voter's copy counts
        for voter in self._voter_ids:
            if voter == self.self_replica:
                matches.append(self._own_match())
            else:
                progress = self._progress[voter]
                matches.append(0 if progress.failed else progress.match)
        matches.sort()
        if matches[0] > self.all_replicated_index:
            self.all_replicated_index = matches[0]
        index = matches[len(matches) - len(matches) // 2 - 1]
        if index > self.commit_index and self._may_commit(index):
            self._set_commit(index)

    def _may_commit(self, index: int) -> bool:
        """Only entries of the own term are committed by counting (Raft §5.4.2, figure 8)."""
        return self.log.term_at(index) == self.term

    # Time

    def _tick_leader(self) -> None:
        now = self._now_ms
        if now < self._heartbeat_due_ms:
            return
        self._heartbeat_due_ms = now + self.options.heartbeat_ms
        since = now - self.options.election_max_ms
        heard = 0
        for voter in self._voter_ids:
            if voter == self.self_replica or self._progress[voter].heard_since(since):
                heard += 1
        if heard < self.config.majority:
            why = f"only {heard} of {len(self._voter_ids)} voters answered within {self.options.election_max_ms} ms"
            self._step_down(Code.NO_QUORUM, why)
            return
        gone = 0
        for progress in self._progress.values():
            due = progress.departing_until_ms
            if due is not None and now >= due and progress.hold_from is None:
                gone = progress.replica_id
                continue
            progress.look(self._last_for(progress), now)
            if not progress.unreached and now - progress.last_heard_ms > self.options.unreached_ms:
                self._tell_reached(progress, False)
            replicates = progress.state is PeerState.REPLICATE
            if replicates and progress.inflight and now - progress.moved_ms > self.options.election_min_ms:
                progress.probe_from(progress.match + 1)
                self._heartbeat(progress)
                continue
            # Entries that went out were a heartbeat too, as long as they are answered soon: on their stream they may wait
            # behind other groups' entries, where heartbeats have one of their own.
            answered_ms = progress.heard_ms or 0
            next_ms = min(progress.updated_ms, answered_ms) + self.options.heartbeat_ms
            if now < next_ms:
                self._heartbeat_due_ms = min(self._heartbeat_due_ms, next_ms)
            elif progress.state is PeerState.PROBE:
                progress.probe_sent = False  # a lost probe is sent again by the turn's end
            else:
                if not replicates and now - progress.moved_ms > self.options.election_max_ms:
                    self._needs_copy(progress)  # once more, in case nobody could act on it
                self._heartbeat(progress)
        if gone:
            del self._progress[gone]
