"""Hundreds of TabletGroups: what a pass costs grows as they do, and nothing else waits for it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from stele.driver.planner import plan as plan_steps
from stele.driver.view import ClusterView, Intent
from stele.model.ids import ReplicaId
from stele_operator.kube import Kube
from stele_operator.plan import Observation, Plan, make_plan
from stele_operator.plan.status import cluster_status, group_status
from stele_operator.reconcile import ClusterTask
from stele_operator.report import WRITES_AT_ONCE, Reporter
from tests.operator.cluster import bench
from tests.operator.desk import Kept
from tests.operator.world import World

Json = dict[str, Any]
NOW = "2026-01-01T00:00:00Z"


def instructions(work: Callable[[], object]) -> int:
    """How many bytecode instructions it takes: no clock that a busy machine could make late."""
    done = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal done
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        done += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return done


def with_groups(groups: int, *, dead: bool = False) -> World:
    """A cluster of ten nodes with so many tables of four tablets each. `dead`: one of its machines has been off for long."""
    world = World({"nodes": {"replicas": 10}}, machines=10)
    world.run()
    for n in range(groups):
        world.group(f"g{n:03}", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.step()
    if dead:
        world.kill("n1")
        for _ in range(40):
            world.settle()
            world.now_s += 1
    return world


def one_pass(o: Observation) -> None:
    """All that a pass computes over a cluster."""
    plan = make_plan(o)
    cluster_status(o, plan, (), NOW)
    for group in o.groups:
        group_status(o, plan, group, NOW)


def healing(view: ClusterView) -> ClusterView:
    """Each tablet has an intent, as a driver before this one left them."""
    intents = tuple(
        Intent(t.tablet_id, ReplicaId(9), t.config.peers[0].node_id, "add", 1) for t in view.tablets
    )
    return replace(view, intents=intents)


@pytest.mark.parametrize("state", ["whole", "a machine is dead", "adopted"])
def test_a_pass_over_twice_as_many_tables_costs_twice_as_much(state: str) -> None:
    def cost(groups: int) -> int:
        world = with_groups(groups, dead=state == "a machine is dead")
        if state == "adopted":  # each is known by its table's name, and not by its own uid
            for group in world.of("TabletGroup"):
                group["metadata"]["uid"] = f"ad0{group['metadata']['uid'][3:]}"
        o = world.observe()
        return instructions(lambda: one_pass(o))

    few, many = cost(40), cost(80)
    assert many < 2.2 * few


def test_a_driver_of_twice_as_many_tablets_works_twice_as_much() -> None:
    def cost(groups: int) -> int:
        o = with_groups(groups, dead=True).observe()
        plan = make_plan(o)
        assert o.catalog is not None and plan.policy is not None
        view, policy = healing(o.catalog.view), plan.policy
        return instructions(lambda: plan_steps(view, policy))

    few, many = cost(40), cost(80)
    assert many < 2.2 * few


def task_over(kube: Kube) -> ClusterTask:
    """A task for the cluster of a world."""
    return ClusterTask(kube, Reporter(kube, "test"), "default", "flights", "", lambda done: None)


async def test_others_get_their_turn_between_statuses_that_stay_as_they_are(tmp_path: Path) -> None:
    """The Lease is renewed in the same loop: a process that does not come to it has to end."""
    world = with_groups(20)
    o = world.observe()
    plan = make_plan(o)
    for raw, group in zip(world.of("TabletGroup"), o.groups, strict=True):
        raw["status"] = group_status(o, plan, group, NOW)
    o = world.observe()
    plan = make_plan(o)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with bench(tmp_path, machines=1) as made:
        task = asyncio.create_task(other())
        try:
            await task_over(made.kube)._report_groups(world.cluster, world.of("TabletGroup"), o, plan, [])
        finally:
            task.cancel()
        assert turns >= 20 / WRITES_AT_ONCE


class Slow(Kube):
    """A connection over which the status of a TabletGroup is written only once the cluster is being healed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.healing = asyncio.Event()

    async def patch(self, kind: str, namespace: str, name: str, patch: Json, sub: str = "") -> Json:
        if kind == "TabletGroup" and sub == "status":
            await self.healing.wait()
        return await super().patch(kind, namespace, name, patch, sub)


class Healing(ClusterTask):
    """A task that tells when it comes to heal."""

    async def _heal(self, raw: Json, view: ClusterView | None, plan: Plan) -> None:
        assert isinstance(self._kube, Slow)
        self._kube.healing.set()
        await super()._heal(raw, view, plan)


async def test_healing_does_not_wait_for_the_statuses_of_tables(tmp_path: Path) -> None:
    async with bench(tmp_path, machines=1) as made:
        kube = Slow(made.kube.settings)
        task = Healing(kube, Reporter(kube, "test"), "default", "flights", "", lambda done: None)
        await made.apply("cluster", paused=True)
        await made.apply("flights")
        try:
            async with asyncio.timeout(120):  # it would be for ever
                await task.run_pass()
            assert (await made.condition("TabletGroup", "flights", "Ready"))[0] == "False"
        finally:
            await kube.close()


class Steps:
    """How many bytecode instructions each step of this thread's event loop takes; what threads do is none of it."""

    def __init__(self) -> None:
        self.largest = 0
        self._done = 0

    def __enter__(self) -> Steps:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "call" and frame.f_code is asyncio.Handle._run.__code__:
            self._done = 0
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._done += event == "opcode"
        self.largest = max(self.largest, self._done)
        return self._trace


async def largest_step(groups: int, *, lost: bool) -> int:
    """Of a pass over so many tables of four tablets each, one of whose nodes is lost, or none."""
    world = with_groups(groups)
    task = Kept(world)
    await task.seconds(3)
    if lost:
        world.kill("n1")
        for _ in range(40):
            world.settle()
            world.now_s += 1
    await task.desk.prepare()
    with Steps() as steps:
        await task.run_pass()
    return steps.largest


@pytest.mark.parametrize("lost", [False, True])
async def test_no_step_of_the_loop_grows_with_the_tables(lost: bool) -> None:
    """A pass over 1,000 tables held it for seconds: the Lease, probes and watches live there."""
    few, many = await largest_step(20, lost=lost), await largest_step(60, lost=lost)
    assert many < few + 40 * 150
