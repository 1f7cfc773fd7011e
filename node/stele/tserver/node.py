"""Assembles a node: `start_node` makes all parts, starts them in order, and returns the Node; process.py runs
it.

Decides nothing. First the volume and the log are opened. Then all parts are made, each with the parts that it
uses, and then started. No part is changed once it is made. A master is a node with an extension
(extension.py).

Invariant: nothing is served before the volume is locked and known to be this node's. `Node.stop`, and a start
that fails, end what was begun in reverse order; the volume's lock is released last.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from stele.consensus.copy_source import CopySessions
from stele.consensus.shielded import until_finished
from stele.model.ids import NodeId
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import ChannelPool
from stele.rpc.flight_client import FlightConnections
from stele.rpc.identity import PeerBook
from stele.rpc.listener import StreamListener
from stele.tserver.admission import Admission
from stele.tserver.admission_votes import AdmissionVotes
from stele.tserver.copy_client import FLIGHT_OPTIONS, CopySources
from stele.tserver.copy_service import CopyFiles
from stele.tserver.description import NodeDescription
from stele.tserver.extension import Extension, ExtensionPorts, MakeExtension, NoExtension
from stele.tserver.fences import Fences
from stele.tserver.fencing import Fencing
from stele.tserver.formation import Formation
from stele.tserver.gauges import set_gauges
from stele.tserver.health import NodeHealth
from stele.tserver.heartbeat_source import HeartbeatSource
from stele.tserver.heartbeater import Heartbeater
from stele.tserver.host import NodeHost
from stele.tserver.leader_load import LeaderLoad
from stele.tserver.leases import LeaseKeeper
from stele.tserver.log_space import LogSpace
from stele.tserver.maintenance import Maintenance
from stele.tserver.manager import TabletManager
from stele.tserver.memory import ScanMemory, StoreMemory
from stele.tserver.messenger import Messenger
from stele.tserver.monitor import HAND_OVER_S, NodeMonitor
from stele.tserver.opening import Opened, open_node
from stele.tserver.options import NodeOptions
from stele.tserver.plans import Plans
from stele.tserver.replicas import Replicas
from stele.tserver.scan import Scans
from stele.tserver.servers import Servers
from stele.tserver.services import make_server
from stele.tserver.shutdown import Shutdown
from stele.tserver.startup import Startup
from stele.tserver.threads import NodeThreads
from stele.tserver.ticker import ReplicaClock, Ticker
from stele.tserver.volume import Volume
from stele.tserver.wall_clock import WallClock
from stele.tserver.watching import Watches
from stele.tserver.withdrawal import Withdrawal
from stele.wal.log import Log

log = structlog.get_logger("stele.tserver")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A running node or master. Its parts are attributes, for whoever started it. No part has the Node
    itself.
    """

    options: NodeOptions
    volume: Volume
    log: Log
    description: NodeDescription
    threads: NodeThreads
    shutdown: Shutdown
    clock: ReplicaClock
    wall_clock: WallClock
    replicas: Replicas
    load: LeaderLoad
    host: NodeHost
    manager: TabletManager
    formation: Formation
    sessions: CopySessions
    stores: StoreMemory
    scan_memory: ScanMemory
    log_space: LogSpace
    monitor: NodeMonitor
    maintenance: Maintenance
    pool: ChannelPool
    flight_connections: FlightConnections
    copy_sources: CopySources
    messenger: Messenger
    fences: Fences
    fencing: Fencing
    withdrawal: Withdrawal
    admission: Admission
    heartbeat_source: HeartbeatSource
    heartbeater: Heartbeater
    startup: Startup
    health: NodeHealth
    plans: Plans
    watches: Watches
    leases: LeaseKeeper
    servers: Servers
    extension: Extension
    life: AsyncExitStack
    """The exit stack that ends what was begun. Entries stand in the order of their beginning."""

    @property
    def node_id(self) -> NodeId:
        """The permanent UUID of this node."""
        return self.options.node_id

    @property
    def address(self) -> str:
        """The HOST:PORT of its gRPC server."""
        return self.description.address

    @property
    def incarnation(self) -> int:
        """The incarnation of this start."""
        return self.description.identity.incarnation

    @property
    def failed(self) -> asyncio.Future[Exception]:
        """Resolves with the first error after which the node cannot continue. It never raises."""
        return self.shutdown.failed

    async def stop(self, *, hand_over: bool = True) -> None:
        """Become unready, hand leaders over (`hand_over`), stop serving, close the log. Idempotent."""
        if self.shutdown.begin(hand_over=hand_over):
            await self.life.aclose()


async def start_node(options: NodeOptions, extend: MakeExtension = NoExtension) -> Node:
    """Open the volume and begin to serve. Replicas open in the background: see `Startup` and
    `NodeHealth.started`.

    A start that fails or is cancelled undoes exactly what it began.

    Raises:
        Fate: the volume is not fit for this process.
        Rejected: a port in use, a bad address.
        Corrupt: the log is damaged, and not only the streams of single replicas.
    """
    life = AsyncExitStack()
    try:
        node = _assemble(await open_node(options, life), extend, life)
        await _begin(node)
    except BaseException:
        await until_finished(life.aclose())
        raise
    return node


def _assemble(opened: Opened, extend: MakeExtension, life: AsyncExitStack) -> Node:
    """Make all parts without starting them."""
    options, volume, node_log, threads = opened.options, opened.volume, opened.log, opened.threads
    description, record, memory = opened.description, volume.record, options.memory
    shutdown, clock, wall_clock = Shutdown(), ReplicaClock(), WallClock(options.node_id)
    replicas, load = Replicas(), LeaderLoad()
    stores = StoreMemory(replicas, memory.stores_bytes, clock.now_ms)
    scan_memory = ScanMemory(memory.stores_bytes)
    budget = ByteBudget(memory.budget_bytes, memory.budget_bytes // 4)
    pool, book, streams = ChannelPool(description.identity), PeerBook(), StreamListener()
    flight_connections = FlightConnections(FLIGHT_OPTIONS)
    copy_sources = CopySources(pool, flight_connections)
    fences = Fences(volume, threads.in_thread)
    fencing = Fencing(
        replicas, fenced=record.fenced, remember=volume.remember_fenced, in_thread=threads.in_thread
    )
    withdrawal = Withdrawal(
        replicas, dropped=record.dropped, remember=volume.remember_dropped, in_thread=threads.in_thread
    )
    monitor = NodeMonitor(
        volume,
        node_log,
        replicas,
        wall_clock,
        in_thread=threads.in_thread,
        fail=shutdown.fail,
        log_stall_ms=options.log_stall_ms,
    )
    masters = max(len(options.masters), len(record.masters), len(record.first_masters))
    admission = Admission(AdmissionVotes(options.node_id, options.role, masters))
    heartbeat_source = HeartbeatSource(
        description,
        replicas,
        node_log,
        monitor,
        wall_clock,
        admission,
        withdrawal,
        load,
        log_found=opened.log_found,
    )
    heartbeater = Heartbeater(
        heartbeat_source,
        admission,
        fences,
        fencing,
        withdrawal,
        pool,
        book,
        wall_clock,
        interval_s=options.heartbeat_s,
        given=options.masters,
        remember=lambda known: threads.submit(volume.remember_masters, known, options.masters),
    )
    messenger = Messenger(
        replicas,
        pool,
        book,
        budget,
        streams,
        options.replica.raft,
        now_ms=clock.now_ms(),
        own_address=lambda: description.address,
        dial_configured=not volume.adopted,
    )
    host = NodeHost(
        options.node_id,
        clock,
        wall_clock,
        threads,
        messenger,
        stores,
        node_log,
        shutdown,
        report_due=heartbeater.changed,
        woken=messenger.woken,
        cluster_version=lambda: heartbeater.cluster_version,
    )
    sessions = CopySessions(volume.copies_directory, host)
    manager = TabletManager(
        replicas,
        volume.tablets_directory,
        node_log,
        host,
        options.replica,
        hold=lambda superblock: volume.record.holds(superblock.key),
        changed=host.changed_key,
    )
    formation = Formation(volume, replicas, manager, threads.in_thread)
    log_space = LogSpace(replicas, node_log, host)
    maintenance = Maintenance(replicas, stores, node_log, log_space, sessions, monitor, host)
    startup = Startup(
        volume,
        admission,
        manager,
        formation,
        maintenance,
        clock,
        shutdown,
        in_thread=threads.in_thread,
    )
    extension = extend(
        ExtensionPorts(
            options.node_id,
            options.cluster_id,
            volume.adopted,
            replicas,
            formation,
            pool,
            book,
            shutdown.fail,
        )
    )
    health = NodeHealth(
        description,
        replicas,
        heartbeater,
        startup,
        clock.now_ms,
        ending=shutdown.reason,
        extra_ready=extension.why_unready,
    )
    plans = Plans(description, replicas, lambda: heartbeater.addresses, threads.in_thread)
    watches, leases = Watches(replicas), LeaseKeeper(replicas, host)
    server = make_server(
        description,
        book,
        budget,
        streams,
        threads,
        wall_clock,
        replicas,
        manager,
        sessions,
        copy_sources,
        fences,
        messenger,
        heartbeater,
        monitor,
        host,
        plans,
        watches,
        leases,
        load,
    )
    extension.add_services(server)
    servers = Servers(
        description,
        server,
        streams,
        Scans(plans.plan, replicas, scan_memory, load),
        CopyFiles(description.identity, book, sessions),
        health,
        lambda: set_gauges(
            replicas,
            stores,
            messenger.quiet,
            sessions,
            wall_clock,
            watches,
            leases,
            load,
            log_bytes=node_log.bytes_on_disk,
            disk_free_bytes=monitor.disk_bytes[0],
        ),
    )
    return Node(
        options=options,
        volume=volume,
        log=node_log,
        description=description,
        threads=threads,
        shutdown=shutdown,
        clock=clock,
        wall_clock=wall_clock,
        replicas=replicas,
        load=load,
        host=host,
        manager=manager,
        formation=formation,
        sessions=sessions,
        stores=stores,
        scan_memory=scan_memory,
        log_space=log_space,
        monitor=monitor,
        maintenance=maintenance,
        pool=pool,
        flight_connections=flight_connections,
        copy_sources=copy_sources,
        messenger=messenger,
        fences=fences,
        fencing=fencing,
        withdrawal=withdrawal,
        admission=admission,
        heartbeat_source=heartbeat_source,
        heartbeater=heartbeater,
        startup=startup,
        health=health,
        plans=plans,
        watches=watches,
        leases=leases,
        servers=servers,
        extension=extension,
        life=life,
    )


async def _begin(node: Node) -> None:
    """Start the parts. The parts are ended in reverse order of their registration."""
    life, volume = node.life, node.volume

    def tick(now_ms: int) -> None:
        node.replicas.tick(now_ms)
        node.messenger.tick(now_ms)
        node.monitor.tick(now_ms)

    async def look() -> None:
        await node.monitor.look()
        for replica in node.load.look(node.clock.now_ms()):
            node.heartbeater.load_changed(replica.superblock.key)

    async def give_leaders() -> None:
        if node.shutdown.hands_over:
            await node.replicas.hand_over_leadership(HAND_OVER_S)

    life.push_async_callback(node.servers.close)
    life.callback(node.flight_connections.close)
    life.push_async_callback(node.pool.close)
    life.push_async_callback(node.plans.close)
    life.push_async_callback(node.extension.stop)
    await node.sessions.clear_debris()
    life.push_async_callback(node.messenger.close)
    await node.monitor.measure()
    life.push_async_callback(Ticker(node.clock, tick, look).close)
    life.push_async_callback(node.sessions.close)
    life.push_async_callback(lambda: node.manager.close())
    life.push_async_callback(node.servers.stop_serving)
    node.extension.start()
    await node.servers.start()
    life.push_async_callback(node.watches.close)
    node.leases.start()
    life.push_async_callback(node.leases.close)
    life.push_async_callback(node.startup.close)
    life.push_async_callback(node.fencing.close)
    life.push_async_callback(node.withdrawal.close)
    life.push_async_callback(node.heartbeater.close)
    node.heartbeater.start(() if volume.adopted else volume.record.masters)
    life.push_async_callback(give_leaders)
    life.push_async_callback(node.maintenance.close)
    life.push_async_callback(node.monitor.close)
    log.info("memory", **node.options.memory.in_mib())
    node.startup.begin()
    life.push_async_callback(node.startup.cancel)
