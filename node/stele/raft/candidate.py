"""Standing for election in one term (Raft §5.2). Ends as Leader, as Follower of another, or with the next
attempt.

Invariants: this replica votes for itself and for no other in this term; its vote counts once it is durable.
"""

from __future__ import annotations

from stele.model.ids import ReplicaId
from stele.raft.any_role import refuse_old_term, take_persisted, take_vote_response
from stele.raft.ballot import Ballot
from stele.raft.events import Persisted, Tick
from stele.raft.messages import UpdateRequest, VoteResponse
from stele.raft.role import Switch
from stele.raft.state import RaftState


class Candidate:
    """A replica that has asked for votes in its term."""

    __slots__ = ("ballot", "state", "switch")

    def __init__(
        self, state: RaftState, switch: Switch, *, ignore_live_leader: bool, released: int = 0
    ) -> None:
        self.state = state
        self.switch = switch
        self.ballot = Ballot(
            state, state.term, pre_vote=False, ignore_live_leader=ignore_live_leader, released=released
        )

    @property
    def caught_up_ms(self) -> int | None:
        """As `Follower.caught_up_ms`. The value is from the time when there still was a leader."""
        return self.state.caught_up_ms

    def on_update_request(self, sender: ReplicaId, request: UpdateRequest) -> None:
        """Follow the sender, if it leads this term or a later one. Refuse the leader of an older term."""
        state = self.state
        if request.term < state.term:
            refuse_old_term(state, sender, request)
            return
        if request.term > state.term:
            self.switch.adopt_term(request.term, f"replica {sender} is at term {request.term}")
        else:
            self.switch.follow(sender, f"replica {sender} leads term {state.term}")
        self.switch.receive(sender, request)

    def on_vote_response(self, sender: ReplicaId, response: VoteResponse) -> None:
        """Count a vote."""
        if take_vote_response(self, sender, response) and self.ballot.take(sender, response):
            self._count()

    def on_persisted(self, event: Persisted) -> None:
        """Count this replica's vote for itself once it is durable."""
        take_persisted(self, event)
        if not self.ballot.own_counts and self.state.outbox.durable_id >= self.ballot.own_after:
            self.ballot.take_own()
            self._count()

    def on_tick(self, event: Tick) -> None:
        """Start another attempt when the election time-out is over."""
        state = self.state
        state.advance_clock(event.now_ms)
        state.pending.transfer_times_out(state.now_ms)
        if state.now_ms < state.timer.due_ms:
            return
        if not self.ballot.lost:
            state.timer.unanswered += 1
        if state.may_campaign:
            self.switch.campaign("no leader heard within the election timeout")
        else:
            state.draw_election()

    def _count(self) -> None:
        state, ballot = self.state, self.ballot
        granted = ballot.granted
        if len(granted) >= state.config.majority:
            self.switch.lead(f"votes of {','.join(map(str, granted))}")
        elif not ballot.lost and len(ballot.refused) < state.config.majority and ballot.all_have_voted:
            # Nobody won: all have answered, and too few refused for another candidate to have a majority. The
            # next time-out is drawn from a range much wider than a round of votes takes, so one of the
            # candidates will be first.
            ballot.lost = True
            if not state.leads_if_nobody_can:
                low, high = state.options.election_min_ms // 6, state.options.election_max_ms // 2
                state.timer.draw_within(state.now_ms, low, high)
