"""Tables that are dropped and taken back: names, time, nodes that must know, and a leader that dies between any two steps."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stele.master.background import Background
from stele.master.dropping import _step_ms
from stele.master.orders import Orders
from stele.model.bounds import DROPPED_TABLES_MAX, KEEP_DROPPED_MAX_MS
from stele.model.errors import Code, Rejected
from stele.model.ids import new_id
from stele.model.steps import AddColumn
from stele.rpc.convert import id_to_pb
from stele.rpc.convert_schema import steps_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    MASTERS,
    World,
    claimed,
    create_request,
    hex_of,
    made,
    ready,
    ready_again,
    refused,
    until,
    world,
)
from tests.master.test_altering import alter_request, follow

HOUR_MS = 3_600_000
ADDED = AddColumn("stars", "int8", False, "0")


async def drop(w: World, table_id: str, *, keep_ms: int = HOUR_MS, wait_ms: int = 0) -> pb.DropTableResponse:
    """As clients ask for it: by id."""
    request = pb.DropTableRequest(table_id=id_to_pb(table_id), keep_ms=keep_ms, wait_ms=wait_ms)
    return await w.leader.DropTable(request, None)


async def recall(w: World, table_id: str, *, new_name: str = "", wait_ms: int = 0) -> pb.RecallTableResponse:
    request = pb.RecallTableRequest(table_id=id_to_pb(table_id), new_name=new_name, wait_ms=wait_ms)
    return await w.leader.RecallTable(request, None)


async def listed(w: World) -> dict[str, pb.TableInfoPB]:
    """All tables by id, whatever their state."""
    answer = await w.leader.ListTables(pb.ListTablesRequest(include_removed=True), None)
    return {hex_of(t.table_id): t for t in answer.tables}


async def pass_time(w: World, ms: int) -> None:
    """Let so much time pass, in steps in which no node counts as silent."""
    await w.beat()
    w.shift_ms += ms
    await w.beat()


async def look(w: World) -> None:
    """Let the background look at everything."""
    lead = w.lead
    background = Background(lead, Orders(lead, w.pool))
    background._swept_ms = -(1 << 60)
    await background.look()


async def test_a_dropped_table_keeps_its_tablets_and_loses_its_name(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        tablets = w.catalog.current_tablets(table_id)
        answer = await drop(w, table_id)
        assert (answer.table.state, answer.table.name) == ("DROPPED", "t")
        assert HOUR_MS - 10_000 < answer.table.keep_left_ms <= HOUR_MS and answer.table.dropped_us
        assert (
            await drop(w, table_id, keep_ms=5_000)
        ).table.keep_left_ms > HOUR_MS - 10_000  # repeated: as it was
        assert w.catalog.current_tablets(table_id) == tablets
        assert not (await w.leader.ListTables(pb.ListTablesRequest(), None)).tables
        assert (await listed(w))[table_id].state == "DROPPED"
        for request in (
            w.leader.GetTable(pb.GetTableRequest(name="t"), None),
            w.leader.GetTableLocations(pb.GetTableLocationsRequest(table_id=id_to_pb(table_id)), None),
            w.leader.DropTable(pb.DropTableRequest(name="t"), None),
        ):
            assert (await refused(request)).code is Code.NOT_FOUND
        again = await made(w, "t", buckets=0)
        assert again != table_id
        error = await refused(recall(w, table_id))
        assert error.code is Code.ALREADY_PRESENT and "recall it under another name" in str(error)
        assert (await refused(recall(w, table_id, new_name=" "))).code is Code.INVALID_ARGUMENT
        back = await recall(w, table_id, new_name="old")
        assert (back.table.name, back.table.state, back.table.tablets) == ("old", "RUNNING", 4)
        assert (await recall(w, table_id, new_name="old")).table == back.table  # repeated
        error = await refused(recall(w, table_id, new_name="other"))
        assert "it is not dropped" in str(error)
        row = w.catalog.tables[table_id]
        assert (row.dropped_us, row.keep_ms) == (0, 0) and not w.catalog.dropped and not w.catalog.withdrawn
        assert w.catalog.current_tablets(table_id) == tablets


async def test_views_have_its_tablets_and_not_the_table(tmp_path: Path) -> None:
    """So drivers heal and move them, and nobody takes it for the new table of its name."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        changes = w.masters[w.group.leader].view_changes
        assert changes is not None
        first = await changes.page(pb.ViewPlacePB(), "c" * 32)
        await drop(w, table_id)
        again = await made(w, "t", buckets=0)
        for view in (
            await changes.page(first.upto, "c" * 32),
            await w.leader.GetClusterView(pb.GetClusterViewRequest(), None),
        ):
            assert [hex_of(t.table_id) for t in view.tables] == [again]
            names = [t.table_name for t in view.tablets if hex_of(t.table_id) == table_id]
            assert names == ["t (dropped)"] * 4
            assert [t.table_name for t in view.tablets if hex_of(t.table_id) == again] == ["t"]
        tablet = w.catalog.current_tablets(table_id)[0]
        spare = next(n for n in w.nodes if tablet.config.peer_on(n) is None)
        intent = pb.IntentPB(tablet_id=id_to_pb(tablet.tablet_id), target_node=id_to_pb(spare))
        begun = await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=await claimed(w), intent=intent), None)
        assert begun.intent.replica_id > 0


async def test_a_table_whose_time_is_over_is_deleted(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id, other = await made(w), await made(w, "u", buckets=0)
        tablets = [t.tablet_id for t in w.catalog.current_tablets(table_id)]
        await drop(w, table_id, keep_ms=60_000)
        await drop(w, other, keep_ms=120_000)
        await pass_time(w, 55_000)
        await look(w)
        assert w.catalog.tables[table_id].state == "DROPPED"
        await pass_time(w, 6_000)
        await w.beat_until(lambda: w.catalog.tables[table_id].state == "REMOVED")
        assert {w.catalog.tablets[t].state for t in tablets} == {"DELETED"}
        error = await refused(recall(w, table_id))
        assert error.code is Code.NOT_FOUND and "its time to be recalled is over" in str(error)
        assert w.catalog.tables[other].state == "DROPPED"
        # Nodes refuse it for as long as they may have replicas of it.
        assert set(w.catalog.withdrawn) == {table_id, other}
        await w.beat()
        assert all(n.withdrawn == {table_id, other} for n in w.nodes.values())


async def test_no_new_leader_and_no_wall_clock_shortens_the_time(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w, buckets=0)
        await drop(w, table_id, keep_ms=HOUR_MS)
        assert _step_ms(HOUR_MS) == 360_000
        await pass_time(w, 350_000)
        await look(w)
        assert w.catalog.tables[table_id].keep_ms == HOUR_MS  # too little has passed to be written down
        await pass_time(w, 20_000)
        await w.beat_until(lambda: w.catalog.tables[table_id].keep_ms < HOUR_MS)
        table = w.catalog.tables[table_id]
        assert HOUR_MS - 380_000 < table.keep_ms <= HOUR_MS - 370_000
        assert (
            0 <= table.keep_ms - w.lead.keep_left_ms(table) < 10_000
        )  # that it was written down takes no time away
        w.wall_ahead_ms += 100 * HOUR_MS
        await w.elect(MASTERS[1])
        await ready_again(w)
        await look(w)
        table = w.catalog.tables[table_id]
        assert table.state == "DROPPED" and w.lead.keep_left_ms(table) > HOUR_MS - 400_000
        await pass_time(w, HOUR_MS - 400_000)
        await look(w)
        assert w.catalog.tables[table_id].state == "DROPPED"
        await pass_time(w, 400_000)
        await w.beat_until(lambda: w.catalog.tables[table_id].state == "REMOVED")


@pytest.mark.parametrize("fate", ["lost", "unknown"])
async def test_a_leader_dies_with_the_batch_of_a_drop(tmp_path: Path, fate: str) -> None:
    """The caller asks the next leader again: the table is dropped once, with its whole time."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        w.group.lose_next = fate
        assert (await refused(drop(w, table_id))).code is Code.UNKNOWN_OUTCOME
        await w.elect(MASTERS[1])
        await ready_again(w)
        assert (table_id in w.catalog.dropped) == (fate == "unknown")
        assert (await drop(w, table_id)).table.state == "DROPPED"
        assert w.lead.keep_left_ms(w.catalog.tables[table_id]) > HOUR_MS - 10_000
        assert len(w.catalog.current_tablets(table_id)) == 4


@pytest.mark.parametrize("fate", ["lost", "unknown"])
async def test_a_leader_dies_with_the_batch_of_a_recall(tmp_path: Path, fate: str) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await drop(w, table_id)
        w.group.lose_next = fate
        assert (await refused(recall(w, table_id, new_name="u"))).code is Code.UNKNOWN_OUTCOME
        await w.elect(MASTERS[1])
        await ready_again(w)
        assert (table_id in w.catalog.dropped) == (fate == "lost")
        assert (await recall(w, table_id, new_name="u")).table.state == "RUNNING"
        assert list(w.catalog.table_by_name) == ["u"] and len(w.catalog.current_tablets(table_id)) == 4


@pytest.mark.parametrize("fate", ["lost", "unknown"])
async def test_a_leader_dies_with_the_batch_that_ends_the_time(tmp_path: Path, fate: str) -> None:
    """Table and tablets go together, under whichever leader."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await drop(w, table_id, keep_ms=1_000)
        w.group.lose_next = fate
        await pass_time(w, 2_000)
        await until(lambda: not w.group.leader)
        await w.elect(MASTERS[1])
        await ready_again(w)
        states = {t.state for t in w.catalog.tablets_of_table(table_id)}
        assert (w.catalog.tables[table_id].state, states) in (
            ("DROPPED", {"RUNNING"}),
            ("REMOVED", {"DELETED"}),
        )
        await pass_time(w, 2_000)
        await w.beat_until(lambda: w.catalog.tables[table_id].state == "REMOVED")
        assert {t.state for t in w.catalog.tablets_of_table(table_id)} == {"DELETED"}


async def test_a_recall_and_the_end_of_the_time_at_once(tmp_path: Path) -> None:
    """Either the whole table is back, or all of it is deleted."""
    async with world(tmp_path) as w:
        await ready(w)
        for _ in range(4):
            table_id = await made(w)
            await drop(w, table_id, keep_ms=1_000)
            w.shift_ms += 1_000
            done, _ = await asyncio.gather(recall(w, table_id), look(w), return_exceptions=True)
            await w.beat()
            state = w.catalog.tables[table_id].state
            states = {t.state for t in w.catalog.tablets_of_table(table_id)}
            if isinstance(done, BaseException):
                assert (state, states) == ("REMOVED", {"DELETED"}), done
            else:
                assert (state, states) == ("RUNNING", {"RUNNING"})
                await w.leader.DeleteTable(pb.DeleteTableRequest(table_id=id_to_pb(table_id)), None)


@pytest.mark.parametrize("late", [False, True])
async def test_an_alteration_under_way_goes_on(tmp_path: Path, late: bool) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await w.leader.AlterTable(alter_request(ADDED), None)
        await drop(w, table_id)
        assert list(w.catalog.altering) == [table_id]
        for request in (
            pb.AlterTableRequest(table_id=id_to_pb(table_id), alter_id=id_to_pb(new_id()), new_name="u"),
            pb.AlterTableRequest(
                table_id=id_to_pb(table_id), alter_id=id_to_pb(new_id()), steps=steps_to_pb([ADDED])
            ),
        ):
            error = await refused(w.leader.AlterTable(request, None))
            assert error.code is Code.NOT_FOUND and "was dropped; `stele table recall" in str(error)
        if late:
            assert (await recall(w, table_id)).table.state == "ALTERING"
        follow(w, table_id)
        await w.beat_until(lambda: not w.catalog.altering)
        assert w.catalog.tables[table_id].state == ("RUNNING" if late else "DROPPED")
        found = (await recall(w, table_id)).table
        assert found.state == "RUNNING" and found.schema.version == 2


async def test_nodes_that_may_serve_it_are_named(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        beating = asyncio.create_task(_beat_on(w, ()))
        try:
            assert not (await drop(w, table_id, wait_ms=2_000)).unreached
            assert all(n.withdrawn == {table_id} for n in w.nodes.values())
            assert not (await recall(w, table_id, wait_ms=2_000)).unreached
            assert not any(n.withdrawn for n in w.nodes.values())
            holder = next(n for n in w.nodes.values() if n.replicas)
            holder.obeys = False
            assert list((await drop(w, table_id, wait_ms=200)).unreached) == [holder.node_id]
            holder.obeys = True
            assert not (await drop(w, table_id, wait_ms=2_000)).unreached
        finally:
            beating.cancel()


@pytest.mark.parametrize("what", ["drop", "recall", "delete"])
async def test_a_leader_that_is_replaced_while_nodes_are_asked_does_not_say_that_nothing_was_done(
    tmp_path: Path, what: str
) -> None:
    """NOT_LEADER says so. The change is on record, and the next leader has it."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w, buckets=0)
        if what == "recall":
            await drop(w, table_id)
            await w.beat()
            await w.beat()
        before = len(w.group.entries)
        for node in w.nodes.values():
            node.obeys = False
        calls = {
            "drop": lambda: drop(w, table_id, wait_ms=30_000),
            "recall": lambda: recall(w, table_id, wait_ms=30_000),
            "delete": lambda: w.leader.DeleteTable(
                pb.DeleteTableRequest(table_id=id_to_pb(table_id), wait_ms=30_000), None
            ),
        }
        beating = asyncio.create_task(_beat_on(w, ()))
        waiting = asyncio.create_task(calls[what]())
        try:
            await until(lambda: len(w.group.entries) > before)
            await asyncio.sleep(0.1)
            assert not waiting.done()
            w.group.elect(MASTERS[1])
            error = await refused(waiting)
            assert error.code is Code.UNKNOWN_OUTCOME and "another master leads now" in str(error)
        finally:
            beating.cancel()
        await until(lambda: w.masters[MASTERS[1]].lead is not None)
        state = (await listed(w))[table_id].state
        assert state == {"drop": "DROPPED", "recall": "RUNNING", "delete": "REMOVED"}[what]


async def test_a_silent_node_is_named_if_it_may_lead(tmp_path: Path) -> None:
    """It led when last heard; or it and other silent ones are a majority, and may have elected a leader since."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w, buckets=0)
        (tablet,) = w.catalog.current_tablets(table_id)
        _, leader = w.lead.liveness.leader_of(tablet.tablet_id)
        followers = sorted(p.node_id for p in tablet.config.peers if p.node_id != leader)
        for silent, named in (
            ((followers[0],), []),
            ((leader,), [leader]),
            (tuple(followers), followers),
        ):
            await w.beat()
            w.shift_ms += w.lead.options.alive_ms + 1
            beating = asyncio.create_task(_beat_on(w, silent))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            assert list((await drop(w, table_id, wait_ms=300)).unreached) == named
            # The callers ask until nobody is named, so the answer must not come at once.
            assert time.monotonic() - began > 0.25 or not named
            began = time.monotonic()
            assert not (await recall(w, table_id, wait_ms=2_000)).unreached
            assert time.monotonic() - began < 1
            beating.cancel()


async def test_a_node_that_knows_of_an_earlier_drop_only_is_waited_for(tmp_path: Path) -> None:
    """It heard that the table is back, and its last heartbeat is from before that."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w, buckets=0)
        await drop(w, table_id)
        await w.beat()
        await w.beat()
        assert not (await drop(w, table_id, wait_ms=100)).unreached
        await recall(w, table_id)
        holders = sorted(p.node_id for p in w.catalog.current_tablets(table_id)[0].config.peers)
        assert list((await drop(w, table_id, wait_ms=100)).unreached) == holders


async def test_a_request_that_is_repeated_late_undoes_nothing(tmp_path: Path) -> None:
    """A caller repeats it until all nodes know, or because no answer came; somebody else was there meanwhile."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w, buckets=0)
        dropping = pb.DropTableRequest(
            table_id=id_to_pb(table_id), keep_ms=HOUR_MS, drop_id=id_to_pb(new_id())
        )
        recalling = pb.RecallTableRequest(table_id=id_to_pb(table_id), recall_id=id_to_pb(new_id()))
        await w.leader.DropTable(dropping, None)
        assert (await w.leader.DropTable(dropping, None)).table.state == "DROPPED"
        await w.leader.RecallTable(recalling, None)
        error = await refused(w.leader.DropTable(dropping, None))
        assert error.code is Code.CAS_FAILED and "somebody recalled it since" in str(error)
        rename = pb.AlterTableRequest(table_id=id_to_pb(table_id), alter_id=id_to_pb(new_id()), new_name="u")
        await w.leader.AlterTable(rename, None)
        assert (await w.leader.RecallTable(recalling, None)).table.name == "u"
        await drop(w, table_id)
        error = await refused(w.leader.RecallTable(recalling, None))
        assert error.code is Code.CAS_FAILED and "somebody dropped it since" in str(error)
        assert w.catalog.tables[table_id].state == "DROPPED"


async def _beat_on(w: World, silent: tuple[str, ...]) -> None:
    while True:
        await w.beat(silent=silent)
        await asyncio.sleep(0.01)


async def test_a_create_that_is_tried_again_does_not_take_a_dropped_table_up(tmp_path: Path) -> None:
    """Nor does one of its name: it makes a new table."""
    async with world(tmp_path) as w:
        await ready(w)
        request = create_request("t", table_id="d" * 32)
        await w.leader.CreateTable(request, None)
        await drop(w, "d" * 32)
        error = await refused(w.leader.CreateTable(request, None))
        assert error.code is Code.TABLET_DELETED and "created and dropped since" in str(error)
        answer = await w.leader.CreateTable(create_request("t"), None)
        assert hex_of(answer.table_id) != "d" * 32 and w.catalog.tables["d" * 32].state == "DROPPED"


async def test_a_key_space_is_dropped_and_recalled(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        answer = await w.leader.CreateTable(pb.CreateTableRequest(name="k", kind="keyspace"), None)
        assert (await drop(w, hex_of(answer.table_id))).table.state == "DROPPED"
        assert (await recall(w, hex_of(answer.table_id))).table.kind == "keyspace"


async def test_the_setting_of_the_cluster(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w, buckets=0)
        answer = await w.leader.SetKeepDropped(pb.SetKeepDroppedRequest(keep_ms=2 * HOUR_MS), None)
        assert answer.before_ms == 24 * HOUR_MS
        assert (await w.leader.ListTables(pb.ListTablesRequest(), None)).keep_dropped_ms == 2 * HOUR_MS
        assert HOUR_MS < (await drop(w, table_id, keep_ms=0)).table.keep_left_ms <= 2 * HOUR_MS
        for keep_ms in (0, 999, KEEP_DROPPED_MAX_MS + 1):
            error = await refused(w.leader.SetKeepDropped(pb.SetKeepDroppedRequest(keep_ms=keep_ms), None))
            assert error.code is Code.INVALID_ARGUMENT and "expected 1 s to 366 days" in str(error)
        await recall(w, table_id)
        assert (await refused(drop(w, table_id, keep_ms=999))).code is Code.INVALID_ARGUMENT
        assert w.catalog.tables[table_id].state == "RUNNING"


async def test_before_an_upgrade_is_finalized_nothing_is_dropped(tmp_path: Path) -> None:
    """The release before would end at such a row."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w, buckets=0)
        catalog = w.catalog
        assert catalog.cluster is not None
        catalog.cluster = replace(catalog.cluster, cluster_version=1)
        error = await refused(drop(w, table_id))
        assert error.code is Code.UNSUPPORTED_VERSION and "stele cluster finalize" in str(error)
        assert w.catalog.tables[table_id].state == "RUNNING"


async def test_too_many_dropped_tables_are_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        ids = [await made(w, name, buckets=0) for name in ("a", "b", "c")]
        w.catalog.withdrawn.update((f"{n:032x}", "") for n in range(DROPPED_TABLES_MAX - 1))
        told = await asyncio.gather(*(drop(w, table_id) for table_id in ids), return_exceptions=True)
        errors = [error for error in told if isinstance(error, Rejected)]
        assert len(errors) == 2, "those that come at once keep to the bound, too"
        assert all(e.code is Code.TOO_LARGE and "1000 dropped tables" in str(e) for e in errors)


async def test_a_dropped_table_takes_no_other_changes_and_can_be_deleted(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await drop(w, table_id)
        request = pb.SetReplicationFactorRequest(table_id=id_to_pb(table_id), replication_factor=5)
        assert (await refused(w.leader.SetReplicationFactor(request, None))).code is Code.NOT_FOUND
        await w.leader.DeleteTable(pb.DeleteTableRequest(table_id=id_to_pb(table_id)), None)
        assert w.catalog.tables[table_id].state == "REMOVED" and not w.catalog.dropped
        assert (await refused(recall(w, table_id))).code is Code.NOT_FOUND
        assert (await refused(drop(w, table_id))).code is Code.NOT_FOUND
        assert (await refused(recall(w, "e" * 32))).code is Code.NOT_FOUND
