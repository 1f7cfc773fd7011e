"""Membership while leading: one change at a time, and the promotions that the leader makes by itself.

Invariants: no change before an entry of the own term is committed, none while one is pending; the leader stays a voter
of every configuration it appends (one that is asked to go hands over instead).
"""

from __future__ import annotations

from dataclasses import replace

from stele.model.config import Configuration, MemberType, Peer, encode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code
from stele.model.ids import OPID_NONE
from stele.raft.core_leader import LeaderPart
from stele.raft.effects import ChangeRefused, Role
from stele.raft.events import ProposeChange
from stele.raft.membership import PeerFacts, Refusal, changed_peers, unsafe
from stele.raft.progress import Progress


class ChangePart(LeaderPart):
    """Answers ProposeChange."""

    _promote_due = False

    @property
    def pending_change_index(self) -> int | None:
        """Log index of a membership change that is not known committed."""
        at = self.log.config_index
        return at if at > self.commit_index else None

    @property
    def transferring(self) -> bool:
        """Whether leadership is being handed over."""
        raise NotImplementedError

    def _hand_over(self, cause: str) -> bool:
        """Begin to hand leadership to any sound voter; false if there is none."""
        raise NotImplementedError

    def _on_propose_change(self, event: ProposeChange) -> None:
        refusal = self._not_now(event) or self._begin_change(event)
        if refusal is not None:
            self._out.append(ChangeRefused(event.context, refusal.code, refusal.message))

    def _not_now(self, event: ProposeChange) -> Refusal | None:
        pending = self.pending_change_index
        if self.role is not Role.LEADER:
            return Refusal(Code.NOT_LEADER, f"replica {self.self_replica} does not lead; ask {self.leader}")
        if self.transferring:
            return Refusal(Code.STEPPING_DOWN, "leadership is being handed over; ask the next leader")
        if not self.term_committed:
            return Refusal(Code.NOT_READY, f"nothing of term {self.term} is committed yet; try again")
        if pending is not None:
            return Refusal(
                Code.CHANGE_IN_PROGRESS, f"the change at index {pending} is not committed yet; try again"
            )
        if event.cas_opid_index != self.config.opid_index:
            return Refusal(
                Code.CAS_FAILED,
                f"the configuration is {self.config.opid_index}, not {event.cas_opid_index}; look again",
            )
        return None

    def _begin_change(self, event: ProposeChange) -> Refusal | None:
        peers = changed_peers(self.config, event)
        if isinstance(peers, Refusal):
            return peers
        refusal = unsafe(self.config, peers, self._facts(), self.commit_index, self.log.term_at)
        if refusal is not None:
            return refusal
        if not any(p.replica_id == self.self_replica and p.votes for p in peers):
            if self._hand_over("asked to leave the voters"):
                return Refusal(
                    Code.STEPPING_DOWN, "the leader itself is to go; it hands over first, ask the next leader"
                )
            return Refusal(
                Code.UNSAFE_CHANGE, "the leader itself is to go and no other voter can take over now"
            )
        self._append_change(
            event.context, peers, f"change {event.change_type.name} of {event.peer.replica_id}"
        )
        return None

    def _append_change(self, context: int | None, peers: tuple[Peer, ...], cause: str) -> None:
        index = self.log.last_index + 1
        self._change = (context, self.term, index)
        payload = encode_configuration(Configuration(index, peers))
        self._append(Entry(self.term, index, EntryKind.CONFIG, 0, payload), cause)

    def _facts(self) -> dict[int, PeerFacts]:
        since = self._now_ms - self.options.election_max_ms
        facts: dict[int, PeerFacts] = {
            # Its own disk moves: a leader whose sync stalls steps down.
            self.self_replica: PeerFacts(self._own_match(), True, False, self.has_data)
        }
        for progress in self._progress.values():
            facts[progress.replica_id] = PeerFacts(
                progress.match,
                progress.reachable(since),
                progress.failed,
                progress.has_data,
                progress.stuck(since),
            )
        return facts

    # Promotions

    def _on_candidate_moved(self, progress: Progress) -> None:
        progress.judge_round(
            self.log.last_index, self.commit_index, self._now_ms, self.options.election_max_ms
        )
        self._promote_due = True

    def _consider_promotion(self) -> None:
        """Make a voter of the first peer that is ready; one at a time."""
        self._promote_due = False
        if self.pending_change_index is not None or not self.term_committed or self.transferring:
            return
        for peer in self.config.peers:
            progress = self._progress.get(peer.replica_id)
            if progress is None or not self._ready(peer, progress):
                continue
            voter = replace(peer, member_type=MemberType.VOTER, promote=False, witness_start=OPID_NONE)
            peers = tuple(voter if p is peer else p for p in self.config.peers)
            if unsafe(self.config, peers, self._facts(), self.commit_index, self.log.term_at) is None:
                self._append_change(None, peers, f"replica {peer.replica_id} has caught up")
                return

    def _ready(self, peer: Peer, progress: Progress) -> bool:
        if progress.failed or not progress.has_data or not progress.round_fast:
            return False
        since = self._now_ms - self.options.election_max_ms
        if not progress.reachable(since) or progress.stuck(since):
            return False
        return peer.promote or peer.member_type is MemberType.WITNESS
