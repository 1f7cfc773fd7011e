"""What the core asks its owner to do: its only output.

The owner's duties:
1. Persist effects go to the log in the order they come; `Persisted(id)` is fed back once that one is durable.
2. A Send whose `after` is not 0 leaves only once the Persist of that id is durable. If it says `written`, it leaves once that
   Persist survives the end of the process.
3. Committed entries are applied in order, each once. They never run ahead of this replica's own disk.
4. ReadReady(context, index) is served once everything up to `index` is applied.
5. A Propose that was answered by Proposed stays open until its OpId comes as Committed or as ProposalLost.

Invariant: one list of effects has this order. First each Send that waits for no Persist, then each Persist,
then each Send that waits. All others follow, as they came about. So peers receive entries while the leader
writes them (dissertation 10.2.1).

`cause` of an effect names the event it came from and says why it followed (`cause.cause_of`). For example:
"Tick at 612 ms: no leader heard within the election timeout".
"""

from __future__ import annotations

from enum import Enum

from stele.model.config import Configuration
from stele.model.entry import Entry
from stele.model.errors import Code
from stele.model.ids import OpId, ReplicaId
from stele.model.record import record
from stele.raft.messages import Message


class Role(Enum):
    """The role of a replica in its group."""

    LEADER = "LEADER"
    FOLLOWER = "FOLLOWER"
    CANDIDATE = "CANDIDATE"
    LEARNER = "LEARNER"
    NON_PARTICIPANT = "NON_PARTICIPANT"


@record
class HardState:
    """Term and vote, which a replica must never forget (Raft figure 2). `promoted`: the vote is its own,
    because an administrator ordered it to stand for election."""

    term: int
    voted_for: ReplicaId | None
    promoted: bool = False


@record
class Persist:
    """Write in this order: the hard state; a truncation that drops all from `truncate_from` on; the entries.

    Then sync. `tells_written`: also feed back `LogWritten(id)`, once all is in the file and before the sync.
    """

    id: int
    hard_state: HardState | None
    truncate_from: int | None
    entries: tuple[Entry, ...]
    tells_written: bool = False


@record
class Send:
    """Send a message; it must never leave before the Persist with id `after` is durable (0: at once).

    `written`: it may leave once that Persist is written to the log's file, though it is not synced."""

    to: ReplicaId
    message: Message
    after: int = 0
    written: bool = False


@record
class Committed:
    """These entries are committed and durable here: apply them."""

    entries: tuple[Entry, ...]


@record
class Proposed:
    """The proposal is in the leader's log at `opid`. Committed or ProposalLost tells its outcome."""

    context: int
    opid: OpId


@record
class HeldByAll:
    """Every voter has written this leader's log up to `index` to its file. Some may not have synced it yet.

    Given only for proposals that are `early`. It commits nothing, and no rule of Raft uses it."""

    index: int


@record
class ProposalRefused:
    """The proposal never entered a log."""

    context: int
    code: Code
    message: str


@record
class ProposalLost:
    """The entry at `opid` was dropped from this log and will never be committed from it."""

    opid: OpId


@record
class ReadReady:
    """The read may be served once `index` is applied."""

    context: int
    index: int


@record
class ReadRefused:
    """The read cannot be served here."""

    context: int
    code: Code
    message: str


@record
class RoleChanged:
    """Role, term or known leader changed. `serves`: this replica leads, and is no witness, so it has rows."""

    role: Role
    term: int
    leader: ReplicaId | None
    cause: str
    serves: bool = True


@record
class ConfigChanged:
    """The active configuration changed, or was committed (`committed`).

    It changes when a new one is appended, and when the log drops an appended one.
    """

    config: Configuration
    committed: bool
    cause: str


@record
class ChangeCommitted:
    """The configuration change with this context is committed."""

    context: int
    config: Configuration


@record
class ChangeRefused:
    """The configuration change with this context was refused, or its entry was dropped from the log."""

    context: int
    code: Code
    message: str


@record
class ReadLog:
    """Read entries from `first_index` on for a slow peer: about `bytes_max` bytes, at least one entry.

    Answer with LogRead.
    """

    to: ReplicaId
    first_index: int
    bytes_max: int


@record
class TransferDone:
    """The chosen replica leads now."""

    context: int


@record
class TransferFailed:
    """Leadership was not handed over as asked. If this replica still leads, it goes on as before."""

    context: int
    code: Code
    message: str


@record
class PeerNeedsCopy:
    """The peer's log ends before this log begins, so the peer needs a copy of the tablet.

    Repeated each election timeout, as long as the peer needs it.
    """

    replica_id: ReplicaId
    cause: str


@record
class PeerReached:
    """A peer of this leader has not answered for `unreached_ms` (`reached` false), or answers again.

    An answer that says FAILED is an answer, too.
    """

    replica_id: ReplicaId
    reached: bool
    cause: str


@record
class PeerSound:
    """A peer of this leader says that it is FAILED (`sound` false), or answers as a sound replica again."""

    replica_id: ReplicaId
    sound: bool
    cause: str


@record
class PeerForgot:
    """A peer refuses, in this leader's term, entries that it acknowledged before: it has lost a part of its
    log.

    It may run on an older copy of its volume. The leader sends it the missing entries again. Until the peer
    acknowledges these, its copy counts for nothing.
    """

    replica_id: ReplicaId
    cause: str


@record
class MessageIgnored:
    """A message came that no sound replica sends. It was ignored."""

    sender: ReplicaId
    cause: str


Effect = (
    Persist
    | Send
    | Committed
    | Proposed
    | HeldByAll
    | ProposalRefused
    | ProposalLost
    | ReadReady
    | ReadRefused
    | RoleChanged
    | ConfigChanged
    | ChangeCommitted
    | ChangeRefused
    | ReadLog
    | TransferDone
    | TransferFailed
    | PeerNeedsCopy
    | PeerReached
    | PeerSound
    | PeerForgot
    | MessageIgnored
)
