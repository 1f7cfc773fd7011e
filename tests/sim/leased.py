"""Leaders with leases that are deposed, at the worst moments for a lease.

Part of `Faults`. Invariant: does only what machines, networks, administrators and drivers do.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from stele.model.ids import OPID_NONE
from tests.sim.node import SimNode

if TYPE_CHECKING:
    from tests.sim.faults import Faults
    from tests.sim.world import World

_WRITES = 16
"""How many writes clients begin at the next leader, beside others."""
_TRIES = 6
"""How often an administrator tries to promote the next leader."""


class LeasedLeaders:
    """Takes leadership from leaders that nothing reaches meanwhile, so that each relies on its lease."""

    def __init__(self, world: World, faults: Faults) -> None:
        self._world = world
        self._faults = faults
        self._hand_over: dict[int, tuple[list[int], float]] = {}
        """Leaders that are to hear nothing once they have asked another to stand: from whom, and for how long."""

    def depose(self, leader: SimNode, rng: random.Random) -> None:
        """Have another voter lead while the leader hears nothing of it. Its last answers come late."""
        world, core = self._world, leader.core
        if world.healing or core is None or not leader.leads:
            return
        others = [world.nodes[p.replica_id] for p in core.config.voters if p.replica_id != leader.replica_id]
        sound = [node for node in others if node.core is not None and node.up]
        if not sound:
            return
        rng.shuffle(sound)
        heir = max(sound, key=lambda node: node.core.log.last_opid if node.core is not None else OPID_NONE)
        options = world.plan.options
        deaf_ms = options.lease_ms + rng.uniform(0.5, 1.5) * options.election_min_ms
        how = rng.choice(("alarm", "alarm", "hand over", "start again"))
        world.met[f"a leased leader deposed: {how}"] += 1
        if how == "hand over":
            self._hand_over[leader.replica_id] = [node.replica_id for node in others], deaf_ms
            world.driver.hand_over(leader, heir.replica_id)
        else:
            late_ms = rng.choice((0.0, 1.0, 2.5)) * options.heartbeat_ms
            for node in others:
                self._faults.slow_down(
                    node.replica_id, leader.replica_id, world.now + late_ms + deaf_ms, late_ms
                )
            delay_ms = 1.2 * late_ms + rng.uniform(0.0, options.heartbeat_ms)
            world.at(world.now + delay_ms, self._cut, leader, heir, others, deaf_ms, how, rng)
        for _ in range(_WRITES):
            world.at(world.now + rng.uniform(2.0, deaf_ms), world.clients.write, heir)

    def _cut(
        self,
        leader: SimNode,
        heir: SimNode,
        others: list[SimNode],
        deaf_ms: float,
        how: str,
        rng: random.Random,
    ) -> None:
        """The leader is cut off, but for answers that are under way. The others learn that its node failed, or start again."""
        world = self._world
        if world.healing:
            return
        until = world.now + deaf_ms
        self._faults.block(heir.replica_id, leader.replica_id, until)
        for node in others:
            self._faults.block(leader.replica_id, node.replica_id, until)
            if how == "start again" and node.up:
                node.exits("it is killed", again=False)
                world.at(world.now + rng.uniform(1.0, 5.0), node.boot)
        if how == "alarm":
            self._faults.tell_failed(leader)
        else:
            for n in range(_TRIES):
                at = world.now + 5.0 + (n + rng.random()) * world.plan.options.lease_ms / _TRIES
                world.at(at, world.driver.promote, heir)

    def hands_over(self, leader: int) -> None:
        """A leader's TimeoutNow arrives. If this was to be, nothing of its peers reaches it from now on."""
        others, deaf_ms = self._hand_over.pop(leader, ([], 0.0))
        for other in others:
            self._faults.block(other, leader, self._world.now + deaf_ms)
