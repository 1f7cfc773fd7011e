"""A node assembled: volume, log, tablets, transport, services, heartbeats, probes. `Node.start`, `Node.stop`; process.py runs it.

Owns the process's parts and their order of life; decides nothing about tablets. Masters are made of the same class
with more services.

Invariant: nothing is served before the volume is locked and known to be this node's, and the lock is held until the last
thread that works on the volume has ended; a log that failed ends the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import structlog

from stele import metrics
from stele.consensus.copy_source import CopySessions
from stele.consensus.fetch import CopySource
from stele.consensus.ports import HostedReplica
from stele.consensus.shielded import until_finished
from stele.consensus.superblock import Superblock
from stele.model.bounds import INCARNATION_JUMP_MAX
from stele.model.errors import SteleError
from stele.model.ids import NodeId, ReplicaId, StreamKey
from stele.raft.messages import Message, UpdateRequest
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import ChannelPool
from stele.rpc.flight_client import FlightConnections
from stele.rpc.identity import PeerBook
from stele.rpc.inbound import PeerInbound
from stele.rpc.listener import StreamListener
from stele.rpc.logging import OncePer
from stele.rpc.peers import PeerTransport
from stele.rpc.proto import consensus_pb2, tserver_pb2
from stele.tserver.copy_client import FLIGHT_OPTIONS, RemoteCopySource
from stele.tserver.facts import NodeFacts
from stele.tserver.fences import Fences
from stele.tserver.formation import Formation, holds, open_log, take_volume
from stele.tserver.gauges import set_gauges
from stele.tserver.health import NodeHealth
from stele.tserver.heartbeater import Heartbeater
from stele.tserver.log_space import LogSpace
from stele.tserver.maintenance import Maintenance
from stele.tserver.manager import TabletManager
from stele.tserver.memory import ScanMemory, StoreMemory
from stele.tserver.messages import QUIET, encode_body, encode_head, message_from_pb
from stele.tserver.options import EXIT_TRY_AGAIN, NodeOptions
from stele.tserver.quiet import QuietGroups
from stele.tserver.reads import READS_AT_ONCE
from stele.tserver.replicas import Replicas
from stele.tserver.servers import AddService, Servers
from stele.tserver.ticker import ReplicaClock, Ticker
from stele.tserver.vetting import newest
from stele.tserver.volume import Fate, Volume, volume_old
from stele.tserver.wall_clock import WallClock
from stele.tserver.watch import HAND_OVER_S, NodeWatch
from stele.wal.aio import kernel_sync
from stele.wal.appender import call_all

log = structlog.get_logger("stele.tserver")

T = TypeVar("T")
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
        self.log: Any = None
        self.replicas = Replicas()
        self.manager: TabletManager
        self.formation: Formation
        self.log_space: LogSpace
        self.quiet: QuietGroups
        self.sessions: CopySessions
        self.heartbeater: Heartbeater
        self.pool: ChannelPool
        self.transport: PeerTransport
        self.streams = StreamListener()
        self.inbound: PeerInbound
        self.flight_connections = FlightConnections(FLIGHT_OPTIONS)
        self.book = PeerBook()
        self.clock = ReplicaClock()
        self.now_ms = self.clock.now_ms
        memory = options.memory
        self.budget = ByteBudget(memory.budget_bytes, memory.budget_bytes // 4)
        self.stores = StoreMemory(self.replicas, memory.stores_bytes, self.now_ms)
        self.scan_memory = ScanMemory(memory.stores_bytes)
        self.stopping = False
        self._life = AsyncExitStack()
        """How to end what was begun, in the order of its beginning. `stop`, or a start that fails, ends it backwards."""
        self._gives_leaders = True
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._servers = Servers(self, extra_services)
        self._extra_ready = extra_ready
        self.health: NodeHealth
        self._loop = asyncio.get_running_loop()
        self._random = random.Random()
        self._threads = ThreadPoolExecutor(8, "stele-io")
        self._read_threads = ThreadPoolExecutor(READS_AT_ONCE, "stele-read")
        self.watch: NodeWatch
        self._starting: asyncio.Task[None] | None = None
        self._vetting: asyncio.Task[None] | None = None
        self.wall_clock = WallClock(self.node_id)
        self.wall_us, self.clock_fault = self.wall_clock.read, self.wall_clock.fault
        # What was sent last, until the next tick at most: a leader sends the same to each peer, one after the other.
        self._encoded: tuple[Message | None, bytes] = None, b""
        self._maintenance: Maintenance | None = None
        self._once = OncePer()

    # --- Host

    def randint(self, a: int, b: int, /) -> int:
        """A whole number from a to b."""
        return a + int(self._random.random() * (b - a + 1))

    def send(
        self, replica: HostedReplica, node_id: NodeId, to: ReplicaId, message: Message, *, quiet: bool = False
    ) -> None:
        """Hand a message to the transport."""
        superblock = replica.superblock
        head = encode_head(replica.raw_tablet_id, superblock.replica_id, to, superblock.tablet_incarnation)
        if message is not self._encoded[0]:
            self._encoded = message, encode_body(message)
        raw = head + self._encoded[1]
        if isinstance(message, UpdateRequest):
            bulk = bool(message.entries)
            may_wait = not bulk and not message.read_context
            self.transport.send(node_id, raw + QUIET if quiet else raw, bulk=bulk, may_wait=may_wait)
        else:
            self.transport.send(node_id, raw)

    def latest_time(self) -> int:
        """The highest hybrid time that an entry which is not committed may bear."""
        return self.wall_clock.latest_time

    def dropped(self, node_id: NodeId, cause: str, why: str) -> None:
        """A message was dropped: count it, and tell it once."""
        metrics.peer_refused.labels(cause).inc()
        self._once.tell(
            log.warning, "message dropped", node_id, cause, from_node=node_id, cause=cause, error=why
        )

    def _ping(self, node_id: NodeId, resting: consensus_pb2.RestingPB) -> None:
        self.transport.send(node_id, consensus_pb2.ConsensusMessage(resting=resting).SerializeToString())

    def changed(self, replica: HostedReplica) -> None:
        """A replica's report is due."""
        self.changed_key(replica.superblock.key)

    def changed_key(self, key: StreamKey) -> None:
        """The report of the replica with this key is due."""
        if not self.stopping:
            self.heartbeater.changed(key)

    def low_space(self) -> bool:
        """Whether writes must be refused."""
        return bool(self.log.low_space)

    def stores_full(self) -> bool:
        """Whether writes have to wait for flushes."""
        return self.stores.full

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run blocking work in a thread."""
        return await self._loop.run_in_executor(self._threads, work, *args)

    async def in_read_thread(self, work: Callable[[], T]) -> T:
        """Do a point read in a thread of those that do nothing else."""
        return await self._loop.run_in_executor(self._read_threads, work)

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
        life.push_async_callback(self._end_threads)
        life.callback(self._read_threads.shutdown, wait=False, cancel_futures=True)
        life.push_async_callback(self._servers.close)
        life.callback(self.flight_connections.close)
        self.facts = NodeFacts(self.options, self.volume)
        self.fences = Fences(self.volume, self.in_thread)
        self.pool = ChannelPool(self.facts.identity)
        life.push_async_callback(self.pool.close)
        await self.in_thread(self._open_log)
        self.log.attach(self._loop, await self.in_thread(kernel_sync, self.volume.wal_directory))
        found = record.found or self.log.recovery.found
        if found != record.found:
            await self.in_thread(lambda: self.volume.update(found=found))
        self.sessions = CopySessions(self.volume.copies_directory, self)
        await self.sessions.clear_debris()
        self.manager = TabletManager(
            self.replicas,
            self.volume.tablets_directory,
            self.log,
            self,
            self.options.replica,
            hold=self._hold,
            changed=self.changed_key,
        )
        self.formation = Formation(self.volume, self.replicas, self.manager, self.in_thread)
        self.log_space = LogSpace(self.replicas, self.log, self)
        self.quiet = QuietGroups(self.replicas, self.options.replica.raft, self._ping, self.now_ms())
        self.watch = NodeWatch(
            self.volume, self.log, self.replicas, self, log_stall_ms=self.options.log_stall_ms
        )
        self.heartbeater = Heartbeater(self, self.options.heartbeat_s, self.options.masters)
        self.heartbeater.log_found = found
        self.health = NodeHealth(
            self.facts,
            self.replicas,
            self.heartbeater,
            self.now_ms,
            ending=self._ending,
            extra_ready=self._extra_ready,
        )
        self.transport = PeerTransport(
            self.pool,
            self._address_of,
            self._on_message,
            self._on_disconnect,
            on_heard=self.quiet.heard,
            book=self.book,
            rng=self._random,
        )
        life.push_async_callback(self.transport.close)
        self.inbound = PeerInbound(self.transport, self.budget, self.streams)
        await self.watch.measure()
        life.push_async_callback(Ticker(self.clock, self._tick, self._look).close)
        life.push_async_callback(self.sessions.close)
        life.push_async_callback(lambda: self.manager.close())
        life.push_async_callback(self._servers.stop_serving)
        await self._servers.start()
        life.push_async_callback(self.heartbeater.close)
        self.heartbeater.start(() if self.volume.adopted else record.masters)
        life.push_async_callback(self._give_leaders)
        life.push_async_callback(self._end_maintenance)
        life.push_async_callback(self.watch.close)
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
            self.health.opened_ms = self.now_ms()
            await self.formation.make_first_catalog()
            self._maintenance = Maintenance(self)
        except Exception as exc:  # noqa: BLE001 - told to whoever runs the node
            self.fail(exc)

    async def _be_vetted(self) -> None:
        """Until the masters had their chance to refuse this volume; from then on they may count on what it says.

        A volume that this start has formatted needs nobody's word: there is nothing that it could have forgotten.
        """
        try:
            if not self.volume.new:
                await self.heartbeater.vouched()
            if self.volume.record.found:
                await self.in_thread(lambda: self.volume.update(found=0))
        except Exception as exc:  # noqa: BLE001 - told to whoever runs the node
            self.fail(exc)
            return
        self.heartbeater.vetted = True
        if self.volume.record.accepting:
            await asyncio.sleep(ACCEPTED_S)
            with contextlib.suppress(OSError):  # said once more at the next start: no harm
                await self.in_thread(lambda: self.volume.update(accepting=False))

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
            await self.in_thread(lambda: self.volume.update(incarnation=later, refused=refused))
        except OSError as exc:
            log.error("what the masters said of the volume could not be noted", error=str(exc))
        finally:
            stale = Fate("StaleStart", EXIT_TRY_AGAIN, why)
            self.fail(volume_old(self.volume.directory, why) if condemned else stale)

    async def stop(self, *, hand_over: bool = True) -> None:
        """Unready, hand leaders over, stop serving, close the log. Idempotent."""
        if self.stopping:
            return
        self.stopping = True
        self._gives_leaders = hand_over
        await self._life.aclose()

    async def _end_background(self) -> None:
        for task in filter(None, (self._starting, self._vetting)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _end_maintenance(self) -> None:
        if self._maintenance is not None:
            await self._maintenance.close()

    async def _give_leaders(self) -> None:
        if self._gives_leaders and not self.failed.done():
            await self.replicas.hand_over_leadership(HAND_OVER_S)

    async def _end_threads(self) -> None:
        await self._loop.run_in_executor(None, self._threads.shutdown)

    async def _close_log(self) -> None:
        if self.log is not None:
            await self._loop.run_in_executor(None, self.log.close)

    def fail(self, error: Exception) -> None:
        """The node cannot go on; `failed` tells whoever runs it."""
        if not self.failed.done():
            log.error("node fails", error=str(error), exc_info=error)
            self.failed.set_result(error)

    def _ending(self) -> str:
        """Why it serves no more; "" while it does."""
        if self.stopping:
            return "stopping"
        return str(self.failed.result()) if self.failed.done() else ""

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
            self._threads.submit(lambda: self.volume.update(**known))

    def status(self) -> tserver_pb2.GetNodeStatusResponse:
        """The node as tools see it."""
        return self.facts.status(
            disk_free_bytes=self.watch.disk_bytes[0],
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

    def _address_of(self, node_id: NodeId) -> str:
        """By the configurations; of an adopted volume they may name the nodes of the one that it was copied from."""
        if self.volume.adopted:
            return ""
        for replica in self.replicas:
            peer = replica.config.peer_on(node_id)
            if peer is not None and peer.address:
                return peer.address
        return ""

    def _on_message(self, from_node: NodeId, envelope: consensus_pb2.ConsensusMessage) -> None:
        replica = self.replicas.route((envelope.tablet_id, envelope.to_replica))
        if replica is None:
            if envelope.HasField("resting"):
                self.quiet.told(from_node, envelope.resting)
            return
        if envelope.tablet_incarnation < replica.standing.superblock.tablet_incarnation:
            return
        try:
            message = message_from_pb(envelope)
        except SteleError as exc:
            self.dropped(from_node, "kind", str(exc))
            return
        sender = ReplicaId(envelope.from_replica)
        if not (envelope.quiet and self.quiet.take(replica, sender, message)):
            replica.on_message(from_node, sender, message)

    def _on_disconnect(self, node_id: NodeId) -> None:
        self.quiet.lost(node_id)
        self.replicas.peer_node_failed(node_id)

    def _tick(self, now_ms: int) -> None:
        self._encoded = None, b""
        self.replicas.tick(now_ms)
        self.quiet.tick(now_ms)
        self.watch.tick(now_ms)

    async def _look(self) -> None:
        await self.watch.look()
        set_gauges(
            self.replicas,
            self.stores,
            self.quiet,
            self.sessions,
            self.wall_clock,
            log_bytes=self.log.bytes_on_disk,
            disk_free_bytes=self.watch.disk_bytes[0],
        )
