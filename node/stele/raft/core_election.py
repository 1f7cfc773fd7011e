"""Elections: pre-vote, vote, and who answers what (Raft §5.2, §5.4.1; dissertation 4.2.3, 9.6).

Invariants: one vote per term, durable before it is given, the candidate's own included; a term rises only after a
majority has said that it would vote and hears no leader, or when the leader itself asked for it.
"""

from __future__ import annotations

from stele.model.config import MemberType
from stele.model.ids import ReplicaId
from stele.raft.core_base import NEVER_MS
from stele.raft.core_follower import FollowerPart
from stele.raft.effects import Role
from stele.raft.messages import TimeoutNow, VoteRequest, VoteResponse


class _Campaign:
    """One round of asking for votes."""

    __slots__ = ("ignore_live_leader", "lost", "own_after", "pre_vote", "term", "votes")

    def __init__(self, term: int, pre_vote: bool, ignore_live_leader: bool) -> None:
        self.term = term
        self.pre_vote = pre_vote
        self.ignore_live_leader = ignore_live_leader
        self.votes: dict[int, bool] = {}
        self.lost = False  # everybody has voted, and it was not enough
        self.own_after = 0  # the own vote counts once this Persist is durable


class ElectionPart(FollowerPart):
    """Asks for votes and gives them."""

    _campaign_round: _Campaign | None = None

    def _become_leader(self, cause: str) -> None:
        raise NotImplementedError

    def _end_campaign(self) -> None:
        self._campaign_round = None

    # Asking

    def _campaign(self, cause: str) -> None:
        """Begin with a pre-vote; for a single voter there is nobody to ask."""
        if not self.may_campaign:
            self._draw_election()
            return
        self._draw_election()
        if self.leader is not None or self.role is Role.CANDIDATE:
            self._set_role(Role.FOLLOWER, None, cause)
        if self.config.majority == 1:
            self._stand(cause, ignore_live_leader=False)
            return
        campaign = self._campaign_round = _Campaign(self.term + 1, True, False)
        campaign.votes[self.self_replica] = True
        self._ask(campaign)

    def _stand(self, cause: str, *, ignore_live_leader: bool) -> None:
        """Raise the term and ask for real votes."""
        self.term += 1
        self.voted_for = self.self_replica
        self._term_leader = None
        self._hard_dirty = True
        self._verified_index = 0
        self._heard_ms = None
        campaign = self._campaign_round = _Campaign(self.term, False, ignore_live_leader)
        self._set_role(Role.CANDIDATE, None, cause)
        self._draw_election()
        campaign.own_after = self._hard_barrier()
        self._ask(campaign)

    def _ask(self, campaign: _Campaign) -> None:
        me = self.config.peer(self.self_replica)
        request = VoteRequest(
            campaign.term,
            self.log.last_opid,
            campaign.pre_vote,
            campaign.ignore_live_leader,
            me.node_id if me is not None else "",
        )
        after = self._hard_barrier()
        for peer in self.config.voters:
            if peer.replica_id != self.self_replica:
                self._send(peer.replica_id, request, after)

    def _on_vote_response(self, sender: ReplicaId, response: VoteResponse) -> None:
        if sender == self._lost_leader:
            self._lost_leader = None  # it is back, and may vote
        if response.failed:
            return
        if response.term > self.term:
            self._adopt_term(response.term, f"{sender} is at term {response.term}")
            return
        campaign = self._campaign_round
        if (
            campaign is None
            or response.pre_vote != campaign.pre_vote
            or response.request_term != campaign.term
        ):
            return
        campaign.votes[sender] = response.granted
        self._count_votes(campaign)

    def _own_vote_durable(self) -> None:
        campaign = self._campaign_round
        if campaign is None or campaign.pre_vote or self.self_replica in campaign.votes:
            return
        if self._persist_durable >= campaign.own_after:
            campaign.votes[self.self_replica] = True
            self._count_votes(campaign)

    def _count_votes(self, campaign: _Campaign) -> None:
        voters = self.config.voters
        granted = [p.replica_id for p in voters if campaign.votes.get(p.replica_id) is True]
        refused = [p.replica_id for p in voters if campaign.votes.get(p.replica_id) is False]
        if len(granted) >= self.config.majority:
            by = ",".join(map(str, granted))
            if campaign.pre_vote:
                self._stand(f"would get the votes of {by}", ignore_live_leader=False)
            else:
                self._campaign_round = None
                self._become_leader(f"votes of {by}")
        elif campaign.pre_vote and (
            len(refused) > len(voters) - self.config.majority or self._all_have_voted(campaign)
        ):
            # Costs nobody a term, so the next attempt need not wait as long as after a vote that nobody answers. Who
            # refused may only not have heard yet of the leader's end.
            self._campaign_round = None
            self._campaign_within(self.options.election_min_ms // 2, self.options.election_max_ms // 2)
        elif (
            not campaign.pre_vote
            and not campaign.lost
            and len(refused) < self.config.majority
            and self._all_have_voted(campaign)
        ):
            # A vote that nobody won: no more are to be expected, and too few refused for another to have a majority.
            # What is drawn from now is wide beside the time of a vote, so that one of those who stood will be first.
            campaign.lost = True
            self._campaign_within(self.options.election_min_ms // 6, self.options.election_max_ms // 2)

    def _all_have_voted(self, campaign: _Campaign) -> bool:
        """Whether every voter has answered, but for the leader whose end brought the election about."""
        gone = self._lost_leader
        return all(p.replica_id in campaign.votes or p.replica_id == gone for p in self.config.voters)

    def _campaign_within(self, low_ms: int, high_ms: int) -> None:
        """Earlier than drawn before; but a witness, or one that is unfit, stays as patient as it is."""
        if self.leads_if_nobody_can:
            return
        self._election_due_ms = min(self._election_due_ms, self._now_ms + self._rng.randint(low_ms, high_ms))

    # Answering

    def _on_vote_request(self, sender: ReplicaId, request: VoteRequest) -> None:
        alive = self._leader_alive()
        if request.pre_vote:
            granted = not alive and self._free_to_vote(sender, request) and self._up_to_date(request)
            self._reply(sender, request, granted, alive)
            return
        if request.term < self.term or (alive and not request.ignore_live_leader):
            # Whoever hears a live leader neither votes nor takes the term (dissertation 4.2.3).
            self._reply(sender, request, False, alive)
            return
        if request.term > self.term:
            self._adopt_term(request.term, f"{sender} stands for term {request.term}")
        granted = self._free_to_vote(sender, request) and self._up_to_date(request)
        if granted and self.voted_for is None:
            self.voted_for = sender
            self._hard_dirty = True
            self._draw_election()
        self._reply(sender, request, granted, alive)

    def _free_to_vote(self, sender: ReplicaId, request: VoteRequest) -> bool:
        return request.term > self.term or (request.term == self.term and self.voted_for in (None, sender))

    def _up_to_date(self, request: VoteRequest) -> bool:
        """The candidate's log must be at least as up to date as this one (Raft §5.4.1)."""
        return request.last_logged >= self.log.last_opid

    def _reply(self, sender: ReplicaId, request: VoteRequest, granted: bool, alive: bool) -> None:
        response = VoteResponse(self.term, granted, request.pre_vote, request.term, not alive)
        self._send(sender, response, self._hard_barrier())

    def _on_timeout_now(self, sender: ReplicaId, request: TimeoutNow) -> None:
        if (
            request.term == self.term
            and self.role is Role.FOLLOWER
            and self.may_campaign
            and self._may_take_over_from(sender)
        ):
            self._stand(f"leader {sender} hands over", ignore_live_leader=True)

    def _may_take_over_from(self, leader: ReplicaId) -> bool:
        """Not a witness; and one that is unfit only from a witness, which serves nobody and never has it back."""
        peer = self.config.peer(leader)
        from_witness = peer is not None and peer.member_type is MemberType.WITNESS
        return not self.is_witness and (self._fit or from_witness)

    # Time

    def _tick_election(self) -> None:
        if self._now_ms < self._election_due_ms:
            return
        if self.role in (Role.FOLLOWER, Role.CANDIDATE) and not self.failed:
            self._campaign("no leader heard within the election timeout")
        else:
            self._election_due_ms = NEVER_MS
