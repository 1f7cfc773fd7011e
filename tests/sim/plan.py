"""What one seed draws: the size of the group and how bad its world is. Even the chances of faults are drawn.

Invariant: a plan depends on its seed alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from stele.raft.options import RaftOptions


@dataclass(frozen=True, slots=True)
class Plan:
    """Times in simulated milliseconds, chances per message or per second as the names say."""

    seed: int
    voters: int
    options: RaftOptions
    fault_ms: int
    loss: float
    duplicate: float
    delay_min_ms: float
    delay_max_ms: float
    slow_message: float
    partitions_per_s: float
    crashes_per_s: float
    crash_leader: float
    crash_after_vote: float
    crash_after_election: float
    down_ms_max: float
    alarms_per_s: float
    stalls_per_s: float
    slow_disks_per_s: float
    sync_ms: float
    writes_per_s: float
    reads_per_s: float
    changes_per_s: float
    transfers_per_s: float
    flushes_per_s: float
    failures: bool
    clock_skew: float
    hinted: bool


def draw_plan(seed: int) -> Plan:
    """The world of this seed."""
    rng = random.Random(f"plan/{seed}")

    def sometimes(chance: float, low: float, high: float) -> float:
        return rng.uniform(low, high) if rng.random() < chance else 0.0

    # A storm strikes where it hurts: leaders as soon as they are elected, voters as soon as they have voted, several
    # candidates at once, messages nearly as slow as elections.
    storm = rng.random() < 0.4
    heartbeat = rng.choice((25, 75, 75, 100))
    low = heartbeat * rng.randint(3, 5)
    options = RaftOptions(
        heartbeat_ms=heartbeat,
        election_min_ms=low,
        election_max_ms=low * 2 if not storm or rng.random() < 0.5 else low + 10,
        inflight_bytes_max=rng.choice((200, 1000, 1 << 20)),
        batch_bytes_max=rng.choice((1, 100, 400, 1 << 16)),
        probe_bytes_max=rng.choice((1, 100, 1 << 12)),
        tail_bytes_max=rng.choice((200, 2000, 1 << 20)),
        uncommitted_bytes_max=rng.choice((2000, 1 << 20)),
    )
    delay_min = rng.uniform(0.1, 2.0)
    return Plan(
        seed=seed,
        voters=rng.choice((1, 2, 3, 3, 3, 3, 4, 5, 5)),
        options=options,
        fault_ms=rng.randint(4000, 9000),
        loss=sometimes(0.6, 0.0, 0.25),
        duplicate=sometimes(0.5, 0.0, 0.15),
        delay_min_ms=delay_min,
        delay_max_ms=delay_min + (low * rng.uniform(0.02, 0.4) if storm else rng.choice((0.5, 5.0, 40.0))),
        slow_message=sometimes(0.4, 0.0, 0.1),
        partitions_per_s=sometimes(0.7, 0.1, 1.0),
        crashes_per_s=rng.uniform(0.5, 8.0) if storm else sometimes(0.8, 0.1, 1.5),
        crash_leader=rng.uniform(0.0, 0.8),
        crash_after_vote=sometimes(0.6, 0.05, 0.5) if storm else 0.0,
        crash_after_election=sometimes(0.6, 0.05, 0.7) if storm else 0.0,
        down_ms_max=low * rng.uniform(0.1, 1.5) if storm else 2500.0,
        alarms_per_s=sometimes(0.6, 0.2, 5.0) if storm else 0.0,
        stalls_per_s=sometimes(0.4, 0.1, 1.0),
        slow_disks_per_s=sometimes(0.5, 0.1, 1.0),
        sync_ms=rng.choice((0.2, 2.0, 15.0)),
        writes_per_s=rng.uniform(5.0, 60.0),
        reads_per_s=rng.uniform(0.0, 30.0),
        changes_per_s=sometimes(0.75, 0.3, 4.0),
        transfers_per_s=sometimes(0.5, 0.1, 1.5),
        flushes_per_s=sometimes(0.6, 0.2, 3.0),
        failures=rng.random() < 0.2,
        clock_skew=sometimes(0.5, 0.0, 0.1),
        hinted=rng.random() < 0.7,
    )
