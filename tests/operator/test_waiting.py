"""Members that no machine takes yet: what they leave to those who have run, and when their turn comes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele_operator.plan import make_plan
from stele_operator.plan.actions import DeletePod
from stele_operator.plan.fates import State
from stele_operator.plan.status import restart_pending
from tests.operator.world import REQUIRED, World
from tests.operator.worlds import check, node_of

NEW = {"node": "flights-node-3", "master": "flights-master-3"}
ROLES = pytest.mark.parametrize("role", ["node", "master"])


def one_too_few(volumes_move: bool = False) -> World:
    """Three machines, each with a node and a master; one is lost for good, so those that replace its two wait."""
    world = World({"nodes": {"replicas": 3}, "healing": {"machineLostAfter": "5s"}}, machines=3)
    world.volumes_move = volumes_move
    world.run()
    world.kill("n3")
    for _ in range(8):
        world.step()
    world.run()
    for name in NEW.values():
        assert machine(world, name) == ""
    return world


def machine(world: World, name: str) -> str:
    """Where a pod runs; empty: nowhere yet."""
    return str(world.objects["Pod", name]["spec"].get("nodeName", ""))


def states(world: World) -> dict[str, State]:
    """Of each member."""
    return {m.name: m.state for m in make_plan(world.observe()).members}


def uids(world: World) -> dict[str, str]:
    """Of the pods that run."""
    return {p["metadata"]["name"]: p["metadata"]["uid"] for p in world.of("Pod") if "nodeName" in p["spec"]}


@pytest.mark.parametrize("volumes_move", [False, True], ids=["volumes stay", "volumes move"])
@ROLES
def test_a_pod_that_is_deleted_comes_back_though_another_waits_for_a_machine(
    role: str, volumes_move: bool
) -> None:
    """The scheduler looks at the one that waits before the operator has made the deleted one again."""
    world = one_too_few(volumes_move)
    before = states(world)
    for where in ("n1", "n2"):
        name = node_of(world, where, role)
        del world.objects["Pod", name]
        world.settle()
        assert machine(world, NEW[role]) == ""
        world.run()
        assert machine(world, name) == where
        assert machine(world, NEW[role]) == ""
    world.now_s += 3600
    world.settle()
    world.run()
    assert states(world) == before
    check(world)


@ROLES
def test_the_machine_comes_back_and_who_waits_takes_it(role: str) -> None:
    world = one_too_few()
    world.machines = [replace(m, ready=True) for m in world.machines]
    world.run()
    assert machine(world, NEW[role]) == "n3"
    check(world)


@ROLES
def test_a_machine_that_is_free_is_taken_once_it_is_up_and_no_reason_to_make_a_pod_again_before(
    role: str,
) -> None:
    """The pod was made before the one that ran there was retired."""
    world = one_too_few()
    pod = world.objects["Pod", NEW[role]]
    pod["metadata"]["annotations"]["stele.dev/keeps-off"] = "n1,n2,n3"
    (term,) = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    term["matchFields"].append({"key": "metadata.name", "operator": "NotIn", "values": ["n3"]})
    assert not world.step().actions
    world.machines = [replace(m, ready=True) for m in world.machines]
    world.run()
    assert machine(world, NEW[role]) == "n3"


@ROLES
def test_a_machine_is_added_and_who_waits_takes_it_at_once(role: str) -> None:
    world = one_too_few()
    world.machines.append(replace(world.machines[0], name="n4"))
    world.settle()
    assert machine(world, NEW[role]) == "n4"


def test_a_node_is_retired_and_who_waits_takes_its_machine() -> None:
    """Its machine is well, its process is not. A second master of three would take the majority with it."""
    world = one_too_few()
    name = node_of(world, "n2")
    world.silent.add(name)
    for _ in range(310):
        world.step()
    assert ("Pod", name) not in world.objects
    assert machine(world, NEW["node"]) == "n2"
    check(world)


def test_more_nodes_than_machines_are_at_rest_and_nothing_that_runs_is_made_again() -> None:
    world = World({"nodes": {"replicas": 5}})
    world.run()
    before = uids(world)
    world.cluster["spec"]["nodes"]["replicas"] = 7
    world.run()
    assert uids(world) == before and len(before) == 8
    assert not restart_pending(world.observe())
    for name in ("flights-node-5", "flights-node-6"):
        affinity = world.objects["Pod", name]["spec"]["affinity"]
        (term,) = affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
        assert term["matchFields"] == [
            {"key": "metadata.name", "operator": "NotIn", "values": [f"n{i}"]} for i in range(1, 6)
        ]
    messages = [f.message for f in make_plan(world.observe()).findings if f.reason == "NodePending"]
    assert len(messages) == 2 and all("n1, n2, n3, n4, n5" in m for m in messages)
    check(world)


def test_all_are_made_at_once_and_the_one_that_got_no_machine_leaves_them_to_the_others() -> None:
    """Nobody has run yet when their pods are made."""
    world = World({"nodes": {"replicas": 6}})
    world.run()
    (waiting,) = [name for name, state in states(world).items() if state is State.PENDING]
    del world.objects["Pod", node_of(world, "n2")]
    world.settle()
    assert machine(world, waiting) == ""
    world.run()
    assert sum(s is State.READY for s in states(world).values()) == 8


def test_a_pod_that_was_made_by_an_operator_that_did_not_know_of_it_is_made_again() -> None:
    world = one_too_few()
    pod = world.objects["Pod", "flights-node-3"]
    del pod["metadata"]["annotations"]["stele.dev/keeps-off"]
    del pod["spec"]["affinity"]["nodeAffinity"]
    before = uids(world)
    world.run()
    again = world.objects["Pod", "flights-node-3"]
    assert again["metadata"]["annotations"]["stele.dev/keeps-off"] == "n1,n2"
    assert uids(world) == before


@pytest.mark.parametrize("spread", ["Required", "Preferred"])
def test_only_nodes_that_never_share_a_machine_leave_it_to_others(spread: str) -> None:
    spec = {"masters": {"replicas": 1}, "nodes": {"replicas": 3, "machineSpread": spread}}
    world = World(spec, machines=2)
    world.run()
    pods = (p for p in world.of("Pod") if p["metadata"]["labels"]["stele.dev/role"] == "node")
    kept = [p for p in pods if "nodeAffinity" in p["spec"]["affinity"]]
    assert len(kept) == (1 if spread == "Required" else 0)


@ROLES
def test_all_is_applied_again_and_who_never_ran_leaves_the_machines_to_those_who_did(role: str) -> None:
    """No master can be asked yet."""
    world = one_too_few()
    confirmed, world.confirmed = world.confirmed, set()
    for name in [p["metadata"]["name"] for p in world.of("Pod")]:
        del world.objects["Pod", name]
    world.step()
    affinity = {p["metadata"]["name"]: p["spec"]["affinity"] for p in world.of("Pod")}
    assert "nodeAffinity" in affinity[NEW[role]]
    assert sum("nodeAffinity" in a for a in affinity.values()) == 2
    world.confirmed = confirmed
    world.run()
    assert machine(world, f"flights-{role}-0") == "n1" and machine(world, NEW[role]) == ""


def test_nothing_is_made_again_while_no_master_can_say_who_ran_where() -> None:
    """Nobody else knows it of a node without a pod whose volume reaches all machines: its own would be given away."""
    world = one_too_few(volumes_move=True)
    confirmed, world.confirmed = world.confirmed, set()
    del world.objects["Pod", node_of(world, "n1")]
    assert not [a for a in make_plan(world.observe()).actions if isinstance(a, DeletePod)]
    world.confirmed = confirmed
    world.run()
    assert machine(world, "flights-node-0") == "n1"


def test_a_new_member_is_given_no_zone_whose_only_machine_another_comes_back_to() -> None:
    """The zone stands for good: the new one would wait there until there is another machine."""
    world = World({"zones": ["z2", "z1", "z3"], "nodes": {"replicas": 3}}, machines=4)
    world.run()
    name = node_of(world, "n2", "node")
    del world.objects["Pod", name]
    world.cluster["spec"]["nodes"]["replicas"] = 4
    world.settle()
    world.run()
    (claim,) = (
        c["metadata"] for c in world.of("PersistentVolumeClaim") if c["metadata"]["name"] == NEW["node"]
    )
    assert machine(world, name) == "n2"
    assert claim["annotations"]["stele.dev/zone"] == "z1"  # where n4 is free
