"""Rows of tablets that are gone leave the catalog once no replica of them can turn up any more, and not before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stele.master.forgetting import DROPPED_AT_ONCE, Forgetting
from stele.master.orders import Orders, fate_of
from stele.master.port import insert
from stele.model.ids import CATALOG_TABLET_ID, TabletId
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import OPTIONS, Node, World, made, ready, until, world
from tests.master.test_following import commit, gone_table

HOUR_MS = OPTIONS.forget_after_ms


async def deleted(w: World, name: str) -> list[TabletId]:
    """A table made and deleted; its tablets. Nodes still have the replicas."""
    table_id = await made(w, name, rf=3, buckets=2)
    tablets = [t.tablet_id for t in w.catalog.current_tablets(table_id)]
    await w.leader.DeleteTable(pb.DeleteTableRequest(name=name), None)
    return tablets


async def deleted_but_at_one_node(w: World) -> tuple[list[TabletId], Node]:
    """A table made and deleted, and its replicas too, but those of one node; its tablets, and that node."""
    gone = await deleted(w, "t")
    away = next(n for n in w.nodes.values() if any(t in gone for t, _ in n.replicas))
    erase(w, gone, but=away.node_id)
    return gone, away


def erase(w: World, tablets: list[TabletId], *, but: str = "") -> None:
    """What DeleteTablet orders would have done, on all nodes but one."""
    for node in w.nodes.values():
        if node.node_id != but:
            node.replicas = {k: v for k, v in node.replicas.items() if k[0] not in tablets}


async def sweeps(w: World, *, silent: tuple[str, ...] = ()) -> None:
    """Long enough for the background to have looked at all several times."""
    lead = w.lead
    until = lead.now_ms() + 10 * OPTIONS.sweep_ms
    await w.beat_until(lambda: lead.now_ms() > until, silent=silent)


def rows_of(w: World, tablets: list[TabletId]) -> int:
    """How many of these tablets, and of their tables, are on record."""
    tables = [t for t in w.catalog.tables.values() if t.state == "REMOVED"]
    return sum(t in w.catalog.tablets for t in tablets) + len(tables)


async def test_rows_stay_for_their_time_and_go_then_and_the_name_is_of_use_meanwhile(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        gone = await deleted(w, "t")
        again = await made(w, "t")
        erase(w, gone)
        await sweeps(w)
        assert rows_of(w, gone) == 3
        assert all(not w.catalog.tablets[t].config.peers for t in gone)  # a mark, not all that was
        w.shift_ms += HOUR_MS
        await w.beat_until(lambda: rows_of(w, gone) == 0)
        assert not w.catalog.gone and set(w.catalog.tablets_of) == {again, w.catalog.catalog_tablet.table_id}
        for master in w.masters.values():
            assert set(master.catalog.tablets) == {CATALOG_TABLET_ID, *w.catalog.tablets_of[again]}
        listed = await w.leader.ListTables(pb.ListTablesRequest(include_removed=True), None)
        assert [(t.name, t.state) for t in listed.tables] == [("t", "RUNNING")]


async def test_thousands_of_rows_go_in_batches(tmp_path: Path) -> None:
    async with world(tmp_path, replace(OPTIONS, sweep_ms=1)) as w:
        await ready(w)
        before = len(w.group.entries)
        for number in range(1, 201):
            table, tablets = gone_table(number)
            commit(w, [*(insert(t) for t in tablets), insert(table)])
        alive = await made(w, "alive")
        await w.beat_until(lambda: not w.catalog.gone)
        assert len(w.group.entries) - before - 200 >= 2_000 // DROPPED_AT_ONCE
        assert list(w.catalog.tables) == [alive]


async def test_a_node_that_is_away_holds_rows_back_and_its_late_replica_is_deleted(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        gone, away = await deleted_but_at_one_node(w)
        w.shift_ms += HOUR_MS
        await sweeps(w, silent=(away.node_id,))
        await w.elect(next(n for n in w.masters if n != w.group.leader))  # it has no report of that node
        await sweeps(w, silent=(away.node_id,))
        assert rows_of(w, gone) == 3
        tablet, fate = await fate_of_late_replica(w, away)
        assert fate == "delete"
        await sweeps(w)
        assert tablet in w.catalog.tablets  # for as long as it is reported
        erase(w, gone)
        await w.beat_until(lambda: rows_of(w, gone) == 0)


async def test_a_silent_node_that_has_told_of_no_replica_holds_rows_back(tmp_path: Path) -> None:
    """It may be carrying out an order of before. Nothing runs by itself here: no order is under way."""
    async with world(tmp_path, replace(OPTIONS, sweep_ms=10 * HOUR_MS)) as w:
        await ready(w)
        gone = await deleted(w, "t")
        erase(w, gone)
        lead, silent = w.lead, min(w.nodes)
        await w.beat_until(lambda: not any(lead.liveness.all_reports_of(t) for t in gone))
        forgetting = Forgetting(lead, Orders(lead, w.pool))
        w.shift_ms += HOUR_MS
        lead.liveness.awake(lead.now_ms())  # no node is heard now; a look would do so at any moment
        await w.beat(silent=(silent,))
        assert lead.liveness.all_full(w.nodes)
        await forgetting.step()
        assert rows_of(w, gone) == 3
        await w.beat()
        await forgetting.step()
        assert rows_of(w, gone) == 0


async def fate_of_late_replica(w: World, away: Node) -> tuple[TabletId, str]:
    """What becomes of a replica on a node that is heard again."""
    lead = w.lead
    (tablet, replica), *_ = away.replicas
    await w.beat_until(lambda: lead.liveness.report(tablet, away.node_id, replica) is not None)
    report = lead.liveness.report(tablet, away.node_id, replica)
    assert report is not None
    return tablet, fate_of(lead, lead.catalog.tablets.get(tablet), report)


async def test_a_retired_node_holds_nothing_back_and_its_late_replica_is_left_alone(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        gone, away = await deleted_but_at_one_node(w)
        for state in (pb.DRAINING, pb.RETIRED):
            await w.move(away.node_id, state)
        w.shift_ms += HOUR_MS
        # This leader has its report and goes by it; the next one has not heard of the node.
        await w.elect(next(n for n in w.masters if n != w.group.leader))
        await w.beat_until(lambda: rows_of(w, gone) == 0, silent=(away.node_id,))
        _, fate = await fate_of_late_replica(w, away)
        assert fate == "keep"
        await sweeps(w)
        assert w.catalog.nodes[away.node_id].state == "RETIRED"


async def test_of_orders_that_ended_nothing_is_remembered_once_they_may_be_given_again(
    tmp_path: Path,
) -> None:
    options = replace(OPTIONS, sweep_ms=3_600_000, order_retry_ms=60_000)
    async with world(tmp_path, options) as w:
        await ready(w)
        lead = w.lead
        gone = await deleted(w, "t")
        await w.beat()
        orders = Orders(lead, w.pool)
        for tablet in gone:
            orders.consider(lead.catalog.tablets[tablet])
        assert orders.under_way() == set(gone)
        await until(lambda: not orders.under_way())
        orders.forget_old()
        assert len(orders) == 3 * len(gone)  # each ended a moment ago
        w.shift_ms += options.order_retry_ms
        orders.forget_old()
        assert len(orders) == 0
        await orders.close()


async def test_the_row_of_a_removed_table_that_has_no_tablets_goes_too(tmp_path: Path) -> None:
    """All its ranges were dropped, and their rows went, before it was removed. Such rows counted for ever."""
    async with world(tmp_path) as w:
        await ready(w)
        table, _ = gone_table(1)
        commit(w, [insert(replace(table, dropped_us=1, dropped_by="somebody"))])
        await sweeps(w)
        assert table.table_id in w.catalog.tables and w.catalog.withdrawn == {table.table_id: "somebody"}
        await w.elect(next(n for n in w.masters if n != w.group.leader))  # a new leader counts anew
        await sweeps(w)
        assert table.table_id in w.catalog.tables
        w.shift_ms += HOUR_MS
        await w.beat_until(lambda: not w.catalog.withdrawn)
        for master in w.masters.values():
            assert table.table_id not in master.catalog.tables
