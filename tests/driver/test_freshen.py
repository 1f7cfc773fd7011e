"""A view that nodes' own reports bring up to date: it never goes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.wire import freshen
from stele.rpc.convert import config_to_pb, id_to_pb
from stele.rpc.proto import common_pb2
from tests.driver.stories import one


def leads(
    tablet_id: str, replica_id: int, term: int, index: int, config: common_pb2.ConfigurationPB
) -> common_pb2.ReplicaStatusPB:
    told = common_pb2.ReplicaStatusPB(
        tablet_id=id_to_pb(tablet_id), replica_id=replica_id, role=common_pb2.LEADER, term=term
    )
    told.committed_config.CopyFrom(config)
    told.committed_config.opid_index = index
    return told


@pytest.mark.parametrize(
    ("term", "index", "takes_leader", "takes_config"),
    [(6, 9, True, True), (5, 9, True, True), (6, 6, True, False), (4, 9, False, False)],
    ids=["a later term", "the same term", "an older configuration", "an older term"],
)
def test_a_leader_of_an_older_term_and_an_older_configuration_change_nothing(
    term: int, index: int, takes_leader: bool, takes_config: bool
) -> None:
    cluster, t = one()
    view = cluster.view()
    before = next(each for each in view.tablets if each.tablet_id == t.tablet_id)
    before = replace(before, term=5, config=replace(before.config, opid_index=7))
    view = replace(view, tablets=(before,))
    peer = next(p for p in before.config.peers if p.node_id != before.leader_node)
    told = leads(t.tablet_id, peer.replica_id, term, index, config_to_pb(before.config))
    (found,) = freshen(view, {peer.node_id: [told]}).tablets
    assert (found.leader_node == peer.node_id) is takes_leader
    assert found.config.opid_index == (index if takes_config else 7)
    assert found.term == (term if takes_leader else 5)
