"""Cores and timestamps with a known bug each, to prove that the simulator would see it. Used by test_sim.py only.

Each breaks one rule, where it is a core one of the paper or of its own README; its docstring says which.
"""

from __future__ import annotations

from dataclasses import replace

from stele.consensus.timestamps import Timestamps
from stele.model.config import MemberType
from stele.model.ids import HybridTime, OpId, ReplicaId
from stele.raft import RaftCore
from stele.raft.changes import Changes
from stele.raft.effects import HardState, ReadReady, Role
from stele.raft.events import ProposeChange
from stele.raft.follower import Follower
from stele.raft.leader import Leader
from stele.raft.log import LogView
from stele.raft.membership import Refusal
from stele.raft.messages import UpdateResponse
from stele.raft.outbox import Outbox
from stele.raft.roles import Parts
from tests.sim.plan import Weather


class _ForgetsVotes(Outbox):
    def persist(self) -> None:
        if self.hard_state is not None:
            self.hard_state = HardState(self.hard_state.term, None)
        super().persist()


class ForgetsItsVote(RaftCore):
    """Persists the term but not the vote (Raft figure 2: votedFor is persistent)."""

    parts = Parts(outbox=_ForgetsVotes)


class _CommitsAnyTerm(Leader):
    def may_commit(self, index: int) -> bool:
        return True


class CommitsOldTerms(RaftCore):
    """Commits entries of earlier terms by counting copies (Raft §5.4.2, figure 8)."""

    parts = Parts(leader=_CommitsAnyTerm)


class _CountsMemory(Leader):
    def own_match(self) -> int:
        return self.state.log.last_index


class CountsItsUndurableCopy(RaftCore):
    """The leader's own copy counts before its disk has it."""

    parts = Parts(leader=_CountsMemory)


class _NoLogBarrier(Outbox):
    def log_barrier(self) -> int:
        return 0


class AnswersBeforeItsDisk(RaftCore):
    """A follower acknowledges entries that it has only in memory."""

    parts = Parts(outbox=_NoLogBarrier)


class _NoHardBarrier(Outbox):
    def hard_barrier(self) -> int:
        return 0


class SpeaksBeforeItsDisk(RaftCore):
    """Asks and answers in a term that it has only in memory (Raft figure 2: updated before responding)."""

    parts = Parts(outbox=_NoHardBarrier)


class _CoveredByAny(LogView):
    def covered_by(self, last_logged: OpId) -> bool:
        return True


class VotesForShorterLogs(RaftCore):
    """Grants votes without comparing logs (Raft §5.4.1)."""

    parts = Parts(log=_CoveredByAny)


class _Trusting(Follower):
    @property
    def verified_index(self) -> int:
        return self.state.log.last_index

    @verified_index.setter
    def verified_index(self, index: int) -> None:
        pass


class TrustsItsWholeLog(RaftCore):
    """Takes the leader's commit index for entries that were never compared with the leader's log."""

    parts = Parts(follower=_Trusting)


class _AsksNobody(Leader):
    def serve_reads(self) -> bool:
        waiting, self.reads.waiting = self.reads.waiting, []
        for context in waiting:
            self.state.outbox.others.append(ReadReady(context, self.state.commit_index))
        return False


class ReadsWithoutAsking(RaftCore):
    """Serves reads at its commit index without a word from a majority (Raft §8)."""

    parts = Parts(leader=_AsksNobody)


class _AtAnyTime(Changes):
    def not_now(self, event: ProposeChange) -> Refusal | None:
        refusal = super().not_now(event)
        if refusal is not None and refusal.code.name in ("CHANGE_IN_PROGRESS", "NOT_READY", "CAS_FAILED"):
            return None
        return refusal


class ChangesAtAnyTime(RaftCore):
    """Changes the membership while another change is pending and before it committed in its own term."""

    parts = Parts(changes=_AtAnyTime)


class BeginsBelowTheCeiling(Timestamps):
    """A new leader goes by its own clock, however far ahead its predecessor's ran (DESIGN.md, timestamps)."""

    def in_log(self, ceiling: int) -> None:
        pass


class AssignsAboveTheCeiling(Timestamps):
    """Assigns by the clock alone, whatever ceiling is committed."""

    def assign(self) -> HybridTime | None:
        return self._clock.now()


class CountsProposedCeilings(Timestamps):
    """Takes a ceiling for committed when it is proposed."""

    def next_ceiling(self, at_least: int = 0) -> int | None:
        ceiling = super().next_ceiling(at_least)
        self._committed = max(self._committed, ceiling or 0)
        return ceiling


class ForgetsServedSnapshots(Timestamps):
    """Assigns timestamps below a snapshot that it promised to change no more."""

    def reserve(self, snapshot: int) -> None:
        pass


PLANTED_TIMESTAMPS = (
    (BeginsBelowTheCeiling, 45),
    (AssignsAboveTheCeiling, 10),
    (CountsProposedCeilings, 10),
    (ForgetsServedSnapshots, 41),
)
"""(bug, first seed): looked for in the next worlds whose writes have timestamps."""


class _Promotes(Changes):
    def consider_promotion(self) -> None:
        state = self.state
        if not state.term_committed:
            for peer in state.config.peers:
                if peer.promote and state.pending_change_index is None:
                    voter = replace(peer, member_type=MemberType.VOTER, promote=False)
                    peers = tuple(voter if p is peer else p for p in state.config.peers)
                    self.append(None, peers, "at once")
        super().consider_promotion()


class PromotesAtOnce(RaftCore):
    """Makes voters of learners before it has committed anything in its own term."""

    parts = Parts(changes=_Promotes)


class HoldsItsDiskForIdle(RaftCore):
    """Takes a sync for one from which nothing follows, also where it elects, commits or hands out."""

    @property
    def awaits_disk(self) -> bool:
        return False


class HoldsAnswersForIdle(RaftCore):
    """Takes an answer for one from which nothing follows, also where it commits."""

    def awaits_answer(self, sender: ReplicaId, answer: UpdateResponse) -> bool:
        return self.role is not Role.LEADER


PLANTED_STEPS = (
    (ForgetsItsVote, Weather.DUEL, 5, "on disk"),
    (AnswersBeforeItsDisk, Weather.DUEL, 5, "on disk"),
    (SpeaksBeforeItsDisk, Weather.DUEL, 5, "on disk"),
    (ChangesAtAnyTime, Weather.CHURN, 5, "members change"),
    (PromotesAtOnce, Weather.MIXED, 19, "members change before anything"),
    (HoldsItsDiskForIdle, Weather.MIXED, 1, "no effect by itself"),
    (HoldsAnswersForIdle, Weather.MIXED, 1, "no effect by itself"),
)
"""(bug, weather, seed, what is told): wrong as it is said or done, whatever comes of it."""

PLANTED = (
    (ForgetsItsVote, Weather.DUEL, 1, 20),
    (CommitsOldTerms, Weather.FIGURE_8, 1, 20),
    (CountsItsUndurableCopy, Weather.FIGURE_8, 4, 20),
    (AnswersBeforeItsDisk, Weather.FIGURE_8, 15, 20),
    (VotesForShorterLogs, Weather.MIXED, 1, 20),
    (TrustsItsWholeLog, Weather.FIGURE_8, 5, 20),
    (ReadsWithoutAsking, Weather.MIXED, 1, 20),
    (ChangesAtAnyTime, Weather.CHURN, 22, 20),
)
"""(bug, the weather that brings it out, first seed, how many seeds it may take)."""
