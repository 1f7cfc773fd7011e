"""A node's volume and log, opened before any other part is made. Called by node.py, once.

Invariant: the caller's exit stack closes in this order: threads that use the volume end, the log is closed,
the volume's lock is released. Otherwise two processes could write to the volume at once. This also holds for
a start that is cancelled while the log is recovered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import structlog

from stele.tserver.description import NodeDescription
from stele.tserver.formation import take_volume
from stele.tserver.options import NodeOptions
from stele.tserver.threads import NodeThreads
from stele.tserver.volume import Volume
from stele.wal.aio import kernel_sync
from stele.wal.appender import call_all
from stele.wal.log import Log
from stele.wal.options import LogOptions, SyncMode

log = structlog.get_logger("stele.tserver")


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened volume and its log.

    `log_found`: where the log ended at the first start that no majority of masters has admitted yet; 0 if all
    starts were admitted.
    """

    options: NodeOptions
    volume: Volume
    description: NodeDescription
    threads: NodeThreads
    log: Log
    log_found: int


async def open_node(options: NodeOptions, life: AsyncExitStack) -> Opened:
    """Take the volume and recover its log. Registers their closing with `life`.

    Raises:
        Fate: the volume is not fit for this process.
        Rejected: a port in use, a bad address.
        Corrupt: the log is damaged, and not only the streams of single replicas.
    """
    loop = asyncio.get_running_loop()
    volume = await take_volume(options)
    life.callback(volume.close)
    threads = NodeThreads()
    opening = loop.create_task(threads.in_thread(_open_log, volume, options, loop))
    life.push_async_callback(_close_log, opening)
    life.push_async_callback(threads.close)
    life.callback(threads.end_reads)
    node_log = await asyncio.shield(opening)
    node_log.attach(loop, await threads.in_thread(kernel_sync, volume.wal_directory))
    record = volume.record
    found = record.found or node_log.recovery.found
    if found != record.found:
        await threads.in_thread(lambda: volume.update(lambda record: replace(record, found=found)))
    options = await threads.in_thread(_with_lease, options, volume)
    return Opened(options, volume, NodeDescription(options, volume), threads, node_log, found)


def _with_lease(options: NodeOptions, volume: Volume) -> NodeOptions:
    """The options, with the leases of leaders filled in among those of Raft.

    On return node.json has the longest lease that replicas here may ever promise. Blocks.
    """
    lease_ms = options.leader_lease_ms
    volume.update(lambda record: replace(record, promised_ms=max(record.promised_ms, lease_ms)))
    raft = replace(options.replica.raft, lease_ms=lease_ms, promised_ms=volume.record.promised_ms)
    return replace(options, replica=replace(options.replica, raft=raft))


def _open_log(volume: Volume, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> Log:
    """Open the log and recover it. Blocks."""

    def dispatch(callbacks: list[Callable[[], None]]) -> None:
        """Run callbacks on the event loop. Called by the log's thread after each sync. If the loop's own thread
        syncs, the log calls them directly."""
        try:
            loop.call_soon_threadsafe(call_all, callbacks)
        except RuntimeError:  # the loop has closed: nobody waits for these any more
            log.debug("callbacks of the log dropped, because the event loop is closed", count=len(callbacks))

    log_options = LogOptions(
        sync=SyncMode(options.wal_sync),
        segment_bytes=options.wal_segment_mib << 20,
        pool_segments_max=options.wal_spare_segments,
        queue_bytes_max=options.memory.queue_bytes,
        cache_bytes_max=options.memory.cache_bytes,
    )
    return Log.open(volume.wal_directory, log_options, volume.record.node_id, dispatch)


async def _close_log(opening: asyncio.Task[Log]) -> None:
    """Close the log once it is open. A log that could not be opened needs no closing."""
    await asyncio.wait((opening,))
    if not opening.cancelled() and opening.exception() is None:
        await asyncio.get_running_loop().run_in_executor(None, opening.result().close)
