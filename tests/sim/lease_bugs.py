"""Faults of leases of leaders, for `tests/sim/bugs.py`. Each docstring says which rule it breaks."""

from __future__ import annotations

from stele.model.ids import ReplicaId
from stele.raft.leader import Leader
from stele.raft.lease import Lease, Promise
from tests.sim.clock import Clocks
from tests.sim.world import World

_init_clocks = Clocks.__init__


def keeps_it(lease: Lease) -> bool:
    """A leader goes on with its lease after it asked another one to stand."""
    return True


def forgets(promise: Promise, term: int, until_ms: int) -> None:
    """A voter that starts again votes at once, whatever it promised before."""


def from_the_answer(leader: Leader, sender: ReplicaId, sent_ms: int) -> None:
    """A leader counts its lease from when the answer came."""
    leader.lease.promised(sender, leader.state.steady_ms)


def binds_nobody(promise: Promise, now_ms: int, released: int) -> bool:
    """A voter votes although it promised not to."""
    return False


def too_slow(clocks: Clocks, world: World) -> None:
    """Some steady clocks run at half their rate, far beyond the bound."""
    _init_clocks(clocks, world)
    clocks._rate = world.rng.choice((0.5, 1.1))


def trusts_its_clock(lease_ms: int) -> int:
    """A leader counts its lease as if its clock and those of the voters ran alike."""
    return lease_ms * 1_000
