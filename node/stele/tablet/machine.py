"""What a replica needs of its state machine. Two implementations: TabletStore (rows) and KeySpace (keys and
values).

Invariant: the state after applying entries 1..n depends on those entries alone, so replicas agree byte for
byte.

Threads: only the owner's thread calls `begin`, `apply`, `begin_flush` and `finish_flush`. `job.write`,
lookups, `checkpoint`, `verify` and views may run in other threads meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from stele.model.block import RowError
from stele.model.entry import Entry
from stele.model.errors import Code, SteleError, error_for
from stele.model.ids import OpId
from stele.model.record import record
from stele.model.writeop import WriteHeader

if TYPE_CHECKING:
    from stele.tablet.writing import Plan

Found: TypeAlias = "Plan | SteleError"
"""What a lookup found: what the entry does, or why it cannot be done."""


class WouldBlock(Exception):
    """The caller asked for a brief look, but it would take long. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What must be looked up before an entry can be applied. It takes too long for the event loop.

    `run` blocks and may read files. It changes nothing and does not raise, so it may run in any thread. Pass its
    result to `StateMachine.begin` once, with no other entry applied in between."""

    run: Callable[[], Found]


@record
class Outcome:
    """The outcome of one WRITE entry. A retry of the same write gets the same outcome.

    If `code` is not OK, the whole write was refused and changed nothing; `message` says why. Rows in
    `row_errors` were not written, all others were. `value`: the answer of a key space operation. `duplicate`:
    this entry repeats an earlier one. `schema_version`: the version that the table has from here on; 0 if the
    entry did not change it. `in_memory`: the caller was answered before the entry was committed.
    """

    timestamp: int = 0
    row_errors: tuple[RowError, ...] = ()
    value: bytes | None = None
    code: Code = Code.OK
    message: str = ""
    duplicate: bool = False
    schema_version: int = 0
    in_memory: bool = False

    def error(self) -> SteleError | None:
        """The exception for a refused write; None if the write was done."""
        return None if self.code is Code.OK else error_for(self.code, self.message)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A flushed state as hard links in one directory. `files`: their names; they hold all entries up to
    `opid`.

    In all checkpoints of a replica, a file name stands for the same bytes. Only the last name in `files` does not: that
    file is written anew each time.
    """

    opid: OpId
    files: tuple[str, ...]


class FlushJob(Protocol):
    """A flush in progress. `opid`: what the files hold once it is finished."""

    opid: OpId

    def write(self) -> None:
        """Write and sync the files. Any thread; blocks.

        On return the state up to `opid` survives power loss. After an error the store works on unchanged, and
        the next `begin_flush` returns a job for the same state. Raises:
            Retryable: DISK_FULL.
            Corrupt: IO_ERROR.
        """


class StateMachine(Protocol):
    """Applies the committed entries of one replica."""

    @property
    def applied(self) -> OpId:
        """The last entry applied."""

    @property
    def flushed(self) -> OpId:
        """The last entry in synced files. Replay needs only the log after it."""

    @property
    def last_timestamp(self) -> int:
        """Hybrid time of the newest applied write; 0 for none."""

    @property
    def max_ceiling(self) -> int:
        """The highest timestamp ceiling among the applied entries; 0 for none."""

    @property
    def clients_idle_us(self) -> int | None:
        """When all clients that it remembers have been idle long enough, in µs since 1970. The next entry with a
        later timestamp makes it forget them. None if it remembers none."""

    @property
    def memory_bytes(self) -> int:
        """About how many bytes of memory a flush would free."""

    @property
    def rewritten_bytes(self) -> int:
        """About how many bytes a flush would write that earlier flushes have written too."""

    def admit(self, header: WriteHeader, wall_us: int, clock_error_us: int) -> None:
        """Check a write before the leader proposes it. Raises what `ExactlyOnce.admit` raises."""

    def expect(self, header: WriteHeader) -> None:
        """As leader, note that this write is proposed, so that `admit` counts its client and its job if they are new."""

    def stop_expecting(self, header: WriteHeader) -> None:
        """Note that this write was applied, or was lost."""

    def knows_client(self, client_id: bytes) -> bool:
        """Whether this state machine has applied a write of this client id and has not forgotten the client."""

    def foreseen(self, payload: bytes, timestamp: int) -> Outcome | None:
        """The outcome that a WRITE entry will have, if it is certain; else None. Changes nothing.

        All entries after `applied` and before this one must be blocks of rows or ceilings."""

    def begin(self, entry: Entry, found: Found | None = None) -> Outcome | Lookup:
        """As `apply`, but takes at most a few milliseconds, for an event loop.

        If it returns a Lookup, nothing was applied yet. The owner then runs it in a thread and calls `begin` again
        with the result in `found`, the same entry, and no other before it. If a flush began meanwhile, that may
        return another Lookup.

        Raises: see `apply`.
        """

    def apply(self, entry: Entry) -> Outcome:
        """Apply the next committed entry, of any kind. May block.

        The outcome follows from the entry and the state by rules that never change. An entry that this
        program cannot read has no outcome, because another program may have applied it.

        After an exception the entry may be half applied, so the state must not be read or flushed any more.

        Raises:
            InvariantViolation: the entry is not the next one.
            Corrupt: its payload is not what a leader proposed, or a needed file is damaged.
            Rejected: UNSUPPORTED_VERSION: a later release proposed it, or wrote a needed file.
        """

    def should_flush(self) -> bool:
        """Whether there is enough in memory for a flush."""

    def begin_flush(self) -> FlushJob | None:
        """Freeze the rows or pairs in memory, and return the job that writes them. Takes little time.

        None if a flush is running, or if nothing is new since `flushed`."""

    def finish_flush(self, job: FlushJob) -> None:
        """Call after `job.write()` returned: `flushed` moves to `job.opid`."""

    def checkpoint(self, directory: Path) -> Checkpoint:
        """Link the files of the last flushed state into `directory`, which is made if absent, and sync it. Any thread.

        Raises:
            Rejected: ALREADY_PRESENT: the directory is not empty.
        """

    def verify(self, read: Callable[[int], None] = lambda size: None, compared: Collection[str] = ()) -> None:
        """Read all files of the last flushed state and compare every checksum. Any thread; blocks; needs
        little memory.

        Calls `read` with the bytes of each piece; an exception from it ends the reading. For files named in
        `compared` the parts' checksums were compared before; this only checks that they are the right files.

        Raises:
            Corrupt: something is damaged, or the disk cannot read it.
        """

    def close(self) -> None:
        """Release files and memory. Open views stay readable."""
