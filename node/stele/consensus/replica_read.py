"""The reading side of a replica: ReadIndex rounds, one for all readers of a turn, and snapshots. A layer of Replica.

Invariant: a snapshot that was said to be ready holds everything at or below it, at this leader and every later one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.replica_write import WritePart, wrong_clock
from stele.consensus.superblock import Superblock
from stele.model.clock import from_physical_us
from stele.model.errors import Code, Retryable, SteleError
from stele.model.ids import HybridTime
from stele.raft.events import RequestRead


class ReadPart(WritePart):
    """Linearizable reads and snapshots."""

    def __init__(
        self, superblock: Superblock, directory: Path, host: Host, options: ReplicaOptions | None = None
    ) -> None:
        super().__init__(superblock, directory, host, options)
        self._read_futures: list[asyncio.Future[int]] = []
        self._reads: dict[int, list[asyncio.Future[int]]] = {}

    async def linearizable_read(self, within_ms: int = 0) -> None:
        """Return once whatever was acknowledged before the call is applied here (ReadIndex).

        `within_ms`: how long its caller waits; 0, or more than the replica's own limit: that one.

        Raises:
            Retryable: NOT_LEADER, NO_QUORUM, TIMED_OUT.
        """
        self.check_leader()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        if not self._read_futures:
            loop.call_soon(self._request_read)
        self._read_futures.append(future)
        async with self._deadline("a read", within_ms):
            await self._wait_applied(await future)

    def _request_read(self) -> None:
        futures, self._read_futures = self._read_futures, []
        if self._runtime is None or not futures:
            return
        context = next(self._contexts)
        self._reads[context] = futures
        self.active_ms = self.host.now_ms()
        self._runtime.post(RequestRead(context))

    def _refuse_reads(self, error: SteleError) -> None:
        waiting = [f for futures in self._reads.values() for f in futures] + self._read_futures
        self._reads.clear()
        self._read_futures = []
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    async def _wait_applied(self, index: int) -> None:
        if self._applier is None:
            raise self._not_leader()
        await self._applier.wait(index)

    def _deadline(self, what: str, within_ms: int) -> _Deadline:
        limit_ms = self.options.read_timeout_ms
        return _Deadline(min(within_ms or limit_ms, limit_ms), f"{what} of tablet {self.tablet_id}")

    async def latest_snapshot(self, within_ms: int = 0) -> HybridTime:
        """A snapshot that holds everything acknowledged before the call. Errors as `linearizable_read`.

        It lies no further ahead than the present and the newest write. What is applied here may: a new leader's first ceiling
        follows on its predecessor's last one, and whoever was told of that would scan other tablets in the future.
        """
        await self.linearizable_read(within_ms)
        newest = self.machine.last_timestamp if self.machine is not None else 0
        snapshot = HybridTime(max(newest, from_physical_us(self.host.wall_us())))
        if self.timestamps.applied:
            return HybridTime(min(self.timestamps.applied, snapshot))
        self._check_clock()
        await self.snapshot_ready(snapshot, within_ms)
        return snapshot

    async def snapshot_ready(self, snapshot: int, within_ms: int = 0) -> None:
        """Return once everything at or below `snapshot` is applied here and can never change; `within_ms` as above.

        Raises:
            Retryable: NOT_LEADER (a follower that cannot know), NO_QUORUM, TIMED_OUT, NOT_READY (clocks are apart).
            Rejected: CLOCK_AHEAD.
        """
        if snapshot <= self.timestamps.applied and self.running:
            return
        self.check_leader()
        if fault := self.timestamps.fault:
            raise wrong_clock(fault)
        self.timestamps.reserve(snapshot)
        if not self.timestamps.covers(snapshot):
            self._check_clock()
        async with self._deadline(f"snapshot {snapshot}", within_ms):
            term = None
            while term != self.term:
                # All of it in one term of leading: who lost the lead and won it back may hold less than it waited for,
                # until a ceiling of the new term is committed.
                term = self.term
                await self._covered(snapshot)
                # What earlier leaders proposed is committed with the first ceiling of this one, but may wait to be applied.
                if self._applier is not None:
                    await self._applier.wait(self._applier.committed_index)
                outstanding = self._proposals.outstanding(snapshot)
                if outstanding:
                    await asyncio.wait(outstanding)
                self.check_leader()

    async def _covered(self, snapshot: int) -> None:
        """Return once a ceiling of this leader at or above `snapshot` is committed."""
        while not self.timestamps.covers(snapshot):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ceiling_waiters.append(future)
            self._want_ceiling(snapshot)
            await future

    def _read_ready(self, context: int, index: int) -> None:
        for future in self._reads.pop(context, ()):
            if not future.done():
                future.set_result(index)

    def _read_refused(self, context: int, error: SteleError) -> None:
        for future in self._reads.pop(context, ()):
            if not future.done():
                future.set_exception(error)


class _Deadline:
    """`async with`: a TimeoutError of the body becomes Retryable TIMED_OUT."""

    def __init__(self, timeout_ms: int, what: str) -> None:
        self._timeout = asyncio.timeout(timeout_ms / 1000)
        self._what = what
        self._timeout_ms = timeout_ms

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: Any, exc: Any, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, exc, trace)
        except TimeoutError:
            raise Retryable(
                f"{self._what} was not ready within {self._timeout_ms} ms; try again", code=Code.TIMED_OUT
            ) from None
