"""What replicas of one group say to each other. Built by the core, carried by its owner; knows no encoding.

One dataclass per message of `rpc/proto/consensus.proto`, one field per field. Group, sender and receiver are not in
here: the owner's envelope carries them.

Invariant: a message is an immutable value; whoever receives it twice, late or out of order is not harmed.
"""

from __future__ import annotations

from stele.model.entry import Entry
from stele.model.ids import OPID_NONE, OpId
from stele.model.record import record

ENTRY_MESSAGE_BYTES = 48
"""Of a message, for an entry beside its payload."""


@record
class UpdateRequest:
    """Entries or a heartbeat from a leader (AppendEntries, Raft figure 2).

    `preceding` is the OpId just before `entries`. `commit_index` is the leader's; the receiver takes no more of it
    than it knows to match. `read_context` numbers the leader's ReadIndex round, 0 for none. `sent_ms` is the leader's
    clock, echoed. `all_replicated_index` is the last index that every voter holds durably: what a witness may drop.
    """

    term: int
    preceding: OpId
    entries: tuple[Entry, ...]
    commit_index: int
    read_context: int = 0
    sent_ms: int = 0
    all_replicated_index: int = 0


@record
class UpdateResponse:
    """The answer to an UpdateRequest of `preceding_index`.

    On success `last_received` is the last OpId that both matches the leader's log and is durable here when the answer
    leaves. Otherwise the next probe should end before `conflict_index`, where this log holds `conflict_term` (0: it
    holds nothing there). A refusal without `conflict_index` answers a message of an older term, and says nothing of a
    log. `failed`: this replica is FAILED and its answers count for nothing. `has_data`: it holds the
    rows too, not only the log (false for a young witness).
    """

    term: int
    success: bool
    last_received: OpId = OPID_NONE
    conflict_index: int = 0
    conflict_term: int = 0
    read_context: int = 0
    sent_ms: int = 0
    has_data: bool = True
    failed: bool = False
    preceding_index: int = 0


@record
class VoteRequest:
    """A candidate asks for a vote at `term` (RequestVote, Raft figure 2), or with `pre_vote` whether it would get one.

    `ignore_live_leader`: the leader itself asked for this election (dissertation 3.10).
    """

    term: int
    last_logged: OpId
    pre_vote: bool = False
    ignore_live_leader: bool = False
    candidate_node: str = ""


@record
class VoteResponse:
    """The answer to a VoteRequest at `request_term`; `term` is the answerer's own.

    `leader_failed`: the answerer, too, has not heard from a live leader. `failed`: it abstains.
    """

    term: int
    granted: bool
    pre_vote: bool = False
    request_term: int = 0
    leader_failed: bool = False
    failed: bool = False


@record
class TimeoutNow:
    """The leader of `term` asks the receiver to campaign at once (dissertation 3.10)."""

    term: int


Message = UpdateRequest | UpdateResponse | VoteRequest | VoteResponse | TimeoutNow
