"""What keeps a node from being RETIRED and a replica from being tombstoned: whoever may still be counted on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from stele.master import driving
from stele.master.background import Background
from stele.master.orders import Orders, fate_of
from stele.master.placement import Placement
from stele.master.port import insert
from stele.master.records import NO_CONFIGURATION
from stele.model.config import Configuration, Peer
from stele.model.errors import Code
from stele.model.ids import CATALOG_TABLET_ID, NodeId, ReplicaId, TabletId
from stele.rpc.convert import config_to_pb, id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    Call,
    Node,
    claimed,
    heartbeat,
    in_force,
    one_tablet,
    ready,
    refused,
    until,
    world,
)


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


async def test_a_node_is_given_nothing_behind_its_drain_in_the_log(tmp_path: Path) -> None:
    """The drain was proposed, and not applied, when the node was chosen: it may be RETIRED by the time that it has a replica."""
    async with world(tmp_path) as w:
        await ready(w)
        row, epoch = await one_tablet(w), await claimed(w)
        target = next(n for n in w.nodes if row.config.peer_on(n) is None)
        intent = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(target))
        begin = w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=intent), None)
        _, error = await asyncio.gather(w.move(target, pb.DRAINING), refused(begin))
        assert error.code is Code.CAS_FAILED and not w.catalog.intents
        fresh = replace(row, tablet_id=TabletId("f" * 32), state="PREPARING", config=NO_CONFIGURATION)
        lead = w.lead
        lead.liveness.began_ms += 3_600_000  # the leader's own background still waits for nodes
        await lead.commit([insert(fresh)])
        place = Background(lead, Orders(lead, w.pool))._place([fresh.tablet_id])
        (first, *_) = Placement(lead.candidates()).choose(3)
        drain = pb.SetNodeStateRequest(node_id=id_to_pb(first), state=pb.DRAINING)
        _, error = await asyncio.gather(driving.set_node_state(lead, drain), refused(place))
        assert error.code is Code.CAS_FAILED and w.catalog.tablets[fresh.tablet_id].state == "PREPARING"


async def test_a_master_that_has_just_joined_the_catalog_does_not_retire(tmp_path: Path) -> None:
    """Its log knows the configuration before the row of its own tablet does."""
    async with world(tmp_path) as w:
        joins = f"{0xB0:032x}"
        beat = Node(joins, "m9", "z1").heartbeat(1)
        beat.registration.role = "master"
        await w.leader.RegisterNode(pb.RegisterNodeRequest(node_id=id_to_pb(joins), role="master"), Call())
        await w.move(joins, pb.DRAINING)
        w.group.config = Configuration(20, (*w.group.config.peers, Peer(NodeId(joins), ReplicaId(4), "")))
        error = await refused(w.move(joins, pb.RETIRED))
        assert error.code is Code.UNSAFE_CHANGE and "the configuration of the catalog" in str(error)
        await w.move(joins, pb.ACTIVE)
        await heartbeat(w.leader, beat)
        await until(lambda: w.catalog.nodes[joins].formed)
        asked = pb.IntentPB(tablet_id=id_to_pb(CATALOG_TABLET_ID), target_node=id_to_pb(joins))
        begin = pb.BeginIntentRequest(epoch=await claimed(w), intent=asked)
        w.group.config = Configuration(21, w.group.config.peers[:3])
        begun = (await w.leader.BeginIntent(begin, None)).intent
        assert begun.config_index == 21, "not what the row says"


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
            status = report.status
            status.MergeFrom(type(status)(**told))
            other = replace(report, replica_id=status.replica_id, status_bytes=status.SerializeToString())
            return fate_of(lead, row, other)

        assert fate() == "tombstone"
        assert fate(committed_config=config_to_pb(Configuration(13, smaller.peers))) == "keep"
        assert fate(replica_id=row.next_replica_id) == "keep"
        intent = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(evicted.node_id))
        begun = pb.BeginIntentRequest(epoch=await claimed(w), intent=intent)
        intended = (await w.leader.BeginIntent(begun, None)).intent.replica_id
        row = w.catalog.tablets[row.tablet_id]
        assert intended < row.next_replica_id and fate(replica_id=intended) == "keep"
