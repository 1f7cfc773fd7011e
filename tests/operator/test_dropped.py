"""Tables that were dropped and can be recalled: their tablets stay, and no longer stand in anybody's way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stele_operator.plan import make_plan
from stele_operator.plan.actions import DeleteClaim, RollPod
from stele_operator.plan.status import cluster_status
from tests.operator.test_budgets import drains, least, with_failed
from tests.operator.world import World

Json = dict[str, Any]


def made(factor: int, most: int = 1) -> World:
    """A cluster of four nodes with a table of so many replicas, which stays, and one that goes."""
    world = World({"nodes": {"replicas": 4}, "budget": {"maxUnavailable": most}})
    world.group("kept")
    world.group("gone", replicationFactor=factor)
    world.run()
    return world


def drop(world: World, name: str = "gone") -> None:
    """As masters tell it: the table is in no list, and its tablets are there under another name."""
    (table,) = [t for t in world.tables if t.name == name]
    world.tables = [t for t in world.tables if t is not table]
    del world.objects["TabletGroup", name]
    world.tablets = [
        replace(t, table_name=f"{name} (dropped)") if t.table_id == table.table_id else t
        for t in world.tablets
    ]


def change(world: World, **fields: Any) -> None:
    """Of the dropped tablet."""
    world.tablets = [replace(t, **fields) if t.table_name == "gone (dropped)" else t for t in world.tablets]


def told(world: World) -> Json:
    """The status, with its conditions by type."""
    status = cluster_status(world.observe(), make_plan(world.observe()), (), "now")
    return {**status, **{c["type"]: c for c in status["conditions"]}}


def test_its_only_replica_lets_machines_be_drained() -> None:
    """The message before told users to drop it."""
    world = made(1)
    assert drains(world)[:2] == ("True", "SingleReplica") and least(world) == 4
    drop(world)
    world.step()
    assert drains(world)[:2] == ("False", "Drainable") and least(world) == 3


def test_one_that_lacks_a_voter_is_protected_until_it_is_healed() -> None:
    """It can be recalled whole."""
    world = made(3)
    drop(world)
    (tablet,) = [t for t in world.tablets if t.table_name == "gone (dropped)"]
    change(world, replicas=with_failed(tablet).replicas)
    world.step()
    assert drains(world)[:2] == ("True", "VoterLost")


def test_its_only_replica_bounds_no_budget() -> None:
    world = made(1, most=2)
    world.tables = [t for t in world.tables if t.name == "gone"]
    world.tablets = [t for t in world.tablets if t.table_name == "gone"]
    del world.objects["TabletGroup", "kept"]
    drop(world)
    world.step()
    assert drains(world)[2].startswith("2 nodes and one master may be evicted") and least(world) == 2


def test_it_is_not_counted_and_the_cluster_is_ready_without_it() -> None:
    world = made(1)
    assert told(world)["tablets"]["total"] == 2
    drop(world)
    change(world, leader_node="")
    status = told(world)
    assert status["tablets"] == {"total": 1, "healthy": 1, "underReplicated": 0, "unavailable": 0}
    assert (status["Ready"]["status"], status["Degraded"]["status"]) == ("True", "False")
    assert not make_plan(world.observe()).health.settled, "it is healed as others are"


def test_its_only_replica_without_a_leader_keeps_no_roll_waiting() -> None:
    world = made(1)
    drop(world)
    change(world, leader_node="")
    world.cluster["spec"]["image"] = "stele/node:next"
    assert [a.name for a in world.step().actions if isinstance(a, RollPod)]


def test_claims_are_kept_while_it_has_no_leader() -> None:
    """One of them may hold its rows."""
    world = made(1)
    drop(world)
    (tablet,) = [t for t in world.tablets if t.table_name == "gone (dropped)"]
    victim = tablet.config.peers[0].node_id
    world.cluster["spec"]["nodes"]["retire"] = [world.node_names[victim]]
    for _ in range(12):
        world.step()
    change(world, leader_node="")
    world.now_s += 90_000
    for _ in range(3):
        assert not [a for a in world.step().actions if isinstance(a, DeleteClaim)]
    (tablet,) = [t for t in world.tablets if t.table_name == "gone (dropped)"]
    change(world, leader_node=tablet.config.peers[0].node_id)
    gone = [a for _ in range(3) for a in world.step().actions if isinstance(a, DeleteClaim)]
    assert [a.name for a in gone] == [world.node_names[victim]]
