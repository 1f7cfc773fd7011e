"""A simulated node as its replica sees it: time, chance, the transport, and a thread whose work takes
simulated time.

Implements `stele.consensus.ports.Host`. Invariant: each message of a replica is checked before it leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stele.consensus.ports import Follower, HostedReplica, Reader
from stele.model.clock import from_physical_us
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.ids import NodeId, ReplicaId
from stele.raft.messages import Message
from tests.sim.checks import check_said

if TYPE_CHECKING:
    from tests.sim.node import SimNode

T = TypeVar("T")
_AHEAD_US = 3_600_000_000


class SimHost:
    """The host of one node's replica, over all lives of the node."""

    def __init__(self, node: SimNode) -> None:
        self.node_id = node.node_id
        self._node = node
        self._world = node.world

    def now_ms(self) -> int:
        return self._node.ticker.now_ms()

    def wall_us(self) -> int:
        return self._node.clocks.wall_us()

    def clock_fault(self, wall_us: int) -> str:
        return "" if self._node.fit else "its clock is wrong"

    def latest_time(self) -> int:
        return from_physical_us(self.wall_us() + _AHEAD_US)

    def dropped(self, node_id: NodeId, cause: str, why: str) -> None:
        own = self._node.replica_id
        if cause == "incarnation":  # of a recovery, from no peer of the replica
            self._world.met["a message of another incarnation dropped"] += 1
            return
        self._world.failed(f"{own} drops a message of {node_id}, although it is valid: {cause}: {why}")

    def randint(self, a: int, b: int, /) -> int:
        return self._world.rng.randint(a, b)

    def send(
        self, replica: HostedReplica, node_id: NodeId, to: ReplicaId, message: Message, *, quiet: bool = False
    ) -> None:
        world, node = self._world, self._node
        if world.strict:
            world.judge(check_said, node.twin.durable, node.replica_id, to, message)
        world.send(node.replica_id, to, message, quiet=quiet)

    def takes_beats(self, node_id: NodeId) -> bool:
        return self._node.messenger.beating.takes_beats(node_id)

    def beat(
        self, replica: HostedReplica, node_id: NodeId, to: ReplicaId, term: int, commit_index: int
    ) -> None:
        self._node.messenger.beating.beat(replica, node_id, to, term, commit_index)

    def read_came(self, reader: Reader) -> None:
        self._node.messenger.confirming.read_came(reader)

    def ask_leader(self, follower: Follower, snapshot: int) -> asyncio.Future[int]:
        return self._node.messenger.following.ask_leader(follower, snapshot)

    def steady_us(self) -> int:
        return int(1000 * self._node.clocks.monotonic_ms())

    def woken(self, replica: HostedReplica) -> None:
        self._node.woken()

    def changed(self, replica: HostedReplica) -> None:
        return None

    def low_space(self) -> bool:
        return self._node.log is not None and self._node.log.low_space

    def cluster_version(self) -> int:
        """See Host."""
        return CLUSTER_VERSION

    def stores_full(self) -> bool:
        return False

    def fail(self, error: Exception) -> None:
        self._world.failed(f"node {self._node.replica_id} gives up: {error}")

    # Threads

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return cast(T, await self.blocking(work, *args))

    def blocking(self, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run work as a thread would: it takes a while, and then is done at once."""
        node, world = self._node, self._world
        assert node.loop is not None
        future = node.loop.create_future()
        took = world.rng.uniform(0.05, 3.0) + node.disk_waits()
        world.at(world.now + took, self._work, node.life, future, work, args)
        return future

    def _work(self, life: int, future: asyncio.Future[Any], work: Callable[..., Any], args: Any) -> None:
        node, world = self._node, self._world
        if life != node.life or node.loop is None:
            return
        if world.now < node.stalled_until:
            world.at(node.stalled_until, self._work, life, future, work, args)
            return
        try:
            result, error = work(*args), None
        except Exception as exc:  # noqa: BLE001 - it belongs to whoever waits
            result, error = None, exc
        if node.lost_power():
            return

        def tell() -> None:
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        node.loop.call_soon(tell)
        if node.thread is not None:
            node.thread.look()
