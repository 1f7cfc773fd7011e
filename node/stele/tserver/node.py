"""A node assembled: volume, log, tablets, transport, services, heartbeats, probes. `Node.start`, `Node.stop`; process.py runs it.

Owns the process's parts and their order of life; decides nothing about tablets. Masters are made of the same class
with more services.

Invariant: nothing is served before the volume is locked and known to be this node's, and the lock is held until the last
thread that works on the volume has ended; a log that failed ends the node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import structlog

from stele.consensus.copy_source import CopySessions
from stele.consensus.fetch import CopySource
from stele.consensus.shielded import until_finished
from stele.consensus.superblock import Superblock
from stele.model.bounds import INCARNATION_JUMP_MAX
from stele.model.errors import SteleError
from stele.model.ids import NodeId
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import ChannelPool
from stele.rpc.flight_client import FlightConnections
from stele.rpc.identity import PeerBook
from stele.rpc.listener import StreamListener
from stele.rpc.proto import tserver_pb2
from stele.tserver.copy_client import FLIGHT_OPTIONS, RemoteCopySource
from stele.tserver.facts import NodeFacts
from stele.tserver.fences import Fences
from stele.tserver.formation import Formation, holds, open_log, take_volume
from stele.tserver.gauges import set_gauges
from stele.tserver.health import NodeHealth
from stele.tserver.heartbeater import Heartbeater
from stele.tserver.host import NodeHost
from stele.tserver.log_space import LogSpace
from stele.tserver.maintenance import Maintenance
from stele.tserver.manager import TabletManager
from stele.tserver.memory import ScanMemory, StoreMemory
from stele.tserver.messenger import Messenger
from stele.tserver.monitor import HAND_OVER_S, NodeMonitor
from stele.tserver.options import EXIT_TRY_AGAIN, NodeOptions
from stele.tserver.replicas import Replicas
from stele.tserver.servers import AddService, Servers
from stele.tserver.shutdown import Shutdown
from stele.tserver.threads import NodeThreads
from stele.tserver.ticker import ReplicaClock, Ticker
from stele.tserver.vetting import newest
from stele.tserver.volume import Fate, Volume, volume_old
from stele.tserver.wall_clock import WallClock
from stele.wal.aio import kernel_sync
from stele.wal.appender import call_all
from stele.wal.log import Log

log = structlog.get_logger("stele.tserver")

ACCEPTED_S = 60.0
"""So long a volume that was taken back goes on saying so once it is vetted: then each master has noted what it tells."""
VETTING_S = 3.0
"""How long a start waits for the masters' word on its volume. Longer, and tablets would not come back without them."""


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
        self._starting: asyncio.Task[None] | None = None
        self._vetting: asyncio.Task[None] | None = None
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
        self.heartbeater = Heartbeater(self, self.options.heartbeat_s, self.options.masters)
        self.heartbeater.log_found = found
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
        self.health = NodeHealth(
            self.facts,
            self.replicas,
            self.heartbeater,
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
        life.push_async_callback(self.heartbeater.close)
        self.heartbeater.start(() if self.volume.adopted else record.masters)
        life.push_async_callback(self._give_leaders)
        life.push_async_callback(self.maintenance.close)
        life.push_async_callback(self.monitor.close)
        log.info("memory", **self.options.memory.in_mib())
        self._vetting = self._loop.create_task(self._be_vetted())
        self._starting = self._loop.create_task(self._open_replicas())
        life.push_async_callback(self._end_background)

    def _open_log(self) -> None:
        """Noted by the thread that opens it: whoever waits may be cancelled, and the log is to be closed all the same."""
        self.log = open_log(self.volume, self.options, self._dispatch)

    async def _open_replicas(self) -> None:
        try:
            await self._vetted()
            await self.manager.open_all()
            self.health.opened_ms = self.clock.now_ms()
            await self.formation.make_first_catalog()
            self.maintenance.start()
        except Exception as exc:  # noqa: BLE001 - told to whoever runs the node
            self.shutdown.fail(exc)

    async def _be_vetted(self) -> None:
        """Until the masters had their chance to refuse this volume; from then on they may count on what it says.

        A volume that this start has formatted needs nobody's word: there is nothing that it could have forgotten.
        """
        try:
            if not self.volume.new:
                await self.heartbeater.vouched()
            if self.volume.record.found:
                await self.threads.in_thread(lambda: self.volume.update(found=0))
        except Exception as exc:  # noqa: BLE001 - told to whoever runs the node
            self.shutdown.fail(exc)
            return
        self.heartbeater.vetted = True
        if self.volume.record.accepting:
            await asyncio.sleep(ACCEPTED_S)
            with contextlib.suppress(OSError):  # said once more at the next start: no harm
                await self.threads.in_thread(lambda: self.volume.update(accepting=False))

    async def _vetted(self) -> None:
        """Before a replica votes or acknowledges anything. Without masters tablets must come back all the same."""
        if self.volume.new or not self.heartbeater.addresses:
            return
        try:
            async with asyncio.timeout(VETTING_S):
                await self.heartbeater.may_open()
        except TimeoutError:
            # Others vouch for it soon, the doubt ends, or the process does.
            await self.heartbeater.undoubted()
            log.warning("starting without the masters' word on this volume", waited_s=VETTING_S)

    async def refused(self, error: SteleError, *, condemned: bool) -> None:
        """Masters know a later start or state of this node. This process ends, whatever its disk says. `condemned`: a majority
        has evidence that the volume is an older copy, and no later start of it may go on either."""
        for task in filter(None, (self._starting, self._vetting)):
            task.cancel()
        self.heartbeater.vetted = False
        why = str(error.args[0])
        # A start of an older copy, or beside another one, or somebody spoke in this node's name: the next start has a higher
        # number than all that the masters heard, and is judged by its log.
        own = self.volume.record.incarnation
        later = max(own, min(newest(error), own + INCARNATION_JUMP_MAX))
        refused = why if condemned else self.volume.record.refused
        try:
            await self.threads.in_thread(lambda: self.volume.update(incarnation=later, refused=refused))
        except OSError as exc:
            log.error("what the masters said of the volume could not be noted", error=str(exc))
        finally:
            stale = Fate("StaleStart", EXIT_TRY_AGAIN, why)
            self.shutdown.fail(volume_old(self.volume.directory, why) if condemned else stale)

    async def stop(self, *, hand_over: bool = True) -> None:
        """Unready, hand leaders over, stop serving, close the log. Idempotent."""
        if not self.shutdown.begin():
            return
        self._gives_leaders = hand_over
        await self._life.aclose()

    async def _end_background(self) -> None:
        for task in filter(None, (self._starting, self._vetting)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

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

    def remember_masters(self, masters: tuple[str, ...]) -> None:
        """Keep the newest list of masters beside --masters, and what this start knows of the addresses on its volume."""
        record = self.volume.record
        known = {
            "masters": masters,
            "given": self.options.masters or record.given,
            "adopted": self.volume.adopted,
        }
        if any(getattr(record, name) != value for name, value in known.items()):
            self.threads.submit(lambda: self.volume.update(**known))

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
