"""What is written to Kubernetes, counted: little while nothing is lost, and by node rather than by tablet when it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from stele.driver.view import ReplicaView, TabletView
from tests.operator.desk import Kept
from tests.operator.world import World
from tests.operator.worlds import node_of

Json = dict[str, Any]
GROUPS = 24
"""More than any bound of writes below, so that one write for each group is seen."""


async def at_rest(groups: int = GROUPS) -> Kept:
    """A task over a cluster of five nodes with so many tables of four tablets, of which nothing is left to write."""
    world = World({"nodes": {"replicas": 5}})
    for n in range(groups):
        world.group(f"g{n:02}", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    task = Kept(world)
    await task.seconds(15)
    assert all(g["status"]["conditions"][0]["status"] == "True" for g in world.of("TabletGroup"))
    task.desk.forget()
    await task.seconds(3)
    assert task.desk.written == []
    return task


def leaderless(world: World, age_ms: int) -> list[TabletView]:
    """The tablets as their leaders stepped down so long ago, and nobody has led since."""
    peers = [t.config.peers[0] for t in world.tablets]
    said = [ReplicaView(p.node_id, p.replica_id, age_ms=age_ms) for p in peers]
    return [replace(t, leader_node="", replicas=(r,)) for t, r in zip(world.tablets, said, strict=True)]


def groups_written(task: Kept) -> list[str]:
    return [name for kind, name in task.desk.written if kind == "TabletGroup"]


def warnings(task: Kept) -> list[str]:
    return [e["reason"] for e in task.desk.told() if e["type"] == "Warning"]


@pytest.mark.parametrize("role", ["node", "master"])
async def test_a_pods_restart_is_told_of_no_group(role: str) -> None:
    """Each group was written twice, and had a Warning: 129 writes in a pass."""
    task = await at_rest()
    world = task.world
    name = node_of(world, "n2", role)
    before = dict(world.objects["Pod", name])
    world.silent.add(name)
    await task.seconds(10)
    world.silent.clear()
    await task.seconds(10)
    assert world.objects["Pod", name]["metadata"]["uid"] == before["metadata"]["uid"]
    assert groups_written(task) == [] and warnings(task) == []
    assert len(task.desk.written) <= 6


async def test_that_leaders_change_is_told_of_no_group() -> None:
    """Between a leader that stepped down and the report of the next one, a tablet has none."""
    task = await at_rest()
    before = task.world.tablets
    for age_ms in (500, 1_500):
        task.world.tablets = leaderless(task.world, age_ms)
        await task.seconds(1)
    task.world.tablets = before
    await task.seconds(1)
    assert groups_written(task) == [] and warnings(task) == []


async def test_that_masters_elect_a_leader_is_told_of_no_group() -> None:
    """Nothing is known of tablets meanwhile, and each group said so."""
    task = await at_rest()
    confirmed = set(task.world.confirmed)
    for _ in range(2):
        task.world.confirmed.clear()
        await task.seconds(8)
        task.world.confirmed |= confirmed
        await task.seconds(2)
    assert groups_written(task) == []
    task.world.confirmed.clear()
    await task.seconds(29)
    assert groups_written(task) == []
    await task.seconds(3)
    assert len(groups_written(task)) == GROUPS


@pytest.mark.parametrize("what", ["a node is silent", "no leader", "a leader does not reach a peer"])
async def test_what_lasts_as_long_as_healing_waits_is_told(what: str) -> None:
    """And no sooner: `witnessAfter` is 30 s."""
    task = await at_rest()
    world, before = task.world, task.world.tablets
    if what == "a node is silent":
        world.silent.add(node_of(world, "n2"))
    for second in range(35):
        if what == "no leader":
            world.tablets = leaderless(world, second * 1_000)
        elif what == "a leader does not reach a peer":
            world.tablets = [cut_off(t, second * 1_000) for t in before]
        await task.seconds(1)
        assert second >= 29 or not groups_written(task), f"after {second} s"
    assert len(groups_written(task)) == GROUPS and len(warnings(task)) >= (
        GROUPS if what != "no leader" else 0
    )


def cut_off(tablet: TabletView, silent_ms: int) -> TabletView:
    """The tablet as its leader does not reach its second replica."""
    leader, other = tablet.config.peers[:2]
    unreached = {other.replica_id: silent_ms}
    return replace(tablet, replicas=(ReplicaView(leader.node_id, leader.replica_id, unreached_ms=unreached),))


@pytest.mark.parametrize("groups", [2, 5])
async def test_a_machine_lost_for_good_is_a_handful_of_events(groups: int) -> None:
    """Of four tablets in each table; what the driver does beside it is HealBegan and HealEnded of a node (test_heals.py).
    Each table is told of once, and its status is written once for each state of it."""
    task = await at_rest(groups)
    world = task.world
    states = States(task)
    world.kill("n2")
    for _ in range(660):
        await task.seconds(1, heals=True)
        states.look()
    told = [e["reason"] for e in task.desk.told("TabletCluster")]
    assert len(told) <= 16, told
    assert {"NodeLost", "MasterLost", "PodDeleted", "ClaimReleased"} <= set(told)
    assert Counter(told)["Healed"] == 1, told
    assert Counter(e["reason"] for e in task.desk.told("TabletGroup")) == {"VoterLost": groups}
    written = Counter(groups_written(task))
    assert len(written) == groups and all(count <= 3 for count in written.values())
    assert written == states.of_groups, "each write is another state"


class States:
    """How often what a TabletGroup's status says became something else, without the times in it."""

    def __init__(self, task: Kept) -> None:
        self.of_groups: Counter[str] = Counter()
        self._world = task.world
        self._last: dict[str, Any] = {}
        self.look()
        self.of_groups.clear()

    def look(self) -> None:
        """Count the changes since the last look."""
        for group in self._world.of("TabletGroup"):
            name, status = group["metadata"]["name"], group["status"]
            said = [(c["type"], c["status"], c["reason"], c["message"]) for c in status["conditions"]]
            now = (said, status.get("tablets"), status.get("worst"))
            self.of_groups[name] += now != self._last.get(name)
            self._last[name] = now
