"""Members that are lost for good: taken out, let go, and replaced under new serials; or a case for a human."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from stele.driver.view import NodeState
from stele.model.ids import NodeId
from stele_operator.plan import Plan, make_plan
from stele_operator.plan.actions import CreatePod, DeleteClaim
from stele_operator.plan.fates import Fate, State
from stele_operator.plan.findings import Kind
from stele_operator.plan.status import cluster_status
from tests.operator.world import World
from tests.operator.worlds import check, made, names, node_of


def test_a_machine_lost_for_good_loses_node_and_master_and_both_are_replaced() -> None:
    world = made()
    node, master = node_of(world, "n1"), node_of(world, "n1", "master")
    world.kill("n1")
    world.settle()
    plan = None
    for _ in range(601):
        plan = world.step()
        check(world)
    assert plan is not None
    by_name = {m.name: m for m in plan.members}
    assert by_name[node].state is State.LOST or by_name[node].state is State.RETIRED
    world.run()
    assert ("Pod", node) not in world.objects
    assert ("Pod", master) not in world.objects
    released = world.objects["PersistentVolumeClaim", node]["metadata"]["annotations"]
    assert re.fullmatch(r"\d+", released["stele.dev/released-at"])
    retired = next(m for m in make_plan(world.observe()).members if m.name == node)
    assert (retired.state, retired.fate) == (State.RETIRED, Fate.NONE)
    assert "flights-master-3" in names(world, "Pod")
    assert "--join" in world.objects["Pod", "flights-master-3"]["spec"]["containers"][0]["args"]
    assert "flights-node-5" in names(world, "Pod")  # waits for a machine: there are four
    findings = {f.reason for f in make_plan(world.observe()).findings}
    assert "NodePending" in findings
    world.now_s += 24 * 3600 + 1
    world.settle()
    world.run()
    assert ("PersistentVolumeClaim", node) not in world.objects


def test_a_replacement_goes_to_the_zone_of_the_one_that_was_lost() -> None:
    spec = {"zones": ["z1", "z2", "z3"], "nodes": {"replicas": 3}, "healing": {"machineLostAfter": "40s"}}
    world = World(spec, machines=9)
    world.run()

    def zones(role: str) -> dict[str, str]:
        claims = (o["metadata"] for o in world.of("PersistentVolumeClaim"))
        return {c["name"]: c["annotations"]["stele.dev/zone"] for c in claims if role in c["name"]}

    assert zones("node") == {f"flights-node-{n}": f"z{n + 1}" for n in range(3)}
    machine = world.objects["Pod", "flights-node-1"]["spec"]["nodeName"]
    assert world.objects["Pod", "flights-master-1"]["spec"]["nodeName"] == machine
    world.kill(machine)
    for _ in range(60):
        world.step()
    assert (zones("node")["flights-node-3"], zones("master")["flights-master-3"]) == ("z2", "z2")


def test_a_lost_volume_means_a_new_node_under_a_new_serial() -> None:
    world = made()
    name = node_of(world, "n2")
    del world.objects["PersistentVolumeClaim", name]
    del world.objects["Pod", name]
    for _ in range(8):
        world.step()
    world.run()
    assert ("Pod", name) not in world.objects
    assert "flights-node-5" in names(world, "Pod")
    check(world)


def a_day_after_a_node_was_replaced() -> tuple[World, str]:
    """The claim of the one that was retired is due to go."""
    world = made()
    world.machines.append(replace(world.machines[0], name="n6"))
    name = node_of(world, "n5")
    world.cluster["spec"]["healing"] = {"machineLostAfter": "5s"}
    world.kill("n5")
    for _ in range(8):
        world.step()
    world.run()
    assert "stele.dev/released-at" in world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
    world.now_s += 24 * 3600 + 1
    world.settle()
    return world, name


def deletes(plan: Plan) -> list[str]:
    """Names of the claims that a plan deletes."""
    return [a.name for a in plan.actions if isinstance(a, DeleteClaim)]


@pytest.mark.parametrize("down", [1, 2])
def test_a_volume_that_was_let_go_is_not_deleted_while_tablets_lack_a_voter(down: int) -> None:
    """It may be the last that holds their rows; what was due is done once nothing can need it any more."""
    world, name = a_day_after_a_node_was_replaced()
    heard = dict(world.heard_s)
    for peer in world.tablets[0].config.peers[:down]:
        world.heard_s[peer.node_id] -= 3600
    plan = make_plan(world.observe())
    assert not deletes(plan)
    (kept,) = [f.message for f in plan.findings if f.reason == "ClaimKept"]
    assert name in kept and world.tablets[0].tablet_id[:8] in kept
    world.heard_s = heard
    plan = make_plan(world.observe())
    assert deletes(plan) == [name]
    assert not plan.findings


def test_tables_of_one_replica_do_not_keep_a_volume_that_was_let_go_for_ever() -> None:
    """They never have a voter to spare; that their only one serves is all that can be asked for."""
    world, name = a_day_after_a_node_was_replaced()
    world.tablets = [
        replace(
            t,
            config=replace(t.config, peers=t.config.peers[:1]),
            replication_factor=1,
            leader_node=t.config.peers[0].node_id,
        )
        for t in world.tablets
    ]
    assert deletes(make_plan(world.observe())) == [name]
    world.heard_s[world.tablets[0].leader_node] -= 3600
    assert not deletes(make_plan(world.observe()))


def applied_again(world: World, masters: int) -> None:
    """Deleted under Retain, and applied with another number of masters, which the API server cannot know of."""
    for name in names(world, "Pod"):
        del world.objects["Pod", name]
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    world.cluster["spec"]["masters"] = {"replicas": masters}


def stalled(world: World) -> dict[str, str]:
    """What waits for a human, by its reason."""
    return {f.reason: f.message for f in make_plan(world.observe()).findings if f.kind is Kind.STALLED}


@pytest.mark.parametrize("asked", [1, 5])
def test_a_cluster_that_is_applied_again_gets_the_number_of_masters_asked_for(asked: int) -> None:
    world = made()
    world.finalized = world.readable = 2
    applied_again(world, asked)
    for _ in range(60):
        world.step()
        check(world)
        assert "MastersLost" not in stalled(world)
    world.run()
    assert len(world.voters) == world.masters_wanted == asked and not stalled(world)
    assert len([n for n in names(world, "Pod") if "master" in n]) == asked


def test_a_lost_master_is_replaced() -> None:
    world = made()
    world.silent.add("flights-master-1")
    told = set()
    for _ in range(315):
        world.step()
        o = world.observe()
        conditions = cluster_status(o, make_plan(o), (), "2026-01-01T00:00:00Z")["conditions"]
        told |= {c["message"] for c in conditions}
    assert "2 of 3 masters hold the catalog" in told
    there = [n for n in names(world, "Pod") if "master" in n]
    assert there == ["flights-master-0", "flights-master-2", "flights-master-3"]
    check(world)


def test_masters_whose_volumes_are_gone_for_good_are_a_case_for_a_human() -> None:
    world = made()
    masters = sorted(n for n in names(world, "PersistentVolumeClaim") if "master" in n)
    world.confirmed = set(sorted(world.confirmed)[:1])
    assert not world.leads()
    for name in masters[:2]:
        for asked in (1, 3, 5):
            world.cluster["spec"]["masters"] = {"replicas": asked}
            assert "MastersLost" not in stalled(world), "the volumes of two could still elect a leader"
        del world.objects["PersistentVolumeClaim", name]
        del world.objects["Pod", name]
    for asked in (1, 3, 5):
        world.cluster["spec"]["masters"] = {"replicas": asked}
        assert "1 of 3" in stalled(world)["MastersLost"]
        assert "kubectl delete pvc -l stele.dev/cluster=flights" in stalled(world)["MastersLost"]


@pytest.mark.parametrize("leaderless_after", range(6))
def test_a_retired_node_is_not_started_again_while_no_master_leads(leaderless_after: int) -> None:
    """Its pod is deleted because the masters say RETIRED; from then on nobody starts it, whoever can be asked or not."""
    world = made()
    name = node_of(world, "n2")
    node_id = NodeId(world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"])
    world.tables, world.tablets = [], []
    world.nodes[node_id] = replace(world.nodes[node_id], state=NodeState.RETIRED)
    for _ in range(leaderless_after):
        world.step()
    there = [names(world, "Pod").count(name)]
    confirmed, world.confirmed = world.confirmed, set()
    for _ in range(5):
        plan = world.step()
        assert not any(isinstance(a, CreatePod) and a.name == name for a in plan.actions)
        there.append(names(world, "Pod").count(name))
    assert len(set(there)) == 1, "while nobody confirms it, nothing is taken away either"
    world.confirmed = confirmed
    world.run()
    assert ("Pod", name) not in world.objects
    annotations = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
    assert "stele.dev/released-at" in annotations
    check(world)


def test_the_masters_decide_who_is_retired_not_what_stands_on_a_claim() -> None:
    """Their catalog was restored from an older moment, or somebody wrote on a claim."""
    world = made()
    name = node_of(world, "n2")
    claim = world.objects["PersistentVolumeClaim", name]
    claim["metadata"]["annotations"]["stele.dev/retired-at"] = f"{world.now_s:.0f}"
    world.run()
    assert ("Pod", name) in world.objects
    del world.objects["Pod", name]
    world.run()
    assert ("Pod", name) in world.objects
    assert "stele.dev/released-at" not in claim["metadata"]["annotations"]
