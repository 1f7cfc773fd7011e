"""The cause of an effect: the event that the core was handling when it gave the effect, as one line of text.

Logs of nodes, Kubernetes events and the stories of the simulator show causes. The same event has the same
text in all.

Invariant: the text of a cause is made only when an effect carries it. An event without such an effect costs
just one assignment (`RaftState.event`).
"""

from __future__ import annotations

from typing import assert_never

from stele.raft.events import (
    Compacted,
    DataArrived,
    Event,
    Fitness,
    LogRead,
    LogWritten,
    PeerFailed,
    Persisted,
    Promote,
    Propose,
    ProposeChange,
    Received,
    ReportFailed,
    RequestRead,
    Start,
    SyncStalled,
    Tick,
    TransferLeadership,
)
from stele.raft.messages import TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse

END_OF_TURN = "end of turn"
"""The cause of effects that follow from all events of a turn together, such as a commit."""


def cause_of(event: Event | None) -> str:
    """The text for `event`; None stands for the end of a turn.

    An order from outside the group has the cause that its sender gave (`ProposeChange.cause`).
    """
    match event:
        case None:
            return END_OF_TURN
        case Received():
            return _cause_of_message(event)
        case ProposeChange(context=context, cause=cause) | TransferLeadership(context=context, cause=cause):
            return cause or f"{type(event).__name__} {context}"
        case Promote(cause=cause):
            return cause or "Promote"
        case Propose(context=context) | RequestRead(context=context):
            return f"{type(event).__name__} {context}"
        case Start(now_ms=now_ms) | Tick(now_ms=now_ms) | SyncStalled(now_ms=now_ms):
            return f"{type(event).__name__} at {now_ms} ms"
        case Persisted(persist_id=persist_id):
            return f"Persisted {persist_id}"
        case LogWritten(persist_id=persist_id):
            return f"LogWritten {persist_id}"
        case LogRead(to=to, first_index=first_index):
            return f"LogRead from {first_index} for {to}"
        case PeerFailed(replica_id=replica_id):
            return f"PeerFailed {replica_id}"
        case Compacted(opid=opid):
            return f"Compacted {opid}"
        case Fitness(fit=fit):
            return f"Fitness {fit}"
        case DataArrived() | ReportFailed():
            return type(event).__name__
        case _:
            assert_never(event)


def _cause_of_message(event: Received) -> str:
    message = event.message
    text = f"{type(message).__name__} of term {message.term} from {event.sender}"
    match message:
        case UpdateRequest(preceding=preceding):
            return f"{text} after {preceding}"
        case UpdateResponse(preceding_index=index):
            return f"{text} after {index}"
        case VoteRequest(pre_vote=True) | VoteResponse(pre_vote=True):
            return f"pre-vote {text}"
        case TimeoutNow(cause=cause) if cause:
            return f"{text} for {cause}"
        case VoteRequest() | VoteResponse() | TimeoutNow():
            return text
        case _:
            assert_never(message)
