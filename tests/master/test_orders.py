"""What masters order nodes to do, and that no node, and no number of tablets, holds up the others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from stele.master.background import TABLETS_AT_ONCE, Background
from stele.master.liveness import Report
from stele.master.orders import ORDERS_PER_NODE, Order, Orders, fate_of
from stele.master.records import TabletRecord
from stele.model.config import Configuration, MemberType, Peer
from stele.model.ids import OpId, ReplicaId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import config_to_pb, id_to_pb, opid_from_pb
from stele.rpc.identity import Identity
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    OPTIONS,
    claimed,
    in_force,
    made,
    one_tablet,
    ordered,
    ready,
    until,
    world,
)


async def test_a_sweep_over_all_tablets_gives_others_their_turns_and_leaves_out_what_is_gone(
    tmp_path: Path,
) -> None:
    """It took one step of the event loop for all: 170 ms each second for 3,000 tablets, and more for those of all tables
    that were ever deleted."""

    class Considered(Orders):
        def consider(self, row: TabletRecord) -> bool:
            seen.append(row.tablet_id)
            return False

    seen: list[str] = []
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w, buckets=4 * TABLETS_AT_ONCE)
        lead = w.lead
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        tablets = {t.tablet_id for t in w.catalog.current_tablets(table_id)}
        task = asyncio.create_task(others())
        await asyncio.sleep(0)
        turns = 0
        await Background(lead, Considered(lead, w.pool)).look()
        assert turns >= 4 and tablets <= set(seen)
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="t"), None)
        for node in w.nodes.values():
            node.replicas.clear()
        await w.beat()
        await until(lambda: not lead.dirty)
        seen.clear()
        await Background(lead, Considered(lead, w.pool)).look()
        task.cancel()
        assert not tablets & set(seen)
        assert w.catalog.states["DELETED"] == len(tablets) and w.catalog.states["RUNNING"] == 1


async def test_a_node_that_does_not_answer_holds_up_no_orders_to_others(tmp_path: Path) -> None:
    class Nodes(ChannelPool):
        """The first node's CreateTablet does not return for long."""

        async def unary(self, address: str, stub: Any, method: str, request: Any, **how: Any) -> Any:
            made.append((bytes(request.tablet_id), how["to_node"]))
            if how["to_node"] == slow:
                await answers.wait()
            await asyncio.sleep(0.001)

    made: list[tuple[bytes, str]] = []
    answers = asyncio.Event()
    # An order that has its turn between a step of the clock and the heartbeat after it is not to find the node silent.
    options = replace(OPTIONS, order_retry_ms=10_000, create_timeout_ms=3_600_000, alive_ms=3_600_000)
    async with world(tmp_path, options) as w:
        await ready(w)
        slow = min(w.nodes)
        table_id = await ordered(w, buckets=64)
        lead = w.lead
        orders = Orders(lead, Nodes(Identity()))
        wanted = [p.node_id for r in w.catalog.current_tablets(table_id) for p in r.config.peers]
        for _ in range(5):
            for row in w.catalog.current_tablets(table_id):
                orders.consider(row)
            w.shift_ms += 10_000
            await w.beat()
            await asyncio.sleep(0.02)
        due = sum(n != slow for n in wanted)
        await until(lambda: len({(t, n) for t, n in made if n != slow}) == due)
        sound = {(t, n) for t, n in made if n != slow}
        assert sum(n == slow for _, n in made) == ORDERS_PER_NODE
        assert len(orders._running) <= wanted.count(slow) + len(sound), "one task for each replica"
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="t"), None)
        made.clear()
        answers.set()
        await until(lambda: not orders._running)
        assert not made, "what is not due any more is not sent"


async def test_which_replicas_are_tombstoned(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        lead = w.lead
        evicted = row.config.peers[2]
        report = lead.liveness.report(row.tablet_id, evicted.node_id, evicted.replica_id)
        assert report is not None and fate_of(lead, row, report) == "keep"
        assert fate_of(lead, None, report) == "keep"  # a tablet nobody knows
        smaller = Configuration(12, row.config.peers[:2])
        await in_force(w, row.tablet_id, smaller, says=row.config.peers[0].node_id)
        row = w.catalog.tablets[row.tablet_id]
        assert fate_of(lead, row, report) == "tombstone"
        assert fate_of(lead, replace(row, state="CREATING"), report) == "keep"
        # Two nodes hold one id: only the one that the configuration names keeps it.
        elsewhere = next(n for n in w.nodes if row.config.peer_on(n) is None)
        member = lead.liveness.report(
            row.tablet_id, row.config.peers[0].node_id, row.config.peers[0].replica_id
        )
        assert member is not None and fate_of(lead, row, member) == "keep"
        assert fate_of(lead, row, replace(member, node_id=elsewhere)) == "tombstone"
        order = Order("tombstone", evicted.node_id, evicted.replica_id)
        sent = Orders(lead, w.pool)._delete_request(row, order)
        assert sent.cas_config_opid_index_less_or_equal == 12, (
            "its node may know of a newer one, that names it"
        )
        # A change that it proposed itself as a leader, and that lost: nobody will ever tell it so.
        told = common_pb2.ReplicaStatusPB()
        told.CopyFrom(report.status)
        told.pending_config.CopyFrom(config_to_pb(Configuration(14, row.config.peers)))
        assert fate_of(lead, row, replace(report, status_bytes=told.SerializeToString())) == "tombstone"
        leads = w.nodes[row.leader]
        leads.pending[row.tablet_id] = config_to_pb(Configuration(14, (*row.config.peers, evicted)))
        await w.beat()
        assert fate_of(lead, row, replace(report, status_bytes=told.SerializeToString())) == "keep", (
            "its leader is adding it"
        )
        leads.pending.clear()
        await w.beat()
        told.committed_config.opid_index = 13
        assert fate_of(lead, row, replace(report, status_bytes=told.SerializeToString())) == "keep"
        newer = Peer(evicted.node_id, ReplicaId(3), "", MemberType.VOTER)
        again = Configuration(15, (*smaller.peers, newer))
        await in_force(w, row.tablet_id, again, says=evicted.node_id)
        assert fate_of(lead, w.catalog.tablets[row.tablet_id], report) == "keep"
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="t"), None)
        assert fate_of(lead, w.catalog.tablets[row.tablet_id], report) == "delete"


async def test_a_first_replica_is_not_made_once_another_configuration_is_in_force(tmp_path: Path) -> None:
    """It would take that one for the group's first; the driver makes it as a copy instead."""

    class Nodes(ChannelPool):
        async def unary(self, address: str, stub: Any, method: str, request: Any, **how: Any) -> Any:
            sent.append((method, how["to_node"]))

    sent: list[tuple[str, str]] = []
    async with world(tmp_path, replace(OPTIONS, create_timeout_ms=60_000)) as w:
        await ready(w)
        (row,) = w.catalog.current_tablets(await ordered(w))
        late = next(p for p in row.config.peers if p.node_id != row.leader)
        for peer in row.config.peers:
            if peer is not late:
                w.nodes[peer.node_id].replicas[row.tablet_id, peer.replica_id] = peer.node_id == row.leader
        await w.beat()
        await until(lambda: w.catalog.tablets[row.tablet_id].state == "RUNNING")
        lead = w.lead

        async def sent_now() -> list[tuple[str, str]]:
            sent.clear()
            await w.beat()
            orders = Orders(lead, Nodes(Identity()))
            orders.consider(w.catalog.tablets[row.tablet_id])
            await until(lambda: not orders.under_way())
            return list(sent)

        assert await sent_now() == [("CreateTablet", late.node_id)]
        w.nodes[row.leader].configs[row.tablet_id] = config_to_pb(Configuration(12, row.config.peers))
        await w.beat()
        await until(lambda: w.catalog.tablets[row.tablet_id].config.opid_index == 12)
        assert w.catalog.tablets[row.tablet_id].uncreated == (late.replica_id,)
        assert await sent_now() == []


async def test_a_replica_that_an_intent_names_is_kept_and_orders_name_their_catalog(tmp_path: Path) -> None:
    """It is in no configuration before its copy is here. Elsewhere, under the same id, it is nobody's."""
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        lead = w.lead
        target, elsewhere = sorted(n for n in w.nodes if row.config.peer_on(n) is None)
        intent = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(target))
        begin = pb.BeginIntentRequest(epoch=await claimed(w), intent=intent)
        replica_id = (await w.leader.BeginIntent(begin, None)).intent.replica_id
        row = w.catalog.tablets[row.tablet_id]
        peer = row.config.peers[0]
        member = lead.liveness.report(row.tablet_id, peer.node_id, peer.replica_id)
        assert member is not None
        status = common_pb2.ReplicaStatusPB()
        status.CopyFrom(member.status)
        status.replica_id = replica_id
        told = Report(target, replica_id, status.SerializeToString(), member.at_ms)
        assert fate_of(lead, row, told) == "keep"
        assert fate_of(lead, row, replace(told, node_id=elsewhere)) == "tombstone"
        orders = Orders(lead, w.pool)
        for request in (
            orders._create_request(row),
            orders._delete_request(row, Order("tombstone", elsewhere, replica_id)),
        ):
            assert opid_from_pb(request.catalog_opid) == OpId(lead.term, lead.catalog.opid.index) > OpId(1, 0)
