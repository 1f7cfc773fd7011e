"""A replica's rows (its state machine) and its stream in the node's log. One part of a StartedReplica.

Owns flushes, after which the log may be collected; the anchors that keep the log for peers; and reading the
log.

Invariant: the log is released only up to what synced files of the store hold.
"""

from __future__ import annotations

import asyncio

from stele.consensus.ports import Host, ReplicaStream
from stele.consensus.runtime import CoreRuntime
from stele.consensus.shielded import ShieldedTasks
from stele.consensus.state import Standing
from stele.model.entry import Entry
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import OpId
from stele.raft.events import Compacted
from stele.tablet.files import translate
from stele.tablet.machine import StateMachine

LOG_KEPT_MS = 120_000
"""How long flushed entries are kept for a peer that may still be added."""


class Storage:
    """Rows and log of one replica.

    `machine` is None for a young witness without rows, and once the replica has stopped.
    """

    def __init__(
        self,
        standing: Standing,
        host: Host,
        stream: ReplicaStream,
        runtime: CoreRuntime,
        machine: StateMachine | None,
    ) -> None:
        self.stream = stream
        self.machine = machine
        self._standing = standing
        self._host = host
        self._runtime = runtime
        self._core = runtime.core
        self._flushed_marks: list[tuple[int, int]] = []  # few; an empty deque takes 760 bytes
        """(when, flushed index) of the last LOG_KEPT_MS, the oldest first."""
        self._settled: int | None = None
        """The flushed index at which the anchor was last set while the replica rests; None: it does not rest."""
        self._flushing = asyncio.Lock()
        self._flushes = ShieldedTasks()

    def take(self, machine: StateMachine) -> None:
        """Take over the rows of a young witness, which hold everything that is committed."""
        self.machine = machine
        self.stream.set_flushed(machine.flushed.index)

    async def close(self) -> None:
        """Close the store once a flush under way has ended. Idempotent."""
        async with self._flushing:
            machine, self.machine = self.machine, None
        if machine is not None:
            await self._host.in_thread(machine.close)

    # --- flushes

    async def flush(self) -> OpId:
        """Write the rows in memory to synced files, and release the log up to there.

        Returns the last entry that the files hold. Cancelling the caller ends only its waiting. A flush runs
        to its end, since the store would wait for ever for an unfinished one.

        Raises:
            Retryable: DISK_FULL, NOT_READY for a replica without rows.
        """
        return await self._flushes.run(self._flush())

    async def _flush(self) -> OpId:
        async with self._flushing:
            machine = self.machine
            if machine is None or not self._standing.running:
                raise Retryable("this replica holds no rows to flush yet; try again", code=Code.NOT_READY)
            job = machine.begin_flush()
            if job is not None:
                await self._host.in_thread(job.write)
                machine.finish_flush(job)
                self.stream.set_flushed(machine.flushed.index)
            return machine.flushed

    # --- what holds the log

    def anchor_log(self, now_ms: int) -> None:
        """Keep the log for peers that lag, and for LOG_KEPT_MS for a copy that is not a peer yet.

        The log bounds how much an anchor keeps, and drops what the disk has no space for. A peer that lags
        further needs a copy. Entries that this replica has not flushed are kept without an anchor.
        """
        machine = self.machine
        if machine is None or (self._runtime.quiet and self._settled == machine.flushed.index):
            return
        status = self._core.status()
        behind = min((p.match_index for p in status.peers), default=status.all_replicated_index)
        self._flushed_marks.append((now_ms, machine.flushed.index))
        while len(self._flushed_marks) > 1 and self._flushed_marks[1][0] <= now_ms - LOG_KEPT_MS:
            del self._flushed_marks[0]
        wanted = min(behind, self._flushed_marks[0][1])
        self.stream.anchor("peers", max(wanted, self.stream.start.index) + 1, gives_way=True)
        # At rest nothing else moves the anchor: neither peers nor this replica's entries do.
        self._settled = self._flushed_marks[0][1] if self._runtime.quiet else None

    def log_collected(self, start: OpId) -> None:
        """Tell the core that the log up to and including `start` is gone."""
        self._runtime.post(Compacted(start))

    # --- reading the log

    def log_reaches(self, opid: OpId) -> bool:
        """Whether this replica's log holds the entry `opid` durably, and this replica knows it to be
        committed.

        If rows ended beyond the commit index, the log could drop entries that the core has not handed out
        yet.

        Raises:
            Retryable: it never will, because the replica does not run, or its log begins later.
        """
        log, standing = self._core.log, self._standing
        if not standing.running:
            raise Retryable(f"the replica does not take part: {standing.error or standing.state.name}")
        if opid.index < log.start.index:
            raise Retryable(
                f"the log begins after {log.start}, but the copied rows end at {opid}; copy the replica again"
            )
        return log.handed_index >= opid.index and log.term_at(opid.index) == opid.term

    async def read_log(self, first_index: int, bytes_max: int) -> tuple[Entry, ...]:
        """Read entries of the log in a thread.

        Returns an empty tuple if they were collected, which the core may not know yet.

        Raises:
            Retryable: the system has no file descriptor or memory for it now.
            Corrupt: the disk gives other bytes than were written.
        """
        try:
            return tuple(await self._host.in_thread(self.stream.read_entries, first_index, bytes_max))
        except Rejected as exc:
            if exc.code is not Code.NOT_FOUND:
                raise
            return ()
        except OSError as exc:
            raise translate(exc, "reading the log") from exc
        except MemoryError as exc:
            raise Retryable("reading the log: out of memory; give the node more, or try again") from exc
