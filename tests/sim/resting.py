"""Groups at rest in the simulator: the code of quiet groups that nodes run, on a node with one replica, over the world's
network.

Invariant: drives nothing but the replica's clock and what its node says; what comes of it is judged as in any world.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import structlog

from stele.consensus.quiet import QUIET_AFTER_MS
from stele.model.ids import NodeId, ReplicaId, StreamKey, TabletId
from stele.raft import RaftCore
from stele.raft.effects import Role
from stele.raft.messages import Message
from stele.tserver.quiet import QuietGroups
from stele.tserver.replicas import Replicas

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica

TICK_MS = 25.0
_TABLET = TabletId("7" * 32)


def node_of(replica_id: int) -> NodeId:
    """Every replica has a node of its own."""
    return NodeId(f"{replica_id:032x}")


def say_less() -> None:
    """What resting groups say of themselves is not news here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


class RestingNode:
    """One life of a node; and its replica, as the code of quiet groups sees it."""

    def __init__(self, sim: SimReplica) -> None:
        self.sim = sim
        self.life = sim.life
        self.replica_id = sim.replica_id
        self.tablet_id = _TABLET
        self.superblock = SimpleNamespace(key=StreamKey(_TABLET, sim.replica_id))
        self.runtime = sim
        self.host = SimpleNamespace(node_id=node_of(sim.replica_id), now_ms=sim.node_ms, send=self._send)
        self.groups = QuietGroups(cast(Replicas, self), sim.world.plan.options, self._ping, sim.node_ms())
        sim.world.at(sim.world.now + TICK_MS, self._tick)

    # Replicas

    def __iter__(self) -> Iterator[RestingNode]:
        yield self

    def by_key(self, key: StreamKey) -> RestingNode:
        """The only one."""
        return self

    # Replica

    @property
    def core(self) -> RaftCore | None:
        """None once it crashed."""
        return self.sim.core if self.life == self.sim.life else None

    @property
    def running(self) -> bool:
        """Whether it takes part."""
        return self.core is not None and not self.core.failed

    @property
    def is_leader(self) -> bool:
        """Whether it leads and holds rows."""
        return self.running and self.role is Role.LEADER and not cast(RaftCore, self.core).is_witness

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""
        return self.sim.busy

    @property
    def active_ms(self) -> int:
        """When something last happened: what rests after three seconds elsewhere rests sooner here."""
        return self.sim.active_ms - QUIET_AFTER_MS + cast(int, self.sim.world.plan.rest_after_ms)

    @property
    def applied_index(self) -> int:
        """The last index that is applied."""
        return self.sim.applied

    def __getattr__(self, name: str) -> Any:
        """Configuration, role, leader and term are the core's."""
        return getattr(self.sim.core, name)

    # The world

    def _tick(self) -> None:
        if self.life != self.sim.life:
            return
        world = self.sim.world
        if world.now >= self.sim.stalled_until:
            self.groups.tick(self.sim.node_ms())
        world.at(max(world.now + TICK_MS, self.sim.stalled_until), self._tick)

    def _ping(self, node_id: NodeId, told: Any) -> None:
        self.sim.world.send(self.replica_id, ReplicaId(int(node_id, 16)), told)

    def _send(self, _: Any, node_id: NodeId, to: ReplicaId, message: Message, *, quiet: bool) -> None:
        self.sim.world.send(self.replica_id, to, message, quiet=quiet)
