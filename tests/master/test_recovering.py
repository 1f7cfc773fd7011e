"""A lost majority is given up: what the catalog records, and what nodes are told then."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from stele.master.liveness import Report, is_given_up
from stele.master.orders import Order, Orders, fate_of
from stele.master.records import RecoveryRecord, TabletRecord
from stele.master.row_encoding import decode, encode
from stele.model.config import Configuration
from stele.model.errors import Code
from stele.model.ids import CATALOG_TABLET_ID, OpId, new_id
from stele.model.incarnation import raised, recoveries
from stele.model.steps import AddColumn
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import config_to_pb, id_to_pb, opid_to_pb
from stele.rpc.convert_schema import steps_to_pb
from stele.rpc.identity import Identity
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import OPTIONS, World, claimed, one_tablet, ready, refused, until, world

ALIVE_MS = 300
OPTIONS_ = replace(OPTIONS, alive_ms=ALIVE_MS)


def request_for(row: TabletRecord, survivor: str, **other: Any) -> pb.RecoverTabletRequest:
    peer = row.config.peer_on(survivor)
    fields: dict[str, Any] = {
        "tablet_id": id_to_pb(row.tablet_id),
        "survivor_node": id_to_pb(survivor),
        "survivor_replica": peer.replica_id if peer is not None else 9,
        "last_logged": opid_to_pb(OpId(4, 100)),
        "term": 6,
        "tablet_incarnation": row.incarnation,
        "owner": "ann@desk",
        "reason": "rack burnt",
        "told": "rows after 12:00 may be lost",
    }
    return pb.RecoverTabletRequest(**(fields | other))


async def two_lost(w: World) -> tuple[TabletRecord, str, tuple[str, ...]]:
    """A tablet whose leader and one more are silent; its survivor, and the lost ones."""
    await ready(w)
    row = await one_tablet(w)
    lost = tuple(p.node_id for p in row.config.peers[:2])
    survivor = row.config.peers[2].node_id
    w.shift_ms += 2 * ALIVE_MS
    await w.beat(silent=lost)
    return row, survivor, lost


async def test_it_is_refused_while_a_majority_is_heard_or_may_still_be_there(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS_) as w:
        await ready(w)
        row = await one_tablet(w)
        survivor, other = row.config.peers[2].node_id, row.config.peers[1].node_id
        error = await refused(w.leader.RecoverTablet(request_for(row, survivor), None))
        assert error.code is Code.UNSAFE_CHANGE and "3 of 3 voters are heard" in str(error)
        lost = row.config.peers[0].node_id
        w.shift_ms += 2 * ALIVE_MS
        await w.beat(silent=(lost,))
        error = await refused(w.leader.RecoverTablet(request_for(row, survivor), None))
        assert error.code is Code.UNSAFE_CHANGE and "2 of 3 voters are heard" in str(error)
        # Two are lost, but a change under way names two others, which could elect a leader by it.
        w.shift_ms += 2 * ALIVE_MS
        spare = next(n for n in w.nodes if row.config.peer_on(n) is None)
        w.nodes[survivor].pending[row.tablet_id] = config_to_pb(Configuration(90, row.config.peers[2:]))
        await w.beat(silent=(lost, other))
        error = await refused(w.leader.RecoverTablet(request_for(row, survivor), None))
        assert error.code is Code.UNSAFE_CHANGE, spare
        assert w.catalog.tablets[row.tablet_id] == row and not w.catalog.recoveries


async def test_what_is_no_survivor_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS_) as w:
        row, survivor, lost = await two_lost(w)
        spare = next(n for n in w.nodes if row.config.peer_on(n) is None)
        for request, code in (
            (request_for(row, lost[0]), Code.NOT_READY),
            (request_for(row, spare), Code.NOT_FOUND),
            (request_for(row, survivor, survivor_replica=7), Code.NOT_FOUND),
            (request_for(row, survivor, tablet_incarnation=3), Code.CAS_FAILED),
            (request_for(row, survivor, tablet_id=id_to_pb("0" * 31 + "7")), Code.NOT_FOUND),
        ):
            assert (await refused(w.leader.RecoverTablet(request, None))).code is code
        catalog = w.catalog.tablets[CATALOG_TABLET_ID]
        error = await refused(w.leader.RecoverTablet(request_for(catalog, survivor), None))
        assert "stele local cmeta rewrite" in str(error)


async def test_the_record_stays_and_the_survivor_alone_is_ordered_until_it_leads(tmp_path: Path) -> None:
    class Nodes(ChannelPool):
        async def unary(self, address: str, stub: Any, method: str, request: Any, **how: Any) -> Any:
            sent.append((method, how["to_node"], request))

    sent: list[tuple[str, str, Any]] = []
    async with world(tmp_path, OPTIONS_) as w:
        row, survivor, lost = await two_lost(w)
        answer = await w.leader.RecoverTablet(request_for(row, survivor), None)
        assert answer == await w.leader.RecoverTablet(request_for(row, survivor), None), "a retry is harmless"
        changed = w.catalog.tablets[row.tablet_id]
        incarnation = changed.incarnation
        assert recoveries(incarnation) == 1 and changed.config.incarnation == incarnation
        assert [p.node_id for p in changed.config.peers] == [survivor] and changed.term == 7
        done = w.catalog.recoveries[row.tablet_id]
        assert (done.owner, done.reason, done.config_before) == ("ann@desk", "rack burnt", row.config)
        assert decode(RecoveryRecord, encode(done)) == done
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        (shown,) = [t for t in view.tablets if t.tablet_id == id_to_pb(row.tablet_id)]
        assert shown.recovery == answer.recovery and shown.recovery.told == "rows after 12:00 may be lost"

        async def due() -> list[tuple[str, str, Any]]:
            sent.clear()
            await w.beat()
            orders = Orders(w.lead, Nodes(Identity()))
            orders.consider(w.catalog.tablets[row.tablet_id])
            await until(lambda: not orders.under_way())
            return list(sent)

        # The lost ones are back, and still have the old configuration, with a later index than the survivor's.
        for node_id in lost:
            w.nodes[node_id].configs[row.tablet_id] = config_to_pb(Configuration(900, row.config.peers))
        ((method, to, request),) = await due()
        assert (method, to) == ("UnsafeChangeConfig", survivor) and request.term == 7
        assert (request.tablet_incarnation, request.at_least) == (incarnation, opid_to_pb(OpId(4, 100)))
        assert w.catalog.tablets[row.tablet_id].config == changed.config, "what they say counts no more"
        node = w.nodes[survivor]
        node.incarnations[row.tablet_id] = incarnation
        node.configs[row.tablet_id] = config_to_pb(Configuration(101, changed.config.peers, incarnation))
        node.replicas[row.tablet_id, changed.config.peers[0].replica_id] = True
        await w.beat_until(lambda: w.catalog.tablets[row.tablet_id].config.opid_index == 101)
        orders = await due()
        assert sorted((m, n) for m, n, _ in orders) == sorted(("DeleteTablet", n) for n in lost)
        assert {(r.tablet_incarnation, r.cas_config_opid_index_less_or_equal) for *_, r in orders} == {
            (incarnation, 101)
        }
        # A copy that is on its way does not know its incarnation yet.
        spare = next(n for n in w.nodes if row.config.peer_on(n) is None)
        asked = pb.IntentPB(
            tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(spare), source_node=id_to_pb(survivor)
        )
        begun = await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=await claimed(w), intent=asked), None)
        status = common_pb2.ReplicaStatusPB(
            tablet_id=id_to_pb(row.tablet_id),
            replica_id=begun.intent.replica_id,
            state=common_pb2.BOOTSTRAPPING,
            data_state=common_pb2.COPYING,
        )
        copied = Report(spare, status.replica_id, status.SerializeToString(), 0)
        assert fate_of(w.lead, w.catalog.tablets[row.tablet_id], copied) == "keep"
        assert not is_given_up(status, incarnation), "and the view of a driver shows how far it is"
        (shown,) = [
            t
            for t in (await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)).tablets
            if t.tablet_id == id_to_pb(row.tablet_id)
        ]
        assert [r.node_id for r in shown.replicas] == [id_to_pb(survivor)]


async def test_a_survivor_that_missed_changes_of_columns_is_given_them(tmp_path: Path) -> None:
    """It was away while the table was altered, and its table is not ALTERING any more."""
    async with world(tmp_path, OPTIONS_) as w:
        await ready(w)
        row = await one_tablet(w)
        lost = tuple(p.node_id for p in row.config.peers[:2])
        survivor = row.config.peers[2].node_id
        w.shift_ms += 2 * ALIVE_MS
        for version in (2, 3):
            step = AddColumn(f"c{version}", "int8", True)
            request = pb.AlterTableRequest(name="t", alter_id=id_to_pb(new_id()), steps=steps_to_pb([step]))
            await w.leader.AlterTable(request, None)
            for node_id in lost:
                w.nodes[node_id].versions[row.tablet_id] = version
            await w.beat_until(lambda: not w.catalog.altering, silent=(survivor,))
        w.shift_ms += 2 * ALIVE_MS
        await w.beat(silent=lost)
        row = w.catalog.tablets[row.tablet_id]
        await w.leader.RecoverTablet(request_for(row, survivor), None)
        recovered = w.catalog.tablets[row.tablet_id]
        peer = recovered.config.peers[0]
        node = w.nodes[survivor]
        node.incarnations[row.tablet_id] = recovered.incarnation
        node.configs[row.tablet_id] = config_to_pb(Configuration(101, (peer,), recovered.incarnation))
        node.replicas[row.tablet_id, peer.replica_id] = True
        await w.beat(silent=lost)
        alter = Order("alter", survivor, peer.replica_id)
        assert alter in set(Orders(w.lead, w.pool)._due(w.catalog.tablets[row.tablet_id]))
        node.versions[row.tablet_id] = 3
        await w.beat(silent=lost)
        assert alter not in set(Orders(w.lead, w.pool)._due(w.catalog.tablets[row.tablet_id]))


async def test_an_intent_ends_with_the_configuration_that_it_was_made_for(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS_) as w:
        await ready(w)
        row = await one_tablet(w)
        spare = next(n for n in w.nodes if row.config.peer_on(n) is None)
        asked = pb.IntentPB(
            tablet_id=id_to_pb(row.tablet_id),
            target_node=id_to_pb(spare),
            source_node=id_to_pb(row.config.peers[0].node_id),
            kind="add",
        )
        await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=await claimed(w), intent=asked), None)
        assert row.tablet_id in w.catalog.intents
        lost = tuple(p.node_id for p in row.config.peers[:2])
        w.shift_ms += 2 * ALIVE_MS
        await w.beat(silent=lost)
        row = w.catalog.tablets[row.tablet_id]
        await w.leader.RecoverTablet(request_for(row, row.config.peers[2].node_id), None)
        assert row.tablet_id not in w.catalog.intents


async def test_a_second_recovery_follows_where_the_survivor_of_the_first_is_lost_too(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS_) as w:
        row, survivor, lost = await two_lost(w)
        await w.leader.RecoverTablet(request_for(row, survivor), None)
        w.shift_ms += 2 * ALIVE_MS
        await w.beat(silent=(survivor,))
        now = w.catalog.tablets[row.tablet_id]
        request = request_for(row, lost[1], tablet_incarnation=now.incarnation)
        await w.leader.RecoverTablet(request, None)
        again = w.catalog.tablets[row.tablet_id]
        assert [recoveries(r.incarnation) for r in (now, again)] == [1, 2]
        assert [p.node_id for p in again.config.peers] == [lost[1]]
        assert Order("recover", lost[1], again.config.peers[0].replica_id) in set(
            Orders(w.lead, w.pool)._due(again)
        )
        await asyncio.sleep(0)


async def test_of_two_recoveries_that_did_not_know_of_each_other_the_first_that_is_told_stays(
    tmp_path: Path,
) -> None:
    """Two survivors were rewritten by hand while no master led: both histories are the first after incarnation 0."""
    async with world(tmp_path, OPTIONS_) as w:
        await ready(w)
        row = await one_tablet(w)
        first, second = row.config.peers[:2]
        for peer, mark, index in ((first, 7, 101), (second, 9, 900)):  # both numbers of the second are higher
            node = w.nodes[peer.node_id]
            node.incarnations[row.tablet_id] = raised(0, mark)
            node.configs[row.tablet_id] = config_to_pb(Configuration(index, (peer,), raised(0, mark)))
            node.replicas[row.tablet_id, peer.replica_id] = True
            await w.beat_until(lambda: w.catalog.tablets[row.tablet_id].incarnation == raised(0, 7))
        for _ in range(3):
            await w.beat()
        now = w.catalog.tablets[row.tablet_id]
        assert now.config == Configuration(101, (first,), raised(0, 7))
        (other,) = [r for r in w.lead.liveness.all_reports_of(row.tablet_id) if r.node_id == second.node_id]
        assert is_given_up(other.status, now.incarnation)
        assert fate_of(w.lead, now, other) == "tombstone", "and is copied anew"
