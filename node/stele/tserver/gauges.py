"""The gauges of a node, set from what its parts hold whenever its metrics are read. Called by rpc/http.py."""

from __future__ import annotations

from collections import Counter

from stele import metrics
from stele.consensus.copy_source import CopySessions
from stele.consensus.replica import ReplicaState
from stele.tablet.keyspace import KeySpace
from stele.tablet.store import TabletStore
from stele.tserver.holds import held_bytes
from stele.tserver.leader_load import LeaderLoad
from stele.tserver.leases import LeaseKeeper
from stele.tserver.memory import StoreMemory
from stele.tserver.quiet import QuietGroups
from stele.tserver.replicas import Replicas
from stele.tserver.wall_clock import WallClock
from stele.tserver.watching import Watches


def set_gauges(
    replicas: Replicas,
    stores: StoreMemory,
    quiet: QuietGroups,
    sessions: CopySessions,
    wall_clock: WallClock,
    watches: Watches,
    leases: LeaseKeeper,
    load: LeaderLoad,
    *,
    log_bytes: int,
    disk_free_bytes: int,
) -> None:
    """Set all gauges to their present values. `log_bytes`: the size of all segments of the log."""
    metrics.clock_ahead_seconds.set((wall_clock.ahead_us or 0) / 1e6)
    states = Counter(r.state for r in replicas)
    for state in ReplicaState:
        metrics.replicas.labels(state.name).set(states[state])
    metrics.replicas_leading.set(sum(r.is_leader for r in replicas))
    metrics.leader_load.set(load.total)
    metrics.replicas_resting.set(quiet.resting)
    tables = [r.machine for r in replicas if isinstance(r.machine, TabletStore)]
    metrics.store_files.set(sum(len(store.files) for store in tables))
    metrics.holds.set(sum(len(store.held.holds) for store in tables))
    metrics.held_bytes.set(held_bytes(tables))
    metrics.store_memory_bytes.set(stores.bytes)
    spaces = (r.machine.held_bytes for r in replicas if isinstance(r.machine, KeySpace))
    metrics.keyspace_bytes.set(max(spaces, default=0))
    metrics.leases.set(len(leases))
    metrics.watches.set(len(watches))
    metrics.wal_bytes.set(log_bytes)
    metrics.disk_free_bytes.set(disk_free_bytes)
    metrics.copy_sessions.set(len(sessions))
