"""Messages between the replicas of a group. Built by the core, carried by its owner; knows no encoding.

Each is a message of `rpc/proto/consensus.proto`, field by field. Group, sender and receiver are in the
owner's envelope.

Invariant: a message is an immutable value. It may come twice, late or out of order, and does no harm.
"""

from __future__ import annotations

from stele.model.entry import Entry
from stele.model.ids import OPID_NONE, OpId
from stele.model.record import record

ENTRY_MESSAGE_BYTES = 48
"""Bytes that an entry takes in a message beside its payload."""


@record
class UpdateRequest:
    """Entries or a heartbeat from a leader (AppendEntries, Raft figure 2).

    - `preceding`: the OpId just before `entries`.
    - `commit_index`: the leader's. The receiver commits only as far as its log is known to match.
    - `read_context`: number of the leader's ReadIndex round, 0 for none.
    - `sent_ms`: the leader's clock; the answer repeats it.
    - `all_replicated_index`: the last index that every voter holds durably. A witness may drop its log up to
      there.
    - `early`: answer also when `entries` are written to the log's file, before they are synced.
    - `lease_ms`: for how long the receiver is asked to elect nobody else; 0: not at all. `lease_sent_ms`: when
      this left, by the leader's steady clock.
    """

    term: int
    preceding: OpId
    entries: tuple[Entry, ...]
    commit_index: int
    read_context: int = 0
    sent_ms: int = 0
    all_replicated_index: int = 0
    lease_ms: int = 0
    lease_sent_ms: int = 0
    early: bool = False


@record
class UpdateResponse:
    """The answer to an UpdateRequest of `preceding_index`.

    - On success, `last_received` is the last OpId that matches the leader's log and is durable here when the
      answer leaves.
    - On refusal, the next probe should end before `conflict_index`, where this log has `conflict_term` (0:
      nothing). A refusal without `conflict_index` answers a message of an older term, and says nothing about
      the log.
    - `failed`: this replica is FAILED, and its answers count for nothing.
    - `has_data`: it holds the rows, not only the log. False for a witness whose rows are still being copied.
    - `lease_sent_ms`: repeated from the request if this replica promises the lease that it asks for, else 0.
    - `written_index`: up to here the log matches the leader's and survives the end of this process. 0: not told. It counts for
      no commit.
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
    lease_sent_ms: int = 0
    written_index: int = 0


@record
class VoteRequest:
    """A candidate asks for a vote at `term` (RequestVote, Raft figure 2).

    `pre_vote`: it asks whether it would get one. `ignore_live_leader`: the leader itself (dissertation 3.10)
    or an administrator (`Promote`) asked for this election. `released`: the leader of this term asked, and
    has given its lease up; 0: none.
    """

    term: int
    last_logged: OpId
    pre_vote: bool = False
    ignore_live_leader: bool = False
    candidate_node: str = ""
    released: int = 0


@record
class VoteResponse:
    """The answer to a VoteRequest at `request_term`; `term` is the voter's own.

    `leader_failed`: the voter has not heard from a live leader either. `failed`: the voter is FAILED, and
    abstains.
    """

    term: int
    granted: bool
    pre_vote: bool = False
    request_term: int = 0
    leader_failed: bool = False
    failed: bool = False


@record
class TimeoutNow:
    """The leader of `term` asks the receiver to campaign at once (dissertation 3.10).

    `cause`: why the leader was asked to hand over; empty if unknown. `lease_given_up`: it takes no lease any more
    in this term, so no voter needs to keep a promise to it.
    """

    term: int
    cause: str = ""
    lease_given_up: bool = False


Message = UpdateRequest | UpdateResponse | VoteRequest | VoteResponse | TimeoutNow
