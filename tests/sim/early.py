"""Draws worlds whose clients are content with memory. Used by draw.py.

Invariant: what is drawn depends only on the plan's seed.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.sim.plan import Plan, Weather


def with_early(plan: Plan, weather: Weather | None) -> Plan:
    """Clients that are content with memory, in a table. Drawn from a source of its own, in all weathers."""
    rng = random.Random(f"early/{plan.seed}")
    if weather is not Weather.EARLY:
        return replace(plan, early=rng.choice((0.0, 0.5, 1.0))) if plan.table else plan
    return replace(
        plan,
        table=True,
        catalog=False,
        early=rng.choice((0.5, 1.0)),
        fault_ms=min(plan.fault_ms, 5_000),
        rest_after_ms=None,
        lull_ms=0.0,
        failures=False,
        voters=rng.choice((3, 3, 3, 1, 2, 4, 5)),
        writes_per_s=rng.uniform(20.0, 60.0),
        reads_per_s=rng.uniform(10.0, 30.0),
        snapshots_per_s=rng.choice((0.0, 5.0)),
        reads_back=rng.choice((0.0, 0.5, 1.0)),
        sync_ms=rng.choice((10.0, 50.0, 100.0)),
        loss=rng.choice((0.0, 0.05, 0.2)),
        slow_message=rng.choice((0.0, 0.1)),
        partitions_per_s=rng.choice((0.0, 0.0, 1.0)),
        slow_disks_per_s=rng.choice((0.0, 1.0)),
        crashes_per_s=rng.choice((0.5, 2.0, 4.0)),
        crash_leader=rng.choice((0.3, 1.0)),
        kill=rng.choice((0.0, 0.5, 1.0)),
        down_ms_max=rng.choice((50.0, 500.0)),
        changes_per_s=rng.choice((0.0, 0.0, 1.0)),
        transfers_per_s=rng.choice((0.0, 0.5)),
    )
