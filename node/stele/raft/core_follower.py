"""Following: what a replica does with a leader's entries, heartbeats and commit index (Raft §5.3).

Invariant: what is at or below the commit index is never dropped; what is acknowledged matches the leader's log and is
durable.
"""

from __future__ import annotations

from stele.model.entry import Entry
from stele.model.ids import OpId, ReplicaId
from stele.raft.core_base import CoreBase
from stele.raft.effects import Role
from stele.raft.messages import UpdateRequest, UpdateResponse


class FollowerPart(CoreBase):
    """Answers UpdateRequest."""

    _verified_index = 0
    """Up to here the log is known to match that of this term's leader."""

    def _adopt_term(self, term: int, cause: str) -> None:
        super()._adopt_term(term, cause)
        self._verified_index = 0
        self._told_commit = 0

    def _on_update_request(self, sender: ReplicaId, request: UpdateRequest) -> None:
        if request.term > self.term:
            self._adopt_term(request.term, f"update of term {request.term} from {sender}")
        elif request.term < self.term:
            # A deposed leader learns from our term that it is one.
            refusal = UpdateResponse(
                self.term, False, sent_ms=request.sent_ms, preceding_index=request.preceding.index
            )
            self._send(sender, refusal, self._hard_barrier())
            return
        if self.leader != sender or self.role is Role.LEADER:
            if not self._follow(sender):
                return
        elif self._term_leader is None:
            self._term_leader = sender  # named to lead, and does
        if self.log.handed_index >= self._told_commit and self.term_committed:
            self._caught_up_ms = self._heard_ms
        if request.commit_index > self._told_commit:
            self._told_commit = request.commit_index
        self._heard_ms = self._now_ms
        self._election_due_ms = self._now_ms + self._patience_ms
        log = self.log
        if request.all_replicated_index > self.all_replicated_index:
            self.all_replicated_index = min(request.all_replicated_index, log.last_index)
        entries = request.entries
        preceding = request.preceding
        if preceding.index > self.commit_index and log.term_at(preceding.index) != preceding.term:
            self._refuse_gap(sender, request)
            return
        new = entries if preceding.index == log.last_index else self._not_held(sender, entries)
        if new:
            first = new[0]
            if first.index != log.last_index + 1 or first.term < log.last_term:
                self._ignore(sender, f"its entry {first.opid} cannot follow {log.last_opid}")
                return
            for entry in new:
                self._append(entry)
        verified = max(self._verified_index, self.commit_index, preceding.index + len(entries))
        if verified > log.last_index:
            verified = log.last_index
        self._verified_index = verified
        if request.commit_index > self.commit_index:
            known = min(request.commit_index, verified)
            if known > self.commit_index:
                self._set_commit(known)
                self._hand_out()
        if entries:
            # The answer waits for the disk, so it may vouch for all that is known to match.
            self._answer(sender, request, verified, self._log_barrier())
        else:
            self._answer(sender, request, min(verified, log.durable_index), self._hard_barrier())

    @property
    def caught_up_ms(self) -> int | None:
        """Up to when all that was committed is handed out, on the owner's clock. None: not known since the start. A leader was not
        replaced before an election timeout ago."""
        if self.role is Role.LEADER:
            return self._now_ms - self.options.election_max_ms if self.term_committed else None
        if self.log.handed_index >= self._told_commit and self.term_committed and self._heard_ms is not None:
            return self._heard_ms
        return self._caught_up_ms

    def _follow(self, leader: ReplicaId) -> bool:
        """Another one leads; whether it may, as nobody else has led in this term. As long as a leader is known no campaign is
        under way (`ElectionPart._campaign`)."""
        if self.role is Role.LEADER or self._term_leader not in (None, leader):
            self._ignore(
                leader, f"it leads term {self.term}, as {self._term_leader} does: a term has one leader"
            )
            return False
        self._term_leader = leader
        self._rest(leader, f"heard from the leader of term {self.term}")
        self._draw_election()
        self._on_leader_known(leader)
        return True

    def _on_leader_known(self, leader: ReplicaId) -> None:
        raise NotImplementedError

    def _not_held(self, sender: ReplicaId, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """What is new; a suffix is dropped only where an entry of another term stands (Raft figure 2, step 3)."""
        skip = 0
        for entry in entries:
            if entry.index > self.commit_index:
                held = self.log.term_at(entry.index)
                if held is None:
                    break
                if held != entry.term:
                    self._truncate(
                        entry.index, f"leader {sender} of term {self.term} holds term {entry.term} there"
                    )
                    break
            skip += 1
        return entries[skip:]

    def _refuse_gap(self, sender: ReplicaId, request: UpdateRequest) -> None:
        """Say where the next probe should end: before the run of the conflicting term (Raft §5.3, last part)."""
        log = self.log
        at = request.preceding.index
        conflict_term = log.term_at(at)
        if conflict_term is None:
            conflict_index, conflict_term = log.last_index + 1, 0
        else:
            conflict_index = max(log.first_of_term(at), self.commit_index + 1)
        response = UpdateResponse(
            self.term,
            False,
            log.last_opid,
            conflict_index,
            conflict_term,
            request.read_context,
            request.sent_ms,
            self.has_data,
            False,
            at,
        )
        self._send(sender, response, self._hard_barrier())

    def _answer(self, sender: ReplicaId, request: UpdateRequest, vouched: int, after: int) -> None:
        log = self.log
        last = log.opid_at(vouched) if vouched >= log.start.index else OpId(0, vouched)
        response = UpdateResponse(
            self.term,
            True,
            last,
            0,
            0,
            request.read_context,
            request.sent_ms,
            self.has_data,
            False,
            request.preceding.index,
        )
        self._send(sender, response, after)
