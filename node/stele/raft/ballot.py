"""One round of votes, or of pre-votes ("would you vote for me?"). Owned by a Candidate, or by a Follower
(pre-vote).

Invariant: an answer counts only in the round that asked for it. A replica's vote for itself counts once it is
durable.
"""

from __future__ import annotations

from stele.model.ids import ReplicaId
from stele.raft.messages import VoteRequest, VoteResponse
from stele.raft.state import RaftState


class Ballot:
    """The votes of one round at `term`. In a pre-vote, `term` is the one that this replica would enter."""

    __slots__ = (
        "_state",
        "_votes",
        "ignore_live_leader",
        "lost",
        "own_after",
        "pre_vote",
        "released",
        "term",
    )

    def __init__(
        self, state: RaftState, term: int, *, pre_vote: bool, ignore_live_leader: bool, released: int = 0
    ) -> None:
        self._state = state
        self.term = term
        self.pre_vote = pre_vote
        self.ignore_live_leader = ignore_live_leader
        self.released = released
        """As in `VoteRequest`."""
        self.lost = False
        """Whether the vote is split: every voter has answered, and neither those that granted their vote nor
        those that refused it are a majority."""
        self.own_after = state.outbox.hard_barrier()
        """Id of the Persist that holds this replica's vote for itself."""
        self._votes: dict[int, bool] = {}

    def ask(self) -> None:
        """Ask all other voters."""
        state = self._state
        request = VoteRequest(
            self.term,
            state.log.last_opid,
            self.pre_vote,
            self.ignore_live_leader,
            state.node_id(),
            self.released,
        )
        after = state.outbox.hard_barrier()
        for peer in state.config.voters:
            if peer.replica_id != state.self_replica:
                state.outbox.send(peer.replica_id, request, after)

    def take(self, sender: ReplicaId, response: VoteResponse) -> bool:
        """Count an answer. Returns whether it belongs to this round."""
        if response.pre_vote != self.pre_vote or response.request_term != self.term:
            return False
        self._votes[sender] = response.granted
        return True

    def take_own(self) -> None:
        """Count this replica's vote for itself."""
        self._votes[self._state.self_replica] = True

    @property
    def own_counts(self) -> bool:
        """Whether this replica's vote for itself counts already."""
        return self._state.self_replica in self._votes

    @property
    def granted(self) -> tuple[ReplicaId, ...]:
        """The voters that have granted their vote."""
        return self._answers(True)

    @property
    def refused(self) -> tuple[ReplicaId, ...]:
        """The voters that have refused their vote."""
        return self._answers(False)

    def _answers(self, answer: bool) -> tuple[ReplicaId, ...]:
        return tuple(
            p.replica_id for p in self._state.config.voters if self._votes.get(p.replica_id) is answer
        )

    @property
    def all_have_voted(self) -> bool:
        """Whether every voter has answered. The last leader's answer is not needed if its node failed."""
        gone = self._state.lost_leader
        return all(p.replica_id in self._votes or p.replica_id == gone for p in self._state.config.voters)
