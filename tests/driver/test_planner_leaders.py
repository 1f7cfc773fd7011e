"""The planner spreads leaders over nodes: when it moves them, where to, and when it leaves them alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from stele.driver.leader_trials import LeaderTrials
from stele.driver.planner import plan
from stele.driver.progress import leader_records
from stele.driver.steps import Blocked, MoveLeader, Step, next_title
from stele.driver.trials import Trials
from stele.driver.view import ClusterView, NodeState, NodeView, ReplicaState, ReplicaView, Wanted
from stele.model.errors import Code, Retryable
from stele.model.ids import NodeId
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelNode, node_name
from tests.driver.stories import reported

SPREAD = replace(POLICY, balance_leaders=True)
A, B, C = (node_name(i) for i in (1, 2, 3))


def piled(tablets: int = 12, machines: int = 3) -> Cluster:
    """All leaders on the first node, which has a replica of each tablet."""
    cluster = Cluster(machines, 1, tablets, 3)
    for t in cluster.tablets.values():
        t.leader = A
    return cluster


def moves(view: ClusterView, trials: LeaderTrials | None = None) -> list[MoveLeader]:
    """The planned moves of leaders. There must be no other steps."""
    steps = plan(view, SPREAD, Trials(leaders=trials) if trials is not None else Trials())
    assert all(isinstance(s, MoveLeader) and not s.removes for s in steps)
    return [s for s in steps if isinstance(s, MoveLeader)]


def targets(found: list[MoveLeader]) -> Counter[str]:
    return Counter(m.target_node for m in found)


def node(view: ClusterView, node_id: str, **what: object) -> ClusterView:
    """The view as it would be if this node were different."""
    return replace(
        view,
        nodes=tuple(replace(n, **what) if n.node_id == node_id else n for n in view.nodes),  # type: ignore[arg-type]
    )


def test_leaders_move_to_both_others_some_at_once() -> None:
    cluster = piled()
    found = moves(cluster.view())
    assert len(found) == SPREAD.leader_moves_at_once == 8 and targets(found) == Counter({B: 4, C: 4})
    assert {m.reason for m in found} == {f"node {A[:8]} leads 12 tablets, but its share is 4"}
    assert {m.cause for m in found} == {f"leaders/{A[:8]}-1"}
    assert {next_title(m) for m in found} == {""}
    for move in found:
        cluster.apply(move)
    assert plan(cluster.view(), SPREAD) == ()


def test_only_as_many_as_this_minute_allows() -> None:
    assert len(moves(piled().view(), LeaderTrials(left=3))) == 3
    assert moves(piled().view(), LeaderTrials(left=0)) == []


def test_a_policy_without_it_moves_nothing() -> None:
    assert plan(piled().view(), POLICY) == ()


def test_the_view_may_be_older_than_a_move() -> None:
    """Otherwise the same leaders would be ordered to move until their nodes report it."""
    cluster = piled()
    view = cluster.view()
    done = {str(m.tablet_id): str(m.target_node) for m in moves(view)}
    assert moves(view, LeaderTrials(moved=done)) == []


def test_a_move_that_failed_goes_elsewhere() -> None:
    cluster = piled(3)
    view = cluster.view()
    first = moves(view)[0]
    refused = LeaderTrials(refused=frozenset((t.tablet_id, str(first.target_node)) for t in view.tablets))
    assert first.target_node not in targets(moves(view, refused))


@pytest.mark.parametrize(
    "what",
    [
        {"disk_low": True},
        {"clock_ahead_us": 3_000_000},
        {"clock_ahead_us": -3_000_000},
    ],
    ids=["disk", "ahead", "behind"],
)
def test_no_leader_moves_to_a_node_that_is_not_well(what: dict[str, object]) -> None:
    found = plan(node(piled().view(), B, **what), SPREAD)
    assert targets([s for s in found if isinstance(s, MoveLeader)]).keys() == {C}


def test_no_leader_moves_to_a_node_that_is_lost_or_not_needed() -> None:
    view = piled().view()
    for policy in (replace(SPREAD, lost=frozenset({B})), replace(SPREAD, unneeded=frozenset({B}))):
        assert targets([s for s in plan(view, policy) if isinstance(s, MoveLeader)]).keys() == {C}


@pytest.mark.parametrize("state", [ReplicaState.CONFIGURING, ReplicaState.BOOTSTRAPPING])
def test_a_replica_that_starts_is_waited_for_but_not_for_ever(state: ReplicaState) -> None:
    """Otherwise leaders would be spread over the others, and once more when it runs."""

    def starts(r: ReplicaView, age_ms: int) -> ReplicaView:
        return replace(r, state=state, age_ms=age_ms) if r.node_id == B else r

    view = piled().view()
    assert moves(reported(view, lambda r: starts(r, 20_000))) == []
    assert targets(moves(reported(view, lambda r: starts(r, 31_000)))).keys() == {C}


def test_a_node_that_fell_silent_is_waited_for_until_it_is_given_up() -> None:
    view = piled().view()
    assert moves(node(view, B, heartbeat_age_ms=6_000)) == []
    assert {type(s) for s in plan(node(view, B, heartbeat_age_ms=11_000), SPREAD)} == {Blocked, MoveLeader}


def test_a_replica_that_was_not_reported_yet_is_waited_for() -> None:
    view = piled().view()
    t, *others = view.tablets
    known = tuple(r for r in t.replicas if r.node_id != B)
    assert moves(replace(view, tablets=(replace(t, replicas=known), *others))) == []


def test_no_leader_moves_to_a_replica_that_does_not_answer() -> None:
    """After such a short time nothing heals yet."""
    view = piled().view()
    lost = {t.tablet_id: t.config.peer_on(B) for t in view.tablets}

    def unreached(r: ReplicaView) -> ReplicaView:
        silent = {p.replica_id: 6_000 for p in lost.values() if p is not None}
        return replace(r, unreached_ms=silent) if r.node_id == A else r

    found = [s for s in plan(reported(view, unreached), SPREAD) if isinstance(s, MoveLeader)]
    assert B not in targets(found)


def others(steps: tuple[Step, ...]) -> bool:
    """Whether there are steps, none of which moves a leader to spread leaders."""
    return bool(steps) and not any(
        isinstance(s, MoveLeader) and s.cause.startswith("leaders/") for s in steps
    )


def test_not_while_a_tablet_heals_or_is_copied() -> None:
    cluster = piled(machines=5)
    peers = [p.node_id for t in cluster.tablets.values() for p in t.config.peers]
    for t in cluster.tablets.values():
        t.leader = t.config.peers[0].node_id
    lost = peers[2]
    cluster.nodes[lost].alive = False
    cluster.advance()
    for _ in range(40):
        steps = plan(cluster.view(), SPREAD)
        if cluster.healthy():
            break
        assert others(steps)
        for step in steps:
            cluster.apply(step)
        cluster.advance()
    assert cluster.healthy()


def test_not_while_a_node_drains_but_when_it_is_empty() -> None:
    """A drained node may stay drained for long."""
    cluster = piled(machines=4)
    for t in cluster.tablets.values():
        t.leader = t.config.peers[0].node_id
    drained = node_name(4)
    cluster.nodes[drained].state = NodeState.DRAINING
    assert others(plan(cluster.view(), SPREAD))
    empty = piled()
    empty.nodes[drained] = ModelNode(drained, "m4", "z0", state=NodeState.DRAINING)
    assert len(plan(empty.view(), replace(SPREAD, retire=False))) == 8


@pytest.mark.parametrize("way", ["wanted", "policy"])
def test_no_leader_moves_to_a_node_that_is_parked(way: str) -> None:
    """It is not waited for either, if it is away."""
    view = piled().view()
    parked = node(view, B, wanted=Wanted.PARKED, wanted_by="administrator")
    if way == "policy":
        steps = plan(view, replace(SPREAD, retiring={}, parked={B: "maintenance"}, retire=False))
        assert targets([s for s in steps if isinstance(s, MoveLeader)]).keys() == {C}
        return
    assert targets(moves(parked)).keys() == {C}
    assert targets(moves(node(parked, B, heartbeat_age_ms=6_000))).keys() == {C}


def test_leaders_are_spread_while_a_tablet_waits_for_a_machine() -> None:
    """The third machine is gone for long. The leaders of the other two should not stay where they happened to
    end."""
    cluster = piled()
    cluster.nodes[C].alive = False
    cluster.advance()
    steps = plan(cluster.view(), SPREAD)
    assert {s.code for s in steps if isinstance(s, Blocked)} == {"NoTarget"}
    assert targets([s for s in steps if isinstance(s, MoveLeader)]) == Counter({B: 6})


def test_not_while_a_new_leader_master_has_not_heard_all() -> None:
    assert others(plan(replace(piled().view(), settled=False), SPREAD))


def test_a_leader_that_was_moved_by_hand_stays() -> None:
    cluster = piled(3)
    for t in cluster.tablets.values():
        t.kept = True
    assert moves(cluster.view()) == []
    (first, *_) = cluster.tablets.values()
    first.kept = False
    assert [(m.tablet_id, m.reason.partition(" leads ")[2]) for m in moves(cluster.view())] == [
        (first.tablet_id, "3 tablets, but its share is 2")
    ], "the two others count for their node"


def test_zones_lead_alike_where_nodes_do() -> None:
    """Two of four nodes lead one more. They were in one zone, which so led 8 of 14."""
    cluster = Cluster(4, 2, 14, 4)
    for number, t in enumerate(cluster.tablets.values()):
        t.leader = node_name((1, 3, 2, 4)[number % 4])
    (move,) = moves(cluster.view())
    assert move.reason == "zone z1 leads 8 tablets, zone z0 leads 6"
    cluster.apply(move)
    assert moves(cluster.view()) == []


def test_masters_are_no_nodes() -> None:
    """The catalog has only one leader, so it does not matter which master that is."""
    cluster = piled(1)
    assert moves(cluster.view()) == []


def test_a_new_node_gets_leaders_once_it_has_replicas() -> None:
    cluster = piled(12)
    name = node_name(9)
    cluster.nodes[name] = ModelNode(name, "m9", "z0")
    for t in list(cluster.tablets.values())[:6]:
        (gone,) = (p for p in t.config.peers if p.node_id == B)
        t.replicas[gone.replica_id].node_id = name
        peers = tuple(replace(p, node_id=name) if p is gone else p for p in t.config.peers)
        t.config = replace(t.config, peers=peers)
    for _ in range(4):
        for move in moves(cluster.view()):
            cluster.apply(move)
    assert Counter(t.leader for t in cluster.tablets.values())[name] == 3
    assert max(cluster.leader_moves.values()) == 1


def test_users_are_told_once_for_each_pair_of_nodes() -> None:
    view = piled().view()
    error = Retryable("replica 2 lacks 812 entries of the log", code=Code.NOT_READY)
    found = [(m, error if m.target_node == B and i < 4 else None) for i, m in enumerate(moves(view))]
    told = leader_records(found, {t.tablet_id: t.leader_node for t in view.tablets})
    assert [r.where for r in told] == [f"node {A[:8]}"] * 2
    assert told[1].reason == (
        f"moves the leader of 4 tablets to node {C[:8]}: node {A[:8]} leads 12 tablets, but its share is 4"
    )
    failed = sum(1 for _, e in found if e is not None)
    assert told[0].error.startswith(f"{failed} of 4 were not moved: NOT_READY") and not told[1].error
    assert [r.leaders.moved for r in told if r.leaders is not None] == [4 - failed, 4]


def test_a_node_of_the_view_is_named() -> None:
    view = piled().view()
    known: dict[str, NodeView] = {n.node_id: n for n in view.nodes}
    assert all(NodeId(m.target_node) in known for m in moves(view))


def test_a_drain_that_cannot_go_on_holds_no_leaders_up() -> None:
    """Three machines and three replicas: the drained node keeps what it has, and the leaders are spread over the others."""
    cluster = piled()
    leaving = cluster.nodes[C]
    leaving.state, leaving.wanted, leaving.wanted_by = NodeState.DRAINING, Wanted.DRAINED, "administrator"
    steps = plan(cluster.view(), SPREAD)
    assert {s.code for s in steps if isinstance(s, Blocked)} == {"NoTarget"}
    assert {s.target_node for s in steps if isinstance(s, MoveLeader)} == {B}


def test_leaders_leave_a_parked_node_some_at_a_time() -> None:
    """A pass must not last for minutes, since its claim is not renewed meanwhile."""
    cluster = piled(tablets=60, machines=3)
    cluster.nodes[A].wanted, cluster.nodes[A].wanted_by = Wanted.PARKED, "administrator"
    assert len(moves(cluster.view())) == SPREAD.leader_moves_at_once
