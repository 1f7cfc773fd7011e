"""What a replica needs from its node. Implemented by stele.tserver.node and by the tests' in-memory host.

Invariant: everything here is called on the node's event loop, and nothing here blocks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from stele.consensus.superblock import Superblock
from stele.model.ids import NodeId, ReplicaId
from stele.model.writeop import WRITE_BYTES_MAX
from stele.raft.messages import Message
from stele.raft.options import RaftOptions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Times in milliseconds, sizes in bytes.

    `clock_error_max_ms` bounds how far the nodes' clocks may be apart; a ceiling runs half of it ahead, and up to
    `ceiling_ahead_max_ms` where commits take long: so long may a new leader wait before it writes.
    `write_bytes_max` is the largest payload of one write. `apply_slice_ms` bounds one step of applying.
    """

    raft: RaftOptions = field(default_factory=RaftOptions)
    clock_error_max_ms: int = 500
    ceiling_ahead_max_ms: int = 5_000
    write_bytes_max: int = WRITE_BYTES_MAX
    apply_slice_ms: float = 4.0
    read_timeout_ms: int = 5_000

    @property
    def ceiling_ahead_us(self) -> int:
        """How far a ceiling runs ahead of the wall clock where commits are quick."""
        return self.clock_error_max_ms * 1000 // 2


class Loop(Protocol):
    """What the runtime of a replica needs of the event loop that runs it. The loops of asyncio and uvloop have it, and so
    has the simulator's, whose time is not the machine's."""

    def call_soon(self, callback: Callable[..., object], /, *args: Any) -> object:
        """Run `callback(*args)` in the next turn of the loop, behind all that waits."""

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> object:
        """The same, `delay` seconds from now."""

    def create_task(self, coroutine: Coroutine[Any, Any, T], /) -> asyncio.Task[T]:
        """Run a coroutine to its end."""


class HostedReplica(Protocol):
    """A replica, as its node sees it here: who it is, for messages and reports."""

    superblock: Superblock
    raw_tablet_id: bytes
    """As messages carry it."""


class Host(Protocol):
    """The node, as a replica sees it."""

    node_id: NodeId

    def now_ms(self) -> int:
        """Milliseconds of the node's monotonic clock."""

    def wall_us(self) -> int:
        """Microseconds since 1970."""

    def clock_fault(self, wall_us: int) -> str:
        """Why no timestamp may be made of this reading of `wall_us`, for people; "" if it may."""

    def latest_time(self) -> int:
        """The highest hybrid time that an entry which is not committed may bear: some hours ahead of what most clocks say."""

    def dropped(self, node_id: NodeId, cause: str, why: str) -> None:
        """A message of this node broke a bound and was dropped. Count it, and tell it once per node and `cause`, a word of
        a fixed set."""

    def randint(self, a: int, b: int, /) -> int:
        """A whole number from a to b, both included."""

    def send(
        self, replica: HostedReplica, node_id: NodeId, to: ReplicaId, message: Message, *, quiet: bool = False
    ) -> None:
        """Hand a message to the transport; it may be lost, late, doubled or out of order. `quiet`: marked so."""

    def changed(self, replica: HostedReplica) -> None:
        """State, role, term or configuration differ from what was last reported."""

    def low_space(self) -> bool:
        """Whether writes must be refused because the disk is nearly full."""

    def stores_full(self) -> bool:
        """Whether writes have to wait because what is to be flushed fills the memory that it may have."""

    def fail(self, error: Exception) -> None:
        """The node cannot go on with what a replica found: it ends, and leaves all files as they are."""

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run blocking work in a thread of the node's pool."""
