"""A majority is lost, for good as it seems; the most advanced survivor goes on alone; the lost ones come back.

From then on there are two histories. That of the survivor begins with what its log held. The other is that of all
the others: they may elect a leader and commit entries until they hear of the recovery. Each is judged by itself
(checks.py). What was acknowledged before may be lost only if the survivor's log lacks it.

Invariant: the survivor is made the only voter by production's code, as `stele local cmeta rewrite` does it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from stele.consensus.recovering import SoleVoter
from stele.model.incarnation import MARK_BITS, raised
from tests.sim.node import SimNode

if TYPE_CHECKING:
    from tests.sim.world import World


class Recovery:
    """The lost majority of one world, and what comes of it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"recovery/{world.plan.seed}")
        self._lost: list[SimNode] = []
        self.incarnation = 0
        """Of the tablet, as the masters have it."""
        self._tombstones_from = 0.0

    def begin(self) -> None:
        """Schedule it, if the plan has it."""
        if self._world.plan.recovers_ms:
            self._world.at(self._world.plan.recovers_ms, self._lose)

    def outdated(self, node: SimNode) -> bool:
        """Whether the recovery gave this node's replica up."""
        return node.history is not self._world.history

    def removes(self, node: SimNode) -> bool:
        """Whether the masters have heard of a replica that was given up, and remove it."""
        return self.outdated(node) and self._world.now >= self._tombstones_from

    def ends(self) -> None:
        """The faults end. Nodes whose majority was lost and not recovered yet come back."""
        for node in self._lost:
            node.gone = False

    def _lose(self) -> None:
        world, config = self._world, self._world.history.config
        voters = [world.nodes[peer.replica_id] for peer in config.voters]
        if len(voters) < 3 or not world.faults.strikes("a majority is lost"):
            return
        self._rng.shuffle(voters)
        self._lost = voters[: config.majority]
        for node in self._lost:
            node.crash()
            node.gone = True
        world.met["a majority lost"] += 1
        self._later(200.0, 1_500.0, self._recover)

    def _recover(self) -> None:
        world = self._world
        if world.healing:
            return
        config = world.history.config
        left = [
            node
            for peer in config.voters
            if (node := world.nodes[peer.replica_id]).up and node.core is not None and not node.failed
        ]
        if not left:
            self._later(100.0, 500.0, self._recover)
            return
        survivor = max(left, key=lambda node: (node.twin.durable.last, -node.replica_id))
        term = max(node.core.term for node in left if node.core is not None) + 1
        self.incarnation = raised(0, self._rng.getrandbits(MARK_BITS))
        order = SoleVoter(survivor.superblock.key, self.incarnation, term, survivor.twin.durable.last)
        survivor.exits("it is made the only voter", again=False)
        survivor.becomes_sole_voter(order)
        lost = world.go_on_from(survivor)
        world.met["a recovery"] += 1
        world.met["an acknowledged write given up"] += lost
        world.trace("{} goes on alone; {} acknowledged writes are given up", survivor.replica_id, lost)
        for node in world.all_nodes():
            if self.outdated(node):
                node.may_fail = "the tablet was recovered without it"
        self._tombstones_from = world.now + self._rng.uniform(1_500.0, 5_000.0)
        if self._rng.random() < 0.6:  # the others do not hear of it at once, and may go on for a while
            until = world.now + self._rng.uniform(500.0, 4_000.0)
            world.faults.cut_off([survivor.replica_id], until, both=True)
        self._later(1.0, 500.0, survivor.boot)
        for node in self._lost:
            self._later(1.0, 3_000.0, self._returns, node)

    def _returns(self, node: SimNode) -> None:
        node.gone = False
        self._world.met["a lost member came back"] += 1
        node.boot()

    def _later(self, low_ms: float, high_ms: float, act: object, *arguments: object) -> None:
        self._world.at(self._world.now + self._rng.uniform(low_ms, high_ms), act, *arguments)  # type: ignore[arg-type]
