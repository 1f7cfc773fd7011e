"""What the operator leaves alone, though it would be quicker to do: each of these keeps a volume, or a cluster from being two."""

from __future__ import annotations

import pytest

from stele_operator.plan import make_plan
from stele_operator.plan.actions import DeletePod
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
    for _ in range(40):
        assert not [a for a in world.step().actions if isinstance(a, DeletePod)]
    world.machines = [m for m in world.machines if m.name != "n3"]
    (gone,) = [a for a in world.step().actions if isinstance(a, DeletePod) and a.name == name]
    assert gone.force and "nobody is left to stop" in gone.reason


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
    assert gone.name == name and "made for another claim" in gone.reason
