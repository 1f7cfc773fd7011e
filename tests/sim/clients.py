"""Those who write and read: they know what was acknowledged to them. Ask the world's replicas; judge through History.

Invariant: a write counts as acknowledged when the replica that proposed it hands it out, as a node would tell its client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stele.model.entry import EntryKind
from stele.model.ids import OpId
from stele.raft.events import Propose, RequestRead

if TYPE_CHECKING:
    from tests.sim.world import World


class Clients:
    """All clients of the group."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._next_context = 0
        self._reads: dict[tuple[int, int], int] = {}
        self._writes: dict[tuple[int, int], int] = {}
        self._proposed: dict[tuple[int, OpId], int] = {}

    def context(self) -> int:
        """A number no request had before."""
        self._next_context += 1
        return self._next_context

    def write(self, replica_id: int) -> None:
        """Ask this replica to write; any but the leader refuses. Several at once, at times."""
        world = self._world
        for _ in range(world.rng.choice((1, 1, 1, 2, 5))):
            context = self.context()
            self._writes[(replica_id, context)] = context
            payload = context.to_bytes(8, "little") * world.rng.choice((1, 1, 4, 20))
            replica = world.replicas[replica_id]
            if replica.stamping is not None:
                replica.stamping.write(context, payload)
            else:
                replica.feed(Propose(context, EntryKind.WRITE, payload, context))

    def snapshot(self, replica_id: int) -> None:
        """Ask this replica for what was there a moment ago, is now or will be soon, by another node's clock."""
        world = self._world
        replica, by = world.replicas[replica_id], world.rng.choice(world.all_replicas())
        if replica.stamping is not None:
            replica.stamping.snapshot(by.wall_us() + world.rng.choice((-50_000, 0, 0, 200_000)))

    def read(self, replica_id: int) -> None:
        """Ask this replica for a linearizable read."""
        context = self.context()
        self._reads[(replica_id, context)] = self._world.history.acknowledged_index
        self._world.replicas[replica_id].feed(RequestRead(context))

    def proposed(self, replica_id: int, context: int, opid: OpId) -> None:
        """The write is in the leader's log."""
        if self._writes.pop((replica_id, context), None) is not None:
            self._proposed[(replica_id, opid)] = context

    def committed(self, replica_id: int, opid: OpId) -> None:
        """The replica applied it; if it had proposed it, the client is told."""
        if self._proposed.pop((replica_id, opid), None) is not None:
            self._world.history.acknowledge(opid)

    def lost(self, replica_id: int, opid: OpId) -> None:
        """The write will not be."""
        self._proposed.pop((replica_id, opid), None)

    def over(self, replica_id: int, context: int) -> None:
        """Refused, or done."""
        self._writes.pop((replica_id, context), None)
        self._reads.pop((replica_id, context), None)

    def read_served(self, replica_id: int, context: int, index: int, applied: int) -> None:
        """The read's answer reaches its client."""
        asked_at = self._reads.pop((replica_id, context), None)
        if asked_at is not None:
            self._world.history.read(asked_at, index, applied)

    def forget(self, replica_id: int) -> None:
        """The replica crashed: its clients never hear."""
        for table in (self._reads, self._writes):
            for key in [k for k in table if k[0] == replica_id]:
                del table[key]
        for proposal in [k for k in self._proposed if k[0] == replica_id]:
            del self._proposed[proposal]
