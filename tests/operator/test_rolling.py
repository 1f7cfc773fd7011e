"""Running pods get another image, resources or fields one at a time: in order, while all is whole, and not beyond one that fails."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from stele.model.ids import CATALOG_TABLET_ID, NodeId
from stele_operator.plan import Plan, make_plan
from stele_operator.plan.actions import RollPod
from stele_operator.plan.fates import State
from stele_operator.plan.status import cluster_status
from tests.operator.world import World
from tests.operator.worlds import check, made, names, node_of

Json = dict[str, Any]
NEXT = "stele/node:next"


def images(world: World) -> dict[str, str]:
    """What each pod runs."""
    return {p["metadata"]["name"]: p["spec"]["containers"][0]["image"] for p in world.of("Pod")}


def up(world: World) -> set[str]:
    """Pods that are ready."""
    return {
        p["metadata"]["name"]
        for p in world.of("Pod")
        if (p.get("status") or {}).get("conditions", [{}])[0].get("status") == "True"
    }


def rolled(plan: Plan) -> list[str]:
    """Pods that a plan makes anew for the spec."""
    return [a.name for a in plan.actions if isinstance(a, RollPod)]


def found(plan: Plan) -> dict[str, str]:
    """Messages of its findings by reason."""
    return {f.reason: f.message for f in plan.findings}


def revive(world: World, machine: str) -> None:
    """The machine has its power again."""
    world.machines = [replace(m, ready=m.ready or m.name == machine) for m in world.machines]


def roll(world: World, passes: int = 200) -> list[str]:
    """Step until nothing is rolled any more; the order. At each step at most one pod is away."""
    order: list[str] = []
    everyone = set(names(world, "Pod"))
    for _ in range(passes):
        plan = world.step()
        check(world)
        order += rolled(plan)
        away = everyone - up(world)
        assert len(away) <= 1, away
    return order


def test_masters_first_then_nodes_one_at_a_time_and_back() -> None:
    world = made()
    old = images(world)
    world.cluster["spec"]["image"] = NEXT
    order = roll(world)
    assert set(images(world).values()) == {NEXT}
    assert len(order) == 8 and [("master" in n) for n in order] == [True] * 3 + [False] * 5
    catalog = next(t for t in world.observe().catalog.view.tablets if t.tablet_id == CATALOG_TABLET_ID)
    ids = {m.name: m.node_id for m in make_plan(world.observe()).members}
    assert catalog.leader_node in (ids[order[2]], ids[order[1]], ids[order[0]])
    del world.cluster["spec"]["image"]
    assert len(roll(world)) == 8 and images(world) == old
    assert not {"Rolling", "RollWaits", "RollStopped"} & set(found(world.step()))


def test_the_leading_master_is_the_last_of_the_masters() -> None:
    world = made()
    catalog = next(t for t in world.observe().catalog.view.tablets if t.tablet_id == CATALOG_TABLET_ID)
    leader = next(m.name for m in make_plan(world.observe()).members if m.node_id == catalog.leader_node)
    world.cluster["spec"]["image"] = NEXT
    first = rolled(world.step())
    assert first and first != [leader]


def test_the_status_tells_how_far_it_is() -> None:
    world = made()
    world.cluster["spec"]["nodes"]["podAnnotations"] = {"note": "x"}
    plan = world.step()
    assert rolled(plan) == ["flights-node-0"]
    assert "3 of 8 pods have the present spec; flights-node-0 is made again" in found(plan)["Rolling"]
    conditions = cluster_status(world.observe(), plan, (), "now")["conditions"]
    (reconciling,) = [c for c in conditions if c["type"] == "Reconciling"]
    assert (reconciling["status"], reconciling["reason"]) == ("True", "Rolling")
    told = cluster_status(world.observe(), plan, (), "now")["budget"]
    assert told == {"holder": "upgrade", "waiting": []}


def test_heals_go_first() -> None:
    world = made()
    world.kill("n2")
    world.cluster["spec"]["image"] = NEXT
    for _ in range(3):
        plan = world.step()
        assert not rolled(plan)
    assert "must be ready first" in found(plan)["RollWaits"]
    for _ in range(40):
        plan = world.step()
        told = cluster_status(world.observe(), plan, (), "now")["budget"]
        if told["holder"].startswith("heal/"):
            break
    assert told["holder"].startswith("heal/") and told["waiting"][-1] == "upgrade"


def test_a_node_that_leaves_is_waited_for() -> None:
    world = made()
    world.cluster["spec"]["nodes"] |= {"replicas": 4}
    world.cluster["spec"]["image"] = NEXT
    plan = world.step()
    assert not rolled(plan)
    order = roll_in_peace(world)
    assert set(images(world).values()) == {NEXT} and len(order) == 7


def roll_in_peace(world: World) -> list[str]:
    """As `roll`, where pods may also leave for good."""
    order: list[str] = []
    for _ in range(200):
        plan = world.step()
        check(world)
        order += rolled(plan)
    return order


class Bad(World):
    """A world where an image cannot be pulled."""

    bad = "stele/node:bad"

    def run_pod(self, raw: Json) -> None:
        if raw["spec"]["containers"][0]["image"] != self.bad:
            super().run_pod(raw)
            return
        waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
        raw["status"] = {
            "phase": "Pending",
            "containerStatuses": [{"name": "stele", "state": {"waiting": waiting}, "restartCount": 0}],
        }
        self.touch(raw)


def bad_world() -> Bad:
    world = Bad({"nodes": {"replicas": 5}})
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    return world


@pytest.mark.parametrize("correction", [None, NEXT])
def test_it_stops_at_a_bad_image_and_the_corrected_spec_goes_to_that_pod_first(
    correction: str | None,
) -> None:
    world = bad_world()
    old = images(world)
    world.cluster["spec"]["image"] = Bad.bad
    for _ in range(90):
        plan = world.step()
        check(world)
        assert len({n for n, i in images(world).items() if i == Bad.bad}) <= 1
    (broken,) = [n for n, i in images(world).items() if i == Bad.bad]
    assert broken in found(plan)["RollStopped"] and "ImagePullBackOff" in found(plan)["RollStopped"]
    assert "set it back" in found(plan)["RollStopped"]
    if correction is None:
        del world.cluster["spec"]["image"]
    else:
        world.cluster["spec"]["image"] = correction
    made_anew: list[str] = []
    for _ in range(200):
        before = {p["metadata"]["name"]: p["metadata"]["uid"] for p in world.of("Pod")}
        world.step()
        check(world)
        after = {p["metadata"]["name"]: p["metadata"]["uid"] for p in world.of("Pod")}
        made_anew += [n for n in after if before.get(n) != after[n]]
    assert made_anew[0] == broken
    assert images(world) == (old if correction is None else dict.fromkeys(old, NEXT))
    assert {m.state for m in make_plan(world.observe()).members} == {State.READY}


def test_a_pod_that_runs_and_is_never_ready_gets_the_corrected_spec_first() -> None:
    world = made()
    name = node_of(world, "n2")
    node_id = NodeId(world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"])
    world.silent.add(name)
    for _ in range(20):
        world.step()
    world.cluster["spec"]["nodes"]["podAnnotations"] = {"note": "x"}
    world.cluster["spec"]["healing"] = {"witnessAfter": "1h", "silentAfter": "2h", "machineLostAfter": "2h"}
    first: list[str] = []
    for _ in range(120):
        first += rolled(world.step())
        if first:
            break
    assert first == [name] and world.nodes[node_id].node_id == node_id


def test_a_member_that_could_not_be_placed_again_keeps_its_pod() -> None:
    world = made()
    world.cluster["spec"]["nodes"]["nodeSelector"] = {"disk": "fast"}
    first = next(iter(world.machines))
    world.machines = [replace(m, labels={"disk": "fast"}) if m is first else m for m in world.machines]
    before = {p["metadata"]["name"]: p["metadata"]["uid"] for p in world.of("Pod")}
    order = roll(world)
    assert order == [node_of(world, first.name)], "the only node that the spec would put where it is"
    now = {p["metadata"]["name"]: p["metadata"]["uid"] for p in world.of("Pod")}
    assert {n for n in now if now[n] != before[n]} == set(order)
    assert "Misplaced" in found(world.step())


def test_nothing_is_rolled_on_delete_or_while_paused() -> None:
    for change in ({"updateStrategy": "OnDelete"}, {"paused": True}):
        world = made()
        world.cluster["spec"] |= {**change, "image": NEXT}
        for _ in range(10):
            assert not rolled(world.step())


def test_tablets_of_one_replica_are_named_and_hold_nothing_up() -> None:
    world = World({"nodes": {"replicas": 3}})
    world.group("single", replicationFactor=1)
    world.run()
    world.cluster["spec"]["nodes"]["podAnnotations"] = {"note": "x"}
    texts: list[str] = []
    for _ in range(100):
        texts.append(found(world.step()).get("Rolling", ""))
    assert any("these cannot be used, since each has one replica" in t and "of single" in t for t in texts)
    assert all(
        p["metadata"]["annotations"].get("note") == "x"
        for p in world.of("Pod")
        if "node" in p["metadata"]["name"]
    )


@pytest.mark.parametrize("seed", range(12))
def test_at_random_a_roll_never_takes_a_second_pod_and_always_ends(seed: int) -> None:
    """Machines fail and come back, and the spec changes again, in the middle of it."""
    rng = random.Random(seed)
    world = made()
    everyone = set(names(world, "Pod"))
    down = ""
    for step in range(150):
        if rng.random() < 0.1:
            world.cluster["spec"]["image"] = rng.choice([NEXT, "stele/node:third"])
        if not down and rng.random() < 0.04:
            down = rng.choice(["n1", "n2", "n3"])
            world.kill(down)
        elif down and rng.random() < 0.3:
            revive(world, down)
            down = ""
        before = up(world)
        plan = world.step()
        check(world)
        taken = rolled(plan)
        assert len(taken) <= 1
        if taken:
            assert before >= everyone & set(names(world, "Pod")) - set(taken), (step, taken, before)
    if down:
        revive(world, down)
    for _ in range(250):
        plan = world.step()
    assert len(set(images(world).values())) == 1, found(plan)
