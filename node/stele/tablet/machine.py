"""What a replica asks of its state machine. Two implementations: TabletStore (rows) and KeySpace (keys and values).

Invariant: the state after applying entries 1..n depends on those entries alone, so replicas agree byte for byte.

Threads: `begin`, `apply`, `begin_flush` and `finish_flush` belong to the owner's one thread; `job.write`, lookups, `checkpoint`,
`verify` and views may run on any other meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stele.model.block import RowError
from stele.model.entry import Entry
from stele.model.errors import Code, SteleError, error_for
from stele.model.ids import OpId
from stele.model.record import record
from stele.model.writeop import WriteHeader
from stele.tablet.lookup import Lookup


@record
class Outcome:
    """What became of one WRITE entry. A retry of the same write gets the same outcome.

    `code` other than OK: the whole write was refused (`message` says why) and changed nothing. Rows in `row_errors`
    were not written, all others were. `value`: what a key space operation answers. `duplicate`: this entry repeated
    an earlier one.
    """

    timestamp: int = 0
    row_errors: tuple[RowError, ...] = ()
    value: Any = None
    code: Code = Code.OK
    message: str = ""
    duplicate: bool = False

    def error(self) -> SteleError | None:
        """The exception that stands for a refused write, None for one that was done."""
        return None if self.code is Code.OK else error_for(self.code, self.message)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A flushed state as hard links in one directory: `files` (names in it) hold all up to `opid`.

    A name stands for the same bytes in all checkpoints of a replica, but for the last one: that file is written anew.
    """

    opid: OpId
    files: tuple[str, ...]


class FlushJob(Protocol):
    """A flush under way. `opid`: what the files hold once it is finished."""

    opid: OpId

    def write(self) -> None:
        """Write and sync the files. Any thread; blocks.

        On return the state up to `opid` survives power loss. On an error the store serves on unchanged, and the next
        `begin_flush` tries the same again.

        Raises:
            Retryable: DISK_FULL.
            Corrupt: IO_ERROR.
        """


class StateMachine(Protocol):
    """What applies the committed entries of one replica."""

    @property
    def applied(self) -> OpId:
        """The last entry applied."""

    @property
    def flushed(self) -> OpId:
        """The last entry that is in synced files: the log up to it is not needed for replay."""

    @property
    def last_timestamp(self) -> int:
        """Hybrid time of the newest write that was applied; 0 for none."""

    @property
    def max_ceiling(self) -> int:
        """The highest timestamp ceiling among the applied entries; 0 for none."""

    @property
    def clients_idle_us(self) -> int | None:
        """The time, µs since 1970, past which an entry of any kind that has a timestamp makes it forget all clients whose
        writes it remembers; None: there are none."""

    @property
    def memory_bytes(self) -> int:
        """About how much memory a flush gives back."""

    @property
    def rewritten_bytes(self) -> int:
        """About how much a flush writes that earlier ones have written, too."""

    def admit(self, header: WriteHeader, wall_us: int, clock_error_us: int) -> None:
        """Called by a leader before it proposes a write. See `ExactlyOnce.admit`, also for what it raises."""

    def knows_client(self, client_id: bytes) -> bool:
        """Whether it has applied a write under this client id, and not forgotten it."""

    def begin(self, entry: Entry) -> Outcome | Lookup:
        """As `apply`, for an event loop: it takes a few milliseconds at most. A lookup: nothing was applied yet. Its owner runs
        it in a thread, and gives what it found to `apply`, with the same entry and no other before it.

        Raises: as `apply`.
        """

    def apply(self, entry: Entry, found: Any = None) -> Outcome:
        """Apply the next committed entry, whatever its kind. `found`: what `begin`'s lookup gave; without it this may block. An outcome follows from the entry and the state by rules that
        never change: what this program cannot read, another one may have done, so it is none.

        Once it has raised, the state is neither with nor without the entry: it must be asked and flushed no more.

        Raises:
            InvariantViolation: the entry is not the next one.
            Corrupt: its payload is not what a leader proposed, or a file it needs is damaged.
            Rejected: UNSUPPORTED_VERSION, a later program's leader proposed it, or wrote a file it needs.
        """

    def should_flush(self) -> bool:
        """Whether memory is worth flushing now."""

    def begin_flush(self) -> FlushJob | None:
        """Freeze what is in memory and return the job that writes it; None if one runs already or nothing is new
        since `flushed`. Cheap."""

    def finish_flush(self, job: FlushJob) -> None:
        """After `job.write()` returned: `flushed` moves to `job.opid`."""

    def checkpoint(self, directory: Path) -> Checkpoint:
        """Hard links of the last flushed state in `directory` (made if absent), synced. Any thread.

        Raises:
            Rejected: ALREADY_PRESENT, the directory is not empty.
        """

    def verify(self, read: Callable[[int], None] = lambda size: None, compared: Collection[str] = ()) -> None:
        """Read all files of the last flushed state and compare every checksum, in little memory. Any thread; blocks. `read`
        is told of each piece's bytes; what it raises ends the reading. Of the files named in `compared` the checksums of all
        parts were compared before; that they are the right files is still looked at.

        Raises:
            Corrupt: something is damaged, or the disk does not give it.
        """

    def close(self) -> None:
        """Let go of files and memory. Views that are open stay readable."""
