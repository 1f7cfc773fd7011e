"""What a new spec would do is foretold by the planners themselves, and happens as foretold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stele.driver.view import ReplicaView
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.group import TabletGroupSpec
from stele_operator.plan.foretold import Foretold, NewMember, NewReplica, Restart
from stele_operator.plan.observation import Machine, Observation
from stele_operator.plan.rehearsal import foretell
from tests.operator.world import World
from tests.operator.worlds import made, names

Json = dict[str, Any]
MIB = 1 << 20


def reported(o: Observation, size: int = 64 * MIB, free: int = 100 << 30) -> Observation:
    """The observation with the reports that nodes send of their replicas and disks."""
    assert o.catalog is not None
    tablets = tuple(
        replace(
            t,
            replicas=tuple(ReplicaView(p.node_id, p.replica_id, bytes_on_disk=size) for p in t.config.peers),
        )
        for t in o.catalog.view.tablets
    )
    nodes = tuple(replace(n, disk_free_bytes=free, disk_used_bytes=1) for n in o.catalog.view.nodes)
    view = replace(o.catalog.view, tablets=tablets, nodes=nodes)
    return replace(o, catalog=replace(o.catalog, view=view))


def ask(world: World, spec: Json, groups: dict[str, Json] | None = None, **more: Any) -> Foretold:
    """What this spec of the cluster, and these of its TabletGroups, would do."""
    o = reported(world.observe(), **more)
    assert o.catalog is not None
    changed = tuple(
        replace(g, spec=TabletGroupSpec.model_validate((groups or {})[g.name]))
        if g.name in (groups or {})
        else g
        for g in o.groups
    )
    after = replace(
        o, cluster=replace(o.cluster, spec=TabletClusterSpec.model_validate(spec)), groups=changed
    )
    return foretell(o, after, o.catalog)


def pods(told: Foretold, kind: str) -> list[str]:
    """The pods that events of a kind name, in their order."""
    return [e.pod for e in told.events if not isinstance(e, NewReplica) and e.kind == kind]


def copies(told: Foretold) -> list[NewReplica]:
    return [e for e in told.events if isinstance(e, NewReplica)]


def test_the_present_spec_does_nothing() -> None:
    told = ask(made(), {"nodes": {"replicas": 5}})
    assert told.fine and not told.events and not told.anyway and not told.unmet
    assert told.lines()[1:] == [
        "nothing: the cluster is as this spec asks",
        "OK: the spec is reached, and every tablet can be used meanwhile",
    ]


def test_an_image_restarts_masters_first_and_the_real_roll_takes_the_same_order() -> None:
    from tests.operator.test_rolling import roll

    world = made()
    told = ask(world, {"nodes": {"replicas": 5}, "image": "stele/node:next"})
    assert told.complete and told.fine and not copies(told)
    restarts = [e for e in told.events if isinstance(e, Restart)]
    assert all(not e.stopped for e in restarts) and sum(e.leaders for e in restarts) == 4
    assert max(e.no_spare for e in restarts) > 0
    (line,) = told.order()
    assert line.startswith("8 pods made again on their volumes, one at a time: flights-master-")
    world.cluster["spec"]["image"] = "stele/node:next"
    assert pods(told, Restart.kind) == roll(world)
    assert ask(world, {"nodes": {"replicas": 5}, "image": "stele/node:next"}).events == ()


def test_nodes_that_may_be_away_together_are_told() -> None:
    world = World({"nodes": {"replicas": 6}}, machines=6)
    world.group("events", replicationFactor=1, partitioning={"hash": [{"columns": ["id"], "buckets": 2}]})
    world.group("more", replicationFactor=3)
    world.run()
    spec = {"nodes": {"replicas": 6}, "image": "x", "budget": {"maxUnavailable": 3}}
    told = ask(world, spec)
    restarts = [e for e in told.events if isinstance(e, Restart)]
    assert told.complete and len(restarts) == 9 and max(e.beside for e in restarts) == 2, told.lines()
    assert any("at most 3 at once" in line for line in told.order())
    assert all(e.beside == 0 for e in restarts if "master" in e.pod)
    assert sum(len(e.stopped) for e in restarts) == 2, "only those of one replica"


def test_owner_and_history_of_a_table_are_foretold_as_one_change() -> None:
    world = made()
    (raw,) = world.of("TabletGroup")
    changed = {**raw["spec"], "owner": "ops", "historyRetention": "7d"}
    told = ask(world, {"nodes": {"replicas": 5}}, {raw["metadata"]["name"]: changed})
    assert told.fine, told.lines()
    assert any("asks for other history retention and owner" in line for line in told.lines())


def test_scale_out_makes_nodes_and_fills_them() -> None:
    world = made()
    world.machines.append(Machine("n6", True, "z3"))
    told = ask(world, {"nodes": {"replicas": 6}, "budget": {"bytesPerSecond": "64Mi", "copies": 4}})
    assert told.fine
    assert [e for e in told.events if isinstance(e, NewMember)] == [NewMember("flights-node-5", "", "n6")]
    assert {c.to_pod for c in copies(told)} == {"flights-node-5"}
    assert told.bytes_copied == len(copies(told)) * 64 * MIB
    assert told.copying_s == told.bytes_copied / (32 * MIB), "moves get half of the rate"
    assert any("copied" in line and "flights-node-5" in line for line in told.lines())


def test_scale_out_without_a_machine_is_not_reached() -> None:
    told = ask(made(), {"nodes": {"replicas": 6}})
    assert not told.fine and pods(told, NewMember.kind) == ["flights-node-5"]
    (unmet,) = told.unmet
    assert unmet.reason == "NodePending" and "add a machine" in unmet.message and not unmet.already


def test_scale_in_names_the_nodes_that_go_and_where_their_replicas_go() -> None:
    world = made()
    told = ask(world, {"nodes": {"replicas": 4}})
    assert told.fine, told.lines()
    (gone,) = pods(told, "retire")
    assert pods(told, "drain") == [gone]
    held = next(m for m in world.node_names if world.node_names[m] == gone)
    assert len(copies(told)) >= sum(p.node_id == held for t in world.tablets for p in t.config.peers)
    world.cluster["spec"]["nodes"]["replicas"] = 4
    world.run()
    assert world.nodes[held].state.name == "RETIRED"


def test_scale_in_below_the_factor_is_not_reached() -> None:
    world = made()
    told = ask(world, {"nodes": {"replicas": 2}})
    assert not told.fine and not copies(told)
    assert "3 replicas need a machine each" in next(
        u.message for u in told.unmet if u.reason == "DrainRefused"
    )
    assert not pods(told, "drain")


def test_scale_in_without_room_is_not_reached() -> None:
    told = ask(made(), {"nodes": {"replicas": 4}}, size=40 << 30, free=20 << 30)
    assert "no node in service on another machine has room" in told.unmet[0].message
    assert not told.events


def test_a_higher_factor_is_copied_and_a_lower_one_leaves_tables_without_spare() -> None:
    world = made()
    (raw,) = world.of("TabletGroup")
    spec = raw["spec"]
    told = ask(world, {"nodes": {"replicas": 5}}, {"events": {**spec, "replicationFactor": 5}})
    assert told.fine and len(copies(told)) == 8 and {c.from_pod for c in copies(told)} == {""}
    told = ask(world, {"nodes": {"replicas": 5}}, {"events": {**spec, "replicationFactor": 1}})
    assert told.fine and not copies(told) and pods(told, "remove")
    assert told.weaker == ("4 tablets of events cannot lose a replica any more",)
    told = ask(world, {"nodes": {"replicas": 5}}, {"events": {**spec, "replicationFactor": 7}})
    assert [(u.reason, u.group) for u in told.unmet] == [("TooFewNodes", "events")] and not told.fine


def test_tablets_of_one_replica_cannot_be_used_meanwhile() -> None:
    world = World({"nodes": {"replicas": 3}})
    world.group("single", replicationFactor=1)
    world.run()
    told = ask(world, {"nodes": {"replicas": 3}, "image": "x"})
    assert not told.fine and sum(len(e.stopped) for e in told.events if isinstance(e, Restart)) == 1
    assert any(line.startswith("AT RISK: these cannot be used") for line in told.lines())


def test_what_happens_anyway_is_told_apart() -> None:
    world = made()
    world.cluster["spec"]["image"] = "x"  # not rolled out yet
    told = ask(world, {"nodes": {"replicas": 5}, "image": "x", "paused": True})
    assert not pods(told, Restart.kind) and any("8 pods made again" in line for line in told.anyway)
    assert told.fine and "nothing is created, changed or healed" in told.notes[0]
    world.kill("n2")
    for _ in range(5):
        world.step()
    told = ask(world, {"nodes": {"replicas": 5}, "image": "y"})
    assert {u.reason for u in told.unmet if u.already} >= {"RollWaits"} and not pods(told, Restart.kind)
    assert told.fine == told.lines()[-1].startswith("OK: apart from what is so now, the spec is reached")


def test_what_has_another_cause_now_is_not_as_now() -> None:
    world = made()
    world.cluster["spec"]["nodes"]["replicas"] = 6  # there are five machines
    for _ in range(3):
        world.step()
    told = ask(world, {"nodes": {"replicas": 6}, "image": "x"})
    assert [u.reason for u in told.unmet if u.already] == ["NodePending"]
    told = ask(world, {"nodes": {"replicas": 7}})
    assert [u.already for u in told.unmet if u.reason == "NodePending"] == [True, False] and not told.fine
    world = made()
    world.cluster["spec"]["image"] = "x"
    told = ask(world, {"nodes": {"replicas": 5}, "image": "x"})
    assert told.lines()[-2] == "without this change too: all of it"


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ({"nodes": {"replicas": 5, "park": ["flights-node-1"]}}, "park", "is parked: nodes.park names it"),
        ({"nodes": {"replicas": 5}, "hibernate": True}, "stop", "its claim is kept"),
        ({"nodes": {"replicas": 5, "storage": {"size": "20Gi"}}}, "grow", "its volume grows to 20Gi"),
        ({"nodes": {"replicas": 5}, "deletionPolicy": "Delete"}, "owner", "goes with the TabletCluster"),
        (
            {"nodes": {"replicas": 5}, "healing": {"maxLostNodes": 2}},
            "policy",
            "the masters heal by the new policy",
        ),
    ],
)
def test_other_changes_are_told(spec: Json, kind: str, words: str) -> None:
    told = ask(made(), spec)
    assert told.complete and pods(told, kind), told.lines()
    assert any(words in line for line in told.lines())


def test_a_cluster_that_is_put_to_sleep_serves_nothing() -> None:
    told = ask(made(), {"nodes": {"replicas": 5}, "hibernate": True})
    assert told.sleeps and not told.fine and len(pods(told, "stop")) == 8
    assert pods(told, "stop")[-1].startswith("flights-master-"), "masters stop last"


def test_what_applies_to_new_members_alone_is_a_note() -> None:
    world = made()
    told = ask(world, {"nodes": {"replicas": 5, "storage": {"size": "5Gi"}}, "zones": ["z1", "z2"]})
    assert any("a volume cannot be made smaller" in note for note in told.notes)
    assert any("apply to new members" in note for note in told.notes)
    told = ask(world, {"nodes": {"replicas": 5}, "zones": ["z9"]})
    assert {u.reason for u in told.unmet} == {"UnknownZone"} and not told.fine


def test_what_waits_for_somebody_is_a_note() -> None:
    world = made()
    spec = {"nodes": {"replicas": 5}, "image": "x", "updateStrategy": "OnDelete", "version": "0.2"}
    told = ask(world, spec)
    assert told.fine and not pods(told, Restart.kind)
    assert any("until somebody deletes them: flights-master-0" in note for note in told.notes)
    assert any("cluster version 2 waits for" in note for note in told.notes)
    world.readable = 2
    told = ask(world, spec)
    assert any("cannot be taken back" in line for line in told.order())


def test_more_masters_and_fewer() -> None:
    world = made()
    world.finalized = world.readable = 2
    told = ask(world, {"nodes": {"replicas": 5}, "masters": {"replicas": 5}})
    assert told.fine and not told.unmet, told.lines()
    new = ["flights-master-3", "flights-master-4"]
    assert pods(told, NewMember.kind) == new and {c.to_pod for c in copies(told)} == set(new)
    assert [e.kind for e in told.events] == ["new", "new", "masters", "copy", "copy"]
    assert "the number of masters becomes 5; it was 3" in told.order()
    world.cluster["spec"]["masters"] = {"replicas": 5}
    world.run()
    told = ask(world, {"nodes": {"replicas": 5}, "masters": {"replicas": 1}})
    assert told.fine and len(pods(told, "retire")) == 4 and not copies(told), told.lines()
    assert told.weaker == ("1 tablet of the catalog cannot lose a replica any more",)
    world.cluster["spec"]["masters"] = {"replicas": 1}
    world.run()
    assert sorted(pods(told, "retire")) == sorted(
        {f"flights-master-{i}" for i in range(5)} - {n for n in names(world, "Pod") if "master" in n}
    )


def test_more_masters_than_machines_are_not_reached() -> None:
    world = World({"nodes": {"replicas": 3}}, machines=3)
    world.run()
    world.finalized = world.readable = 2
    told = ask(world, {"nodes": {"replicas": 3}, "masters": {"replicas": 5}})
    assert [u.reason for u in told.unmet] == ["TooFewMachines"] and not told.events and not told.fine


def test_a_node_to_retire_is_replaced_first() -> None:
    world = World({"nodes": {"replicas": 3}})
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    told = ask(world, {"nodes": {"replicas": 3, "retire": ["flights-node-1"]}})
    assert told.fine, told.lines()
    assert pods(told, NewMember.kind) == ["flights-node-3"] and pods(told, "retire") == ["flights-node-1"]
    moved = [c for c in copies(told) if c.from_pod == "flights-node-1"]
    assert len(moved) == len(copies(told)) == 4 and {c.to_pod for c in moved} == {"flights-node-3"}
    kinds = [e.kind for e in told.events]
    assert kinds.index("new") < kinds.index("drain") < kinds.index("copy") < kinds.index("retire")
    assert [e["kind"] for e in told.as_json()["events"]] == kinds
