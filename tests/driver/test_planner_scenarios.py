"""Whole stories, step by step: what the planner does, in order, until nothing is left to do. Waits are left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from stele.driver.copying import Copying
from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.situation import judge
from stele.driver.steps import (
    WAITS,
    BeginIntent,
    Blocked,
    CancelCopy,
    DemotePeer,
    RemovePeer,
    RetireNode,
    WaitPromotion,
)
from stele.driver.targets import Load
from stele.driver.trials import CopyMemory, Trials
from stele.driver.view import ClusterView, CopyView, Intent, NodeState, ReplicaState
from stele.model.config import MemberType
from stele.model.ids import CATALOG_TABLET_ID, NodeId, ReplicaId
from stele.wal.options import LogOptions
from tests.driver.model import POLICY, Cluster, ModelNode, ModelReplica, ModelTablet, node_name


def story(
    cluster: Cluster, *, policy: Policy = POLICY, after: dict[str, Callable[[], None]] | None = None
) -> list[str]:
    """The steps taken until all is well or nothing but waiting is left; `after[step]` happens once, after it."""
    told: list[str] = []
    idle = 0
    happenings = dict(after or {})
    for _ in range(60):
        steps = plan(cluster.view(), policy)
        if not steps:
            return told
        idle = idle + 1 if all(isinstance(s, WAITS) for s in steps) else 0
        if idle > 5:
            return [*told, *(f"Blocked:{s.code}" for s in steps if isinstance(s, Blocked))]
        for step in steps:
            if isinstance(step, WAITS):
                continue
            cluster.apply(step)
            told.append(type(step).__name__)
            happenings.pop(type(step).__name__, lambda: None)()
        cluster.advance()
    raise AssertionError(f"no end: {told}")


def one(rf: int = 3, machines: int = 5) -> tuple[Cluster, ModelTablet]:
    cluster = Cluster(machines, 1, 1, rf)
    return cluster, next(iter(cluster.tablets.values()))


def node_of(cluster: Cluster, t: ModelTablet, replica: int) -> ModelNode:
    return cluster.nodes[t.config.peers[replica].node_id]


def test_a_dead_replica_where_no_fault_can_be_spared() -> None:
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    assert story(cluster) == [
        "BeginIntent",
        "StartCopy",
        "DemotePeer",
        "AddWitness",
        "RemovePeer",
        "EndIntent",
    ]
    assert cluster.healthy()


def test_a_dead_replica_where_one_fault_can_be_spared() -> None:
    cluster, t = one(rf=5, machines=6)
    node_of(cluster, t, 4).alive = False
    cluster.advance()
    assert story(cluster) == ["BeginIntent", "StartCopy", "AddPreFollower", "RemovePeer", "EndIntent"]


def test_the_dead_one_returns_before_anything_was_changed() -> None:
    cluster, t = one()
    node = node_of(cluster, t, 2)
    node.alive = False
    cluster.advance()

    def returns() -> None:
        node.alive = True

    assert story(cluster, after={"StartCopy": returns}) == ["BeginIntent", "StartCopy", "CancelCopy"]
    assert [p.replica_id for p in t.config.peers] == [1, 2, 3]


def test_the_dead_one_returns_in_time() -> None:
    cluster, t = one()
    node = node_of(cluster, t, 2)
    node.alive = False
    cluster.advance()

    def returns() -> None:
        node.alive = True

    steps = story(cluster, after={"DemotePeer": returns})
    assert steps[:4] == ["BeginIntent", "StartCopy", "DemotePeer", "PromoteBack"]
    assert steps[-1] == "CancelCopy" and [p.replica_id for p in t.config.peers] == [1, 2, 3]


def test_a_voter_that_its_leader_does_not_reach_is_replaced_though_its_node_is_heard() -> None:
    cluster, t = one(machines=4)
    node_of(cluster, t, 2).cut = True
    cluster.advance()
    patient = replace(POLICY, unreached_after_ms=121_000)
    assert plan(cluster.view(), patient) == ()
    steps = plan(cluster.view(), POLICY)
    assert "replica 3" in steps[0].reason and "its leader does not reach it" in steps[0].reason
    assert story(cluster) == [
        "BeginIntent",
        "StartCopy",
        "DemotePeer",
        "AddWitness",
        "RemovePeer",
        "EndIntent",
    ]
    assert cluster.healthy()


def test_a_voter_that_is_reached_again_keeps_its_place() -> None:
    cluster, t = one()
    node = node_of(cluster, t, 2)
    node.cut = True
    cluster.advance()

    def mended() -> None:
        node.cut = False

    steps = story(cluster, after={"DemotePeer": mended})
    assert steps[:4] == ["BeginIntent", "StartCopy", "DemotePeer", "PromoteBack"]
    assert steps[-1] == "CancelCopy" and [p.replica_id for p in t.config.peers] == [1, 2, 3]


def test_a_voter_out_of_reach_stays_where_its_own_machine_is_the_only_place() -> None:
    """A replica made anew there would not be reached either, and without this one nothing is left to come back."""
    cluster, t = one(machines=3)
    node_of(cluster, t, 2).cut = True
    cluster.advance()
    assert story(cluster) == ["Blocked:NoTarget"]


def test_as_many_may_be_out_of_reach_as_may_be_silent() -> None:
    cluster = Cluster(8, 1, 8, 3)
    names = list(cluster.nodes)
    cluster.nodes[names[0]].cut = cluster.nodes[names[4]].cut = True
    cluster.advance()
    steps = plan(cluster.view(), replace(POLICY, max_lost_nodes=1))
    assert steps and {s.code for s in steps if isinstance(s, Blocked)} == {"TooManyLost"}
    assert all(isinstance(s, Blocked) for s in steps)
    cluster.nodes[names[4]].cut = False
    cluster.advance()
    assert any(isinstance(s, BeginIntent) for s in plan(cluster.view(), replace(POLICY, max_lost_nodes=1)))


def test_a_machine_that_is_lost_with_its_node_and_its_master_is_one_of_each() -> None:
    """Else nothing would be healed with `maxLostNodes: 1` whenever a machine of a master goes."""
    cluster = Cluster(6, 1, 2, 3)
    (table, catalog) = cluster.tablets.values()  # on nodes 1, 2, 3 and 2, 3, 4
    cluster.nodes[node_name(1)].alive = cluster.nodes[node_name(4)].alive = False
    cluster.advance()
    view, strict = cluster.view(), replace(POLICY, max_lost_nodes=1)
    assert [s.code for s in plan(view, strict) if isinstance(s, Blocked)] == ["TooManyLost"] * 2
    tablets = tuple(
        replace(t, tablet_id=CATALOG_TABLET_ID) if t.tablet_id == catalog.tablet_id else t
        for t in view.tablets
    )
    steps = {s.tablet_id: s for s in plan(replace(view, tablets=tablets), strict)}
    assert isinstance(steps[table.tablet_id], BeginIntent)
    blocked = steps[CATALOG_TABLET_ID]  # no other master is there
    assert isinstance(blocked, Blocked) and blocked.code == "NoTarget"


def test_a_voter_that_is_not_reached_just_now_neither_gives_rows_nor_spares_another() -> None:
    """Long before it is replaced itself."""
    cluster, t = one()
    node_of(cluster, t, 2).cut = True
    cluster.advance()
    patient = replace(POLICY, unreached_after_ms=1 << 40)
    view = cluster.view()
    situation = judge(view.tablets[0], view, patient, {n.node_id: n for n in view.nodes})
    first, second, third = situation.members
    assert third.live and situation.spare == 1
    assert (
        not situation.can_remove(second) and not situation.can_demote(first) and situation.can_remove(third)
    )
    load = Load(view)
    trials = Trials({(t.tablet_id, 4): 1})
    copying = Copying(view, patient, trials, load)
    assert copying.source(situation, 4) == second.peer.node_id
    again = Copying(view, patient, Trials({(t.tablet_id, 4): 3}), load)
    assert again.source(situation, 4) == second.peer.node_id


def test_a_new_replica_that_its_leader_does_not_reach_goes_elsewhere() -> None:
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    memory = CopyMemory()
    targets: list[str] = []
    for number in range(60):
        view = cluster.view()
        for step in plan(view, POLICY, memory.look(view, number * 1_000)):
            cluster.apply(step)
            if isinstance(step, BeginIntent):
                targets.append(step.target_node)
                cluster.nodes[NodeId(targets[0])].cut = True
        cluster.advance()
    assert len(targets) == 2 and targets[0] != targets[1] and cluster.healthy()


def test_the_target_dies_meanwhile() -> None:
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()

    def dies() -> None:
        cluster.nodes[cluster.intents[t.tablet_id].target_node].alive = False

    steps = story(cluster, after={"StartCopy": dies})
    assert steps[:3] == ["BeginIntent", "StartCopy", "CancelCopy"] and cluster.healthy()


def test_a_replica_is_added() -> None:
    cluster, t = one(rf=1)
    t.rf = 3
    assert story(cluster) == [
        *("BeginIntent", "StartCopy", "AddPreFollower", "EndIntent"),
        *("BeginIntent", "StartCopy", "AddWitness", "EndIntent"),
    ]
    assert cluster.healthy()


def test_a_node_is_drained_and_retires() -> None:
    cluster, t = one()
    node = node_of(cluster, t, 0)
    assert t.leader == node.node_id
    node.state = NodeState.DRAINING
    assert story(cluster) == [
        *(
            "BeginIntent",
            "StartCopy",
            "AddPreFollower",
            "MoveLeader",
            "RemovePeer",
            "EndIntent",
            "RetireNode",
        ),
    ]
    assert node.state is NodeState.RETIRED


def test_a_draining_voter_stays_until_its_successor_votes() -> None:
    """Removed before, the tablet could lose no other replica."""
    cluster, t = one()
    node_of(cluster, t, 1).state = NodeState.DRAINING
    while len(t.config.peers) == 3:
        cluster.advance()
        for step in plan(cluster.view(), POLICY):
            if not isinstance(step, WAITS):
                cluster.apply(step)
    for _ in range(3):
        assert [type(step) for step in plan(cluster.view(), POLICY)] == [WaitPromotion]
    assert "RemovePeer" in story(cluster) and cluster.healthy()


def least_spare(cluster: Cluster, t: ModelTablet) -> int:
    """How few voters the tablet could lose at worst, from now until all is well."""
    spares = []
    for _ in range(60):
        steps = plan(cluster.view(), POLICY)
        if not steps:
            return min(spares)
        for step in steps:
            cluster.apply(step)
            spares.append(cluster.spare(t))
        cluster.advance()
    raise AssertionError("no end")


def test_voters_of_two_draining_nodes_stay_until_each_has_a_successor() -> None:
    """Both went when the first successor voted; the second one's rows were copied while no voter could be spared."""
    cluster, t = one(machines=6)
    node_of(cluster, t, 1).state = node_of(cluster, t, 2).state = NodeState.DRAINING
    assert least_spare(cluster, t) == 1 and cluster.healthy()


def test_a_draining_voter_stays_while_a_dead_one_is_replaced() -> None:
    cluster, t = one(machines=6)
    node_of(cluster, t, 1).alive = False
    node_of(cluster, t, 2).state = NodeState.DRAINING
    cluster.advance()
    while cluster.spare(t) < 1:
        for step in plan(cluster.view(), POLICY):
            cluster.apply(step)
        cluster.advance()
    assert least_spare(cluster, t) == 1 and cluster.healthy()


def test_a_voter_that_dies_while_another_is_drained_goes_first() -> None:
    cluster, t = one(machines=6)
    node_of(cluster, t, 1).state = NodeState.DRAINING
    while len(t.config.voters) < 4:
        for step in plan(cluster.view(), POLICY):
            cluster.apply(step)
        cluster.advance()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    (step,) = plan(cluster.view(), POLICY)
    assert isinstance(step, RemovePeer) and step.replica_id == 3
    cluster.apply(step)
    assert least_spare(cluster, t) == 1 and cluster.healthy()


def test_no_voter_goes_whose_rows_a_majority_of_the_others_lacks() -> None:
    cluster, t = one()
    peers = t.config.peers
    witness = replace(peers[2], member_type=MemberType.WITNESS)
    t.config = replace(t.config, peers=(*peers[:2], witness))
    t.replicas[witness.replica_id].has_data = False
    view = cluster.view()
    (tablet,) = view.tablets
    situation = judge(tablet, view, POLICY, {n.node_id: n for n in view.nodes})
    assert [situation.can_remove(m) for m in situation.members] == [False, False, True]


def test_a_leader_that_must_go_is_not_told_to_wait_for_a_voter_that_lags() -> None:
    """The voter with the lowest id, just back, was named again and again: each time the leader took no writes for an election
    timeout."""
    cluster, t = one()
    node = node_of(cluster, t, 0)
    node.state = NodeState.DRAINING
    t.behind.add(node_of(cluster, t, 1).node_id)
    steps = story(cluster)
    assert steps.count("MoveLeader") == 1 and steps[-1] == "RetireNode"


def test_a_failed_replica_whose_machine_is_the_only_place() -> None:
    cluster, t = one(machines=3)
    t.replicas[3].failed = True
    assert story(cluster) == [
        *("DemotePeer", "RemovePeer", "BeginIntent", "StartCopy", "AddWitness", "EndIntent"),
    ]
    assert {p.node_id for p in t.config.peers} == set(cluster.nodes) and t.config.peer(4) is not None


def test_a_failed_replica_elsewhere() -> None:
    cluster, t = one()
    t.replicas[3].failed = True
    assert story(cluster) == [
        "BeginIntent",
        "StartCopy",
        "DemotePeer",
        "AddWitness",
        "RemovePeer",
        "EndIntent",
    ]


def test_a_tombstone_beside_the_leader_does_not_hide_what_the_leader_says() -> None:
    """Replica 1 was remade on its machine as replica 4, which leads, and whose log replica 2 can no longer catch up on."""
    cluster, t = one()
    t.replicas[1].failed = True
    cluster.nodes[node_name(4)].state = cluster.nodes[node_name(5)].state = NodeState.DRAINING
    story(cluster)
    leader = t.config.peer(ReplicaId(4))
    assert leader is not None and leader.node_id == t.replicas[1].node_id and t.replicas[1].tombstoned
    t.leader = leader.node_id
    view = cluster.view()
    (tablet,) = view.tablets
    replicas = tuple(
        replace(r, failed_peers=(ReplicaId(2),)) if r.replica_id == 4 else r for r in tablet.replicas
    )
    view = replace(view, tablets=(replace(tablet, replicas=replicas),))
    assert "replica 2" in plan(view, POLICY)[0].reason


@pytest.mark.parametrize(
    ("begun", "left"),
    [
        (["BeginIntent", "StartCopy"], ["CancelCopy"]),
        (["BeginIntent", "StartCopy", "DemotePeer", "AddWitness"], ["RemovePeer", "CancelCopy"]),
    ],
)
def test_a_target_whose_disk_filled_up_is_left_for_another(begun: list[str], left: list[str]) -> None:
    """Several copies found the same room there; those that came too late would fail for ever."""
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    for title in begun:
        step = plan(cluster.view(), POLICY)[0]
        assert type(step).__name__ == title
        cluster.apply(step)
    full = cluster.intents[t.tablet_id].target_node

    def seen() -> ClusterView:
        view = cluster.view()
        nodes = tuple(replace(n, disk_free_bytes=1 if n.node_id == full else 1 << 40) for n in view.nodes)
        failed = CopyView("Failed", 10, 20, error="DISK_FULL")
        (tablet,) = view.tablets
        reports = tuple(replace(r, copy=failed) if r.node_id == full else r for r in tablet.replicas)
        return replace(view, nodes=nodes, tablets=(replace(tablet, replicas=reports),))

    for title in left:
        step = plan(seen(), POLICY)[0]
        assert type(step).__name__ == title
        cluster.apply(step)
        cluster.advance()
    again = plan(seen(), POLICY)[0]
    assert isinstance(again, BeginIntent) and again.target_node != full


def test_a_node_whose_log_would_refuse_entries_is_no_target() -> None:
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    view, low = cluster.view(), LogOptions().low_space_bytes
    for free_bytes, step in ((low, Blocked), (4 * low, BeginIntent)):
        nodes = tuple(replace(n, disk_free_bytes=free_bytes) for n in view.nodes)
        assert isinstance(plan(replace(view, nodes=nodes), POLICY)[0], step)
    without_inodes = tuple(replace(n, disk_free_bytes=1 << 40, disk_low=True) for n in view.nodes)
    assert isinstance(plan(replace(view, nodes=without_inodes), POLICY)[0], Blocked)


def test_no_place_left() -> None:
    cluster, t = one(machines=3)
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    assert story(cluster) == ["Blocked:NoTarget"]
    cluster.nodes[node_name(9)] = ModelNode(node_name(9), "m9", "z1")
    assert story(cluster)[-1] == "EndIntent" and cluster.healthy()


def test_a_lost_majority_is_left_alone() -> None:
    cluster, t = one()
    for replica in (1, 2):
        node_of(cluster, t, replica).alive = False
    cluster.advance()
    assert story(cluster) == ["Blocked:LostMajority"]


def test_an_orphan_intent_is_taken_over() -> None:
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()

    def crash() -> None:
        cluster.epoch += 1

    steps = story(cluster, after={"AddWitness": crash})
    assert steps[4:] == ["TakeOverIntent", "RemovePeer", "EndIntent"]


def test_a_new_leader_master_takes_nobody_for_returned() -> None:
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()

    def fails_over() -> None:
        cluster.new_leader_rounds = 3

    steps = story(cluster, after={"DemotePeer": fails_over})
    assert steps == ["BeginIntent", "StartCopy", "DemotePeer", "AddWitness", "RemovePeer", "EndIntent"]


def test_a_new_leader_master_replaces_nobody_that_it_has_not_heard_yet() -> None:
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    cluster.new_leader_rounds = 2
    (step,) = plan(cluster.view(), POLICY)
    assert isinstance(step, Blocked) and step.code == "NotHeard"


@pytest.mark.parametrize("found", ["failed", "tombstoned"])
def test_a_new_replica_that_is_of_no_use_is_made_anew_under_another_number(found: str) -> None:
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()

    def breaks() -> None:
        setattr(t.replicas[4], found, True)

    steps = story(cluster, after={"StartCopy": breaks})
    assert steps[:3] == ["BeginIntent", "StartCopy", "CancelCopy"]
    assert cluster.healthy() and t.config.peer(4) is None


def test_a_demoted_replica_on_a_draining_node_is_not_promoted_back() -> None:
    cluster, t = one()
    node = node_of(cluster, t, 2)
    node.alive = False
    cluster.advance()

    def returns() -> None:
        node.alive, node.state = True, NodeState.DRAINING

    steps = story(cluster, after={"DemotePeer": returns})
    assert "PromoteBack" not in steps and cluster.healthy() and node.state is NodeState.RETIRED


def test_a_witness_joins_while_it_is_prepared_though_it_does_not_run_yet() -> None:
    """Its node has opened it, and waits for the configuration that names it."""
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    for _ in range(2):  # BeginIntent, StartCopy
        for step in plan(cluster.view(), POLICY):
            cluster.apply(step)
    view = cluster.view()
    (tablet,) = view.tablets
    reports = tuple(
        replace(r, state=ReplicaState.CONFIGURING) if r.replica_id == 4 else r for r in tablet.replicas
    )
    (step,) = plan(replace(view, tablets=(replace(tablet, replicas=reports),)), POLICY)
    assert isinstance(step, DemotePeer) and "no dead one's vote" in step.reason


def test_a_dead_witness_is_removed_and_never_demoted() -> None:
    """As a NON_VOTER it would be promoted back, and it holds no rows."""
    cluster, t = one()
    peers = t.config.peers
    t.config = replace(t.config, peers=(*peers[:2], replace(peers[2], member_type=MemberType.WITNESS)))
    t.replicas[3].has_data = False
    cluster.intents[t.tablet_id] = Intent(t.tablet_id, ReplicaId(4), node_name(4), "add", cluster.epoch)
    t.next_replica_id = 5
    t.replicas[4] = ModelReplica(node_name(4), has_data=True)
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    (step,) = plan(cluster.view(), POLICY)
    assert isinstance(step, RemovePeer) and step.replica_id == 3


def test_a_replica_that_is_gone_from_its_node_may_be_made_anew_there() -> None:
    """Its leader does not reach it either, since nobody answers for it; the node is well."""
    cluster, t = one(machines=3)
    t.replicas[3].failed = True
    view = cluster.view()
    (tablet,) = view.tablets
    reports = tuple(
        replace(r, unreached_ms={3: 120_000}) if r.node_id == t.leader else r for r in tablet.replicas
    )
    (step,) = plan(replace(view, tablets=(replace(tablet, replicas=reports),)), POLICY)
    assert isinstance(step, DemotePeer) and step.replica_id == 3


def test_what_a_leader_said_of_its_peers_does_not_grow_worse_while_nobody_hears_it() -> None:
    cluster, t = one()
    node_of(cluster, t, 2).cut = True
    cluster.advance()
    view = cluster.view()
    nodes = tuple(replace(n, heartbeat_age_ms=90_000 if n.node_id == t.leader else 100) for n in view.nodes)
    patient = replace(POLICY, dead_after_ms=100_000)
    assert any(isinstance(s, BeginIntent) for s in plan(view, patient))
    assert plan(replace(view, nodes=nodes), patient) == ()


def test_replicas_that_one_pass_plans_are_spread() -> None:
    cluster = Cluster(7, 1, 7, 3)
    cluster.nodes[node_name(3)].alive = False
    cluster.advance()
    targets = [s.target_node for s in plan(cluster.view(), POLICY) if isinstance(s, BeginIntent)]
    assert len(targets) == 3 and len(set(targets)) == 3


def test_of_too_many_voters_those_on_draining_nodes_go_and_the_leader_goes_last() -> None:
    cluster, t = one(rf=5, machines=5)
    t.rf = 3
    for replica in (0, 1):
        node_of(cluster, t, replica).state = NodeState.DRAINING
    t.leader = t.config.peers[4].node_id
    assert story(cluster) == ["RemovePeer", "RemovePeer", "RetireNode", "RetireNode"]
    assert [p.replica_id for p in t.config.peers] == [3, 4, 5]
    other, u = one(rf=5, machines=5)
    u.rf, u.leader = 3, u.config.peers[4].node_id
    assert story(other) == ["RemovePeer", "RemovePeer"]
    assert [p.replica_id for p in u.config.peers] == [1, 2, 5]


def test_of_too_many_voters_one_that_shares_a_machine_goes_first() -> None:
    cluster, t = one(rf=5, machines=5)
    t.rf = 3
    node_of(cluster, t, 1).machine = node_of(cluster, t, 0).machine
    (step,) = plan(cluster.view(), POLICY)
    assert isinstance(step, RemovePeer) and step.replica_id == 2


def test_no_replica_goes_where_the_masters_have_heard_nobody_or_what_is_lost() -> None:
    cluster, t = one(machines=5)
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    view = cluster.view()
    unheard = tuple(replace(n, ever_heard=n.node_id != node_name(4)) for n in view.nodes)
    (step,) = plan(replace(view, nodes=unheard), POLICY)
    assert isinstance(step, BeginIntent) and step.target_node == node_name(5)
    (step,) = plan(view, replace(POLICY, lost=frozenset({node_name(4)}), lost_after_ms=5_000, retire=False))
    assert isinstance(step, BeginIntent) and step.target_node == node_name(5)


def test_a_target_has_room_for_the_replica_that_takes_most() -> None:
    """Others may hold next to nothing, such as one that is being copied."""
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    view = cluster.view()
    free = {node_name(4): (1 << 30), node_name(5): (3 << 30)}
    nodes = tuple(
        replace(n, disk_free_bytes=free.get(n.node_id, 8 << 30), disk_used_bytes=1) for n in view.nodes
    )
    (tablet,) = view.tablets
    reports = tuple(replace(r, bytes_on_disk=(1 << 30) * (r.replica_id == 1)) for r in tablet.replicas)
    (step,) = plan(replace(view, nodes=nodes, tablets=(replace(tablet, replicas=reports),)), POLICY)
    assert isinstance(step, BeginIntent) and step.target_node == node_name(5)
    full = tuple(replace(n, disk_free_bytes=min(n.disk_free_bytes, 1 << 30)) for n in nodes)
    (step,) = plan(replace(view, nodes=full, tablets=(replace(tablet, replicas=reports),)), POLICY)
    assert isinstance(step, Blocked) and step.code == "NoTarget"


@pytest.mark.parametrize("state", ["PREPARING", "CREATING"])
def test_a_node_that_a_new_tablet_names_does_not_retire(state: str) -> None:
    cluster, t = one()
    node_of(cluster, t, 2).state = NodeState.DRAINING
    view = cluster.view()
    new = tuple(replace(tablet, state=state) for tablet in view.tablets)
    assert plan(replace(view, tablets=new), POLICY) == ()
    assert [type(s) for s in plan(replace(view, tablets=()), POLICY)] == [RetireNode]


def test_a_lost_node_drains_and_retires() -> None:
    cluster, t = one()
    node = node_of(cluster, t, 2)
    node.alive = False
    cluster.advance()
    policy = Policy(dead_after_ms=10_000, lost=frozenset({node.node_id}))
    steps = story(cluster, policy=policy)
    assert "DrainNode" in steps and steps[-1] == "RetireNode" and node.state is NodeState.RETIRED


def test_copies_at_once_are_bounded_and_the_most_urgent_go_first() -> None:
    cluster = Cluster(6, 1, 6, 3)
    dead = node_name(3)
    cluster.nodes[dead].alive = False
    cluster.advance()
    steps = plan(cluster.view(), Policy(dead_after_ms=10_000, max_copies=2))
    assert sum(isinstance(s, BeginIntent) for s in steps) == 2
    assert {s.code for s in steps if isinstance(s, Blocked)} == {"CopyLimit"}
    targets = [s.target_node for s in steps if isinstance(s, BeginIntent)]
    assert len(set(targets)) == 2 and dead not in targets


def test_copies_that_cannot_go_on_hold_up_no_others() -> None:
    """They were under way when their tablets lost their majorities; nobody knows when these come back."""
    cluster = Cluster(6, 1, 6, 3)
    dead = node_name(3)
    cluster.nodes[dead].alive = False
    cluster.advance()
    policy = Policy(dead_after_ms=10_000, max_lost_nodes=9, max_copies=1)
    (begun,) = [s for s in plan(cluster.view(), policy) if isinstance(s, BeginIntent)]
    cluster.apply(begun)
    stuck = cluster.tablets[begun.tablet_id]
    also = next(p.node_id for p in stuck.config.peers if p.node_id != dead)
    cluster.nodes[also].alive = False
    cluster.advance()
    steps = {s.tablet_id: s for s in plan(cluster.view(), policy)}
    blocked = steps.pop(begun.tablet_id)
    assert isinstance(blocked, Blocked) and blocked.code == "LostMajority"
    assert any(isinstance(s, BeginIntent) for s in steps.values())


def test_reasons_are_told_in_words() -> None:
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    reasons = []
    for _ in range(30):
        for step in plan(cluster.view(), POLICY):
            reasons.append(step.reason)
            if not isinstance(step, WAITS):
                cluster.apply(step)
            if isinstance(step, RemovePeer):
                assert "its node is silent" in step.reason
        cluster.advance()
    assert all(reasons) and "no fault can be spared" in reasons[0]


def test_nothing_is_planned_on_a_view_that_is_not_settled() -> None:
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    (only,) = plan(replace(cluster.view(), settled=False), POLICY)
    assert isinstance(only, Blocked) and only.code == "NotSettled"


def test_a_replica_goes_to_the_zone_that_lost_one() -> None:
    cluster = Cluster(6, 3, 1, 3)  # on machines 1, 2, 3 in zones 1, 2, 0; 4, 5, 6 are free, in zones 1, 2, 0
    (t,) = cluster.tablets.values()
    for replica in range(3):
        lost = node_of(cluster, t, replica)
        lost.alive = False
        cluster.advance()
        (begin,) = plan(cluster.view(), POLICY)
        assert isinstance(begin, BeginIntent) and cluster.nodes[NodeId(begin.target_node)].zone == lost.zone
        lost.alive = True
        cluster.advance()


def test_a_second_death_makes_room_for_the_replica_that_waits_for_its_vote() -> None:
    """Six voters with two dead would need four of the other three: one that is dead gives up its vote first."""
    cluster, t = one(rf=5, machines=6)
    first, second = node_of(cluster, t, 4), node_of(cluster, t, 3)
    first.alive = False
    cluster.advance()

    def dies() -> None:
        second.alive = False

    steps = story(cluster, after={"AddPreFollower": dies})
    assert steps[:4] == ["BeginIntent", "StartCopy", "AddPreFollower", "DemotePeer"]
    assert [p.member_type for p in t.config.peers if p.node_id == node_name(6)] == [MemberType.VOTER]


def test_a_node_that_is_heard_is_not_drained_whatever_it_is_called() -> None:
    cluster, t = one()
    called_lost = Policy(dead_after_ms=10_000, lost=frozenset({node_of(cluster, t, 2).node_id}))
    assert not plan(cluster.view(), called_lost)


def test_a_node_that_only_an_intent_names_does_not_retire() -> None:
    cluster, t = one()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    (begin,) = plan(cluster.view(), POLICY)
    assert isinstance(begin, BeginIntent)
    cluster.apply(begin)
    cluster.nodes[NodeId(begin.target_node)].state = NodeState.DRAINING
    assert [type(s) for s in plan(cluster.view(), POLICY)] == [CancelCopy]
    cluster.intents.clear()
    steps = plan(cluster.view(), POLICY)
    assert [s.node_id for s in steps if isinstance(s, RetireNode)] == [begin.target_node]


def test_who_may_not_retire_nodes_heals_their_tablets_and_leaves_them() -> None:
    cluster, t = one()
    node = node_of(cluster, t, 2)
    node.alive = False
    cluster.advance()
    policy = Policy(dead_after_ms=10_000, lost=frozenset({node.node_id}), retire=False)
    assert story(cluster, policy=policy)[-1] == "EndIntent" and node.state is NodeState.ACTIVE


def test_one_of_two_draining_nodes_is_given_back_where_there_is_no_third_machine() -> None:
    """Its machine is where the next new node may come; both waited for a target, and each other's place."""
    cluster, t = one(machines=4)
    draining = [node_of(cluster, t, 1), node_of(cluster, t, 2)]
    for node in draining:
        node.state = NodeState.DRAINING
    for _ in range(60):
        for step in plan(cluster.view(), POLICY):
            cluster.apply(step)
        assert cluster.spare(t) >= 1
        cluster.advance()
    assert len(t.config.voters) == 3
    assert [node.state for node in draining].count(NodeState.RETIRED) == 1
