"""How many pods may be evicted, and what the status says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from stele.driver.view import NodeState, ReplicaState, ReplicaView, TabletView
from stele.model.config import MemberType
from stele.model.ids import NodeId
from stele_operator.plan import make_plan
from stele_operator.plan.actions import DeletePod
from stele_operator.plan.health import tablet_health
from stele_operator.plan.observation import Machine
from stele_operator.plan.status import cluster_status
from tests.operator.world import World
from tests.operator.worlds import made, names, node_of

NOW = "2026-01-01T00:00:00Z"


def least(world: World, role: str = "node") -> int:
    """How many pods of a role must stay."""
    return int(world.objects["PodDisruptionBudget", f"flights-{role}s"]["spec"]["minAvailable"])


def drains(world: World) -> tuple[str, str, str]:
    """Status, reason and message of DrainBlocked; written down, as the operator would."""
    observed = world.observe()
    world.cluster["status"] = cluster_status(observed, make_plan(observed), (), NOW)
    (found,) = [c for c in world.cluster["status"]["conditions"] if c["type"] == "DrainBlocked"]
    return found["status"], found["reason"], found["message"]


def with_failed(tablet: TabletView, count: int = 1) -> TabletView:
    """The tablet with the last `count` of its replicas FAILED."""
    failed = tuple(
        ReplicaView(p.node_id, p.replica_id, ReplicaState.FAILED) for p in tablet.config.peers[-count:]
    )
    return replace(tablet, replicas=failed)


def with_laggard(tablet: TabletView) -> TabletView:
    """The tablet with its last replica behind what the leader's log still has."""
    leader = tablet.leader
    assert leader is not None and leader != tablet.config.peers[-1]
    lacking = (tablet.config.peers[-1].replica_id,)
    report = ReplicaView(leader.node_id, leader.replica_id, ReplicaState.RUNNING, lacking_peers=lacking)
    return replace(tablet, replicas=(report,))


def with_one_in_doubt(tablet: TabletView) -> TabletView:
    """The tablet with its last replica FAILED by its leader's word; its node, started again, has not told of it."""
    leader = tablet.leader
    assert leader is not None and leader != tablet.config.peers[-1]
    failed = (tablet.config.peers[-1].replica_id,)
    report = ReplicaView(leader.node_id, leader.replica_id, ReplicaState.RUNNING, failed_peers=failed)
    return replace(tablet, replicas=(report,))


def with_one_out_of_reach(tablet: TabletView) -> TabletView:
    """The tablet with its last replica on a node that is heard, and that the leader does not reach."""
    leader = tablet.leader
    assert leader is not None and leader != tablet.config.peers[-1]
    silence = {tablet.config.peers[-1].replica_id: 6_000}
    report = ReplicaView(leader.node_id, leader.replica_id, ReplicaState.RUNNING, unreached_ms=silence)
    return replace(tablet, replicas=(report,))


def with_one_that_finds_no_leader(tablet: TabletView) -> TabletView:
    """The tablet with its last replica started long ago, and still without a leader."""
    last = tablet.config.peers[-1]
    report = ReplicaView(last.node_id, last.replica_id, ReplicaState.CONFIGURING, age_ms=31_000)
    return replace(tablet, replicas=(report,))


def without_one(tablet: TabletView) -> TabletView:
    """The tablet with a replica that its node has reported to be gone."""
    last = tablet.config.peers[-1]
    return replace(tablet, replicas=(ReplicaView(last.node_id, last.replica_id, ReplicaState.UNKNOWN),))


def with_a_witness(tablet: TabletView) -> TabletView:
    """The tablet with a last replica that votes, and whose rows are still being copied."""
    *others, last = tablet.config.peers
    peers = (*others, replace(last, member_type=MemberType.WITNESS))
    return replace(tablet, config=replace(tablet.config, peers=peers))


@pytest.mark.parametrize(
    "change",
    [
        with_a_witness,
        with_failed,
        with_laggard,
        with_one_in_doubt,
        with_one_out_of_reach,
        with_one_that_finds_no_leader,
        without_one,
    ],
)
def test_no_node_may_go_while_a_replica_acknowledges_nothing(
    change: Callable[[TabletView], TabletView],
) -> None:
    """Though its node answers."""
    world = made()
    world.tablets[0] = change(world.tablets[0])
    health = tablet_health(world.observe())
    # One that does not answer its leader for 6 s is no spare; its table is told of it after witnessAfter.
    told = 0 if change is with_one_out_of_reach else 1
    assert not health.settled
    assert (health.counts.total - health.counts.healthy, health.counts.under_replicated) == (told, told)
    world.step()
    assert least(world) == 5
    assert drains(world)[:2] == ("True", "VoterLost")


def test_no_node_may_go_while_a_tablet_has_no_leader() -> None:
    """Though all its voters answer: nobody knows yet whether they elect one."""
    world = made()
    world.tablets[0] = replace(world.tablets[0], leader_node="")
    world.step()
    assert least(world) == 5
    assert drains(world)[:2] == ("True", "VoterLost")


def test_one_pod_of_each_role_may_go_while_every_tablet_can_lose_one() -> None:
    world = made()
    assert (least(world), least(world, "master")) == (4, 2)
    assert drains(world) == ("False", "Drainable", "one node and one master may be evicted at a time")


def test_while_no_master_leads_no_more_pods_may_be_evicted_than_before() -> None:
    """A drain takes the leading master first: what is then not known of the tablets must not let a node go."""
    world = made()
    assert least(world) == 4
    tablet = world.tablets[0]
    world.tablets[0] = with_failed(tablet)
    world.step()
    assert least(world) == 5
    told = drains(world)
    confirmed, world.confirmed = world.confirmed, set()
    world.step()
    assert least(world) == 5
    assert drains(world) == told
    world.tablets[0], world.confirmed = tablet, confirmed
    world.step()
    assert least(world) == 4


def test_a_budget_made_while_no_master_leads_lets_nobody_go() -> None:
    """Applied again over volumes that were kept: the budgets went with the TabletCluster, the tables did not."""
    world = made()
    world.confirmed = set()
    for role in ("node", "master"):
        del world.objects["PodDisruptionBudget", f"flights-{role}s"]
    status, reason, message = drains(world)
    assert (status, reason) == ("True", "MastersUnavailable")
    assert "no master leads" in message
    world.step()
    assert (least(world), least(world, "master")) == (5, 3)


def test_no_node_may_go_while_a_table_has_one_replica_and_it_is_said_which_and_what_to_do() -> None:
    world = made()
    world.group("late", replicationFactor=1)
    world.run()
    assert (least(world), least(world, "master")) == (5, 2)
    (tablet,) = [t for t in world.tablets if t.table_name == "late"]
    pod = next(
        p["metadata"]["name"]
        for p in world.of("Pod")
        if p["metadata"]["annotations"]["stele.dev/node-id"] == tablet.config.peers[0].node_id
    )
    status, reason, message = drains(world)
    assert (status, reason) == ("True", "SingleReplica")
    assert f"{tablet.tablet_id[:8]} of late on {pod}" in message
    assert "kubectl delete pod" in message and "replicationFactor 3" in message
    assert "events" not in message


@pytest.mark.parametrize(("policy", "stays"), [("Delete", False), ("Retain", True)])
def test_a_table_of_one_replica_blocks_drains_as_long_as_there_is_the_table(policy: str, stays: bool) -> None:
    """Not its TabletGroup: a table that was retained keeps its rows, and they are as precious."""
    world = made()
    group = world.group("late", replicationFactor=1, deletionPolicy=policy)
    world.run()
    group["metadata"]["deletionTimestamp"] = NOW
    if policy == "Retain":
        del world.objects["TabletGroup", "late"]
    world.run()
    assert ("TabletGroup", "late") not in world.objects
    assert (least(world) == 5, drains(world)[0] == "True") == (stays, stays)


@pytest.mark.parametrize(("factor", "failed", "stay"), [(3, 1, 5), (5, 1, 4), (5, 2, 5)])
def test_what_a_tablet_can_spare_decides_not_whether_it_is_whole(factor: int, failed: int, stay: int) -> None:
    world = World({"nodes": {"replicas": 5}})
    world.group("events", replicationFactor=factor)
    world.run()
    world.tablets[0] = with_failed(world.tablets[0], failed)
    world.step()
    assert least(world) == stay
    status, reason, message = drains(world)
    if stay == 5:
        assert (status, reason) == ("True", "VoterLost")
        assert f"{world.tablets[0].tablet_id[:8]} of events" in message
        assert "status.healing" in message
    else:
        assert status == "False"


def test_a_claim_that_is_kept_of_a_node_that_was_replaced_holds_up_no_drain() -> None:
    """It stays for `keepFor`, a day, and nothing starts on it."""
    world = made()
    world.machines.append(Machine("n6", True, "z3"))
    name = node_of(world, "n5")
    world.kill("n5")
    world.now_s += 700
    world.settle()
    world.run()
    assert name in names(world, "PersistentVolumeClaim") and name not in names(world, "Pod")
    assert sum("-node-" in n for n in names(world, "Pod")) == 5
    assert least(world) == 4 and drains(world)[0] == "False"


def test_a_drain_that_waits_for_the_pod_before_is_told_which() -> None:
    world = made()
    name = node_of(world, "n2")
    world.silent.add(name)
    world.settle()
    status, reason, message = drains(world)
    assert (status, reason) == ("True", "PodsNotReady")
    assert name in message and "4 of 5" in message
    world.silent.clear()
    world.settle()
    assert drains(world)[0] == "False"


def test_pods_beyond_what_the_spec_asks_for_are_no_room_for_another_eviction() -> None:
    """A node is retired and its pod, still ready, cannot be deleted for a while; its replacement is ready too."""
    world = made()
    world.machines.append(replace(world.machines[0], name="n6"))
    name = node_of(world, "n2")
    retired = NodeId(world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"])
    world.nodes[retired] = replace(world.nodes[retired], state=NodeState.RETIRED)
    world.tables, world.tablets = [], []
    for _ in range(6):
        plan = make_plan(world.observe())
        for action in plan.actions:
            if not isinstance(action, DeletePod):
                world.apply(action)
        world.settle()
        world.now_s += 1
    ready = [n for n in names(world, "Pod") if "node" in n]
    assert len(ready) == 6 and name in ready
    assert least(world) == 5


@pytest.mark.parametrize("also", ["", "a table of one replica", "a pod that is not ready"])
def test_no_pod_may_go_while_its_role_has_a_volume_that_would_go_with_it(also: str) -> None:
    """Nor is it advised to delete pods, which come back on their volumes: these do not."""
    world = made()
    if also == "a table of one replica":
        world.group("late", replicationFactor=1)
        world.run()
    name = node_of(world, "n2")
    world.objects["PersistentVolumeClaim", name]["metadata"]["deletionTimestamp"] = NOW
    if also == "a pod that is not ready":
        world.silent.add(node_of(world, "n3"))
        world.settle()
    world.step()
    assert (least(world), least(world, "master")) == (5, 2)
    status, reason, message = drains(world)
    assert (status, reason) == ("True", "ClaimsGoing")
    assert name in message and "on its volume" not in message


def test_also_while_no_master_leads_no_pod_may_go_whose_volume_would_go_with_it() -> None:
    """Of tablets nothing is known then; of claims there is."""
    world = made()
    assert drains(world)[0] == "False"
    world.confirmed = set()
    name = node_of(world, "n2")
    world.objects["PersistentVolumeClaim", name]["metadata"]["deletionTimestamp"] = NOW
    world.step()
    assert (least(world), least(world, "master")) == (5, 2)
    assert drains(world)[:2] == ("True", "ClaimsGoing")


def test_a_lone_master_may_not_go_and_it_is_said_why() -> None:
    world = World({"nodes": {"replicas": 3}, "masters": {"replicas": 1}})
    world.run()
    assert (least(world), least(world, "master")) == (2, 1)
    status, reason, message = drains(world)
    assert (status, reason) == ("True", "SingleReplica")
    assert "flights-master-0" in message and "masters.replicas" in message


def test_no_master_may_go_while_the_catalog_lacks_a_voter() -> None:
    """A master that takes a lost one's place is ready before it votes: three pods, and two that hold the catalog."""
    world = made()
    observed = world.observe()
    assert observed.catalog is not None
    catalog, *others = observed.catalog.view.tablets
    view = replace(observed.catalog.view, tablets=(with_failed(catalog), *others))
    plan = make_plan(replace(observed, catalog=replace(observed.catalog, view=view)))
    (patch,) = plan.actions
    world.apply(patch)
    assert (least(world), least(world, "master")) == (4, 3)


def test_a_lone_node_without_tables_may_go() -> None:
    world = World({"nodes": {"replicas": 1}})
    world.run()
    assert (least(world), drains(world)[0]) == (0, "False")
    world.group("late", replicationFactor=1)
    world.run()
    assert (least(world), drains(world)[:2]) == (1, ("True", "SingleReplica"))


def test_while_paused_what_was_told_stands_as_the_budget_does() -> None:
    world = made()
    world.group("late", replicationFactor=1)
    world.run()
    told = drains(world)
    world.cluster["spec"]["paused"] = True
    world.tables, world.tablets = [], []
    assert drains(world) == told


def test_however_many_tablets_block_a_drain_the_advice_is_not_cut_off() -> None:
    world = World({"nodes": {"replicas": 3}})
    for n in range(12):
        world.group(f"{n}-{'x' * 60}", replicationFactor=1)
    world.run()
    message = drains(world)[2]
    assert "kubectl delete pod" in message and message.endswith("and 7 more")
