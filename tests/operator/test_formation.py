"""From nothing to a formed cluster: whole, cut off after any prefix, and by an operator that saw old news."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from stele_operator.plan import make_plan
from stele_operator.plan.actions import RegisterNode
from stele_operator.plan.fates import State, members
from tests.operator.world import World
from tests.operator.worlds import check, made, names


def test_a_new_cluster_forms_and_makes_its_table() -> None:
    world = made()
    assert names(world, "Pod") == [
        *(f"flights-master-{i}" for i in range(3)),
        *(f"flights-node-{i}" for i in range(5)),
    ]
    assert names(world, "PersistentVolumeClaim") == names(world, "Pod")
    assert names(world, "Service") == ["flights-masters", "flights-peers"]
    assert len(world.confirmed) == 3
    assert [t.name for t in world.tables] == ["events"]
    assert len(world.tablets) == 4
    assert not make_plan(world.observe()).actions
    check(world)


def test_what_is_starting_is_told_in_one_sentence() -> None:
    world = World({"nodes": {"replicas": 5}})
    told = {f.message for _ in range(8) for f in world.step().findings if f.reason.endswith("Starting")}
    assert "flights-master-0 is starting" in told, told


def test_first_masters_get_the_flag_others_join_and_formed_ones_start_plain() -> None:
    world = made()
    pods = {p["metadata"]["name"]: p["spec"]["containers"][0]["args"] for p in world.of("Pod")}
    assert "--first-masters" in pods["flights-master-0"]
    assert "--first-masters" not in pods["flights-node-0"]
    del world.objects["Pod", "flights-master-0"]
    world.run()
    again = world.objects["Pod", "flights-master-0"]["spec"]["containers"][0]["args"]
    assert "--first-masters" not in again
    assert "--join" not in again


def test_a_first_master_is_on_record_without_a_name_and_gets_one() -> None:
    world = made()
    observed = world.observe()
    assert observed.catalog is not None
    master = next(n.node_id for n in observed.catalog.view.nodes if n.role == "master")
    catalog = replace(observed.catalog, names={**observed.catalog.names, master: ""})
    (action,) = make_plan(replace(observed, catalog=catalog)).actions
    assert isinstance(action, RegisterNode) and action.node_id == master
    assert action.name.startswith("flights-master-")


@pytest.mark.parametrize("seed", range(12))
def test_cut_off_after_any_prefix_the_next_pass_goes_on(seed: int) -> None:
    world = World({"nodes": {"replicas": 4}})
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    for n in range(40):
        world.step(prefix=(seed + n * 7) % 4)
        check(world)
    world.run()
    check(world)
    active = [m for m in members(world.observe()) if m.active]
    assert Counter(m.role for m in active) == {"master": 3, "node": 4}
    assert all(m.state is State.READY for m in active)
    assert len(world.tables) == 1


def test_nothing_is_touched_twice_by_an_operator_that_saw_old_news() -> None:
    world = World({"nodes": {"replicas": 3}})
    stale = make_plan(world.observe())
    world.run()
    before = dict(world.objects)
    for action in stale.actions:
        with pytest.raises(Exception, match="exists"):
            world.apply(action)
    assert world.objects == before
