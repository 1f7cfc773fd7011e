"""A node assembled: volume, log, tablets, transport, services, heartbeats, probes. `Node.start`, `Node.stop`; process.py runs it.

Owns the process's parts and their order of life; decides nothing about tablets. Masters are made of the same class
with more services.

Invariant: nothing is served before the volume is locked and known to be this node's, and the lock is held until the last
thread that works on the volume has ended; a log that failed ends the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import structlog

from stele.consensus.copy_source import CopySessions
from stele.consensus.fetch import CopySource
from stele.consensus.shielded import until_finished
from stele.consensus.superblock import Superblock
from stele.model.ids import NodeId
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import ChannelPool
from stele.rpc.flight_client import FlightConnections
from stele.rpc.identity import PeerBook
from stele.rpc.listener import StreamListener
from stele.rpc.proto import tserver_pb2
from stele.tserver.admission import Admission
from stele.tserver.admission_votes import AdmissionVotes
from stele.tserver.copy_client import FLIGHT_OPTIONS, RemoteCopySource
from stele.tserver.facts import NodeFacts
from stele.tserver.fences import Fences
from stele.tserver.formation import Formation, holds, open_log, take_volume
from stele.tserver.gauges import set_gauges
from stele.tserver.health import NodeHealth
from stele.tserver.heartbeat_source import HeartbeatSource
from stele.tserver.heartbeater import Heartbeater
from stele.tserver.host import NodeHost
from stele.tserver.log_space import LogSpace
from stele.tserver.maintenance import Maintenance
from stele.tserver.manager import TabletManager
from stele.tserver.memory import ScanMemory, StoreMemory
from stele.tserver.messenger import Messenger
from stele.tserver.monitor import HAND_OVER_S, NodeMonitor
from stele.tserver.options import NodeOptions
from stele.tserver.replicas import Replicas
from stele.tserver.servers import AddService, Servers
from stele.tserver.shutdown import Shutdown
from stele.tserver.startup import Startup
from stele.tserver.threads import NodeThreads
from stele.tserver.ticker import ReplicaClock, Ticker
from stele.tserver.volume import Volume
from stele.tserver.wall_clock import WallClock
from stele.wal.aio import kernel_sync
from stele.wal.appender import call_all
from stele.wal.log import Log

log = structlog.get_logger("stele.tserver")


class Node:
    """A node or master. `extra_services` add servicers to its gRPC server; `extra_ready` says "" or why not ready."""

    def __init__(
        self,
        options: NodeOptions,
        extra_services: Sequence[AddService] = (),
        *,
        extra_ready: Callable[[], str] = lambda: "",
    ) -> None:
        self.options = options
        self.node_id = options.node_id
        self.cluster_id = options.cluster_id
        self.volume: Volume
        self.facts: NodeFacts
        self.fences: Fences
        self.log: Log
        self.replicas = Replicas()
        self.manager: TabletManager
        self.formation: Formation
        self.log_space: LogSpace
        self.sessions: CopySessions
        self.heartbeater: Heartbeater
        self.pool: ChannelPool
        self.messenger: Messenger
        self.host: NodeHost
        self.streams = StreamListener()
        self.flight_connections = FlightConnections(FLIGHT_OPTIONS)
        self.book = PeerBook()
        self.clock = ReplicaClock()
        memory = options.memory
        self.budget = ByteBudget(memory.budget_bytes, memory.budget_bytes // 4)
        self.stores = StoreMemory(self.replicas, memory.stores_bytes, self.clock.now_ms)
        self.scan_memory = ScanMemory(memory.stores_bytes)
        self.threads = NodeThreads()
        self.shutdown = Shutdown()
        self._life = AsyncExitStack()
        """How to end what was begun, in the order of its beginning. `stop`, or a start that fails, ends it backwards."""
        self._gives_leaders = True
        self._servers = Servers(self, extra_services)
        self._extra_ready = extra_ready
        self.health: NodeHealth
        self._loop = asyncio.get_running_loop()
        self.monitor: NodeMonitor
        self.admission: Admission
        self.startup: Startup
        self.wall_clock = WallClock(self.node_id)
        self.maintenance: Maintenance

    # --- life

    async def start(self) -> None:
        """Open the volume and begin to serve; replicas are opened in the background (see `started`).

        Raises:
            Fate: the volume is not fit for this process.
            Rejected: a port in use, a bad address.
            Corrupt: a log that cannot be read beyond single replicas.
        """
        try:
            self.volume = await take_volume(self.options)
            self._life.callback(self.volume.close)
            await self._begin()
        except BaseException:
            await until_finished(self._life.aclose())
            raise

    async def _begin(self) -> None:
        record, life = self.volume.record, self._life
        # Backwards: once no thread works on the volume, the log is closed. Whoever has the volume next would write beside it.
        # What was cancelled may go on in its thread for as long as the disk takes; whoever runs the node bounds that.
        life.push_async_callback(self._close_log)
        life.push_async_callback(self.threads.close)
        life.callback(self.threads.end_reads)
        life.push_async_callback(self._servers.close)
        life.callback(self.flight_connections.close)
        self.facts = NodeFacts(self.options, self.volume)
        self.fences = Fences(self.volume, self.threads.in_thread)
        self.pool = ChannelPool(self.facts.identity)
        life.push_async_callback(self.pool.close)
        await self.threads.in_thread(self._open_log)
        self.log.attach(self._loop, await self.threads.in_thread(kernel_sync, self.volume.wal_directory))
        found = record.found or self.log.recovery.found
        if found != record.found:
            await self.threads.in_thread(lambda: self.volume.update(found=found))
        self.monitor = NodeMonitor(
            self.volume,
            self.log,
            self.replicas,
            self.wall_clock,
            in_thread=self.threads.in_thread,
            fail=self.shutdown.fail,
            log_stall_ms=self.options.log_stall_ms,
        )
        given = max(len(self.options.masters), len(record.masters), len(record.first_masters))
        self.admission = Admission(AdmissionVotes(self.node_id, self.options.role, given))
        self.heartbeat_source = HeartbeatSource(
            self.facts,
            self.replicas,
            self.log,
            self.monitor,
            self.wall_clock,
            self.admission,
            log_found=found,
        )
        self.heartbeater = Heartbeater(
            self.heartbeat_source,
            self.admission,
            self.fences,
            self.pool,
            self.book,
            self.wall_clock,
            interval_s=self.options.heartbeat_s,
            given=self.options.masters,
            remember=lambda masters: self._remember_masters(masters),
        )
        self.messenger = Messenger(
            self.replicas,
            self.pool,
            self.book,
            self.budget,
            self.streams,
            self.options.replica.raft,
            now_ms=self.clock.now_ms(),
            dial_configured=not self.volume.adopted,
        )
        self.host = NodeHost(
            self.node_id,
            self.clock,
            self.wall_clock,
            self.threads,
            self.messenger,
            self.stores,
            self.log,
            self.shutdown,
            report_due=self.heartbeater.changed,
        )
        self.sessions = CopySessions(self.volume.copies_directory, self.host)
        await self.sessions.clear_debris()
        self.manager = TabletManager(
            self.replicas,
            self.volume.tablets_directory,
            self.log,
            self.host,
            self.options.replica,
            hold=self._hold,
            changed=self.host.changed_key,
        )
        self.formation = Formation(self.volume, self.replicas, self.manager, self.threads.in_thread)
        self.log_space = LogSpace(self.replicas, self.log, self.host)
        self.maintenance = Maintenance(
            self.replicas,
            self.stores,
            self.log,
            self.log_space,
            self.sessions,
            self.monitor,
            self.host,
        )
        self.startup = Startup(
            self.volume,
            self.admission,
            self.manager,
            self.formation,
            self.maintenance,
            self.clock,
            self.shutdown,
            in_thread=self.threads.in_thread,
        )
        self.health = NodeHealth(
            self.facts,
            self.replicas,
            self.heartbeater,
            self.startup,
            self.clock.now_ms,
            ending=self.shutdown.reason,
            extra_ready=self._extra_ready,
        )
        life.push_async_callback(self.messenger.close)
        await self.monitor.measure()
        life.push_async_callback(Ticker(self.clock, self._tick, self._look).close)
        life.push_async_callback(self.sessions.close)
        life.push_async_callback(lambda: self.manager.close())
        life.push_async_callback(self._servers.stop_serving)
        await self._servers.start()
        life.push_async_callback(self.startup.close)
        life.push_async_callback(self.heartbeater.close)
        self.heartbeater.start(() if self.volume.adopted else record.masters)
        life.push_async_callback(self._give_leaders)
        life.push_async_callback(self.maintenance.close)
        life.push_async_callback(self.monitor.close)
        log.info("memory", **self.options.memory.in_mib())
        self.startup.begin()
        life.push_async_callback(self.startup.cancel)

    def _open_log(self) -> None:
        """Noted by the thread that opens it: whoever waits may be cancelled, and the log is to be closed all the same."""
        self.log = open_log(self.volume, self.options, self._dispatch)

    async def stop(self, *, hand_over: bool = True) -> None:
        """Unready, hand leaders over, stop serving, close the log. Idempotent."""
        if not self.shutdown.begin():
            return
        self._gives_leaders = hand_over
        await self._life.aclose()

    async def _give_leaders(self) -> None:
        if self._gives_leaders and not self.shutdown.failed.done():
            await self.replicas.hand_over_leadership(HAND_OVER_S)

    async def _close_log(self) -> None:
        if hasattr(self, "log"):
            await self._loop.run_in_executor(None, self.log.close)

    @property
    def failed(self) -> asyncio.Future[Exception]:
        """Resolves with the first error that the node cannot go on with."""
        return self.shutdown.failed

    def _hold(self, superblock: Superblock) -> bool:
        return holds(self.volume.record, superblock.key)

    # --- facts

    @property
    def address(self) -> str:
        """Where it is reached."""
        return self.facts.identity.address

    @property
    def incarnation(self) -> int:
        """Of this start."""
        return self.facts.identity.incarnation

    def _remember_masters(self, masters: tuple[str, ...]) -> None:
        self.threads.submit(self.volume.remember_masters, masters, self.options.masters)

    def status(self) -> tserver_pb2.GetNodeStatusResponse:
        """The node as tools see it."""
        return self.facts.status(
            disk_free_bytes=self.monitor.disk_bytes[0],
            replicas=len(self.replicas),
            masters=self.heartbeater.addresses,
        )

    def copy_source(self, node_id: NodeId, address: str) -> CopySource:
        """Sessions at another node."""
        return RemoteCopySource(self.pool, self.flight_connections, address, node_id)

    # --- wiring

    def _dispatch(self, callbacks: list[Callable[[], None]]) -> None:
        """From the log's thread, once per sync. What the loop's thread syncs, it tells itself."""
        try:
            self._loop.call_soon_threadsafe(call_all, callbacks)
        except RuntimeError:  # the loop has closed: nobody waits for these any more
            log.debug("callbacks of a closed loop dropped", count=len(callbacks))

    def _tick(self, now_ms: int) -> None:
        self.replicas.tick(now_ms)
        self.messenger.tick(now_ms)
        self.monitor.tick(now_ms)

    async def _look(self) -> None:
        await self.monitor.look()
        set_gauges(
            self.replicas,
            self.stores,
            self.messenger.quiet,
            self.sessions,
            self.wall_clock,
            log_bytes=self.log.bytes_on_disk,
            disk_free_bytes=self.monitor.disk_bytes[0],
        )
