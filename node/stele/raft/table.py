"""The table of handlers: which one handles which event or message in which role. Read by `roles`.

Rows are events and messages, columns are roles. `Received` has no row: its message has one. A learner and a
replica outside its configuration act as Follower.

Invariant: every event and every message has a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stele.raft import any_role
from stele.raft.any_role import ignore_event, ignore_message
from stele.raft.candidate import Candidate
from stele.raft.events import (
    Compacted,
    DataArrived,
    Fitness,
    LogRead,
    LogWritten,
    PeerFailed,
    Persisted,
    Promote,
    Propose,
    ProposeChange,
    ReportFailed,
    RequestRead,
    Start,
    SyncStalled,
    Tick,
    TransferLeadership,
)
from stele.raft.failed import Failed
from stele.raft.follower import Follower
from stele.raft.leader import Leader
from stele.raft.messages import TimeoutNow, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse

EventHandler = Callable[[Any, Any], None]
"""Called with (acting role, event)."""

MessageHandler = Callable[[Any, Any, Any], object]
"""Called with (acting role, sender, message)."""

# fmt: off
_EVENTS: tuple[tuple[type[Any], EventHandler, EventHandler, EventHandler, EventHandler], ...] = (
    # event             Follower                    Candidate                   Leader
    # Failed
    (Start,             any_role.take_start,        any_role.take_start,        any_role.take_start,        any_role.take_start),
    (Tick,              Follower.on_tick,           Candidate.on_tick,          Leader.on_tick,             Failed.on_tick),
    (Propose,           any_role.refuse_proposal,   any_role.refuse_proposal,   Leader.on_propose,          any_role.refuse_proposal),
    (ProposeChange,     any_role.refuse_change,     any_role.refuse_change,     Leader.on_propose_change,   any_role.refuse_change),
    (TransferLeadership, any_role.refuse_transfer,  any_role.refuse_transfer,   Leader.on_transfer,         any_role.refuse_transfer),
    (Promote,           any_role.take_promote,      any_role.take_promote,      ignore_event,               ignore_event),
    (RequestRead,       any_role.refuse_read,       any_role.refuse_read,       Leader.on_request_read,     any_role.refuse_read),
    (Persisted,         any_role.take_persisted,    Candidate.on_persisted,     Leader.on_persisted,        any_role.take_persisted),
    (LogWritten,        ignore_event,               ignore_event,               Leader.on_log_written,      ignore_event),
    (LogRead,           ignore_event,               ignore_event,               Leader.on_log_read,         ignore_event),
    (PeerFailed,        any_role.take_peer_failed,  any_role.take_peer_failed,  Leader.on_peer_failed,      any_role.take_peer_failed),
    (SyncStalled,       any_role.take_stall,        any_role.take_stall,        Leader.on_sync_stalled,     any_role.take_stall),
    (ReportFailed,      any_role.take_report_failed, any_role.take_report_failed, any_role.take_report_failed, ignore_event),
    (Fitness,           any_role.take_fitness,      any_role.take_fitness,      any_role.take_fitness,      any_role.take_fitness),
    (DataArrived,       any_role.take_data,         any_role.take_data,         any_role.take_data,         any_role.take_data),
    (Compacted,         any_role.take_compacted,    any_role.take_compacted,    any_role.take_compacted,    any_role.take_compacted),
)

_MESSAGES: tuple[tuple[type[Any], MessageHandler, MessageHandler, MessageHandler, MessageHandler], ...] = (
    # message           Follower                       Candidate                      Leader
    # Failed
    (UpdateRequest,     Follower.on_update_request,    Candidate.on_update_request,   Leader.on_update_request,    Failed.on_update_request),
    (UpdateResponse,    any_role.take_update_response, any_role.take_update_response, Leader.on_update_response,   ignore_message),
    (VoteRequest,       Follower.on_vote_request,      any_role.answer_vote_request,  Leader.on_vote_request,     Failed.on_vote_request),
    (VoteResponse,      Follower.on_vote_response,     Candidate.on_vote_response,    Leader.on_vote_response,     ignore_message),
    (TimeoutNow,        Follower.on_timeout_now,       ignore_message,                ignore_message,              ignore_message),
)
# fmt: on


class Handlers(NamedTuple):
    """One role's column of the table."""

    events: Mapping[type[Any], EventHandler]
    messages: Mapping[type[Any], MessageHandler]


def _column(at: int) -> Handlers:
    return Handlers({row[0]: row[at] for row in _EVENTS}, {row[0]: row[at] for row in _MESSAGES})


FOLLOWER, CANDIDATE, LEADER, FAILED = _column(1), _column(2), _column(3), _column(4)
