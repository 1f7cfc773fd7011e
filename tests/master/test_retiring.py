"""What keeps a node from being RETIRED and a replica from being tombstoned: whoever may still be counted on."""

from __future__ import annotations

import copy
from pathlib import Path

from stele.master.orders import fate_of
from stele.model.config import Configuration, Peer
from stele.model.errors import Code
from stele.model.ids import NodeId, ReplicaId
from stele.rpc.convert import config_to_pb, id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import claimed, in_force, one_tablet, ready, refused, world


async def test_a_node_that_an_intent_names_does_not_retire(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        target = next(n for n in w.nodes if row.config.peer_on(n) is None)
        intent = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(target))
        await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=await claimed(w), intent=intent), None)
        await w.move(target, pb.DRAINING)
        error = await refused(w.move(target, pb.RETIRED))
        assert error.code is Code.UNSAFE_CHANGE and "the intent on tablet" in str(error)
        assert w.catalog.nodes[target].state == "DRAINING"


async def test_a_master_that_has_just_joined_the_catalog_does_not_retire(tmp_path: Path) -> None:
    """Its log knows the configuration before the row of its own tablet does."""
    async with world(tmp_path) as w:
        joins = f"{0xB0:032x}"
        await w.leader.RegisterNode(pb.RegisterNodeRequest(node_id=id_to_pb(joins), role="master"), None)
        await w.move(joins, pb.DRAINING)
        w.group.config = Configuration(20, (*w.group.config.peers, Peer(NodeId(joins), ReplicaId(4), "")))
        error = await refused(w.move(joins, pb.RETIRED))
        assert error.code is Code.UNSAFE_CHANGE and "the configuration of the catalog" in str(error)


async def test_a_replica_that_may_know_more_than_the_catalog_is_not_tombstoned(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        lead = w.lead
        evicted = row.config.peers[2]
        report = lead.liveness.report(row.tablet_id, evicted.node_id, evicted.replica_id)
        smaller = Configuration(12, row.config.peers[:2])
        await in_force(w, row.tablet_id, smaller, says=row.config.peers[0].node_id)
        row = w.catalog.tablets[row.tablet_id]

        def fate(**told: object) -> str:
            other = copy.deepcopy(report)
            other.status.MergeFrom(type(other.status)(**told))
            return fate_of(lead, row, other)

        assert fate() == "tombstone"
        assert fate(committed_config=config_to_pb(Configuration(13, smaller.peers))) == "keep"
        assert fate(replica_id=row.next_replica_id) == "keep"
        intent = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(evicted.node_id))
        begun = pb.BeginIntentRequest(epoch=await claimed(w), intent=intent)
        intended = (await w.leader.BeginIntent(begun, None)).intent.replica_id
        row = w.catalog.tablets[row.tablet_id]
        assert intended < row.next_replica_id and fate(replica_id=intended) == "keep"
