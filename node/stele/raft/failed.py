"""A FAILED replica: it abstains, and its answers say so. It counts for nothing until a new core replaces this
one.

Invariant: it changes neither term, vote nor log, and never campaigns.
"""

from __future__ import annotations

from stele.model.ids import ReplicaId
from stele.raft.events import Tick
from stele.raft.messages import UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.raft.role import Switch
from stele.raft.state import RaftState
from stele.raft.timer import NEVER_MS


class Failed:
    """A replica whose disk, log or rows are damaged."""

    __slots__ = ("state", "switch")

    def __init__(self, state: RaftState, switch: Switch) -> None:
        self.state = state
        self.switch = switch

    @property
    def caught_up_ms(self) -> int | None:
        """As `Follower.caught_up_ms`. The value is from the time before the replica failed."""
        return self.state.caught_up_ms

    def on_update_request(self, sender: ReplicaId, request: UpdateRequest) -> None:
        """Refuse under the sender's own term, so that the sender does not ignore the answer."""
        state = self.state
        if request.term >= state.term and state.leader != sender:
            state.set_role(state.resting_role, sender, f"replica {sender} leads term {request.term}")
        answer = UpdateResponse(
            request.term,
            False,
            sent_ms=request.sent_ms,
            has_data=False,
            failed=True,
            preceding_index=request.preceding.index,
        )
        state.outbox.send(sender, answer, 0)

    def on_vote_request(self, sender: ReplicaId, request: VoteRequest) -> None:
        """Refuse, in an answer with the term of the request.

        The term of a pre-vote is only proposed: neither this replica nor the sender enters it by this answer.
        """
        alive = self.state.leader_alive()
        refusal = VoteResponse(request.term, False, request.pre_vote, request.term, not alive, True)
        self.state.outbox.send(sender, refusal, 0)

    def on_tick(self, event: Tick) -> None:
        """Note the time, and give up a transfer whose time is over. Never campaign."""
        state = self.state
        state.advance_clock(event.now_ms)
        state.pending.transfer_times_out(state.now_ms)
        if state.now_ms >= state.timer.due_ms:
            state.timer.due_ms = NEVER_MS
