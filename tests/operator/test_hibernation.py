"""A cluster is put to sleep and woken: nodes stop first and start last, claims stay, and nobody is lost by it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from stele.driver.view import NodeState
from stele.model.ids import NodeId
from stele_operator.plan import Plan, make_plan
from stele_operator.plan.actions import CreateClaim, CreatePod, DeletePod, RetireClaim
from stele_operator.plan.fates import State
from stele_operator.plan.findings import Kind
from stele_operator.plan.status import cluster_status
from tests.operator.desk import Kept
from tests.operator.test_rolling import NEXT, images
from tests.operator.world import World
from tests.operator.worlds import check, conditions, made, names, node_of

Json = dict[str, Any]
DAYS_S = 5 * 86_400
PATIENCE_S = 600
ALARMS = ("NodeLost", "MasterLost", "TooManyLost", "NodePending", "MasterPending")


def hibernate(world: World, asleep: bool = True) -> None:
    """As a user asks for it."""
    world.cluster["spec"]["hibernate"] = asleep


def reasons(plan: Plan) -> set[str]:
    """Of all its findings."""
    return {f.reason for f in plan.findings}


def claims(world: World) -> dict[str, tuple[str, str]]:
    """The claims that are in use, with their uids and nodes."""
    found = {}
    for claim in world.of("PersistentVolumeClaim"):
        metadata = claim["metadata"]
        assert "stele.dev/released-at" not in metadata["annotations"]
        found[metadata["name"]] = (metadata["uid"], metadata["annotations"]["stele.dev/node-id"])
    return found


def step(world: World, prefix: int | None = None) -> Plan:
    """A pass of a cluster that sleeps or wakes, in which nobody is lost, given up or healed."""
    before = names(world, "Pod")
    plan = world.step(prefix)
    check(world)
    stopped = [a.name for a in plan.actions if isinstance(a, DeletePod)]
    if any("master" in name for name in stopped):
        assert not [name for name in before if "-node-" in name], "masters stop last"
    if any(isinstance(a, CreatePod) and a.role == "node" for a in plan.actions):
        assert sum("-master-" in name for name in before) >= 2, "masters start first"
    assert not reasons(plan) & set(ALARMS)
    assert not [m.name for m in plan.members if m.given_up or m.state is State.LOST]
    assert all(n.state is NodeState.ACTIVE for n in world.nodes.values())
    return plan


def until_asleep(world: World) -> Plan:
    """Step until it is at rest."""
    hibernate(world)
    for _ in range(20):
        plan = step(world)
        if "Hibernated" in reasons(plan):
            return plan
    raise AssertionError(reasons(plan))


def until_awake(world: World) -> list[Plan]:
    """Step until it is as before; the plans meanwhile."""
    hibernate(world, False)
    plans: list[Plan] = []
    for _ in range(30):
        plans.append(step(world))
        if plans[-1].policy is not None:
            return plans
    raise AssertionError(reasons(plans[-1]))


def test_nodes_stop_first_then_masters_and_all_claims_stay() -> None:
    world = made()
    before = claims(world)
    plan = until_asleep(world)
    assert not names(world, "Pod") and claims(world) == before
    assert not plan.actions and plan.policy is None
    assert {m.state for m in plan.members} == {State.HIBERNATED}
    assert world.standing is not None and world.standing.drive_after_ms == 0
    assert "TabletCluster data/flights hibernates" in world.standing.held, "nor may any other driver heal"
    assert not make_plan(world.observe()).actions


def test_what_is_told_of_a_cluster_that_sleeps() -> None:
    world = made()
    hibernate(world)
    step(world)
    told = conditions(world)
    assert told["Ready"][:2] == ("False", "Hibernating") and told["Reconciling"][:2] == (
        "True",
        "Hibernating",
    )
    until_asleep(world)
    told = conditions(world)
    assert {
        kind: found[:2] for kind, found in told.items() if kind not in ("MajorityLost", "CopiesEqual")
    } == {
        "Ready": ("False", "Hibernated"),
        "Reconciling": ("False", "Hibernated"),
        "Degraded": ("False", "Hibernated"),
        "Stalled": ("False", "NotStalled"),
        "DrainBlocked": ("False", "Hibernated"),
    }
    assert "all claims are kept" in told["Ready"][2]
    of_group = conditions(world, "events")
    assert [of_group[kind][:2] for kind in ("Ready", "Reconciling", "Stalled", "Degraded")] == [
        ("False", "Hibernated"),
        ("False", "Hibernated"),
        ("False", "NotStalled"),
        ("False", "Unknown"),
    ]
    status = cluster_status(world.observe(), make_plan(world.observe()), (), "now")
    assert {m["state"] for m in status["members"]} == {"Hibernated"} and len(status["members"]) == 8
    assert (status["replicas"], status["readyReplicas"], status["readyMasters"]) == (5, 0, 0)


def test_after_days_every_member_is_back_on_its_own_volume_and_nothing_was_healed() -> None:
    world = made()
    before, tablets, standing = claims(world), list(world.tablets), world.standing
    until_asleep(world)
    world.now_s += DAYS_S
    plans = until_awake(world)
    assert {m.state for m in plans[-1].members} == {State.READY}
    assert claims(world) == before and world.tablets == tablets
    assert sorted(names(world, "Pod")) == sorted(before)
    assert "Waking" in reasons(plans[0]) and not reasons(plans[-1])
    assert all(not [f for f in p.findings if f.kind in (Kind.DEGRADED, Kind.STALLED)] for p in plans)
    world.run()
    assert world.standing == standing
    assert conditions(world)["Ready"][:2] == ("True", "Writable")


def test_while_it_wakes_no_condition_is_an_alarm() -> None:
    world = made()
    until_asleep(world)
    world.now_s += DAYS_S
    hibernate(world, False)
    told = [conditions(world)]
    for _ in range(3):
        step(world)
        told.append(conditions(world))
    assert {t["Ready"][:2] for t in told} <= {("False", "Waking"), ("True", "Writable")}
    assert told[0]["Ready"][:2] == ("False", "Waking") == told[1]["Ready"][:2]
    assert {t[kind][0] for t in told for kind in ("Degraded", "Stalled")} == {"False"}


@pytest.mark.parametrize("seed", range(25))
def test_cut_off_anywhere_and_asked_for_otherwise_it_ends_as_it_was_asked_for_last(seed: int) -> None:
    rng = random.Random(seed)
    world = made()
    before = claims(world)
    wanted = True
    hibernate(world)
    for _ in range(60):
        if rng.random() < 0.12:
            wanted = not wanted
            hibernate(world, wanted)
        if rng.random() < 0.1:
            world.now_s += rng.choice((40, 3_600, DAYS_S))  # nobody looks meanwhile
            world.settle()
        step(world, rng.choice((None, 0, 1, 2, 5)))
        assert claims(world) == before
    until_asleep(world)
    until_awake(world)
    world.run()
    assert claims(world) == before and sorted(names(world, "Pod")) == sorted(before)
    assert {m.state for m in make_plan(world.observe()).members} == {State.READY}


def test_a_node_that_is_slow_to_come_is_waited_for_and_then_healed_as_any() -> None:
    world = made()
    until_asleep(world)
    world.now_s += DAYS_S
    world.silent.add("flights-node-4")
    hibernate(world, False)
    waited = 0
    while (plan := world.step()).policy is None:
        waited += 1
        assert waited < 2 * PATIENCE_S
        assert not [m.name for m in plan.members if m.given_up or m.state is State.LOST]
        if waited == PATIENCE_S // 2:
            assert conditions(world)["Ready"][:2] == ("True", "Writable")
            (message,) = [f.message for f in plan.findings if (f.reason, f.group) == ("Waking", "")]
            assert "waits for flights-node-4" in message
            assert "NodePending" in reasons(plan)  # after a minute somebody should look at its pod
    assert PATIENCE_S - 5 <= waited <= PATIENCE_S + 20
    lost = next(m for m in plan.members if m.name == "flights-node-4")
    assert lost.state is State.LOST and [m for m in plan.members if m.given_up] == [lost]


def test_the_time_of_waiting_does_not_run_while_nobody_starts_pods() -> None:
    """The operator is away, or the cluster paused, after the masters came and before the nodes did."""
    world = made()
    world.cluster["spec"]["nodes"]["replicas"] = 5
    until_asleep(world)
    hibernate(world, False)
    while not world.leads():
        world.step()
    world.cluster["spec"]["paused"] = True
    for _ in range(3):
        world.step()
    assert not [n for n in names(world, "Pod") if "-node-" in n]
    world.now_s += 10 * PATIENCE_S
    world.settle()
    world.cluster["spec"]["paused"] = False
    until_awake(world)


def test_volumes_that_would_go_with_their_pods_keep_it_awake() -> None:
    world = made()
    world.objects["PersistentVolumeClaim", "flights-node-1"]["metadata"]["deletionTimestamp"] = (
        "2026-01-01T00:00:00Z"
    )
    hibernate(world)
    for _ in range(5):
        plan = world.step()
    assert len(names(world, "Pod")) == 8 and plan.policy is not None
    assert {"HibernateWaits", "ClaimsGoing"} <= reasons(plan)
    told = cluster_status(world.observe(), plan, (), "now")["budget"]
    assert told["waiting"] == ["hibernate"] or told["holder"] == "hibernate"


def test_a_new_cluster_that_is_to_hibernate_is_not_made_before_it_wakes() -> None:
    world = World({"hibernate": True, "nodes": {"replicas": 3}})
    world.group("events")
    for _ in range(3):
        plan = world.step()
    assert not plan.actions and {k for k, _ in world.objects} == {"TabletCluster", "TabletGroup"}
    assert conditions(world)["Ready"][:2] == ("False", "Hibernated")
    hibernate(world, False)
    world.run()
    assert len(names(world, "Pod")) == 6 and len(world.tables) == 1


def test_one_that_has_not_formed_forms_after_waking() -> None:
    world = World({"nodes": {"replicas": 3}})
    for _ in range(3):
        world.step()
    assert names(world, "Pod") and not world.formed_nodes - set(world.nodes)
    hibernate(world)
    for _ in range(6):
        plan = world.step()
    assert "Hibernated" in reasons(plan) and not names(world, "Pod")
    hibernate(world, False)
    world.run()
    assert len(names(world, "Pod")) == 6 and len(world.confirmed) == 3


def test_a_pod_that_no_kubelet_can_stop_holds_nothing_up() -> None:
    world = made()
    name = node_of(world, "n5")
    world.kill("n5")
    hibernate(world)
    for _ in range(6):
        plan = world.step()
    assert names(world, "Pod") == [name]
    (message,) = [f.message for f in plan.findings if (f.reason, f.group) == ("Hibernated", "")][:1]
    assert f"the pods {name} end once their machines are back" in message
    assert "once machine n5 is back" in next(m.why for m in plan.members if m.name == name)
    world.machines = [m for m in world.machines if m.name != "n5"]
    world.step()
    assert not names(world, "Pod")


def test_what_was_changed_meanwhile_is_acted_on_after_waking() -> None:
    world = made()
    world.machines.append(replace(world.machines[0], name="n6"))
    until_asleep(world)
    world.cluster["spec"] |= {"image": NEXT}
    world.cluster["spec"]["nodes"]["replicas"] = 6
    for _ in range(3):
        assert not step(world).actions
    for plan in until_awake(world)[:-1]:
        assert not [a for a in plan.actions if isinstance(a, CreateClaim)]
    assert set(images(world).values()) == {NEXT}
    world.run()
    assert "flights-node-5" in names(world, "Pod")


def test_it_waits_for_no_heal_roll_or_drain_and_says_that_they_go_on_later() -> None:
    world = made()
    world.drains = False
    world.cluster["spec"]["nodes"]["retire"] = ["flights-node-4"]
    world.machines.append(replace(world.machines[0], name="n6"))
    for _ in range(12):
        world.step()
    assert any(n.state is NodeState.DRAINING for n in world.nodes.values())
    hibernate(world)
    plan = world.step()
    plan = world.step()
    told = cluster_status(world.observe(), plan, (), "now")["budget"]
    assert (told["holder"], told["waiting"]) == ("hibernate", ["drain/flights-node-4"])
    for _ in range(6):
        plan = world.step()
    assert "Hibernated" in reasons(plan)
    hibernate(world, False)
    world.drains = True
    for _ in range(60):
        world.step()
    assert world.nodes[NodeId(claim_node(world, "flights-node-4"))].state is NodeState.RETIRED


def claim_node(world: World, name: str) -> str:
    """The node of a claim."""
    return str(world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]["stele.dev/node-id"])


def test_that_a_member_is_retired_is_on_record_before_its_pod_stops() -> None:
    world = made()
    node_id = NodeId(claim_node(world, "flights-node-3"))
    world.nodes[node_id] = replace(world.nodes[node_id], state=NodeState.RETIRED)
    hibernate(world)
    world.step()
    plan = world.step()
    recorded = [a for a in plan.actions if isinstance(a, RetireClaim)]
    assert [a.name for a in recorded] == ["flights-node-3"] and "flights-node-3" in names(world, "Pod")
    for _ in range(6):
        plan = world.step()
    assert "Hibernated" in reasons(plan)
    hibernate(world, False)
    for _ in range(8):
        world.step()
    assert "flights-node-3" not in names(world, "Pod")


def test_a_machine_that_died_meanwhile_is_told_once_waking_no_longer_waits() -> None:
    world = made()
    name = node_of(world, "n5")
    until_asleep(world)
    world.machines = [replace(m, ready=m.name != "n5") for m in world.machines]
    hibernate(world, False)
    for _ in range(PATIENCE_S + 30):
        plan = world.step()
    assert [m.name for m in plan.members if m.given_up] == [name] or world.nodes[
        NodeId(claim_node(world, name))
    ].state is not NodeState.ACTIVE


async def test_events_tell_it_and_none_is_a_warning() -> None:
    world = made()
    task = Kept(world)
    await task.seconds(2)
    task.desk.forget()
    for asleep in (True, False):
        hibernate(world, asleep)
        await task.seconds(8)
        world.now_s += DAYS_S if asleep else 0
    told = [(e["reason"], e["type"]) for e in task.desk.told("TabletCluster")]
    assert [t for t in told if t[0] in ("Hibernating", "Hibernated", "Waking", "Ready", "NotReady")] == [
        ("Hibernating", "Normal"),
        ("Hibernated", "Normal"),
        ("Waking", "Normal"),
        ("Ready", "Normal"),
    ]
    assert {kind for _, kind in told} == {"Normal"}
    task.desk.forget()
    await task.seconds(10)
    assert not task.desk.written


async def test_a_cluster_at_rest_is_not_written_again_and_again() -> None:
    world = made()
    task = Kept(world)
    hibernate(world)
    await task.seconds(10)
    task.desk.forget()
    await task.seconds(40)
    assert not task.desk.written and not task.desk.told()
    world.group("later")
    world.objects["TabletGroup", "events"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    await task.seconds(2)
    later = world.objects["TabletGroup", "later"]["status"]["conditions"]
    assert next(c["reason"] for c in later if c["type"] == "Ready") == "Hibernated"
    kept = world.objects["TabletGroup", "events"]["status"]["conditions"]
    assert next(c["reason"] for c in kept if c["type"] == "Reconciling") == "ClusterNotKept"


def test_a_pod_that_is_refused_for_ever_does_not_keep_it_waking() -> None:
    """It is waited for as long as for a pod that does not come up; then its node is healed as any."""
    world = made()
    until_asleep(world)
    world.now_s += DAYS_S
    world.forbidden["Pod", "flights-node-4"] = "exceeded quota: pods"
    hibernate(world, False)
    waited = 0
    while (plan := world.step()).policy is None:
        waited += 1
        assert waited < 2 * PATIENCE_S
        assert not [m.name for m in plan.members if m.given_up or m.state is State.LOST]
    assert PATIENCE_S - 5 <= waited <= PATIENCE_S + 20
    lost = next(m for m in plan.members if m.name == "flights-node-4")
    assert lost.state is State.LOST and "exceeded quota" in " ".join(f.message for f in plan.findings)
    identity = world.observe().identity
    assert identity is not None and not identity.asleep and not identity.waking_s


def test_the_time_for_a_refused_pod_begins_anew_with_each_waking() -> None:
    world = made()
    until_asleep(world)
    world.forbidden["Pod", "flights-node-4"] = "exceeded quota: pods"
    hibernate(world, False)
    for _ in range(20):
        world.step()
    hibernate(world)
    while "Hibernated" not in reasons(world.step()):
        pass
    world.now_s += DAYS_S
    hibernate(world, False)
    for _ in range(PATIENCE_S // 2):
        plan = world.step()
        assert not [m.name for m in plan.members if m.given_up or m.state is State.LOST]
    world.forbidden.clear()
    until_awake(world)


@pytest.mark.parametrize("passes", range(0, 8))
def test_an_identity_that_is_lost_meanwhile_wakes_without_a_loss(passes: int) -> None:
    """It does not remember that the cluster sleeps. All that is rebuilt counts as asleep, until everybody is back."""
    world = made()
    before = claims(world)
    until_asleep(world)
    world.now_s += DAYS_S
    hibernate(world, False)
    world.silent.add("flights-node-4")  # it is slow to come
    for _ in range(passes):
        world.step()
    del world.objects["ConfigMap", "flights-identity"]
    for _ in range(90):
        plan = world.step()
        assert not [m.name for m in plan.members if m.given_up or m.state is State.LOST]
        assert not reasons(plan) & {"NodeLost", "MasterLost", "TooManyLost"}
    world.silent.clear()
    while world.step().policy is None:
        pass
    assert claims(world) == before and {m.state for m in make_plan(world.observe()).members} == {State.READY}


def test_an_identity_that_is_lost_while_it_sleeps_lets_it_sleep() -> None:
    world = made()
    until_asleep(world)
    del world.objects["ConfigMap", "flights-identity"]
    for _ in range(5):
        plan = step(world)
    assert "Hibernated" in reasons(plan) and not names(world, "Pod")
    until_awake(world)
