"""What a replica keeps: its rows in a state machine, and its stream in the node's log. One part of a StartedReplica.

Owns flushes, after which the log may go; what holds the log for peers and copies; and reading it back.

Invariant: the log is let go of up to what a synced file of the store holds, and no further.
"""

from __future__ import annotations

import asyncio
from collections import deque

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
"""How long flushed entries stay for a peer to come."""


class Storage:
    """`machine` is None while a young witness has no rows yet, and once the replica has stopped."""

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
        self._flushed_marks: deque[tuple[int, int]] = (
            deque()
        )  # (when, flushed index), the oldest that counts first
        self._flushing = asyncio.Lock()
        self._flushes = ShieldedTasks()

    def take(self, machine: StateMachine) -> None:
        """The rows of a young witness are here and hold all that is committed."""
        self.machine = machine
        self.stream.set_flushed(machine.flushed.index)

    async def close(self) -> None:
        """Close the store, after a flush that is under way. Idempotent."""
        async with self._flushing:
            machine, self.machine = self.machine, None
        if machine is not None:
            await self._host.in_thread(machine.close)

    # --- flushes

    async def flush(self) -> OpId:
        """Write what is in memory to synced files and let the log go up to there; what the store holds then.

        A flush once begun belongs to the replica. Cancelling the caller ends only the waiting: the store would wait
        for ever for a flush that nobody finishes.

        Raises:
            Retryable: DISK_FULL, NOT_READY for a replica without rows.
        """
        return await self._flushes.run(self._flush())

    async def _flush(self) -> OpId:
        async with self._flushing:
            machine = self.machine
            if machine is None or not self._standing.running:
                raise Retryable("this replica holds no rows to flush", code=Code.NOT_READY)
            job = machine.begin_flush()
            if job is not None:
                await self._host.in_thread(job.write)
                machine.finish_flush(job)
                self.stream.set_flushed(machine.flushed.index)
            return machine.flushed

    # --- what holds the log

    def anchor_log(self, now_ms: int) -> None:
        """Hold the log for peers that lag, and for a while for a copy that is not yet a peer.

        The log bounds what an anchor may hold, and gives up what the disk has no space for. A peer that lags further
        needs a copy. Entries that this replica itself has not flushed are held without an anchor.
        """
        machine = self.machine
        if machine is None:
            return
        status = self._core.status()
        behind = min((p.match_index for p in status.peers), default=status.all_replicated_index)
        self._flushed_marks.append((now_ms, machine.flushed.index))
        while len(self._flushed_marks) > 1 and self._flushed_marks[1][0] <= now_ms - LOG_KEPT_MS:
            self._flushed_marks.popleft()
        wanted = min(behind, self._flushed_marks[0][1])
        self.stream.anchor("peers", max(wanted, self.stream.start.index) + 1, gives_way=True)

    def log_collected(self, start: OpId) -> None:
        """The log up to and including `start` is gone."""
        self._runtime.post(Compacted(start))

    # --- reading the log

    def log_reaches(self, opid: OpId) -> bool:
        """Whether this replica's log holds the committed entry `opid` durably.

        Raises:
            Retryable: it never will, because the replica does not run, or its log begins later.
        """
        log, standing = self._core.log, self._standing
        if not standing.running:
            raise Retryable(f"the replica does not take part: {standing.error or standing.state.name}")
        if opid.index < log.start.index:
            raise Retryable(f"the log begins after {log.start}, the copy ends at {opid}; copy anew")
        return log.durable_index >= opid.index and log.term_at(opid.index) == opid.term

    async def read_log(self, first_index: int, bytes_max: int) -> tuple[Entry, ...]:
        """Entries from the log, read in a thread; none if they were collected, which the core may not know yet.

        Raises:
            Retryable: the system has no descriptor or memory for it just now.
            Corrupt: the disk does not give what was written.
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
            raise Retryable("reading the log: no memory just now; give the node more, or try again") from exc
