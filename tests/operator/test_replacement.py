"""Members that are lost for good: taken out, let go, and replaced under new serials; or a case for a human."""

from __future__ import annotations

import re

from stele_operator.plan import make_plan
from stele_operator.plan.fates import Fate, State
from stele_operator.plan.findings import Kind
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


def test_masters_whose_volumes_are_gone_for_good_are_a_case_for_a_human() -> None:
    world = made()
    masters = sorted(n for n in names(world, "PersistentVolumeClaim") if "master" in n)

    def stalled() -> dict[str, str]:
        return {f.reason: f.message for f in make_plan(world.observe()).findings if f.kind is Kind.STALLED}

    assert "MastersLost" not in stalled()
    for name in masters[:2]:
        del world.objects["PersistentVolumeClaim", name]
        del world.objects["Pod", name]
    world.confirmed = set(sorted(world.confirmed)[:1])
    assert not world.leads()
    assert "1 of 3" in stalled()["MastersLost"]
    assert "kubectl delete pvc -l stele.dev/cluster=flights" in stalled()["MastersLost"]
