"""What one seed draws: the cluster, and which faults strike when and for how long. Pure.

Invariant: a plan depends on its seed alone. Who leads is known only when a fault strikes, so a fault names its victim by
part ("the leader of the 2nd tablet"), and the run itself is not repeated to the letter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class Deed(Enum):
    """What is done to the victim for a while, or (TRANSFER, LOSE) once."""

    KILL = "kill -9"
    PAUSE = "pause"
    TRANSFER = "transfer"  # a tablet's leader hands over
    BLACKOUT = "blackout"  # kill -9 of every member at once
    LOSE = "lose"  # kill -9 and the volume with it, for good
    ISOLATE = "isolate"  # from all members and clients
    DEAFEN = "deafen"  # it hears nobody, and is heard
    MUTE = "mute"  # nobody hears it, and it hears
    PART = "part"  # from one other member; clients reach both
    PART_ONE_WAY = "part one way"
    HIDE = "hide"  # from clients alone


CUTS = frozenset((Deed.ISOLATE, Deed.DEAFEN, Deed.MUTE, Deed.PART, Deed.PART_ONE_WAY, Deed.HIDE))


class Victim(Enum):
    """Which member, seen from a tablet or from the masters."""

    LEADER = "leader"
    FOLLOWER = "follower"
    MASTER = "master"
    CATALOG_LEADER = "catalog leader"


@dataclass(frozen=True, slots=True)
class Fault:
    """At second `at_s`, `deed` to `victim` (of the tablet, or among many, that `pick` falls on) for `for_s` seconds."""

    at_s: float
    deed: Deed
    victim: Victim
    for_s: float
    pick: int

    def __str__(self) -> str:
        return f"{self.at_s:.2f} s: {self.deed.value} {self.victim.value} for {self.for_s:.2f} s"


@dataclass(frozen=True, slots=True)
class Plan:
    """`healing`: a driver replaces the replicas of silent nodes meanwhile, so that configurations change. `filling`: big
    rows are written beside, so that stores are flushed, merged and copied. `lease_ms`: of leaders; 0: they have none."""

    seed: int
    masters: int
    nodes: int
    tablets: int
    healing: bool
    filling: bool
    lease_ms: int
    seconds: float
    faults: tuple[Fault, ...]


def draw(seed: int, seconds: float, *, cuts: bool) -> Plan:
    """The plan of a seed; without `cuts` none strikes, and the rest is the same."""
    rng = random.Random(f"linear/{seed}")
    healing = rng.random() < 0.5
    nodes = rng.choice((4, 5)) if healing else rng.choice((3, 3, 4, 5))
    masters = rng.choice((1, 3))
    deeds = [Deed.KILL] * 4 + [Deed.PAUSE] * 4 + [Deed.TRANSFER] * 3 + sorted(CUTS, key=lambda d: d.value)
    victims = [Victim.LEADER] * 4 + [Victim.FOLLOWER] * 2 + [Victim.MASTER, Victim.CATALOG_LEADER]
    gap_s = rng.uniform(0.4, 2.0)
    faults, at_s = [], rng.uniform(0.2, 1.0)
    while at_s < seconds - 1.0:
        deed = rng.choice(deeds)
        for_s = rng.choice((rng.uniform(0.2, 1.0), rng.uniform(0.2, 5.0)))
        fault = Fault(at_s, deed, rng.choice(victims), for_s, rng.randrange(1 << 30))
        faults.append(fault)
        if rng.random() < 0.2:  # two at once
            other = Fault(at_s, rng.choice(deeds), rng.choice(victims), for_s, rng.randrange(1 << 30))
            faults.append(other)
        at_s += rng.expovariate(1 / gap_s)
    if healing and rng.random() < 0.6:
        faults.append(
            Fault(rng.uniform(1.0, seconds / 2), Deed.LOSE, Victim.LEADER, 0.0, rng.randrange(1 << 30))
        )
    tablets, filling = rng.choice((2, 3, 4)), rng.random() < 0.3
    if rng.random() < 0.15:
        faults.append(
            Fault(rng.uniform(1.0, seconds - 1.0), Deed.BLACKOUT, Victim.LEADER, rng.uniform(0.1, 1.0), 0)
        )
    kept = [f for f in faults if cuts or f.deed not in CUTS]
    lease_ms = rng.choice((0, 300, 1_500))
    return Plan(
        seed, masters, nodes, tablets, healing, filling, lease_ms, seconds, tuple(sorted(kept, key=_at))
    )


def _at(fault: Fault) -> float:
    return fault.at_s
