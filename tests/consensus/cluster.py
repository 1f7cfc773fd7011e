"""Nodes of a group in one process: real logs and stores on real files, an in-memory network that can drop and delay.

A TestNode is a Host with a log and a TabletManager of its own; `restart` gives a new one on the same directory.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from stele.consensus.copy_source import CopySessions
from stele.consensus.incarnations import same_incarnation
from stele.consensus.ports import Follower, HostedReplica, Reader, ReplicaOptions
from stele.consensus.quiet import follow_quiet
from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.superblock import DataState, Superblock
from stele.model import writeop
from stele.model.block import RowOp, encode_block
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.config import Configuration, Peer
from stele.model.errors import NotLeader, Retryable
from stele.model.ids import ClusterId, NodeId, ReplicaId, StreamKey, TableId, TabletId, new_id
from stele.model.kvop import KeyOp, KeyOperation, encode_operations
from stele.model.schema import Schema
from stele.model.writeop import NO_CLIENT, BodyKind, WriteHeader
from stele.raft.messages import Message
from stele.raft.options import RaftOptions
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import consensus_pb2, master_pb2
from stele.tserver.beating import Beating
from stele.tserver.confirming import Confirming
from stele.tserver.following import LeaderQuestions
from stele.tserver.log_space import LogSpace
from stele.tserver.manager import TabletManager
from stele.tserver.monitor import NodeMonitor
from stele.tserver.options import NodeOptions
from stele.tserver.quiet import QuietGroups
from stele.tserver.replicas import Replicas
from stele.tserver.ticker import ReplicaClock
from stele.tserver.wall_clock import WallClock
from stele.wal.log import Log
from stele.wal.options import LogOptions
from tests.consensus.network import Network

T = TypeVar("T")

SCHEMA = Schema.make([("id", "int64"), ("name", "string")], ["id"])
OPTIONS = ReplicaOptions(
    raft=RaftOptions(heartbeat_ms=30, election_min_ms=150, election_max_ms=300),
    apply_slice_ms=0.0,  # one entry per turn of the loop, so that everything meets half-applied logs
)
STEADY = replace(OPTIONS, raft=replace(OPTIONS.raft, election_min_ms=1_000, election_max_ms=2_000))
"""For tests in which nobody is to lose the lead by chance: an overrun machine has disks that stand still for longer than
OPTIONS waits."""
PATIENT = RaftOptions(heartbeat_ms=30, election_min_ms=600, election_max_ms=1200)
"""For who rests: on an overrun machine a node must not seem silent at every turn."""
WAIT_S = 60.0
"""For what comes at once, on a machine that stands still for seconds."""
LOG_OPTIONS = LogOptions(segment_bytes=1 << 20, low_space_bytes=1)


class TestNode:
    """A Host with a log and a manager."""

    __test__ = False

    def __init__(self, network: Network, directory: Path, node_id: NodeId | None = None) -> None:
        self.network = network
        self.directory = directory
        self.node_id = node_id or NodeId(new_id())
        self.stopped = False
        self.low = False
        self.told_version = CLUSTER_VERSION
        self.reports_due: set[ReplicaId] = set()
        self.files: Any = None
        self.skew_us = 0
        self.wall_clock = WallClock(self.node_id, self.wall_us)
        self.changed_keys: list[StreamKey] = []
        self.given_up: list[Exception] = []
        self.drops: list[tuple[NodeId, str, str]] = []
        self._random = random.Random(self.node_id)
        self._clock = ReplicaClock()
        self._threads = ThreadPoolExecutor(4)
        self._task: asyncio.Task[None] | None = None
        self.log: Any = None
        self.replicas = Replicas()
        self.manager: TabletManager
        self.log_space: LogSpace
        self.sessions: CopySessions
        self.quiet: QuietGroups | None = None
        self.beating = Beating(
            self.replicas,
            self._beat,
            first=self._random.getrandbits(32),
            patience_ms=OPTIONS.raft.election_max_ms,
            now_ms=self._clock.now_ms(),
        )
        self.confirming = Confirming(
            self.replicas,
            self._confirm,
            first=self._random.getrandbits(32),
            patience_ms=OPTIONS.raft.heartbeat_ms,
            now_ms=self._clock.now_ms(),
        )
        self.following = LeaderQuestions(
            self.replicas, self._follow, first=self._random.getrandbits(32), now_ms=self._clock.now_ms()
        )
        self.options = NodeOptions(directory, self.node_id, ClusterId("c" * 32), "127.0.0.1:1")
        self.monitor: NodeMonitor | None = None

    async def start(self) -> TestNode:
        loop = asyncio.get_running_loop()

        def dispatch(callbacks: list[Callable[[], None]]) -> None:
            loop.call_soon_threadsafe(lambda: [c() for c in callbacks])

        self.directory.mkdir(parents=True, exist_ok=True)

        def open_log() -> Log:
            return Log.open(self.directory / "wal", LOG_OPTIONS, self.node_id, dispatch, files=self.files)

        self.log = await self.in_thread(open_log)
        self.manager = TabletManager(
            self.replicas,
            self.directory / "tablets",
            self.log,
            self,
            OPTIONS,
            changed=self.changed_keys.append,
        )
        self.log_space = LogSpace(self.replicas, self.log, self)
        self.sessions = CopySessions(self.directory / "copies", self)
        await self.sessions.clear_debris()
        self.network.nodes[self.node_id] = self
        await self.manager.open_all()
        self._task = asyncio.create_task(self._tick())
        return self

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self._clock.tick()
            self.replicas.tick(self.now_ms())
            if self.quiet is not None:
                self.quiet.tick(self.now_ms())
            self.beating.tick(self.now_ms())
            self.confirming.tick(self.now_ms())
            self.following.tick(self.now_ms())
            if self.monitor is not None:
                self.monitor.tick(self.now_ms())

    def watch_clock(self) -> None:
        """Let it hand its leaders over when its clock is wrong, as a node does."""
        volume: Any = None  # looked at for its disk alone
        self.monitor = NodeMonitor(
            volume,
            self.log,
            self.replicas,
            self.wall_clock,
            in_thread=self.in_thread,
            fail=self.fail,
            log_stall_ms=self.options.log_stall_ms,
        )

    def watch_quiet(self) -> None:
        """Let its idle groups rest, as a node does."""

        def ping(to: NodeId, *told: Any) -> None:
            self.network.ping(self, to, *told)

        self.quiet = QuietGroups(self.replicas, PATIENT, ping, self.now_ms())

    def _beat(self, to: NodeId, beat: consensus_pb2.BeatPB) -> None:
        self.network.beat(self, to, beat)

    def _confirm(self, to: NodeId, confirm: consensus_pb2.ConfirmPB) -> None:
        self.network.confirm(self, to, confirm)

    def _follow(self, to: NodeId, follow: consensus_pb2.FollowPB) -> None:
        self.network.follow(self, to, follow)

    def pinged(self, from_node: NodeId, *told: Any) -> None:
        if self.quiet is not None:
            self.quiet.heard(from_node)
            if told:
                self.quiet.told(from_node, *told)

    async def stop(self) -> None:
        if self.stopped:
            return
        self.stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.monitor is not None:
            await self.monitor.close()
        await self.manager.close()
        await self.in_thread(self.log.close)
        self._threads.shutdown()

    async def restart(self) -> TestNode:
        await self.stop()
        return await TestNode(self.network, self.directory, self.node_id).start()

    # Host

    def now_ms(self) -> int:
        """As a node counts them: a machine that stands still is no silence of others."""
        return self._clock.now_ms()

    def wall_us(self) -> int:
        return time.time_ns() // 1000 + self.skew_us

    def clock_fault(self, wall_us: int) -> str:
        return self.wall_clock.fault(wall_us)

    def latest_time(self) -> int:
        return self.wall_clock.latest_time

    def dropped(self, node_id: NodeId, cause: str, why: str) -> None:
        self.drops.append((node_id, cause, why))

    def hear_clocks(self, others: Iterable[TestNode]) -> None:
        """As masters' answers to heartbeats tell it."""
        for other in others:
            clock_us = self.wall_clock.monotonic_us()
            self.wall_clock.answered(
                master_pb2.TSHeartbeatResponse(
                    node_id=id_to_pb(other.node_id), clock_id=1, clock_us=clock_us, wall_us=other.wall_us()
                ),
                clock_us,
            )

    def randint(self, a: int, b: int, /) -> int:
        return self._random.randint(a, b)

    def send(
        self, replica: HostedReplica, node_id: NodeId, to: ReplicaId, message: Message, *, quiet: bool = False
    ) -> None:
        block = replica.superblock
        self.network.send(
            self,
            node_id,
            replica.raw_tablet_id,
            block.replica_id,
            to,
            message,
            quiet,
            block.tablet_incarnation,
        )

    def receive(
        self,
        from_node: NodeId,
        tablet: bytes,
        sender: ReplicaId,
        to: int,
        message: Message,
        quiet: bool,
        incarnation: int,
    ) -> None:
        if self.quiet is not None:
            self.quiet.heard(from_node)
        replica = self.replicas.route((tablet, to))
        if replica is None or not same_incarnation(replica, from_node, sender, incarnation):
            return
        if not (quiet and self._rests(replica, sender, message)):
            replica.on_message(from_node, sender, message)

    def _rests(self, replica: Replica, sender: ReplicaId, message: Message) -> bool:
        if self.quiet is not None:
            return self.quiet.take(replica, sender, message)
        return follow_quiet(replica, sender, message, lambda node_id: True)

    def takes_beats(self, node_id: NodeId) -> bool:
        return self.beating.takes_beats(node_id)

    def beat(
        self, replica: HostedReplica, node_id: NodeId, to: ReplicaId, term: int, commit_index: int
    ) -> None:
        self.beating.beat(replica, node_id, to, term, commit_index)

    def read_came(self, reader: Reader) -> None:
        self.confirming.read_came(reader)

    def ask_leader(self, follower: Follower, snapshot: int) -> asyncio.Future[int]:
        return self.following.ask_leader(follower, snapshot)

    def steady_us(self) -> int:
        return time.monotonic_ns() // 1_000

    def woken(self, replica: HostedReplica) -> None:
        self.replicas.woken(replica.superblock.key)
        if self.quiet is not None:
            self.quiet.woken(replica.superblock.key)

    def changed(self, replica: HostedReplica) -> None:
        self.reports_due.add(replica.superblock.replica_id)

    def low_space(self) -> bool:
        return self.low

    def cluster_version(self) -> int:
        return self.told_version

    def stores_full(self) -> bool:
        return False

    def fail(self, error: Exception) -> None:
        self.given_up.append(error)

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


class Group:
    """A tablet with a replica on each of some nodes."""

    def __init__(self, nodes: list[TestNode], kind: str = "table") -> None:
        self.nodes = nodes
        self.kind = kind
        self.tablet_id = TabletId(new_id())
        self.config = Configuration(
            -1,
            tuple(Peer(n.node_id, ReplicaId(i), f"n{i}:1") for i, n in enumerate(nodes, 1)),
        )

    def superblock(self, replica_id: int) -> Superblock:
        return Superblock(
            self.tablet_id,
            ReplicaId(replica_id),
            TableId(new_id()),
            "t",
            self.kind,
            DataState.READY,
            schema=SCHEMA.to_json() if self.kind == "table" else "",
            leader_hint=ReplicaId(1),
        )

    async def create(self) -> Group:
        # The hinted one last, so that the others are there to vote for it.
        for number, node in reversed(list(enumerate(self.nodes, 1))):
            await node.manager.create(self.superblock(number), self.config)
        return self

    def replicas(self) -> list[Replica]:
        found = [n.replicas.current(self.tablet_id) for n in self.nodes if not n.stopped]
        return [r for r in found if r is not None]

    def replica(self, replica_id: int) -> Replica:
        for node in self.nodes:
            if not node.stopped:
                replica = node.replicas.by_key(StreamKey(self.tablet_id, ReplicaId(replica_id)))
                if replica is not None:
                    return replica
        raise AssertionError(f"no replica {replica_id}")

    def node_of(self, replica: Replica) -> TestNode:
        return next(n for n in self.nodes if n.node_id == replica.host.node_id)

    async def leader(self, timeout_s: float = WAIT_S) -> Replica:
        """Who leads, once it has applied all that earlier leaders committed: it can be read and asked for anything."""

        async def look() -> Replica:
            while True:
                cut = self.nodes[0].network.cut
                leaders = [r for r in self.replicas() if leads(r) and r.host.node_id not in cut]
                if leaders:
                    return max(leaders, key=lambda r: r.term)
                await asyncio.sleep(0.01)

        return await asyncio.wait_for(look(), timeout_s)

    async def write(self, payload: bytes, timeout_s: float = WAIT_S) -> Any:
        """As a client: tries again with the same id until there is an outcome."""
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                leader = await self.leader()
                return await leader.writes.propose(payload, deadline_ms=1_000)
            except Retryable:
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(0.02)

    async def fill_segments(self) -> None:
        """Write, 30 times at least, until the log of each node that takes part has begun another segment. What it had before
        may be collected, then; how much that is depends on when its keeper has the next one ready."""
        cut = self.nodes[0].network.cut
        logs = [n.log for n in self.nodes if not n.stopped and n.node_id not in cut]
        before = [log.shared.active_sequence for log in logs]
        async with asyncio.timeout(WAIT_S):
            for number in itertools.count():
                if number >= 30 and all(log.shared.active_sequence > at for log, at in zip(logs, before)):
                    return
                await self.write(rows([number % 30], "x" * 100_000))

    async def led(self, act: Callable[[Replica], Awaitable[T]], timeout_s: float = WAIT_S) -> T:
        """`act(leader)`, tried again while leaders change."""
        async with asyncio.timeout(timeout_s):
            while True:
                with suppress(NotLeader):
                    return await act(await self.leader())

    async def all_applied(self, timeout_s: float = WAIT_S) -> None:
        """Wait until every replica has applied all that the leader's log holds."""

        def done(leader: Replica) -> bool:
            return leader.core is not None and all(
                r.applied_index == leader.core.log.last_index for r in self.replicas()
            )

        leader = await self.leader()
        await wait_until(lambda: done(leader), timeout_s)

    async def caught_up(self, replica: Replica, timeout_s: float = WAIT_S) -> None:
        leader = await self.leader()
        await wait_until(lambda: replica.applied_index >= leader.applied_index, timeout_s)


def leads(replica: Replica) -> bool:
    """Whether it leads and has applied all that earlier leaders committed."""
    machine = replica.machine
    return (
        replica.is_leader
        and replica.state is ReplicaState.RUNNING
        and machine is not None
        and machine.applied.term == replica.term
    )


async def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Until `condition()` holds."""

    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), timeout_s)


def rows(
    ids: Iterable[int],
    name: str = "x",
    *,
    op: RowOp = RowOp.UPSERT,
    client: bytes = NO_CLIENT,
    sequence: int = 0,
    lowest: int = 0,
) -> bytes:
    """A WRITE payload with these rows."""
    keys = list(ids)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(keys, pa.int64()), pa.array([f"{name}{k}" for k in keys], pa.string())],
        schema=SCHEMA.to_arrow(),
    )
    block = encode_block(op, [int(c.id) for c in SCHEMA.columns], batch, SCHEMA.version)
    made_us = time.time_ns() // 1000
    header = WriteHeader(client, sequence, lowest, made_us, writeop.digest(block), SCHEMA.version)
    return writeop.encode(header, block)


def pairs(key: bytes, value: bytes, op: KeyOp = KeyOp.REPLACE) -> bytes:
    """A WRITE payload for a key space."""
    body = encode_operations([KeyOperation(op, key, value)])
    header = WriteHeader(NO_CLIENT, 0, 0, 0, writeop.digest(body), kind=BodyKind.KEYSPACE)
    return writeop.encode(header, body)


def table(replica: Replica, snapshot: int | None = None) -> dict[int, str]:
    """All rows of a replica at a snapshot."""
    machine: Any = replica.machine
    found: dict[int, str] = {}
    with machine.view(snapshot) as view:
        for batch in view.scan():
            found.update(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist()))
    return found


async def make_group(
    directory: Path, size: int = 3, *, spare: int = 0, kind: str = "table", network: Network | None = None
) -> tuple[Group, list[TestNode]]:
    """A group of `size` on new nodes, and `spare` more nodes."""
    network = network or Network()
    nodes = [await TestNode(network, directory / f"n{i}").start() for i in range(size + spare)]
    group = await Group(nodes[:size], kind).create()
    return group, nodes
