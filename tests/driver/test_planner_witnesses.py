"""Witnesses vote and hold no rows: when one joins, and which replicas may be removed meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.planner import plan
from stele.driver.situation import judge
from stele.driver.steps import (
    Blocked,
    DemotePeer,
    PromoteBack,
    RemovePeer,
    StartCopy,
)
from stele.driver.view import Intent, NodeState, ReplicaState
from stele.model.config import Configuration, MemberType, Peer
from stele.model.ids import ReplicaId, TabletId
from tests.driver.model import Cluster
from tests.driver.model_parts import COPY_ROUNDS, POLICY, ModelNode, ModelReplica, ModelTablet, node_name
from tests.driver.stories import node_of, one, one_dead, reported


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


def test_a_witness_joins_while_it_is_prepared_though_it_does_not_run_yet() -> None:
    """Its node has opened it, and it waits for the configuration that names it."""
    cluster, _ = one_dead()
    for _ in range(2):  # BeginIntent, StartCopy
        for step in plan(cluster.view(), POLICY):
            cluster.apply(step)
    opened = ReplicaState.CONFIGURING
    view = reported(cluster.view(), lambda r: replace(r, state=opened) if r.replica_id == 4 else r)
    (step,) = plan(view, POLICY)
    assert isinstance(step, DemotePeer) and "can be added without its vote" in step.reason


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


def test_all_tablets_of_a_lost_node_regain_tolerance_at_once_and_their_rows_follow_within_the_limit() -> None:
    """Of 15 tablets 4 had a witness. The others could lose no further voter until the rows of those had
    arrived."""
    cluster = Cluster(8, 1, 15, 3)
    dead = node_name(3)
    lost = [t for t in cluster.tablets.values() if t.config.peer_on(dead) is not None]
    cluster.nodes[dead].alive = False
    cluster.advance()
    policy = replace(POLICY, max_copies=2)
    whole_after, most_at_once, before = 0, 0, {t.tablet_id: t.config.opid_index for t in lost}
    for number in range(60):
        steps = plan(cluster.view(), policy)
        if not steps:
            break
        for step in steps:
            cluster.apply(step)
        moving = [
            r
            for t in cluster.tablets.values()
            for r in t.replicas.values()
            if r.copied < COPY_ROUNDS and not r.waiting
        ]
        most_at_once = max(most_at_once, len(moving))
        if all(cluster.spare(t) == 1 for t in lost) and not whole_after:
            whole_after = number + 1
            changes = [len([h for h in cluster.history if h.startswith(t.tablet_id[-2:])]) for t in lost]
            assert set(changes) == {2} and max(before.values()) == -1
            assert not all(r.has_data for t in lost for r in t.replicas.values()), "no row was waited for"
        cluster.advance()
    assert cluster.healthy()
    assert whole_after == 4, "begin, prepare, demote, add"
    assert most_at_once == 2


def test_witnesses_that_wait_for_their_rows_come_before_other_copies() -> None:
    """Their logs grow meanwhile, and nothing is copied from them."""
    cluster, t = one_dead(machines=6)
    policy = replace(POLICY, max_copies=1)
    for _ in range(4):
        for step in plan(cluster.view(), policy):
            cluster.apply(step)
    witness = t.replicas[4]
    witness.waiting, witness.copied, witness.has_data = True, 0, False
    for number in (7, 8):
        cluster.nodes[node_name(number)] = ModelNode(node_name(number), f"m{number}", "z0")
    tablet_id = TabletId("0" * 33)  # by its id it would be first
    peers = tuple(Peer(node_name(n), ReplicaId(i + 1), "") for i, n in enumerate((1, 2, 7)))
    drained = ModelTablet(tablet_id, Configuration(-1, peers), 3, next_replica_id=4)
    drained.replicas = {p.replica_id: ModelReplica(p.node_id, has_data=True) for p in peers}
    drained.leader = peers[0].node_id
    cluster.tablets[tablet_id] = drained
    cluster.nodes[peers[2].node_id].state = NodeState.DRAINING
    steps = {s.tablet_id: s for s in plan(cluster.view(), policy)}
    blocked, fetch = steps[tablet_id], steps[t.tablet_id]
    assert isinstance(blocked, Blocked) and blocked.code == "CopyLimit"
    assert isinstance(fetch, StartCopy) and not fetch.log_only


@pytest.mark.parametrize("intended", [True, False])
def test_a_witness_demoted_before_its_rows_came_gets_them_and_its_vote_again(intended: bool) -> None:
    """It waited for its promotion for ever, since no leader promotes a replica without rows (seeds 3302475 and
    3304870 of tests/sim)."""
    cluster, t = one()
    peers = t.config.peers
    log_only = replace(peers[2], member_type=MemberType.NON_VOTER)
    t.config = replace(t.config, peers=(*peers[:2], log_only))
    young = t.replicas[3]
    young.has_data, young.copied, young.waiting = False, 0, True
    if intended:
        intent = Intent(t.tablet_id, ReplicaId(3), log_only.node_id, "add", cluster.epoch)
        cluster.intents[t.tablet_id] = intent
    view = cluster.view()
    (step,) = plan(view, POLICY)
    assert isinstance(step, PromoteBack)
    (tablet,) = view.tablets
    promoted = replace(log_only, promote=True)
    tablet = replace(tablet, config=replace(tablet.config, peers=(*peers[:2], promoted)))
    (step,) = plan(replace(view, tablets=(tablet,)), POLICY)
    assert isinstance(step, StartCopy) and (step.replica_id, step.witness) == (3, True)
