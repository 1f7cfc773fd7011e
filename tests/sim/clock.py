"""The clocks of one simulated node: a steady one that drifts, and a wall clock that may be set wrong.

Invariant: the steady clock runs on from one life of the node to the next, and never steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.world import World

_EPOCH_US = 1_700_000_000_000_000


class Clocks:
    """The clocks of one node."""

    def __init__(self, world: World) -> None:
        self._world = world
        skew = world.plan.clock_skew
        self._rate = 1.0 + world.rng.uniform(-skew, skew)
        self._offset = world.rng.uniform(1_000, 100_000)
        self._wall_off_ms = 0.0

    def monotonic_ms(self) -> float:
        """The steady clock: an offset, and the world's time at a rate of its own."""
        return self._offset + self._rate * self._world.now

    def world_ms(self, own_ms: float) -> float:
        """The world's time at which the steady clock shows `own_ms`."""
        return max((own_ms - self._offset) / self._rate, self._world.now)

    def wall_us(self) -> int:
        """Microseconds since 1970, by the node's clock."""
        return _EPOCH_US + int(1000 * (self._world.now + self._wall_off_ms))

    def set_wall(self, off_ms: float) -> None:
        """Set the wall clock this much ahead of the true time."""
        self._wall_off_ms = off_ms
