"""What may happen to a replica: the core's only input. Made by the owner.

All times are milliseconds of one monotonic clock of the owner's; the core has none. `context` is any number the owner
chose to know its own request by; it comes back in the effect that answers.

Invariant: the core does nothing but in answer to an event.
"""

from __future__ import annotations

from enum import IntEnum

from stele.model.config import Configuration, Peer
from stele.model.entry import Entry, EntryKind
from stele.model.ids import OpId, ReplicaId
from stele.model.logrecord import NOTHING_SKIPPED, SkippedRecord
from stele.model.record import record
from stele.raft.messages import Message


@record
class InitialState:
    """What a replica finds on its disk; not an event, but what comes before the first.

    `log_start`: everything up to it is in the store; `config` is the configuration in force there. What is `skipped`,
    being in the store too, and then `entries` follow it without a gap. `commit_index` is the highest index known
    committed; entries up to it count as handed out already, so only later ones come as `Committed`. `leader_hint`: who
    should lead, or last did; if it is this replica, it campaigns at once. `witness_without_data`: the log is here, the
    rows are still being copied.
    """

    term: int
    voted_for: ReplicaId | None
    log_start: OpId
    config: Configuration
    entries: tuple[Entry, ...] = ()
    commit_index: int = 0
    witness_without_data: bool = False
    failed: bool = False
    leader_hint: ReplicaId | None = None
    skipped: SkippedRecord = NOTHING_SKIPPED


class ChangeType(IntEnum):
    """Kinds of membership change. Numbers are those of ChangeTypePB."""

    ADD = 1
    REMOVE = 2
    MODIFY = 3


@record
class Start:
    """The first event, once."""

    now_ms: int


@record
class Tick:
    """Time has passed. Due at `core.next_deadline_ms` at the latest; earlier ones cost little.

    The owner feeds all messages that have come in before it feeds a Tick, so that a stall is not taken for silence.
    """

    now_ms: int


@record
class Received:
    """A message has come from a replica of this group."""

    sender: ReplicaId
    message: Message
    now_ms: int


@record
class Propose:
    """Append an entry. Answered by Proposed or ProposalRefused; held back during a leadership transfer."""

    context: int
    kind: EntryKind
    payload: bytes
    timestamp: int = 0


@record
class ProposeChange:
    """Change one member. ADD takes the whole peer, REMOVE only its replica_id, MODIFY its new type and `promote`.

    Answered by ChangeCommitted or ChangeRefused. `cause`: why, in the words of whoever asks.
    """

    context: int
    change_type: ChangeType
    peer: Peer
    cas_opid_index: int
    cause: str = ""


@record
class TransferLeadership:
    """Hand leadership over. Answered by TransferDone or TransferFailed.

    `target` None: to the voter that leads least of those that keep up; if none keeps up, to the most advanced. `leads`:
    how many groups the nodes of peers lead, as far as the owner knows. `cause`: why, in the words of whoever asks.
    """

    context: int
    target: ReplicaId | None
    now_ms: int
    leads: tuple[tuple[ReplicaId, int], ...] = ()
    cause: str = ""


@record
class Persisted:
    """The Persist of this id and all before it survive power loss."""

    persist_id: int


@record
class LogRead:
    """Answer to ReadLog: entries from `first_index` on; none means the log there is gone."""

    to: ReplicaId
    first_index: int
    entries: tuple[Entry, ...]


@record
class RequestRead:
    """A linearizable read. Answered by ReadReady or ReadRefused."""

    context: int


@record
class DataArrived:
    """The rows of a witness have been copied and meet its log."""


@record
class PeerFailed:
    """The node of this replica is seen as failed: the connection to it was reset."""

    replica_id: ReplicaId


@record
class Compacted:
    """The log up to and including `opid` (committed, durable in the store) may be gone."""

    opid: OpId


@record
class ReportFailed:
    """This replica has become FAILED: it abstains from now on."""

    reason: str = ""


@record
class Fitness:
    """Whether this replica's node is fit to lead, as it is until told otherwise.

    One that is not takes leadership over from a witness only, and stands only where nobody else has led for two election
    time-outs: it may have the longest log. It goes on to lead where it leads; its owner hands over.
    """

    fit: bool


@record
class SyncStalled:
    """A sync has taken longer than an election timeout; fed again each election timeout while it lasts.

    From `now_ms` for the longest election timeout, or until the next Persisted, this replica does not campaign.
    """

    now_ms: int


Event = (
    Start
    | Tick
    | Fitness
    | Received
    | Propose
    | ProposeChange
    | TransferLeadership
    | Persisted
    | LogRead
    | RequestRead
    | DataArrived
    | PeerFailed
    | Compacted
    | ReportFailed
    | SyncStalled
)
