"""Schedules what happens in a world, and how often: clients, maintenance, changes, faults.

Each kind draws its moments from its own random source. So a world without one kind keeps the others.
Invariant: once healing begins, faults and changes stop; clients, maintenance and repair continue.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.judge import check_nodes, check_rests
from tests.sim.masters import schedule

if TYPE_CHECKING:
    from tests.sim.world import World

_HEALS_PER_S = 4.0
_HEALING_WRITES = 0.2
"""The share of writes that continue during healing, so that the slowest replica can catch up."""


class Schedule:
    """The schedule of one world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def begin(self) -> None:
        """Schedule everything that the plan has."""
        world, plan = self._world, self._world.plan
        faults, driver, clients = world.faults, world.driver, world.clients
        for name, per_s, act in (
            ("write", plan.writes_per_s, self._write),
            ("read", plan.reads_per_s, self._read),
            ("old read", plan.old_reads_per_s, clients.read_old),
            ("flush", plan.flushes_per_s, self._flush),
            ("merge", plan.merges_per_s, self._merge),
            ("collect", 4.0, self._collect),
            ("heal", _HEALS_PER_S, self._heal),
            ("tombstone", 2.0, driver.tombstone_removed),
        ):
            self._often(name, per_s, act, heals=True)
        if world.masters is not None:
            for name, per_s, act in schedule(world.masters):
                self._often(name, per_s, act, heals=True)
        for name, per_s, act in (
            ("snapshot", plan.snapshots_per_s, clients.snapshot),
            ("change", plan.changes_per_s, driver.change),
            ("transfer", plan.transfers_per_s, driver.transfer),
            ("neighbour", 20.0, self._neighbour),
            ("look at all", 4.0, lambda: check_nodes(world)),
        ):
            self._often(name, per_s, act)
        for name, per_s, act in (
            ("partition", plan.partitions_per_s, faults.partition),
            ("crash", plan.crashes_per_s, faults.crash),
            ("rush", plan.rushes_per_s, faults.rush),
            ("alarm", plan.alarms_per_s, faults.alarm),
            ("usurper", plan.usurpers_per_s, faults.usurp),
            ("stall", plan.stalls_per_s, faults.stall),
            ("slow disk", plan.slow_disks_per_s, faults.slow_disk),
            ("wrong clock", plan.unfit_per_s, faults.unfit),
            ("disk error", plan.disk_errors_per_s, faults.disk_error),
            ("full disk", plan.full_disks_per_s, faults.full_disk),
            ("power cut", plan.cuts_per_s, faults.cut_power),
            ("rot", plan.rots_per_s, faults.rot),
            ("clock step", 2.0 if plan.clock_off_ms else 0.0, faults.step_clock),
            ("crash at rest", plan.rest_crashes_per_s, faults.crash_at_rest),
        ):
            self._often(name, per_s, self._if_it_strikes(name, act))
        if plan.rest_after_ms is not None:
            self._often("look at rests", 10.0, lambda: check_rests(world))
        if plan.failures:
            first = random.Random(f"failures/{plan.seed}").uniform(500.0, plan.fault_ms)
            world.at(first, faults.fail_one)

    def _if_it_strikes(self, name: str, act: Callable[[], None]) -> Callable[[], None]:
        def happen() -> None:
            if self._world.faults.strikes(name):
                act()

        return happen

    def _often(self, name: str, per_s: float, act: Callable[[], None], *, heals: bool = False) -> None:
        """Let it happen at random moments, this many times a second; with `heals` also during healing."""
        if per_s <= 0:
            return
        world = self._world
        rng = random.Random(f"{name}/{world.plan.seed}")

        def happen() -> None:
            if heals or not world.healing:
                act()
                world.at(world.now + rng.expovariate(per_s / 1000.0), happen)

        world.at(world.now + rng.expovariate(per_s / 1000.0), happen)

    # Clients and nodes

    @property
    def _lull(self) -> bool:
        """Whether the clients are silent now, in a world whose groups rest."""
        plan = self._world.plan
        return plan.rest_after_ms is not None and int(self._world.now / plan.lull_ms) % 2 == 1

    def _write(self) -> None:
        world = self._world
        if not self._lull and not (world.healing and world.rng.random() >= _HEALING_WRITES):
            world.clients.write()

    def _read(self) -> None:
        if not self._lull:
            self._world.clients.read()

    def _heal(self) -> None:
        world = self._world
        if world.healing or world.rng.random() < world.plan.heals:
            world.healer.look()

    def _flush(self) -> None:
        node = self._world.some_up()
        if node is not None:
            node.rows.flush()

    def _merge(self) -> None:
        node = self._world.some_up()
        if node is not None:
            node.rows.merge()

    def _collect(self) -> None:
        node = self._world.some_up()
        if node is not None:
            node.rows.collect()

    def _neighbour(self) -> None:
        node = self._world.some_up()
        if node is not None:
            node.soon(node.rows.neighbour_writes)
