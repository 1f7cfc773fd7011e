"""Events: the core's only input. Made by the owner.

All times are milliseconds of the owner's monotonic clock; the core has no clock. `context` is a number by
which the owner knows its request again; the effect that answers carries it.

Invariant: the core acts only when it is given an event.
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
    """What a replica finds on its disk. Not an event: a core is made of it.

    - `log_start`: the store holds everything up to it. `config` is the configuration in force there.
    - `skipped`, then `entries`, follow `log_start` without a gap. The store holds the skipped entries, too.
    - `commit_index`: the highest index known committed. Entries up to it count as handed out; later ones come
      as `Committed`.
    - `leader_hint`: the replica that should lead, or last did. If it is this one, it campaigns at once.
    - `witness_without_data`: the log is here, the rows are still being copied.
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
    """The first event. It comes once."""

    now_ms: int


@record
class Tick:
    """Time has passed. Due at `core.next_deadline_ms` at the latest. An earlier Tick costs little.

    The owner first feeds all messages that have come. Otherwise the core would mistake a stall of its owner for
    silence of the leader.
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
    """Append an entry. Answered by Proposed or ProposalRefused; held back during a leadership transfer.

    `early`: the owner also wants to know when every voter has it in its log's file (HeldByAll)."""

    context: int
    kind: EntryKind
    payload: bytes
    timestamp: int = 0
    early: bool = False


@record
class ProposeChange:
    """Change one member. ADD takes the whole peer, REMOVE only its replica_id, MODIFY its new type and
    `promote`.

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

    `target` None: to the voter that keeps up and whose node leads the fewest groups; if none keeps up, to the
    most advanced. `leads`: how many groups the nodes of peers lead, as far as the owner knows. `cause`: why,
    in the words of whoever asks. `at_once`: refuse a target that lacks much of the log, because proposals are
    held until it has all of it.
    """

    context: int
    target: ReplicaId | None
    now_ms: int
    leads: tuple[tuple[ReplicaId, int], ...] = ()
    cause: str = ""
    at_once: bool = False


@record
class Promote:
    """An administrator orders this replica to stand for election at once, even if the others hear a leader.

    It still needs the votes of a majority. Ignored by a leader, and by a replica that may not campaign or
    has no rows. `cause`: why, in the words of whoever asks.
    """

    now_ms: int
    cause: str


@record
class Persisted:
    """The Persist with this id, and all before it, survive power loss."""

    persist_id: int


@record
class LogWritten:
    """The Persist with this id, and all before it, survive the end of this process, but not yet power loss."""

    persist_id: int


@record
class LogRead:
    """Answer to ReadLog: entries from `first_index` on. No entries: that part of the log is gone."""

    to: ReplicaId
    first_index: int
    entries: tuple[Entry, ...]


@record
class RequestRead:
    """A linearizable read. Answered by ReadReady or ReadRefused."""

    context: int


@record
class DataArrived:
    """The rows of a witness have been copied. They include all committed entries of its log."""


@record
class PeerFailed:
    """The node of this replica seems to have failed: the connection to it was reset."""

    replica_id: ReplicaId


@record
class Compacted:
    """The log up to and including `opid` may be gone; the store holds it durably."""

    opid: OpId


@record
class ReportFailed:
    """This replica has become FAILED. It abstains from now on."""

    reason: str = ""


@record
class Fitness:
    """Whether this replica's node is fit to lead. A core begins as fit.

    An unfit replica takes leadership over only from a witness. It stands for election only after two election
    time-outs without a leader, as it may have the longest log. If it leads, it continues until its owner
    hands over.
    """

    fit: bool


@record
class SyncStalled:
    """A sync has taken longer than an election timeout. The event comes again each election timeout until it ends.

    This replica does not campaign until the next Persisted, or until the longest election timeout has passed
    since `now_ms`, whichever comes first.
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
    | Promote
    | Persisted
    | LogWritten
    | LogRead
    | RequestRead
    | DataArrived
    | PeerFailed
    | Compacted
    | ReportFailed
    | SyncStalled
)
