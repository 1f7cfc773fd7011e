"""A node's work in the background: flush, compact, collect the log, end stale copy sessions, forget idle
clients, keep holds in bounds.

One flush and one compaction run at a time, so that they never crowd out clients. Compaction runs in a worker
process. It is given file names and never rows, and it ends when it has nothing to do.

Invariant: no step blocks the event loop, however many stores there are, and no step waits for another. A
failing replica does not stop the others' maintenance. A merge begins only if its file leaves enough disk
space to the log.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pyarrow as pa
import structlog

from stele import metrics
from stele.consensus.copy_source import CopySessions
from stele.consensus.ports import Host
from stele.consensus.replica import Replica
from stele.consensus.shielded import ShieldedTasks
from stele.model.errors import Corrupt, SteleError
from stele.model.ids import StreamKey
from stele.tablet.compaction import CompactionJob
from stele.tablet.compactor import Compactor
from stele.tablet.store import TabletStore
from stele.tserver.holds import HoldKeeper
from stele.tserver.log_space import LogSpace
from stele.tserver.memory import StoreMemory, held_bytes
from stele.tserver.monitor import NodeMonitor
from stele.tserver.replicas import Replicas
from stele.tserver.wheel import Wheel
from stele.wal.log import Log

log = structlog.get_logger("stele.tserver.maintenance")

ROUND_S = 0.5
"""Pause before looking again for something to flush or merge."""
COLLECT_S = 5.0
"""Pause between two collections of the log, and between two looks at copy sessions, idle clients and holds."""
_CLOSE_S = 5.0
"""When the node stops: how long to wait until a finished merge is in use."""
FLUSH_AGE_MS = 120_000
"""A store is flushed this long after its first unflushed row. It waits longer if the flush would rewrite
many bytes, see REWRITTEN_BYTES."""
REWRITTEN_BYTES = 8 << 20
"""A flush may have to rewrite earlier flushed bytes. A store waits FLUSH_AGE_MS longer for each piece of this
size that it would rewrite."""
QUIET_MS = 10_000
"""A store of more than QUIET_BYTES that was not written to for this long is flushed, so that an idle node
uses little memory."""
QUIET_BYTES = 1 << 20
REST_LOOK_MS = 5_000
"""Pause before looking again for stores at rest to flush. By then one may be old, or pin the log."""
RECLAIM_MS = 10_000
"""Pause before looking again for stores with many dead rows, and for merges of stores at rest."""
STORES_AT_ONCE = 200
"""After looking at this many stores, let the rest of the event loop run. One look takes 3 us, more for a
store with many files."""
FLUSH_REST_MS = 30_000
"""How long a store is left alone after its flush failed, for example because the disk was full."""
COMPACTION_REST_MS = 30_000
"""How long a store is left alone after its merge failed. The next merge may fail too, after writing as
much."""
SEGMENTS_KEPT = 2
"""Merges leave disk space for this many more segments of the log."""


Merge = tuple[Replica, TabletStore, CompactionJob]


class Maintenance:
    """The maintenance of one node. Does nothing before `start`."""

    def __init__(
        self,
        replicas: Replicas,
        stores: StoreMemory,
        node_log: Log,
        log_space: LogSpace,
        sessions: CopySessions,
        monitor: NodeMonitor,
        host: Host,
    ) -> None:
        self._replicas = replicas
        self._stores = stores
        self._log = node_log
        self._log_space = log_space
        self._sessions = sessions
        self._monitor = monitor
        self._host = host
        self._since: dict[StreamKey, int] = {}
        self._flush_rests: dict[StreamKey, int] = {}
        self._holds = HoldKeeper(replicas, host)
        self._clients = Wheel(replicas)
        self._compactor = Compactor()
        self._installs = ShieldedTasks()
        self._merged_last: StreamKey | None = None
        self._reclaim_ms = 0
        self._all_due_ms = 0
        self._all_flush_due_ms = 0
        self._changed: dict[StreamKey, Replica] = {}  # whose files changed, and which may need a merge
        self._resting: dict[StreamKey, int] = {}
        self._loops: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin, and go on until `close`."""
        loop = asyncio.get_running_loop()
        self._loops = [
            loop.create_task(self._again_and_again(step, pause_s))
            for step, pause_s in (
                (self.flush_due, ROUND_S),
                (self.merge_due, ROUND_S),
                (self._log_space.collect, COLLECT_S),
                (self._sessions.expire, COLLECT_S),
                (self.forget_clients, COLLECT_S),
                (self._holds.look, COLLECT_S),
            )
        ]

    async def close(self) -> None:
        """Stop. A merge under way is given up; one that is finished is put to use. A flush under way ends
        with its replica."""
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._installs.end(_CLOSE_S)
        await self._compactor.close()

    async def _again_and_again(self, step: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                await step()
            except SteleError as exc:
                log.warning("a round of maintenance failed; the next round tries again", error=str(exc))
            except Exception:
                log.exception("a round of maintenance failed; the next round tries again")

    # --- flushes

    async def flush_due(self) -> None:
        """Flush the stores that are large, old or idle, or that pin the log, one at a time. While all stores
        together take too much memory, flush the largest, however small."""
        while await self._flush_round():
            await self._host.in_thread(give_memory_back)
            if not self._stores.over:
                break

    async def _flush_round(self) -> bool:
        """Look once at each store that is awake and has something to flush. Returns whether one was flushed.

        Stores at rest are looked at every REST_LOOK_MS. Stores whose flush just failed are left out.
        """
        now = self._host.now_ms()
        found = self._stores.unflushed_awake()
        everything = now >= self._all_flush_due_ms or self._stores.looked_over
        if everything:
            found = self._stores.unflushed()
        left = {replica.superblock.key: replica for replica in found}
        if everything:
            self._all_flush_due_ms = now + REST_LOOK_MS
            self._since = {key: since for key, since in self._since.items() if key in left}
        self._flush_rests = {key: until for key, until in self._flush_rests.items() if until > now}
        left = {key: replica for key, replica in left.items() if key not in self._flush_rests}
        pinned = {pin.key for pin in self._log.pins(left, above_bytes=self._log_space.held_max)}
        flushed = await self._flush_largest(left) if self._stores.looked_over else False
        for looked, (key, replica) in enumerate(tuple(left.items()), 1):
            await _give_way(looked)
            if key in left and self._is_due(replica, key in pinned):
                del left[key]
                flushed |= await self._flush(replica)
                flushed |= await self._flush_largest(left)
        return flushed

    async def _flush_largest(self, left: dict[StreamKey, Replica]) -> bool:
        """Flush the largest stores in `left` and remove them from it, while all stores together take too much
        memory. Returns whether one was flushed.
        """
        flushed = False
        while left and self._stores.over:
            key, largest = max(left.items(), key=lambda item: held_bytes(item[1]))
            if not held_bytes(largest):
                break
            del left[key]
            flushed |= await self._flush(largest)
        return flushed

    def _is_due(self, replica: Replica, pinned: bool) -> bool:
        machine = replica.machine
        if machine is None or not replica.running:
            return False
        if machine.should_flush():
            return True
        key, now = replica.superblock.key, self._host.now_ms()
        if machine.applied == machine.flushed:
            self._since.pop(key, None)
            return False
        quiet = now - replica.writes.last_applied_ms > QUIET_MS and machine.memory_bytes > QUIET_BYTES
        age_ms = FLUSH_AGE_MS * (1 + machine.rewritten_bytes // REWRITTEN_BYTES)
        return quiet or pinned or now - self._since.setdefault(key, now) > age_ms

    async def _flush(self, replica: Replica) -> bool:
        self._since.pop(replica.superblock.key, None)
        started = time.perf_counter()
        try:
            await replica.storage.flush()
        except Corrupt as exc:
            replica.fail(f"flush: {exc}")
        except SteleError as exc:
            log.warning("a flush failed; it is tried again later", tablet=replica.tablet_id, error=str(exc))
        except Exception as exc:
            log.error("a flush failed", tablet=replica.tablet_id, exc_info=exc)
        else:
            metrics.flush_seconds.inc(time.perf_counter() - started)
            self._changed[replica.superblock.key] = replica
            return True
        self._flush_rests[replica.superblock.key] = self._host.now_ms() + FLUSH_REST_MS
        return False

    # --- clients

    async def forget_clients(self) -> None:
        """Forget the clients of idle tablets led here, once none of them can send a write again."""
        for looked, replica in enumerate(self._clients.turn(), 1):
            if replica.is_leader:
                replica.writes.let_time_pass()
            await _give_way(looked)

    # --- merges

    async def merge_due(self) -> None:
        """Merge the stores that are due and for which there is room, one at a time. Stores take turns."""
        while True:
            await self._monitor.measure()  # the merge before took space, and released some
            due = await self._next_merge() or await self._next_reclaim()
            if due is None:
                return
            await self._merge(*due)

    async def _next_merge(self) -> Merge | None:
        """The next merge that is due, or None.

        Each call looks at the stores that are awake, and at those whose files changed. Every RECLAIM_MS it
        looks at all.
        """
        room, now = room_bytes(self._log, self._monitor), self._host.now_ms()
        everything = now >= self._all_due_ms
        by_key = self._replicas.by_key
        self._changed = {key: replica for key, replica in self._changed.items() if by_key(key) is replica}
        awake = {replica.superblock.key: replica for replica in self._replicas.awake}
        some = list({**awake, **self._changed}.values())
        async for replica, machine in self._in_turn(list(self._replicas) if everything else some):
            job = machine.plan_compaction(room_bytes=room)
            if job is not None:
                self._merged_last = replica.superblock.key
                return replica, machine, job
            self._changed.pop(replica.superblock.key, None)
        if everything:
            self._all_due_ms = now + RECLAIM_MS
        return None

    async def _next_reclaim(self) -> Merge | None:
        """The next merge of all files of a store with many dead rows, or None.

        Looked for only while no other merge is due. Returns after each look, so that other merges wait for
        one look at most.
        """
        now = self._host.now_ms()
        if now < self._reclaim_ms:
            return None
        async for replica, machine in self._in_turn(list(self._replicas)):
            looked = machine.reclaim_due
            try:
                if looked:
                    await self._host.in_thread(machine.judge_dead)
            except Exception as exc:  # noqa: BLE001 - whatever it was, it holds up no other store
                self._merge_failed(replica, exc)
                continue
            job = (
                machine.plan_reclaim(room_bytes=room_bytes(self._log, self._monitor))
                if replica.running
                else None
            )
            if job is not None:
                self._merged_last = replica.superblock.key
                return replica, machine, job
            if looked:
                return None
        self._reclaim_ms = now + RECLAIM_MS
        return None

    async def _in_turn(self, replicas: list[Replica]) -> AsyncIterator[tuple[Replica, TabletStore]]:
        """The stores of replicas that run, beginning after the one merged last. Leaves out those whose merge
        just failed. Each is looked at when its turn comes.
        """
        now = self._host.now_ms()
        self._resting = {key: until for key, until in self._resting.items() if until > now}
        keys = [replica.superblock.key for replica in replicas]
        start = keys.index(self._merged_last) + 1 if self._merged_last in keys else 0
        for looked, replica in enumerate(replicas[start:] + replicas[:start], 1):
            await _give_way(looked)
            machine = replica.machine
            if (
                replica.running
                and isinstance(machine, TabletStore)
                and replica.superblock.key not in self._resting
            ):
                yield replica, machine

    async def _merge(self, replica: Replica, machine: TabletStore, job: CompactionJob) -> None:
        try:
            result = await self._compactor.run(job)
        except Exception as exc:  # noqa: BLE001 - whatever it was, the store waits for the end of this merge
            self._merge_failed(replica, exc)
            await self._host.in_thread(machine.abandon_compaction, job)
            return
        self._changed[replica.superblock.key] = replica
        try:
            await self._installs.run(self._host.in_thread(machine.install_compaction, result))
        except Exception as exc:  # noqa: BLE001 - the store has given it up, and may fail again
            self._merge_failed(replica, exc)

    def _merge_failed(self, replica: Replica, error: Exception) -> None:
        self._resting[replica.superblock.key] = self._host.now_ms() + COMPACTION_REST_MS
        if isinstance(error, Corrupt):
            replica.fail(f"compaction: {error}")
        elif isinstance(error, SteleError):
            log.warning(
                "a merge of files failed; it is tried again later", tablet=replica.tablet_id, error=str(error)
            )
        else:
            log.error("a merge of files failed", tablet=replica.tablet_id, exc_info=error)


async def _give_way(looked: int) -> None:
    """Let the event loop run after every STORES_AT_ONCE looks. Replicas may come and go meanwhile."""
    if looked % STORES_AT_ONCE == 0:
        await asyncio.sleep(0)


def room_bytes(node_log: Log, monitor: NodeMonitor) -> int:
    """How much of the disk a merge may take: what is free above the log's low-water mark and some segments."""
    options = node_log.options
    free, _ = monitor.disk_bytes
    return max(0, free - int(options.low_space_bytes + SEGMENTS_KEPT * options.segment_bytes))


def give_memory_back() -> None:
    """Return freed memory to the system. Arrow's pool and glibc's heap would keep what a flush freed."""
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
