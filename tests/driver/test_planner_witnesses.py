"""Witnesses vote and hold no rows: when one joins, and who may go beside one."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.planner import plan
from stele.driver.situation import judge
from stele.driver.steps import (
    DemotePeer,
    RemovePeer,
)
from stele.driver.view import Intent, ReplicaState
from stele.model.config import MemberType
from stele.model.ids import ReplicaId
from tests.driver.model import POLICY, ModelReplica, node_name
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
    """Its node has opened it, and waits for the configuration that names it."""
    cluster, _ = one_dead()
    for _ in range(2):  # BeginIntent, StartCopy
        for step in plan(cluster.view(), POLICY):
            cluster.apply(step)
    opened = ReplicaState.CONFIGURING
    view = reported(cluster.view(), lambda r: replace(r, state=opened) if r.replica_id == 4 else r)
    (step,) = plan(view, POLICY)
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
