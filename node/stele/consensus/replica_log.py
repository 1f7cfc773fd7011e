"""A replica and its log: flushes, after which the log may go; what holds it for peers and copies; reading it. A layer of
Replica.

Invariant: the log is let go of up to what a synced file of the store holds, and no further.
"""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.replica_read import ReadPart
from stele.consensus.superblock import Superblock
from stele.consensus.whole import Whole
from stele.model.entry import Entry
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import OpId
from stele.raft.events import Compacted
from stele.tablet.files import translate

LOG_KEPT_MS = 120_000
"""How long flushed entries stay for a peer to come."""


class LogPart(ReadPart):
    """Flushes, anchors, and entries that the core asks back."""

    def __init__(
        self, superblock: Superblock, directory: Path, host: Host, options: ReplicaOptions | None = None
    ) -> None:
        super().__init__(superblock, directory, host, options)
        self._flushed_marks: deque[tuple[int, int]] = deque()
        self._flushing = asyncio.Lock()
        self._flushes = Whole()

    async def flush(self) -> OpId:
        """Write what is in memory to synced files and let the log go up to there; what the store holds then.

        A flush once begun belongs to the replica: cancelling ends only the waiting, or the store would wait for ever
        for the end of a flush that nobody finishes.

        Raises:
            Retryable: DISK_FULL, NOT_READY for a replica without rows.
        """
        return await self._flushes.run(self._flush())

    async def _flush(self) -> OpId:
        async with self._flushing:
            machine = self.machine
            if machine is None or not self.running:
                raise Retryable("this replica holds no rows to flush", code=Code.NOT_READY)
            job = machine.begin_flush()
            if job is not None:
                await self.host.in_thread(job.write)
                machine.finish_flush(job)
                self.stream.set_flushed(machine.flushed.index)
            return machine.flushed

    def anchor_log(self, now_ms: int) -> None:
        """Hold the log for peers that lag, and for a while for a copy that is not yet a peer.

        The log bounds what an anchor may hold, and gives up what the disk has no space for; past that a peer needs a copy.
        What this replica itself still needs is held without an anchor, and what it has flushed a majority has committed.
        """
        core, machine = self.core, self.machine
        if core is None or machine is None:
            return
        status = core.status()
        behind = min((p.match_index for p in status.peers), default=status.all_replicated_index)
        self._flushed_marks.append((now_ms, machine.flushed.index))
        while len(self._flushed_marks) > 1 and self._flushed_marks[1][0] <= now_ms - LOG_KEPT_MS:
            self._flushed_marks.popleft()
        wanted = min(behind, self._flushed_marks[0][1])
        self.stream.anchor("peers", max(wanted, self.stream.start.index) + 1, gives_way=True)

    def log_collected(self, start: OpId) -> None:
        """The log up to and including `start` is gone."""
        if self._runtime is not None:
            self._runtime.post(Compacted(start))

    def log_reaches(self, opid: OpId) -> bool:
        """Whether this replica's log holds the committed entry `opid` durably.

        Raises:
            Retryable: it never will, because the replica does not run, or its log begins later.
        """
        core = self.core
        if core is None or not self.running:
            raise Retryable(f"the replica does not take part: {self.error or self.state.name}")
        if opid.index < core.log.start.index:
            raise Retryable(f"the log begins after {core.log.start}, the copy ends at {opid}; copy anew")
        return core.log.durable_index >= opid.index and core.log.term_at(opid.index) == opid.term

    async def read_log(self, first_index: int, bytes_max: int) -> tuple[Entry, ...]:
        """Entries from the log, read in a thread; none if they were collected, which the core may not know yet.

        Raises:
            Retryable: the system has no descriptor or memory for it just now.
            Corrupt: the disk does not give what was written.
        """
        try:
            return tuple(await self.host.in_thread(self.stream.read_entries, first_index, bytes_max))
        except Rejected as exc:
            if exc.code is not Code.NOT_FOUND:
                raise
            return ()
        except OSError as exc:
            raise translate(exc, "reading the log") from exc
        except MemoryError as exc:
            raise Retryable("reading the log: no memory just now; give the node more, or try again") from exc
