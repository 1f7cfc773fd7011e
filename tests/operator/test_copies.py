"""Claims that are copies of others run under a fork id of their own: restored elsewhere, cloned, or made from snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from stele.model.ids import is_id
from stele_operator.plan import make_plan
from stele_operator.plan.actions import CreatePod, DeleteObject, PatchObject
from tests.operator.world import World
from tests.operator.worlds import check, made, names

CLAIM, CONFIG = "PersistentVolumeClaim", "ConfigMap"
ELSEWHERE = "ffffffff-0000-0000-0000-000000000000"


def identity(world: World) -> dict[str, str]:
    return dict(world.objects[CONFIG, "flights-identity"]["data"])


def forks_of_pods(world: World) -> set[str]:
    """What the pods are told; "" for nothing."""
    told = []
    for pod in world.of("Pod"):
        env = {e["name"]: e.get("value", "") for e in pod["spec"]["containers"][0]["env"]}
        told.append(env.get("STELE_FORK_ID", ""))
    return set(told)


def notes(world: World) -> set[tuple[bool, str]]:
    """(is it about this claim, fork id) of all claims."""
    found = []
    for claim in world.of(CLAIM):
        a = claim["metadata"]["annotations"]
        found.append(
            (a.get("stele.dev/claim-uid") == claim["metadata"]["uid"], a.get("stele.dev/fork-id", "-"))
        )
    return set(found)


def restored(world: World, *, with_identity: bool) -> World:
    """Its claims as a restore makes them: their annotations, other uids; the TabletCluster is another object, too."""
    for name in names(world, "Pod"):
        del world.objects["Pod", name]
    for number, claim in enumerate(world.of(CLAIM), 1_000 * world._count):
        renewed(claim, number)
    world.cluster["metadata"]["uid"] = ELSEWHERE
    if not with_identity:
        del world.objects[CONFIG, "flights-identity"]
    return world


def renewed(claim: dict[str, Any], number: int) -> None:
    claim["metadata"]["uid"] = f"eeeeeeee-0000-0000-0000-{number:012d}"


def test_a_cluster_runs_as_it_was_formed_and_its_claims_say_which_they_are() -> None:
    world = made()
    assert identity(world)["forkID"] == "" and forks_of_pods(world) == {""}
    assert notes(world) == {(True, "")}


@pytest.mark.parametrize("with_identity", [True, False])
def test_copies_of_all_claims_get_a_fork_id_that_stays(with_identity: bool) -> None:
    world = restored(made(), with_identity=with_identity)
    before = identity(world)["clusterUUID"] if with_identity else ""
    world.run()
    fork = identity(world)["forkID"]
    assert is_id(fork) and forks_of_pods(world) == {fork} and notes(world) == {(True, fork)}
    assert before in ("", identity(world)["clusterUUID"])
    check(world)

    del world.objects[CONFIG, "flights-identity"]
    del world.objects["Pod", "flights-node-1"]
    world.run()
    assert identity(world)["forkID"] == fork and forks_of_pods(world) == {fork}

    restored(world, with_identity=False).run()  # a copy of the copy
    assert identity(world)["forkID"] not in ("", fork)
    assert forks_of_pods(world) == {identity(world)["forkID"]}


@pytest.mark.parametrize("seed", range(8))
def test_an_operator_that_is_killed_while_it_adopts_a_copy_gives_one_fork_id_to_all(seed: int) -> None:
    world = restored(made(), with_identity=bool(seed % 2))
    lose = seed > 3
    for n in range(40):
        copied = {c.name for c in world.observe().claims if c.copied}
        plan = world.step(prefix=(seed + n * 7) % 4)
        # A note may be refused: nothing runs under the fork id before one stands.
        assert not copied & {a.name for a in plan.actions if isinstance(a, CreatePod)}
        check(world)
        assert len(forks_of_pods(world)) <= 1
        if lose and forks_of_pods(world):  # the first pod runs, others wait
            del world.objects[CONFIG, "flights-identity"]
            lose = False
    assert not lose
    world.run()
    assert forks_of_pods(world) == {identity(world)["forkID"]} != {""}


def test_the_same_volumes_under_another_tabletcluster_are_no_copy() -> None:
    world = made()
    for name in names(world, "Pod"):
        del world.objects["Pod", name]
    world.cluster["metadata"]["uid"] = ELSEWHERE
    world.run()
    assert identity(world)["forkID"] == "" and forks_of_pods(world) == {""}


def test_a_lost_identity_stays_the_original_while_one_claim_is_it() -> None:
    """Somebody has made single claims anew from snapshots: their volumes are for the masters to judge."""
    world = made()
    for number, claim in enumerate(world.of(CLAIM)[1:]):
        renewed(claim, number)
    del world.objects[CONFIG, "flights-identity"]
    world.step()
    assert identity(world)["forkID"] == ""


def test_claims_of_an_operator_that_noted_nothing_are_noted_and_nothing_restarts() -> None:
    world = made()
    for claim in world.of(CLAIM):
        for key in ("stele.dev/claim-uid", "stele.dev/fork-id"):
            del claim["metadata"]["annotations"][key]
    del world.objects[CONFIG, "flights-identity"]["data"]["forkID"]
    plan = make_plan(world.observe())
    assert all(isinstance(a, PatchObject) for a in plan.actions)
    assert not [a for a in plan.actions if isinstance(a, DeleteObject)]
    pods = {p["metadata"]["name"]: p["metadata"]["uid"] for p in world.of("Pod")}
    world.run()
    assert notes(world) == {(True, "")}
    assert pods == {p["metadata"]["name"]: p["metadata"]["uid"] for p in world.of("Pod")}


@pytest.mark.parametrize("source", ["dataSource", "dataSourceRef"])
def test_claims_made_from_snapshots_are_copies_though_no_uid_was_noted(source: str) -> None:
    world = made()
    for claim in world.of(CLAIM):
        for key in ("stele.dev/claim-uid", "stele.dev/fork-id"):
            del claim["metadata"]["annotations"][key]
        claim["spec"][source] = {"kind": "VolumeSnapshot", "name": "s", "apiGroup": "snapshot.storage.k8s.io"}
    restored(world, with_identity=False).run()
    assert is_id(identity(world)["forkID"])


def test_two_copies_in_one_place_are_told_and_nothing_is_guessed() -> None:
    world = made()
    claims = world.of(CLAIM)
    claims[0]["metadata"]["annotations"]["stele.dev/fork-id"] = "a" * 32
    claims[1]["metadata"]["annotations"]["stele.dev/fork-id"] = "b" * 32
    del world.objects[CONFIG, "flights-identity"]
    plan = make_plan(world.observe())
    assert [f.reason for f in plan.findings] == ["IdentityLost"] and not plan.actions
