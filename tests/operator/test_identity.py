"""The identity ConfigMap: read back from the claims when it is gone, taken over or made anew with the cluster."""

from __future__ import annotations

import pytest

from stele_operator.plan import make_plan
from stele_operator.plan.actions import PatchObject
from stele_operator.plan.ownership import with_owners
from tests.operator.world import World
from tests.operator.worlds import check, made, names, node_of


@pytest.mark.parametrize("same", [True, False], ids=["its claim", "another claim of its name"])
def test_a_pod_says_whose_a_claim_is_only_if_it_was_made_for_this_very_claim(same: bool) -> None:
    """The other one names a node that nobody has on record; labels it may have as well."""
    world = made()
    name = node_of(world, "n2")
    claim = world.objects["PersistentVolumeClaim", name]
    ours = claim["metadata"]["annotations"]["stele.dev/node-id"]
    claim["metadata"]["annotations"] |= {"stele.dev/node-id": "e" * 32, "stele.dev/cluster-id": "d" * 32}
    if not same:
        claim["metadata"]["uid"] = "eeeeeeee-0000-0000-0000-000000000000"
    (seen,) = [c for c in with_owners(world.observe()).claims if c.name == name]
    assert (seen.node_id, seen.identified) == ((ours, False) if same else ("e" * 32, True))
    patched = {a.name for a in make_plan(world.observe()).actions if isinstance(a, PatchObject)}
    assert (name in patched) is same


def test_identity_lost_is_read_back_from_the_claims_as_formed() -> None:
    world = made()
    before = dict(world.objects["ConfigMap", "flights-identity"]["data"])
    del world.objects["ConfigMap", "flights-identity"]
    world.run()
    after = world.objects["ConfigMap", "flights-identity"]["data"]
    assert after == before | {"ownMaster": "3", "ownNode": "5"}  # of those before, who knows which were used


def test_identity_lost_after_a_master_was_replaced_is_read_back_as_formed() -> None:
    """The new master joined and has no format id on its claim; the lost one's claim is kept for a while."""
    world = made()
    before = dict(world.objects["ConfigMap", "flights-identity"]["data"])
    world.kill("n1")
    for _ in range(700):
        world.step()
    assert "flights-master-3" in names(world, "Pod") and "flights-master-0" not in names(world, "Pod")
    assert "flights-master-0" in names(world, "PersistentVolumeClaim")
    serials = dict(world.objects["ConfigMap", "flights-identity"]["data"])
    del world.objects["ConfigMap", "flights-identity"]
    world.run()
    after = world.objects["ConfigMap", "flights-identity"]["data"]
    assert after["formed"] == before["formed"] and after["firstMasters"] == before["firstMasters"]
    assert after["nextMaster"] == serials["nextMaster"]
    assert world.observe().catalog is not None


def test_identity_lost_after_every_first_master_was_replaced_is_read_back_as_formed() -> None:
    """Nobody is left who was there when the cluster formed, nor a claim of theirs."""
    world = made()
    for number in range(3):
        del world.objects["PersistentVolumeClaim", f"flights-master-{number}"]
        del world.objects["Pod", f"flights-master-{number}"]
        for _ in range(8):
            world.step()
        world.run()
    masters = [n for n in names(world, "PersistentVolumeClaim") if "master" in n]
    assert masters == ["flights-master-3", "flights-master-4", "flights-master-5"]
    before = dict(world.objects["ConfigMap", "flights-identity"]["data"])
    del world.objects["ConfigMap", "flights-identity"]
    world.kill(world.objects["Pod", "flights-master-3"]["spec"]["nodeName"])  # it cannot say what it knows
    world.step()
    after = world.objects["ConfigMap", "flights-identity"]["data"]
    assert after["formed"] and after["nextMaster"] == before["nextMaster"]
    assert world.observe().catalog is not None
    check(world)


def test_identity_lost_before_forming_is_not_taken_for_formed() -> None:
    world = World({"nodes": {"replicas": 3}})
    for _ in range(2):
        world.step()
    assert names(world, "PersistentVolumeClaim")
    del world.objects["ConfigMap", "flights-identity"]
    world.run()
    assert len(world.confirmed) == 3
    check(world)


def test_a_cluster_made_again_over_kept_volumes_takes_them_over() -> None:
    world = made()
    before = world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"]
    for name in names(world, "Pod"):
        del world.objects["Pod", name]
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    world.run()
    assert world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"] == before
    assert len(names(world, "Pod")) == 8


def test_a_cluster_made_again_without_volumes_is_a_new_one_with_new_serials() -> None:
    world = made()
    before = world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"]
    for kind in ("Pod", "PersistentVolumeClaim", "TabletGroup"):
        for name in names(world, kind):
            del world.objects[kind, name]
    world.confirmed, world.nodes, world.tables, world.tablets = set(), {}, [], []
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    world.run()
    assert world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"] != before
    assert names(world, "Pod")[0] == "flights-master-3"
    check(world)


def test_a_cluster_made_again_while_its_volumes_go_is_a_new_one() -> None:
    """Under deletionPolicy Delete the volumes belong to the one that was deleted: they go, only later."""
    world = made()
    world.cluster["spec"]["deletionPolicy"] = "Delete"
    world.run()
    before = world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"]
    going = names(world, "PersistentVolumeClaim")
    for name in names(world, "Pod"):
        del world.objects["Pod", name]
    del world.objects["TabletGroup", "events"]
    world.confirmed, world.nodes, world.tables, world.tablets = set(), {}, [], []
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    world.cluster["spec"]["deletionPolicy"] = "Retain"
    for _ in range(6):
        world.step()
    assert world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"] != before
    for name in going:
        assert ("Pod", name) not in world.objects
        owner = world.objects["PersistentVolumeClaim", name]["metadata"]["ownerReferences"][0]["uid"]
        assert owner != world.cluster["metadata"]["uid"]
        del world.objects["PersistentVolumeClaim", name]
    world.run()
    assert names(world, "Pod")[0] == "flights-master-3" and len(names(world, "Pod")) == 8
    check(world)


def test_given_up_and_applied_anew_while_its_claims_still_go_it_is_a_new_one() -> None:
    """What MastersLost advises, done in one go: the identity is gone, and the claims' deletion takes its time."""
    world = made()
    before = world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"]
    del world.objects["ConfigMap", "flights-identity"]
    del world.objects["TabletGroup", "events"]
    for name in names(world, "Pod"):
        del world.objects["Pod", name]
    world.confirmed, world.nodes = set(), {}
    world.tables, world.tablets = [], []
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    going = world.of("PersistentVolumeClaim")
    for claim in going:
        claim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for _ in range(3):
        world.step()
    for claim in going:
        del world.objects["PersistentVolumeClaim", claim["metadata"]["name"]]
    world.run()
    assert world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"] != before
    assert names(world, "Pod")[0] == "flights-master-3" and len(names(world, "Pod")) == 8
    check(world)


def test_its_own_volumes_are_kept_whatever_the_identity_says_of_its_owner() -> None:
    """An identity put back from a copy that is older than this TabletCluster."""
    world = made()
    world.cluster["spec"]["deletionPolicy"] = "Delete"
    world.run()
    identity = world.objects["ConfigMap", "flights-identity"]
    before, identity["data"]["ownerUID"] = (
        identity["data"]["clusterUUID"],
        "00000099-0000-0000-0000-000000000000",
    )
    pods = names(world, "Pod")
    world.run()
    assert world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"] == before
    assert names(world, "Pod") == pods
