"""Parts of a core with one fault each, for `tests/sim/bugs.py`.

Each breaks one rule of the paper or of the core's README; its docstring says which.
"""

from __future__ import annotations

from dataclasses import replace

from stele.model.config import MemberType
from stele.model.entry import Entry
from stele.model.ids import OpId, ReplicaId
from stele.raft.changes import Changes
from stele.raft.effects import HardState, ReadReady
from stele.raft.events import ProposeChange
from stele.raft.follower import Follower
from stele.raft.leader import Leader
from stele.raft.log import LogView
from stele.raft.membership import Refusal
from stele.raft.messages import VoteRequest
from stele.raft.outbox import Outbox


class ForgetsVotes(Outbox):
    """Persists the term but not the vote (Raft figure 2: votedFor is persistent)."""

    def persist(self) -> None:
        if self.hard_state is not None:
            self.hard_state = HardState(self.hard_state.term, None)
        super().persist()


class StandsAgainstOthers(Follower):
    """Gives way to nobody whose pre-vote crosses its own. That is sound; it makes two candidates of a term frequent."""

    def _goes_before(self, other: ReplicaId, request: VoteRequest) -> bool:
        return False

    def _give_way(self) -> None:
        pass


class AcknowledgesMemory(Outbox):
    """A follower acknowledges entries that it has only in memory."""

    def log_barrier(self) -> int:
        return 0


class SpeaksBeforeItsDisk(Outbox):
    """Sends requests and answers in a term that is only in memory (Raft figure 2: updated before
    responding)."""

    def hard_barrier(self) -> int:
        return 0


class CommitsOldTerms(Leader):
    """Commits entries of earlier terms by counting copies (Raft §5.4.2, figure 8)."""

    def may_commit(self, index: int) -> bool:
        return True


class CountsMemory(Leader):
    """The leader's own copy counts before its disk has it."""

    def own_match(self) -> int:
        return self.state.log.last_index


class ReadsWithoutAsking(Leader):
    """Serves reads at its commit index without an answer from a majority (Raft §8)."""

    def serve_reads(self) -> bool:
        waiting, self.reads.waiting = self.reads.waiting, []
        for context in waiting:
            self.state.outbox.others.append(ReadReady(context, self.state.commit_index))
        return False


class VotesForShorterLogs(LogView):
    """Grants votes without comparing logs (Raft §5.4.1)."""

    def covered_by(self, last_logged: OpId) -> bool:
        return True


class TrustsItsWholeLog(Follower):
    """Uses the leader's commit index for entries that were never compared with the leader's log."""

    @property
    def verified_index(self) -> int:
        return self.state.log.last_index

    @verified_index.setter
    def verified_index(self, index: int) -> None:
        pass


class CutsWhatFollows(Follower):
    """Cuts its log behind a request's last entry although that entry matches (Raft figure 2, step 3: only where
    the terms differ). Messages that come late or twice show it."""

    def _missing_entries(self, sender: ReplicaId, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        state = self.state
        missing = super()._missing_entries(sender, entries)
        if entries and not missing and state.commit_index <= entries[-1].index < state.log.last_index:
            self._truncate(entries[-1].index + 1, "it follows")
        return missing


class ChangesAtAnyTime(Changes):
    """Changes the membership while another change is pending and before it committed in its own term."""

    def not_now(self, event: ProposeChange) -> Refusal | None:
        refusal = super().not_now(event)
        if refusal is not None and refusal.code.name in ("CHANGE_IN_PROGRESS", "NOT_READY", "CAS_FAILED"):
            return None
        return refusal


class PromotesAtOnce(Changes):
    """Promotes learners to voters before it has committed anything in its own term."""

    def consider_promotion(self) -> None:
        state = self.state
        if not state.term_committed:
            for peer in state.config.peers:
                if peer.promote and state.pending_change_index is None:
                    voter = replace(peer, member_type=MemberType.VOTER, promote=False)
                    peers = tuple(voter if p is peer else p for p in state.config.peers)
                    self.append(None, peers, "at once", "at once")
        super().consider_promotion()
