"""What the operator leaves alone, though it would be quicker to do: each of these keeps a volume, or a cluster from being two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.view import NodeState
from stele.model.ids import NodeId
from stele_operator.plan import make_plan
from stele_operator.plan.actions import (
    ConfirmFormation,
    DeleteClaim,
    DeletePod,
    ReleaseClaim,
    ReplaceIdentity,
    RetireClaim,
)
from tests.operator.world import World
from tests.operator.worlds import made, names, node_of


def test_no_master_starts_before_the_claims_of_all_first_ones_stand() -> None:
    """Should the ConfigMap be lost, first masters are known by their claims: of two, two would form a cluster."""
    world = World()
    world.forbidden["PersistentVolumeClaim", "flights-master-2"] = "exceeded quota"
    for _ in range(5):
        world.step()
    assert len(names(world, "PersistentVolumeClaim")) == 2 and not names(world, "Pod")
    world.forbidden.clear()
    world.run()
    assert len(names(world, "Pod")) == 6


def test_a_pod_that_somebody_deletes_on_a_machine_that_is_silent_is_not_deleted_by_force() -> None:
    """Its process may run on: a machine that was cut off is not ready, too. Another pod would have the same volume."""
    world = made()
    name = node_of(world, "n3")
    world.kill("n3")
    world.objects["Pod", name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for _ in range(5):
        assert not [a for a in world.step().actions if isinstance(a, DeletePod)]
    world.machines = [m for m in world.machines if m.name != "n3"]
    (gone,) = [a for a in world.step().actions if isinstance(a, DeletePod) and a.name == name]
    assert gone.force and "its kubelet cannot stop" in gone.reason


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_that_has_ended_is_made_again_however_it_ended(phase: str) -> None:
    """A machine that is shut down in order lets its pods end, with 0."""
    world = made()
    name = node_of(world, "n3")
    raw = world.objects["Pod", name]
    raw["status"] |= {"phase": phase}
    (ended,) = [a for a in make_plan(world.observe()).actions if isinstance(a, DeletePod)]
    assert (ended.name, ended.uid, ended.force) == (name, raw["metadata"]["uid"], False)
    assert "has ended" in ended.reason


def test_a_pod_that_was_made_for_another_claim_of_its_name_goes() -> None:
    """What it has mounted is the volume of a claim that is gone."""
    world = made()
    name = node_of(world, "n3")
    world.objects["PersistentVolumeClaim", name]["metadata"]["uid"] = "another"
    (gone,) = [a for a in make_plan(world.observe()).actions if isinstance(a, DeletePod)]
    assert gone.name == name and "created for another claim" in gone.reason


def test_a_volume_that_is_to_be_made_on_a_machine_that_just_went_down_is_waited_for() -> None:
    """Most are back within a minute; what was made meanwhile is not looked at by whoever deletes its claim."""
    world = World({"nodes": {"replicas": 3}})
    for _ in range(3):
        world.step()
    claim = world.objects["PersistentVolumeClaim", "flights-master-0"]
    machine = claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"]
    world.kill(machine)
    claim["status"] = {"phase": "Pending"}
    since_s = world.observe().pod("flights-master-0").created_s
    for after_s, taken in ((60, False), (61, True)):
        world.now_s = since_s + after_s
        found = [a for a in make_plan(world.observe()).actions if isinstance(a, DeletePod | DeleteClaim)]
        assert bool(found) == taken


def test_a_first_master_that_was_formatted_again_is_not_told_that_it_is_formed() -> None:
    """It would vote with an empty log, and a majority might have forgotten what was committed."""
    world = made()
    node_id = min(world.formats)
    world.unconfirmed.add(node_id)
    for own, told in ((True, [node_id]), (False, [])):
        if not own:
            world.formats[node_id] = "format-anew"
        actions = make_plan(world.observe()).actions
        assert [a.node_id for a in actions if isinstance(a, ConfirmFormation)] == told


@pytest.mark.parametrize("role", ["node", "master"])
def test_no_second_pod_may_go_while_one_that_is_ready_is_being_deleted(role: str) -> None:
    """It answers for as long as it hands its leaders over; the next one is another voter."""
    world = made()
    name = node_of(world, "n2", role)
    world.objects["Pod", name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    (budget,) = [b for b in make_plan(world.observe()).budgets if b.role == role]
    assert budget.reason == "PodsNotReady" and name in budget.message


def retired(world: World, name: str) -> None:
    """The masters say of this member that it is RETIRED, and its claim says so, too."""
    node_id = NodeId(world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"])
    world.tables, world.tablets = [], []
    world.nodes[node_id] = replace(world.nodes[node_id], state=NodeState.RETIRED)
    (noted,) = [a for a in make_plan(world.observe()).actions if isinstance(a, RetireClaim)]
    world.apply(noted)


def test_a_claim_is_not_let_go_while_its_pod_is_still_ending() -> None:
    """Whoever deletes it then takes the volume from under a process that runs."""
    world = made()
    name = node_of(world, "n2")
    retired(world, name)
    (gone,) = [a for a in make_plan(world.observe()).actions if isinstance(a, DeletePod)]
    assert (gone.name, gone.force) == (name, False)
    world.objects["Pod", name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    actions = make_plan(world.observe()).actions
    assert not [a for a in actions if isinstance(a, ReleaseClaim | DeletePod | DeleteClaim)]
    del world.objects["Pod", name]
    assert [a.name for a in make_plan(world.observe()).actions if isinstance(a, ReleaseClaim)] == [name]


def test_without_the_right_to_read_machines_no_pod_is_deleted_by_force() -> None:
    """Nobody knows that its machine is gone, and its process may run on."""
    world = made()
    name = node_of(world, "n2")
    retired(world, name)
    seen = replace(world.observe(), machines=None)
    assert [a.force for a in make_plan(seen).actions if isinstance(a, DeletePod)] == [False]


def test_a_cluster_is_not_formed_while_one_first_master_has_not_formatted_its_volume() -> None:
    world = World()
    while len((seen := world.observe()).master_reports) < 3:
        world.step()
    assert seen.identity is not None and not seen.identity.formed
    missing, *there = sorted(seen.master_reports, key=lambda report: report.node_id)
    plan = make_plan(replace(seen, master_reports=tuple(there)))
    assert not [a for a in plan.actions if isinstance(a, ReplaceIdentity)]
    name = next(m.name for m in seen.identity.first_masters if m.node_id == missing.node_id)
    assert [f.message for f in plan.findings if f.reason == "Forming"] == [
        f"waiting for the first masters {name} to format their volumes"
    ]
