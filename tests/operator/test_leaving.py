"""Nodes that the spec wants away: scale in, nodes.retire, nodes.park. Who goes, when, and how it is set back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stele.driver.view import NodeState, NodeView, Wanted
from stele.model.ids import NodeId
from stele_operator.plan import Plan, make_plan
from stele_operator.plan.fates import Member, State
from stele_operator.plan.observation import Machine
from stele_operator.plan.status import cluster_status
from tests.operator.world import World
from tests.operator.world_masters import move, wanted
from tests.operator.worlds import check, names

Json = dict[str, Any]


def made(nodes: int = 5, **more: Any) -> World:
    """A cluster of so many nodes with a table of four tablets."""
    world = World({"nodes": {"replicas": nodes, **more}}, machines=max(5, nodes))
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    return world


def change(world: World, **nodes: Any) -> None:
    """Another spec.nodes."""
    world.cluster["spec"]["nodes"] |= nodes
    world.touch(world.cluster)


def members(world: World) -> dict[str, Member]:
    """The nodes by name."""
    return {m.name: m for m in make_plan(world.observe()).members if m.role == "node"}


def states(world: World) -> dict[str, State]:
    """Their states."""
    return {name: m.state for name, m in members(world).items()}


def ask(world: World, name: str, what: Wanted, by: str = "administrator", left_ms: int = 0) -> None:
    """Somebody asks for it by hand."""
    node_id = NodeId(members(world)[name].node_id)
    world.nodes[node_id] = wanted(world.nodes[node_id], what, by, "by hand", left_ms)


def reasons(plan: Plan) -> dict[str, str]:
    """Findings by reason."""
    return {f.reason: f.message for f in plan.findings}


@pytest.mark.parametrize("prefix", [None, 1, 2])
def test_scale_in_drains_and_retires_the_newest_and_lets_their_claims_go(prefix: int | None) -> None:
    world = made(6)
    change(world, replicas=4)
    plan = make_plan(world.observe())
    assert plan.policy is not None and plan.policy.retiring is not None
    named = {members(world)[n].node_id for n in ("flights-node-5", "flights-node-4")}
    assert set(plan.policy.retiring) == named
    assert "flights-node-4, flights-node-5" in reasons(plan)["NodesLeaving"], "named before anything is done"
    assert {world.nodes[NodeId(n)].state for n in named} == {NodeState.ACTIVE}
    for _ in range(40):
        world.step(prefix)
        check(world)
    world.run()
    assert [n for n, s in states(world).items() if s is State.READY] == [
        f"flights-node-{i}" for i in range(4)
    ]
    assert not {"flights-node-4", "flights-node-5"} & set(names(world, "Pod"))
    for name in ("flights-node-4", "flights-node-5"):
        notes = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
        assert "stele.dev/released-at" in notes
    assert not {p.node_id for t in world.tablets for p in t.config.peers} & named
    status = cluster_status(world.observe(), make_plan(world.observe()), (), "now")
    assert status["replicas"] == status["readyReplicas"] == 4


def test_the_same_nodes_leave_from_pass_to_pass_and_set_back_they_stay() -> None:
    world = made(6)
    world.drains = False
    change(world, replicas=4)
    for _ in range(5):
        world.step()
        assert [n for n, s in states(world).items() if s is State.DRAINING] == [
            "flights-node-4",
            "flights-node-5",
        ]
    found = reasons(world.step())
    assert "is retired once no tablet names it (nodes.replicas is 4)" in found["NodeDraining"]
    assert "NodeLost" not in found
    move(world, members(world)["flights-node-0"].node_id)  # it holds nothing: chosen now, it would go first
    for _ in range(3):
        world.step()
        assert [n for n, s in states(world).items() if s is State.DRAINING] == [
            "flights-node-4",
            "flights-node-5",
        ]
    change(world, replicas=5)
    world.step()
    assert states(world)["flights-node-4"] is State.READY
    assert states(world)["flights-node-5"] is State.DRAINING
    change(world, replicas=6)
    world.run()
    assert set(states(world).values()) == {State.READY}
    assert len(names(world, "PersistentVolumeClaim")) == 9, "no node was made in the place of one that stays"


def test_scale_in_is_refused_where_the_others_cannot_take_the_replicas() -> None:
    world = made(3)
    change(world, replicas=2)
    plan = world.step()
    message = reasons(plan)["DrainRefused"]
    assert "flights-node-2 cannot be drained" in message and "3 replicas need a machine each" in message
    assert "2 machines with a node in service would be left" in message
    assert set(states(world).values()) == {State.READY}
    change(world, replicas=3)
    assert "DrainRefused" not in reasons(world.step())


def test_scale_in_waits_until_enough_others_are_ready() -> None:
    world = made(5)
    world.silent.add("flights-node-1")
    for _ in range(5):
        world.step()
    change(world, replicas=4)
    plan = world.step()
    # The silent one would go first. It is waited for, or given up by the rules of healing.
    assert "flights-node-1" in [m.name for m in plan.members if m.state is not State.READY]
    assert State.DRAINING not in [s for n, s in states(world).items() if n != "flights-node-1"]


def test_nodes_in_the_fullest_zone_go_first() -> None:
    """Five machines in three zones: z1 and z2 have two each."""
    world = made(5)
    change(world, replicas=4)
    plan = make_plan(world.observe())
    assert plan.policy is not None and plan.policy.retiring is not None
    zones = [
        m.node.zone if m.node and m.node.zone else (m.claim.zone if m.claim else "") for m in plan.members
    ]
    (gone,) = [m for m in plan.members if m.node_id in plan.policy.retiring]
    zone = (gone.claim.zone if gone.claim else "") or (gone.node.zone if gone.node else "")
    nodes = [z for z, m in zip(zones, plan.members, strict=True) if m.role == "node"]
    assert nodes.count(zone) == max(nodes.count(z) for z in nodes)


def test_a_node_that_the_spec_names_is_replaced_and_retired() -> None:
    """replicas stay as they were: another one is made first, since the others could not take its replicas."""
    world = made(3)
    world.machines.append(Machine("n9", True, "z1"))
    change(world, retire=["flights-node-1"])
    plan = world.step()
    assert "flights-node-1 cannot be drained" in reasons(plan)["DrainRefused"]
    for _ in range(20):
        world.step()
    world.run()
    now = states(world)
    assert now["flights-node-1"] is State.RETIRED
    assert [n for n, s in now.items() if s is State.READY] == [
        "flights-node-0",
        "flights-node-2",
        "flights-node-3",
    ]
    assert not {"DrainRefused", "UnknownNode"} & set(reasons(make_plan(world.observe())))


def test_the_last_node_of_a_zone_does_not_leave_where_others_could() -> None:
    """Else tablets would have two replicas in one zone, although the spec asks for three zones."""
    world = World({"nodes": {"replicas": 5}, "zones": ["z1", "z2", "z3"]})
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    zones = {
        c["metadata"]["name"]: c["metadata"]["annotations"]["stele.dev/zone"]
        for c in world.of("PersistentVolumeClaim")
        if "-node-" in c["metadata"]["name"]
    }
    (last,) = [n for n, z in zones.items() if list(zones.values()).count(z) == 1]
    change(world, replicas=4, retire=[last])
    plan = world.step()
    assert reasons(plan)["DrainRefused"] == (
        f"{last} cannot be drained: zone {zones[last]} would have no node without {last}; name nodes of other zones in "
        f"nodes.retire, or remove {zones[last]} from zones"
    )
    assert set(states(world).values()) == {State.READY}
    world.cluster["spec"]["zones"] = [z for z in ("z1", "z2", "z3") if z != zones[last]]
    for _ in range(40):
        world.step()
    assert states(world)[last] is State.RETIRED


def test_the_last_node_of_a_zone_is_replaced_in_its_zone() -> None:
    """nodes.replicas stay as they were: another one is made there first."""
    world = World({"nodes": {"replicas": 5}, "zones": ["z1", "z2", "z3"]}, machines=6)
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    zone = {m.name: m.claim.zone for m in members(world).values() if m.claim is not None}
    fewest = min(zone.values(), key=list(zone.values()).count)
    gone = [n for n, z in zone.items() if z == fewest]
    world.machines.append(Machine("n9", True, fewest))
    change(world, retire=gone[:1])
    for _ in range(40):
        world.step()
    world.run()
    now = members(world)
    assert now[gone[0]].state is State.RETIRED
    ready = [m for m in now.values() if m.state is State.READY]
    assert len(ready) == 5 and fewest in {m.claim.zone for m in ready if m.claim is not None}


def test_scale_in_by_name_makes_no_other_node() -> None:
    world = made(5)
    change(world, replicas=4, retire=["flights-node-0"])
    world.run()
    assert sorted(n for n, s in states(world).items() if s is State.READY) == [
        f"flights-node-{i}" for i in (1, 2, 3, 4)
    ]


def test_a_name_taken_away_keeps_the_node() -> None:
    world = made(5)
    world.drains = False
    change(world, replicas=4, retire=["flights-node-0"])
    for _ in range(3):
        world.step()
    assert states(world)["flights-node-0"] is State.DRAINING
    change(world, replicas=5, retire=[])
    world.run()
    assert set(states(world).values()) == {State.READY} and len(states(world)) == 5


def test_names_that_no_node_has_and_nodes_in_both_lists_are_told() -> None:
    world = made(3)
    change(world, retire=["flights-node-7"], park=["flights-node-x"])
    plan = world.step()
    messages = [f.message for f in plan.findings if f.reason == "UnknownNode"]
    assert any("flights-node-7" in m for m in messages) and any("flights-node-x" in m for m in messages)
    change(world, retire=["flights-node-1"], park=["flights-node-1"])
    plan = world.step()
    assert "both name flights-node-1" in reasons(plan)["InvalidSpec"] and plan.policy is None


def silent(world: World, name: str, seconds: int) -> Plan:
    """The node says nothing for so long."""
    world.silent.add(name)
    plan = None
    for _ in range(seconds):
        plan = world.step()
        check(world)
    assert plan is not None
    return plan


HEALING = {"witnessAfter": "5s", "silentAfter": "10s", "machineLostAfter": "10s"}


def test_a_parked_node_is_kept_while_it_is_away() -> None:
    world = made(5)
    world.cluster["spec"]["healing"] = HEALING
    change(world, park=["flights-node-1"])
    world.step()
    assert states(world)["flights-node-1"] is State.READY
    before = world.tablets
    plan = silent(world, "flights-node-1", 40)
    assert states(world)["flights-node-1"] is State.PARKED
    assert plan.policy is not None and not plan.policy.lost
    assert "its replicas wait for it" in reasons(plan)["NodeParked"]
    assert not {"NodeLost", "NodePending"} & set(reasons(plan))
    assert world.tablets == before and len(states(world)) == 5
    change(world, park=[])
    world.step()
    plan = world.step()
    assert "NodeLost" in reasons(plan) and plan.policy is not None and plan.policy.lost


def test_a_node_that_a_new_leader_has_not_heard_is_not_said_to_be_long_unready() -> None:
    """Kubernetes calls its pod ready; when it became ready is no sign of a fault."""
    world = made(5)
    world.now_s += 100
    world.step()
    node_id = NodeId(members(world)["flights-node-1"].node_id)
    world.nodes[node_id] = replace(world.nodes[node_id], ever_heard=False)
    told = reasons(make_plan(world.observe()))
    assert "NodesStarting" in told and "NodePending" not in told


def test_a_fenced_node_is_told_as_such_and_kept() -> None:
    """It sends heartbeats, and its pod is never ready."""
    world = made(5)
    world.cluster["spec"]["healing"] = HEALING
    node_id = NodeId(members(world)["flights-node-1"].node_id)
    fenced = {"wanted": Wanted.FENCED, "wanted_by": "administrator", "wanted_left_ms": 3_600_000}
    world.nodes[node_id] = replace(world.nodes[node_id], **fenced, wanted_reason="odd rows")
    for _ in range(40):
        plan = world.step()
        check(world)
    assert states(world)["flights-node-1"] is State.PARKED
    assert (
        "runs and serves nobody" in reasons(plan)["NodeParked"] and "odd rows" in reasons(plan)["NodeParked"]
    )
    assert not {"NodeLost", "NodePending"} & set(reasons(plan))


def test_the_time_of_a_parked_node_is_renewed_while_the_spec_names_it() -> None:
    world = made(5)
    change(world, park=["flights-node-1"])
    world.step()
    node_id = NodeId(members(world)["flights-node-1"].node_id)
    assert world.nodes[node_id].parked and world.nodes[node_id].wanted_by == "driver"
    world.nodes[node_id] = replace(world.nodes[node_id], wanted_left_ms=1_000)
    world.step()
    assert world.nodes[node_id].wanted_left_ms > 1_000_000


def test_two_nodes_are_not_parked_where_tablets_would_stop() -> None:
    world = made(3)
    world.cluster["spec"]["budget"] = {"maxUnavailable": 2}
    change(world, park=["flights-node-0", "flights-node-1"])
    plan = world.step()
    assert "cannot be parked" in reasons(plan)["ParkRefused"]
    assert not [n for n in world.nodes.values() if n.parked]
    change(world, park=["flights-node-0"])
    world.step()
    assert len([n for n in world.nodes.values() if n.parked]) == 1
    change(world, park=["flights-node-0", "flights-node-1"])
    plan = world.step()
    assert "flights-node-1 cannot be parked" in reasons(plan)["ParkRefused"]
    assert len([n for n in world.nodes.values() if n.parked]) == 1, "the first one stays parked"


def test_a_parked_node_whose_volume_is_gone_is_replaced() -> None:
    world = made(5)
    change(world, park=["flights-node-1"])
    world.step()
    world.silent.add("flights-node-1")
    del world.objects["PersistentVolumeClaim", "flights-node-1"]
    for _ in range(10):
        world.step()
    assert "flights-node-5" in states(world)


def test_what_an_administrator_asked_for_is_left_alone() -> None:
    world = made(5)
    ask(world, "flights-node-4", Wanted.DRAINED)
    for _ in range(5):
        world.step()
    assert states(world)["flights-node-4"] is State.DRAINING
    assert len(states(world)) == 5, "it keeps its place, so no other is made"
    assert "NodeDrained" in reasons(make_plan(world.observe()))
    change(world, replicas=4)
    plan = world.step()
    assert "only 3 of the 4 nodes that stay are ready" in reasons(plan)["ScaleInWaits"]
    now = states(world)
    assert now["flights-node-4"] is State.DRAINING and now["flights-node-3"] is State.READY
    change(world, replicas=4, retire=["flights-node-4"])
    assert "stele node undrain" in reasons(world.step())["AskedByHand"]
    node_id = NodeId(members(world)["flights-node-4"].node_id)
    assert world.nodes[node_id].asked is Wanted.DRAINED


def test_nothing_begins_to_leave_while_too_many_nodes_are_lost() -> None:
    world = made(6)
    world.cluster["spec"]["healing"] = HEALING
    world.silent |= {"flights-node-0", "flights-node-1"}
    for _ in range(12):
        world.step()
    change(world, replicas=3)
    plan = world.step()
    assert "TooManyLost" in reasons(plan)
    assert plan.policy is not None and plan.policy.retiring == {}


def test_a_view_of_masters_that_do_not_tell_what_is_wanted() -> None:
    """Of the version before: a node that it drains counts as one that is to retire."""
    draining = NodeView(NodeId("1" * 32), "node", "m", "z", "a:1", NodeState.DRAINING)
    assert draining.asked is Wanted.RETIRED
    assert replace(draining, given_up=True).asked is Wanted.IN_SERVICE
    assert replace(draining, state=NodeState.ACTIVE).asked is Wanted.IN_SERVICE


def test_a_node_that_holds_nothing_stays_too_if_the_spec_is_set_back() -> None:
    """The drain was ordered, and before the next pass somebody wanted the node again: it was retired all the same."""
    world = World({"nodes": {"replicas": 5}}, machines=6)
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 1}]})
    world.run()
    before = states(world)
    change(world, replicas=4)
    plan = make_plan(world.observe())
    assert plan.policy is not None and plan.policy.retiring is not None
    ((leaving, reason),) = plan.policy.retiring.items()
    world.nodes[NodeId(leaving)] = wanted(world.nodes[NodeId(leaving)], Wanted.RETIRED, "driver", reason)
    change(world, replicas=5)
    world.run()
    assert states(world) == before
