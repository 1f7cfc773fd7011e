"""The ports of a replica: its node, and its stream of the log. Implemented by stele.tserver and stele.wal,
and by tests.

Invariant: all is called on the node's event loop, and does not block it unless its docstring says "Blocks".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

from stele.consensus.superblock import Superblock
from stele.model.config import Configuration
from stele.model.entry import Entry
from stele.model.ids import NodeId, OpId, ReplicaId, StreamKey
from stele.model.logrecord import LogRecord
from stele.model.writeop import WRITE_BYTES_MAX
from stele.raft.messages import Message
from stele.raft.options import RaftOptions
from stele.raft.ports import Appends

if TYPE_CHECKING:
    from stele.consensus.read_round import ReadRound

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class InThread(Protocol):
    """Runs blocking work in a thread. If a caller is cancelled before a thread was free, its work is
    withdrawn."""

    def __call__(self, work: Callable[[*Ts], T], /, *args: *Ts) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The options of a replica. Times are in milliseconds, sizes in bytes.

    - `clock_error_max_ms`: how far the nodes' clocks may be apart. A ceiling runs half of that ahead of the
      clock.
    - `ceiling_ahead_max_ms`: how far a ceiling runs ahead where commits take long. A new leader may wait this
      long before it writes.
    - `write_bytes_max`: the largest payload of one write.
    - `apply_slice_ms`: bounds one step of applying.
    """

    raft: RaftOptions = field(default_factory=RaftOptions)
    clock_error_max_ms: int = 500
    ceiling_ahead_max_ms: int = 5_000
    write_bytes_max: int = WRITE_BYTES_MAX
    apply_slice_ms: float = 4.0
    read_timeout_ms: int = 5_000

    @property
    def ceiling_ahead_us(self) -> int:
        """How far a ceiling runs ahead of the wall clock where commits are fast, in microseconds."""
        return self.clock_error_max_ms * 1000 // 2


class Loop(Protocol):
    """The part of an event loop that the runtime of a replica uses.

    The loops of asyncio and uvloop have it. So has the simulator's loop, which counts its own time.
    """

    def call_soon(self, callback: Callable[..., object], /, *args: Any) -> object:
        """Run `callback(*args)` in the next turn of the loop, after all that is scheduled already."""

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> object:
        """Run `callback(*args)` in a turn of the loop, `delay` seconds from now."""

    def create_task(self, coroutine: Coroutine[Any, Any, T], /) -> asyncio.Task[T]:
        """Run a coroutine to its end."""


class HostedReplica(Protocol):
    """The identity of a replica, for messages and reports."""

    @property
    def superblock(self) -> Superblock:
        """Its superblock, which has the replica's id."""

    @property
    def raw_tablet_id(self) -> bytes:
        """The id of its tablet, as messages carry it."""


class Reader(Protocol):
    """A replica with linearizable reads that wait for confirmation."""

    def begin_round(self) -> ReadRound | None:
        """Return the reads of this turn, for other nodes to confirm. None: nobody waits, or the core confirms
        them.
        """


class Follower(Protocol):
    """A follower that asks its leader before it serves a read."""

    @property
    def standing(self) -> HostedReplica:
        """Which replica this is: its node, tablet and replica id."""

    def leader_to_ask(self) -> tuple[NodeId, ReplicaId, int] | None:
        """(node, leader, term) of the leader that it follows now; None if there is none. The question tells
        the leader that this replica follows it."""


class Host(Protocol):
    """The node, as a replica sees it."""

    node_id: NodeId

    def now_ms(self) -> int:
        """Milliseconds of the node's monotonic clock."""

    def steady_us(self) -> int:
        """Microseconds of a clock that never steps, and goes on while the process or the machine stands still."""

    def wall_us(self) -> int:
        """Microseconds since 1970."""

    def clock_fault(self, wall_us: int) -> str:
        """Why this reading of `wall_us` must not become a timestamp, as text; "" if it may."""

    def latest_time(self) -> int:
        """The highest hybrid time that an uncommitted entry may have. A message with a higher one is refused."""

    def dropped(self, node_id: NodeId, cause: str, why: str) -> None:
        """Count a message from this node that broke a bound and was dropped. Log it once a minute per node and
        `cause`.

        `cause` is one word of a fixed set. `why`: what is wrong with the message, for the log.
        """

    def randint(self, a: int, b: int, /) -> int:
        """A whole number from a to b, both included."""

    def send(
        self, replica: HostedReplica, node_id: NodeId, to: ReplicaId, message: Message, *, quiet: bool = False
    ) -> None:
        """Hand a message to the transport, which may lose, delay, double or reorder it.

        `quiet`: mark it as quiet.
        """

    def takes_beats(self, node_id: NodeId) -> bool:
        """Whether a node takes beats in place of heartbeats."""

    def beat(
        self, replica: HostedReplica, node_id: NodeId, to: ReplicaId, term: int, commit_index: int
    ) -> None:
        """Tell a node, in one message with other tablets, that this replica leads. Pass its answer to
        `Replica.beat_answered`."""

    def read_came(self, reader: Reader) -> None:
        """In the next turn of the loop, call `reader.begin_round()` and ask the other voters of that round to
        confirm it. Give the round up if they do not answer within a heartbeat.
        """

    def ask_leader(self, follower: Follower, snapshot: int) -> asyncio.Future[int]:
        """Ask the leader, in the next turn of the loop, for the index that a follower must have applied to
        serve `snapshot`.

        `snapshot` 0: all that is acknowledged so far. The future fails with SNAPSHOT_NOT_READY if no answer
        comes in time.
        """

    def woken(self, replica: HostedReplica) -> None:
        """Tick the replica again: it was at rest, and its time goes on."""

    def changed(self, replica: HostedReplica) -> None:
        """Report the replica: its state, role, term, configuration or schema has changed since the last
        report.
        """

    def low_space(self) -> bool:
        """Whether writes must be refused because the disk is nearly full."""

    def stores_full(self) -> bool:
        """Whether writes must wait because rows that are not flushed fill their share of memory."""

    def cluster_version(self) -> int:
        """The finalized cluster version that a leading master has sent; 0: none has yet. Any thread."""

    def fail(self, error: Exception) -> None:
        """End the node because of what a replica found, and leave all files as they are."""

    async def in_thread(self, work: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Run blocking work in a thread of the node's pool."""


class CoreLog(Appends, Protocol):
    """What the runtime of a core needs from the replica's stream."""

    @property
    def under_way(self) -> object:
        """Changes whenever a write or a sync of the node's log ends. Compare for equality only."""


class ReplicaStream(CoreLog, Protocol):
    """A replica's stream in the node's log. Implemented by stele.wal.stream.StreamLog."""

    @property
    def start(self) -> OpId:
        """The entry after which the stream begins."""

    @property
    def config(self) -> Configuration:
        """The configuration in force at `start`."""

    @property
    def last_opid(self) -> OpId:
        """The last entry, or `start`."""

    def load(self, above: int = 0) -> Iterator[LogRecord]:
        """As LogPort. Blocks; any thread."""

    def read_entries(self, first_index: int, bytes_max: int) -> list[Entry]:
        """Read entries from `first_index` on: about `bytes_max`, at least one entry, and none past the end.
        Blocks; any thread.

        Raises:
            Rejected: NOT_FOUND, the entries were collected.
            Corrupt: the disk changed what was written.
            OSError, MemoryError: the system has no descriptor or memory for it just now.
        """

    def set_flushed(self, index: int) -> None:
        """Note that the store's synced files hold everything up to `index`. A replay does not need those
        entries.
        """

    def anchor(self, name: str, index: int, *, gives_way: bool = False) -> None:
        """Keep entries from `index` on. Replaces the anchor of that name.

        `gives_way`: the anchor holds nothing if the disk has no space for it.
        """

    def release(self, name: str) -> None:
        """Remove an anchor. Does nothing if there is none of that name."""


class Recovered(Protocol):
    """Result of a log's recovery at its opening."""

    @property
    def failed(self) -> Mapping[StreamKey, str]:
        """Streams whose records cannot be trusted, and why."""


class NodeLog(Protocol):
    """The node's log, as the start of a replica needs it. Implemented by stele.wal.log.Log."""

    @property
    def recovery(self) -> Recovered:
        """Result of the recovery at its opening."""

    def stream(self, key: StreamKey) -> ReplicaStream:
        """The stream of a replica.

        Raises:
            Rejected: NOT_FOUND.
        """
