"""Replicas that their leader does not reach, while the masters hear their nodes: the planner's reaction."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.copying import Copying
from stele.driver.planner import plan
from stele.driver.situation import judge
from stele.driver.steps import (
    BeginIntent,
    Blocked,
    DemotePeer,
)
from stele.driver.targets import Load
from stele.driver.trials import CopyMemory, Trials
from stele.model.ids import NodeId
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY
from tests.driver.stories import REPLACED, node_of, one, one_cut, one_dead, reported, story


def test_a_voter_that_its_leader_does_not_reach_is_replaced_though_its_node_is_heard() -> None:
    cluster, _ = one_cut(machines=4)
    patient = replace(POLICY, unreached_after_ms=121_000)
    assert plan(cluster.view(), patient) == ()
    steps = plan(cluster.view(), POLICY)
    assert "replica 3" in steps[0].reason and "its leader does not reach it" in steps[0].reason
    assert story(cluster) == REPLACED
    assert cluster.healthy()


def test_a_voter_that_is_reached_again_keeps_its_place() -> None:
    cluster, t = one_cut()
    node = node_of(cluster, t, 2)

    def mended() -> None:
        node.cut = False

    steps = story(cluster, after={"DemotePeer": mended})
    assert steps[:4] == ["BeginIntent", "StartCopy", "DemotePeer", "PromoteBack"]
    assert steps[-1] == "CancelCopy" and [p.replica_id for p in t.config.peers] == [1, 2, 3]


def test_a_voter_out_of_reach_stays_where_its_own_machine_is_the_only_place() -> None:
    """A new replica there would not be reached either, and without this one nothing is left that could
    return."""
    cluster, _ = one_cut(machines=3)
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


def test_a_voter_that_is_not_reached_just_now_neither_gives_rows_nor_spares_another() -> None:
    """This happens long before it is replaced itself."""
    cluster, t = one_cut()
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
    cluster, _ = one_dead()
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


def test_a_replica_that_is_gone_from_its_node_may_be_made_anew_there() -> None:
    """Its leader does not reach it either, because nothing answers for it; the node is well."""
    cluster, t = one(machines=3)
    t.replicas[3].failed = True
    silence = {3: 120_000}
    view = reported(
        cluster.view(), lambda r: replace(r, unreached_ms=silence) if r.node_id == t.leader else r
    )
    (step,) = plan(view, POLICY)
    assert isinstance(step, DemotePeer) and step.replica_id == 3


def test_what_a_leader_said_of_its_peers_does_not_grow_worse_while_nobody_hears_it() -> None:
    cluster, t = one_cut()
    view = cluster.view()
    nodes = tuple(replace(n, heartbeat_age_ms=90_000 if n.node_id == t.leader else 100) for n in view.nodes)
    patient = replace(POLICY, dead_after_ms=100_000)
    assert any(isinstance(s, BeginIntent) for s in plan(view, patient))
    assert plan(replace(view, nodes=nodes), patient) == ()
