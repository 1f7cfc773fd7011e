"""Handlers that several roles share. `table.py` says which role uses which.

The first argument is the acting role; then comes the event, or the sender and the message.

Invariants: there is one vote per term, and it is durable before the answer leaves. A replica that hears a
live leader neither votes nor enters a candidate's term (dissertation 4.2.3). The exception is an election
that the leader itself (3.10) or an administrator (`Promote`) asked for.
"""

from __future__ import annotations

from stele.model.errors import Code, ensure
from stele.model.ids import ReplicaId
from stele.raft.effects import ChangeRefused, ProposalRefused, ReadRefused, TransferFailed
from stele.raft.events import (
    Compacted,
    DataArrived,
    Fitness,
    PeerFailed,
    Persisted,
    Promote,
    Propose,
    ProposeChange,
    ReportFailed,
    RequestRead,
    Start,
    SyncStalled,
    TransferLeadership,
)
from stele.raft.messages import Message, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from stele.raft.role import Acting
from stele.raft.state import RaftState
from stele.raft.timer import NEVER_MS

# Events


def ignore_event(role: Acting, event: object) -> None:
    """This role ignores the event."""


def take_start(role: Acting, event: Start) -> None:
    """Begin in the role that the configuration gives."""
    role.switch.start(event.now_ms)


def take_persisted(role: Acting, event: Persisted) -> None:
    """Hand out entries that were committed before and are durable now."""
    state = role.state
    if note_persisted(state, event.persist_id) and state.commit_index > state.log.handed_index:
        state.hand_out()


def note_persisted(state: RaftState, persist_id: int) -> bool:
    """Note that all Persists up to this one are durable. Returns whether the durable part of the log grew."""
    outbox = state.outbox
    if persist_id > outbox.persist_id:
        ensure(False, f"raft: Persist {persist_id} was never issued")
    state.stalled_until_ms = 0
    if persist_id > outbox.durable_id:
        outbox.durable_id = persist_id
    return state.log.persisted(persist_id)


def take_compacted(role: Acting, event: Compacted) -> None:
    """Forget the log up to the OpId of the event."""
    role.state.log.compact(event.opid)


def take_data(role: Acting, event: DataArrived) -> None:
    """Note that a witness holds the rows now."""
    role.state.has_data = True
    role.state.judge_witness()


def take_fitness(role: Acting, event: Fitness) -> None:
    """Note whether the node is fit to lead. On a change draw a new election time-out: unfit replicas wait longer."""
    state = role.state
    if event.fit == state.fit:
        return
    state.fit = event.fit
    if state.timer.due_ms != NEVER_MS:
        state.draw_election()


def take_peer_failed(role: Acting, event: PeerFailed) -> None:
    """Campaign soon if the leader's node failed."""
    role.state.forget_leader(event.replica_id)


def take_stall(role: Acting, event: SyncStalled) -> None:
    """Do not campaign while this replica's own disk stalls."""
    state = role.state
    state.advance_clock(event.now_ms)
    state.stalled_until_ms = state.now_ms + state.options.election_max_ms


def take_report_failed(role: Acting, event: ReportFailed) -> None:
    """Become FAILED: from now on this replica neither votes, campaigns nor leads, and its answers say so."""
    role.switch.fail(event.reason)


def take_promote(role: Acting, event: Promote) -> None:
    """Stand for election, because an administrator asks for it. As in every election, the votes decide."""
    state = role.state
    state.advance_clock(event.now_ms)
    if state.may_campaign and not state.witness:
        role.switch.stand(f"promoted: {event.cause}", ignore_live_leader=True, promoted=True)


# Requests of callers that need the leader


def _not_leader(state: RaftState) -> str:
    if state.leader is None:
        return f"replica {state.self_replica} does not lead, and knows no leader; try again soon"
    return f"replica {state.self_replica} does not lead; ask replica {state.leader}"


def refuse_proposal(role: Acting, event: Propose) -> None:
    """Refuse the proposal, and name the leader."""
    state = role.state
    state.outbox.others.append(ProposalRefused(event.context, Code.NOT_LEADER, _not_leader(state)))


def refuse_read(role: Acting, event: RequestRead) -> None:
    """Refuse the read, and name the leader."""
    state = role.state
    state.outbox.others.append(ReadRefused(event.context, Code.NOT_LEADER, _not_leader(state)))


def refuse_change(role: Acting, event: ProposeChange) -> None:
    """Refuse the membership change, and name the leader."""
    state = role.state
    state.outbox.others.append(ChangeRefused(event.context, Code.NOT_LEADER, _not_leader(state)))


def refuse_transfer(role: Acting, event: TransferLeadership) -> None:
    """Refuse to hand leadership over, and name the leader."""
    state = role.state
    state.advance_clock(event.now_ms)
    state.outbox.others.append(TransferFailed(event.context, Code.NOT_LEADER, _not_leader(state)))


# Messages


def ignore_message(role: Acting, sender: ReplicaId, message: Message) -> None:
    """This role ignores the message."""


def refuse_old_term(state: RaftState, sender: ReplicaId, request: UpdateRequest) -> None:
    """Refuse an UpdateRequest from the leader of an older term. The answer carries the present term."""
    refusal = UpdateResponse(
        state.term, False, sent_ms=request.sent_ms, preceding_index=request.preceding.index
    )
    state.outbox.send(sender, refusal, state.outbox.hard_barrier())


def take_update_response(role: Acting, sender: ReplicaId, response: UpdateResponse) -> None:
    """Handle an answer to a message that this replica sent while it led. Only the answer's term matters."""
    if response.term > role.state.term:
        role.switch.adopt_term(response.term, f"replica {sender} is at term {response.term}")


def answer_vote_request(role: Acting, sender: ReplicaId, request: VoteRequest) -> None:
    """Give or refuse a vote. For a pre-vote, only say whether a vote would be given (Raft §5.2, §5.4.1)."""
    state = role.state
    alive = state.leader_alive()
    bound = state.bound(request.released)
    if request.pre_vote:
        answer_pre_vote(state, sender, request, would_vote(state, sender, request))
        return
    # Refused without its term, so that the leader is not deposed either (dissertation 4.2.3).
    if request.term < state.term or bound or (alive and not request.ignore_live_leader):
        _answer_vote(state, sender, request, False, alive)
        return
    if request.term > state.term:
        role.switch.adopt_term(request.term, f"replica {sender} stands for term {request.term}")
    granted = _free_to_vote(state, sender, request) and _up_to_date(state, request)
    if granted and state.voted_for is None:
        state.give_vote(sender)
        state.draw_election()
    _answer_vote(state, sender, request, granted, alive)


def would_vote(state: RaftState, sender: ReplicaId, request: VoteRequest) -> bool:
    """Whether this replica would grant the pre-vote, and later the vote at the term of the request."""
    free = not state.leader_alive() and not state.bound(request.released)
    return free and _free_to_vote(state, sender, request) and _up_to_date(state, request)


def answer_pre_vote(state: RaftState, sender: ReplicaId, request: VoteRequest, granted: bool) -> None:
    """Say whether the vote would be given."""
    _answer_vote(state, sender, request, granted, state.leader_alive())


def _free_to_vote(state: RaftState, sender: ReplicaId, request: VoteRequest) -> bool:
    return request.term > state.term or (request.term == state.term and state.voted_for in (None, sender))


def _up_to_date(state: RaftState, request: VoteRequest) -> bool:
    return state.log.covered_by(request.last_logged)


def _answer_vote(
    state: RaftState, sender: ReplicaId, request: VoteRequest, granted: bool, alive: bool
) -> None:
    response = VoteResponse(state.term, granted, request.pre_vote, request.term, not alive)
    state.outbox.send(sender, response, state.outbox.hard_barrier())


def take_vote_response(role: Acting, sender: ReplicaId, response: VoteResponse) -> bool:
    """Adopt a higher term from a vote response. If the lost leader answered, note that its node is back.

    A late response is handled the same way. Returns whether the response may count as a vote.
    """
    state = role.state
    if sender == state.lost_leader:
        state.lost_leader = None  # its node is back, so its vote may still come
    if response.failed:
        return False
    if response.term > state.term:
        role.switch.adopt_term(response.term, f"replica {sender} is at term {response.term}")
        return False
    return True
