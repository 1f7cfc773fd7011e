"""Three masters on the in-memory port: where the replicas of new tablets go, and what becomes of one that is never made."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from stele.master.background import CREATING_PER_NODE, Background
from stele.master.leadership import MasterOptions
from stele.master.orders import Orders
from stele.master.patience import Patience
from stele.master.port import swap
from stele.master.records import TabletRecord
from stele.model.errors import Code, Retryable
from stele.model.ids import CATALOG_TABLET_ID, NodeId, TabletId
from stele.rpc.proto import master_pb2 as pb
from tests.consensus.cluster import WAIT_S
from tests.master.harness import (
    MASTERS,
    OPTIONS,
    World,
    create_request,
    hex_of,
    made,
    ordered,
    ready,
    refused,
    until,
    world,
)


async def test_nothing_is_placed_before_the_leader_has_settled(tmp_path: Path) -> None:
    slow = MasterOptions(heartbeat_interval_ms=60_000, sweep_ms=30)
    async with world(tmp_path, slow) as w:
        error = await refused(w.leader.CreateTable(create_request("t"), None))
        assert isinstance(error, Retryable) and error.code is Code.NOT_READY


async def test_creating_in_vain_is_replaced(tmp_path: Path) -> None:
    options = MasterOptions(heartbeat_interval_ms=20, sweep_ms=30, create_timeout_ms=300)
    async with world(tmp_path, options) as w:
        await ready(w)
        answer = await w.leader.CreateTable(create_request("t"), None)
        table_id = hex_of(answer.table_id)
        async with asyncio.timeout(WAIT_S):  # nobody makes the replicas
            while not any(t.state == "REPLACED" for t in w.catalog.tablets_of_table(table_id)):
                await w.beat()
                await asyncio.sleep(0.01)
        await w.beat_until(lambda: [t.state for t in w.catalog.current_tablets(table_id)] == ["RUNNING"])


async def test_a_tablet_that_runs_by_the_time_its_row_may_be_changed_is_not_replaced(tmp_path: Path) -> None:
    """It was looked at before, and another operation held its table meanwhile."""
    options = MasterOptions(heartbeat_interval_ms=20, sweep_ms=30, create_timeout_ms=60_000)
    async with world(tmp_path, options) as w:
        await ready(w)
        table_id = await ordered(w)
        lead = w.lead
        background = Background(lead, Orders(lead, w.pool))
        (row,) = w.catalog.current_tablets(table_id)
        async with lead.locks.hold(tables=(f"id/{table_id}",), tablets=(row.tablet_id,)):
            w.shift_ms += 61_000
            lead.liveness.began_ms += 3_600_000
            assert not background._too_late(row), "a new leader lets nodes tell of it first"
            lead.liveness.began_ms -= 3_600_000
            late = asyncio.create_task(background._replace(row.tablet_id))
            await asyncio.sleep(0)
            row = w.catalog.tablets[row.tablet_id]
            await lead.commit([swap(row, replace(row, state="RUNNING"))])
        await late
        assert [t.state for t in w.catalog.tablets_of_table(table_id)] == ["RUNNING"]


async def test_nothing_is_placed_on_nodes_that_a_new_leader_has_not_heard(tmp_path: Path) -> None:
    """They may be dead: their silence counts from when it began to lead."""
    async with world(tmp_path, replace(OPTIONS, alive_ms=3_600_000)) as w:
        await ready(w)
        silent = tuple(sorted(w.nodes)[:2])
        await w.elect(MASTERS[1])
        lead = w.lead
        await w.beat_until(lambda: lead.settled, silent=silent)
        assert {c.node_id for c in lead.candidates()} == set(w.nodes) - set(silent)
        await w.beat()
        assert {c.node_id for c in lead.candidates()} == set(w.nodes)


async def test_a_first_replica_that_is_never_made_is_missing_in_the_end(tmp_path: Path) -> None:
    """Its node was well and had no room for it, so it passed for healthy, and no driver ever looked for another."""
    async with world(tmp_path, replace(OPTIONS, missing_after_ms=0, create_timeout_ms=60_000)) as w:
        await ready(w)
        await w.leader.CreateTable(create_request("t"), None)
        await until(lambda: all(t.state != "PREPARING" for t in w.catalog.tablets.values()))
        row = next(t for t in w.catalog.tablets.values() if t.tablet_id != CATALOG_TABLET_ID)
        full = next(p for p in row.config.peers if p.node_id != row.leader)
        for peer in row.config.peers:
            if peer is not full:
                leads = peer.node_id == row.leader
                w.nodes[peer.node_id].replicas[(row.tablet_id, peer.replica_id)] = leads

        async def seen() -> list[tuple[int, str]]:
            await w.beat()
            view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
            (tablet,) = (t for t in view.tablets if hex_of(t.tablet_id) == row.tablet_id)
            return sorted((r.status.replica_id, r.status.error) for r in tablet.replicas)

        await w.beat()
        await until(lambda: w.catalog.tablets[row.tablet_id].state == "RUNNING")
        others = sorted((p.replica_id, "") for p in row.config.peers if p is not full)
        assert await seen() == others
        w.shift_ms += 61_000
        await w.beat()
        assert await seen() == sorted([*others, (full.replica_id, "its node reports no such replica")])
        w.nodes[full.node_id].replicas[(row.tablet_id, full.replica_id)] = False
        assert await seen() == sorted([*others, (full.replica_id, "")])


@pytest.mark.parametrize(
    ("free_bytes", "low"), [(300 << 20, False), (1 << 40, True)], ids=["bytes", "inodes"]
)
async def test_nothing_is_placed_on_a_full_disk_where_there_are_others(
    tmp_path: Path, free_bytes: int, low: bool
) -> None:
    async with world(tmp_path) as w:
        await ready(w, 3)
        full = next(iter(w.nodes.values()))
        for node, free in zip(w.nodes.values(), (free_bytes, 1 << 40, 1 << 40)):
            node.disk_free_bytes = free
        full.disk_low = low
        await w.beat()
        for number in range(4):
            table_id = await made(w, f"t{number}", rf=1, buckets=0)
            (row,) = w.catalog.current_tablets(table_id)
            assert row.config.peer_on(NodeId(full.node_id)) is None
        await made(w, "wide", rf=3, buckets=0)


async def test_nobody_is_told_of_a_tablet_that_may_yet_be_replaced(tmp_path: Path) -> None:
    """Its replicas lead and would acknowledge rows; the masters do not hear of it in time, and replace it."""
    async with world(tmp_path, MasterOptions(heartbeat_interval_ms=20, sweep_ms=30)) as w:
        await ready(w)
        table_id = await ordered(w)
        located = await w.leader.GetTableLocations(pb.GetTableLocationsRequest(name="t"), None)
        told = {hex_of(t.tablet_id) for t in located.tablets if t.replicas}
        w.create_replicas()
        w.shift_ms += 60_000  # all power was lost; the masters are back before the nodes
        await w.elect(MASTERS[1])
        await until(lambda: any(t.state == "REPLACED" for t in w.catalog.tablets_of_table(table_id)))
        replaced = {t.tablet_id for t in w.catalog.tablets_of_table(table_id) if t.state == "REPLACED"}
        assert not told & replaced
        await w.beat_until(lambda: [t.state for t in w.catalog.current_tablets(table_id)] == ["RUNNING"])
        located = await w.leader.GetTableLocations(pb.GetTableLocationsRequest(name="t"), None)
        assert [len(t.replicas) for t in located.tablets] == [3]


def _states(w: World, table_id: str) -> Counter[str]:
    return Counter(t.state for t in w.catalog.current_tablets(table_id))


async def _idle_until(w: World, done: Callable[[], bool], silent: tuple[str, ...] = ()) -> None:
    """Let nodes send heartbeats and make nothing."""
    async with asyncio.timeout(WAIT_S):
        while not done():
            await w.beat(silent=silent)
            await asyncio.sleep(0.01)


async def test_many_new_tablets_wait_in_line(tmp_path: Path) -> None:
    """All of them had to get a leader within 30 s. Those at the end of a long line were replaced, and stood in it again."""
    async with world(tmp_path) as w:
        await ready(w)
        answer = await w.leader.CreateTable(create_request("t", buckets=400), None)
        table_id = hex_of(answer.table_id)
        at_most = CREATING_PER_NODE * len(w.nodes)
        await until(lambda: _states(w, table_id)["CREATING"] == at_most)
        for _ in range(3):
            await w.beat()  # no node makes anything
            await asyncio.sleep(OPTIONS.sweep_ms / 1000)
        assert _states(w, table_id) == {"CREATING": at_most, "PREPARING": 400 - at_most}
        most = 0

        def all_run() -> bool:
            nonlocal most
            states = _states(w, table_id)
            most = max(most, states["CREATING"])
            return states["RUNNING"] == 400

        await w.beat_until(all_run)
        assert most == at_most


async def test_a_tablet_that_cannot_be_placed_does_not_hold_up_the_line(tmp_path: Path) -> None:
    async with world(tmp_path, replace(OPTIONS, create_timeout_ms=3_600_000, sweep_ms=600_000)) as w:
        await ready(w)
        answer = await w.leader.CreateTable(create_request("five", rf=5, buckets=300), None)
        five = hex_of(answer.table_id)
        await until(lambda: _states(w, five)["CREATING"] == CREATING_PER_NODE * 5)
        answer = await w.leader.CreateTable(create_request("three", buckets=4), None)
        three = hex_of(answer.table_id)
        await until(lambda: _states(w, three)["PREPARING"] == 4)
        lost = tuple(sorted(w.nodes)[3:])
        w.shift_ms += 2 * w.lead.options.alive_ms
        await w.beat_until(lambda: _states(w, three)["RUNNING"] == 4, silent=lost)
        assert _states(w, five)["PREPARING"] == 300 - CREATING_PER_NODE * 5


async def test_a_tablet_made_just_now_waits_behind_those_in_line(tmp_path: Path) -> None:
    """There was room when it was made, so it was placed before tablets that had waited for that room."""
    async with world(tmp_path, replace(OPTIONS, create_timeout_ms=3_600_000, sweep_ms=600_000)) as w:
        await ready(w)
        answer = await w.leader.CreateTable(create_request("first", buckets=200), None)
        first, room = hex_of(answer.table_id), CREATING_PER_NODE * 5
        await until(lambda: _states(w, first) == {"CREATING": room, "PREPARING": 200 - room})
        rows = [t for t in w.catalog.current_tablets(first) if t.state == "CREATING"]

        def make(rows: list[TabletRecord]) -> None:
            for row in rows:
                for peer in row.config.peers:
                    leads = peer.node_id == row.leader
                    w.nodes[peer.node_id].replicas[(row.tablet_id, peer.replica_id)] = leads

        make(rows[:20])
        async with w.lead.locks.hold(tablets=(rows[0].tablet_id,)):
            await w.beat()  # the background waits for the lock, with the reports in its hands
            late = hex_of((await w.leader.CreateTable(create_request("late", buckets=4), None)).table_id)
            await asyncio.sleep(0.05)
        await until(lambda: _states(w, first)["RUNNING"] == 20)
        await until(lambda: w.catalog.states["CREATING"] == room)
        assert _states(w, first) == {"RUNNING": 20, "CREATING": room, "PREPARING": 200 - room - 20}
        assert _states(w, late) == {"PREPARING": 4}
        make(rows[20:40])
        await w.beat()
        await until(lambda: _states(w, first) == {"RUNNING": 40, "CREATING": room})
        assert _states(w, late) == {"PREPARING": 4}
        make(rows[40:44])
        await w.beat()
        await until(lambda: _states(w, late) == {"CREATING": 4})


@asynccontextmanager
async def _stranded(tmp_path: Path, waits: int) -> AsyncIterator[tuple[World, str, tuple[str, ...]]]:
    """A table whose last tablets wait for five machines, of which two are lost; and the nodes there."""
    options = replace(OPTIONS, create_timeout_ms=3_600_000, sweep_ms=600_000)
    async with world(tmp_path, options) as w:
        await ready(w)
        answer = await w.leader.CreateTable(
            create_request("five", rf=5, buckets=CREATING_PER_NODE * 5 + waits), None
        )
        five = hex_of(answer.table_id)
        await until(lambda: _states(w, five)["CREATING"] == CREATING_PER_NODE * 5)
        lost = tuple(sorted(w.nodes)[3:])
        w.shift_ms += 2 * w.lead.options.alive_ms
        for row in w.catalog.current_tablets(five):
            alive = [p for p in row.config.peers if p.node_id not in lost]
            for peer in alive:
                w.nodes[peer.node_id].replicas[(row.tablet_id, peer.replica_id)] = peer is alive[0]
        await _idle_until(w, lambda: _states(w, five)["RUNNING"] == CREATING_PER_NODE * 5, silent=lost)
        assert _states(w, five)["PREPARING"] == waits
        yield w, five, lost


async def test_no_pass_is_spent_on_tablets_that_cannot_be_placed_and_a_line_tells_of_them(
    tmp_path: Path,
) -> None:
    """Each was tried in each pass, with a warning of its own. So others waited for several passes."""
    async with _stranded(tmp_path, waits=140) as (w, five, _):
        background = Background(w.lead, Orders(w.lead, w.pool))
        with capture_logs() as lines:
            await background.look()
            three = hex_of((await w.leader.CreateTable(create_request("three", buckets=4), None)).table_id)
            w.lead.dirty.update((t.tablet_id, None) for t in w.catalog.current_tablets(three))
            await background.look()
            assert _states(w, three) == {"CREATING": 4}, "in one pass, behind 140 others"
            await background.look()
        told = [
            line for line in lines if "cannot be placed" in line["event"] and line["log_level"] == "warning"
        ]
        assert [(line["tablets"], line["needed"], line["machines"]) for line in told] == [(140, 5, 3)]
        assert w.catalog.tablets[told[0]["first"]].table_id == five


async def test_tablets_that_cannot_be_placed_keep_nobody_patient(tmp_path: Path) -> None:
    """Nodes had been slow once. Because of a tablet without machines, later tablets got eight times the time for ever."""
    async with _stranded(tmp_path, waits=1) as (w, _, lost):
        background = Background(w.lead, Orders(w.lead, w.pool))
        background._patience.times = 8
        await w.beat(silent=lost)
        three = hex_of((await w.leader.CreateTable(create_request("three"), None)).table_id)
        await until(lambda: _states(w, three) == {"CREATING": 1})
        await background.look()
        assert background._patience.times == 8, "a tablet of slow nodes is not made yet"
        (row,) = w.catalog.current_tablets(three)
        w.shift_ms += 8 * w.lead.options.create_timeout_ms + 1
        await w.beat(silent=lost)
        await background._replace(row.tablet_id)
        background._patience.times = 8
        await background._place_line()
        assert background._patience.times == 8, "nor is the one in its place"
        await w.beat_until(lambda: _states(w, three) == {"RUNNING": 1}, silent=lost)
        await background.look()
        assert background._patience.times == 1


@pytest.mark.parametrize("beyond", [False, True], ids=["within patience", "beyond all patience"])
async def test_a_new_leader_is_as_patient_as_the_one_before(tmp_path: Path, beyond: bool) -> None:
    """It began with the shortest time, so it replaced tablets that slow nodes were about to finish."""
    options = replace(OPTIONS, create_timeout_ms=60_000, alive_ms=3_600_000)
    async with world(tmp_path, options) as w:
        await ready(w)
        table_id = await ordered(w)
        (row,) = w.catalog.current_tablets(table_id)
        for times in (1, 2):
            w.shift_ms += 60_000 * times + 10_000
            await _idle_until(w, lambda r=row: w.catalog.tablets[r.tablet_id].state == "REPLACED")
            await _idle_until(w, lambda: _states(w, table_id)["CREATING"] == 1)
            (row,) = w.catalog.current_tablets(table_id)
        w.shift_ms += 60_000 * 16 + 10_000 if beyond else 30_000
        await w.elect(MASTERS[1])
        if beyond:
            await _idle_until(w, lambda: w.catalog.tablets[row.tablet_id].state == "REPLACED")
            return
        await _idle_until(w, lambda: w.lead.settled)
        w.shift_ms += 150_000
        for _ in range(3):
            await w.beat()
            await asyncio.sleep(OPTIONS.sweep_ms / 1000)
        assert w.catalog.tablets[row.tablet_id].state == "CREATING"
        w.shift_ms += 60_000 + 10_000
        await _idle_until(w, lambda: w.catalog.tablets[row.tablet_id].state == "REPLACED")


async def test_a_new_leader_is_not_patient_because_nodes_were_gone(tmp_path: Path) -> None:
    """Tablets of dead nodes are replaced after the shortest time, again and again. Five such rows stood for eight minutes."""
    options = replace(OPTIONS, create_timeout_ms=60_000, alive_ms=3_600_000)
    async with world(tmp_path, options) as w:
        await ready(w)
        table_id = await ordered(w)
        (row,) = w.catalog.current_tablets(table_id)
        catalog = w.lead.catalog
        for between_s, times in ((65, 2), (125, 4), (245, 8), (100_000, 16)):
            for number in range(5):
                old = replace(
                    row,
                    tablet_id=TabletId(f"{number:032x}"),
                    state="REPLACED",
                    since_us=row.since_us - number * between_s * 1_000_000,
                )
                catalog.tablets[old.tablet_id] = old
                catalog.tablets_of[table_id][old.tablet_id] = None
            assert Patience(w.lead).times == times, between_s


async def test_a_new_leader_gives_time_to_what_another_waited_for(tmp_path: Path) -> None:
    """Tablets that were replaced may run by now. A tablet that is old and not replaced was waited for."""
    options = replace(OPTIONS, create_timeout_ms=60_000, alive_ms=3_600_000)
    async with world(tmp_path, options) as w:
        await ready(w)
        table_id = await ordered(w)
        lead = w.lead
        assert Patience(lead).times == 1
        for age_s, times in ((61, 2), (121, 4), (241, 8), (959, 16), (961, 1)):
            before, w.wall_ahead_ms = w.wall_ahead_ms, age_s * 1000
            assert Patience(lead).times == times, age_s
            w.wall_ahead_ms = before
        assert _states(w, table_id) == {"CREATING": 1}


async def test_slow_nodes_get_more_time_with_each_replacement(tmp_path: Path) -> None:
    """Each replacement gave slow nodes more work, so they were never done."""
    async with world(tmp_path, replace(OPTIONS, create_timeout_ms=60_000, alive_ms=3_600_000)) as w:
        await ready(w)
        table_id = await ordered(w)
        for times in (1, 2, 4):
            (row,) = w.catalog.current_tablets(table_id)
            assert row.state == "CREATING"
            w.shift_ms += 60_000 * times - 10_000
            for _ in range(3):
                await w.beat()
                await asyncio.sleep(OPTIONS.sweep_ms / 1000)
            assert w.catalog.tablets[row.tablet_id].state == "CREATING"
            w.shift_ms += 20_000
            await _idle_until(w, lambda r=row: w.catalog.tablets[r.tablet_id].state == "REPLACED")
            await _idle_until(w, lambda: _states(w, table_id)["CREATING"] == 1)


async def test_silent_nodes_do_not_make_others_wait_longer(tmp_path: Path) -> None:
    async with world(tmp_path, replace(OPTIONS, create_timeout_ms=600_000)) as w:
        await ready(w, nodes=4)
        table_id = await ordered(w)
        (row,) = w.catalog.current_tablets(table_id)
        silent = (row.config.peers[0].node_id,)
        w.shift_ms += 601_000
        await _idle_until(w, lambda: w.catalog.tablets[row.tablet_id].state == "REPLACED", silent)
        await _idle_until(w, lambda: _states(w, table_id)["CREATING"] == 1, silent)
        (again,) = w.catalog.current_tablets(table_id)
        w.shift_ms += 601_000
        await _idle_until(w, lambda: w.catalog.tablets[again.tablet_id].state == "REPLACED")


async def test_nobody_waits_longer_for_nodes_that_are_gone(tmp_path: Path) -> None:
    """Slow nodes had made the master patient. Then a tablet whose nodes died held its place in the line for minutes."""
    async with world(tmp_path, replace(OPTIONS, create_timeout_ms=600_000, alive_ms=300_000)) as w:
        await ready(w, nodes=6)
        table_id = await ordered(w)
        (row,) = w.catalog.current_tablets(table_id)
        while w.catalog.tablets[row.tablet_id].state == "CREATING":
            w.shift_ms += 200_000
            for _ in range(3):
                await w.beat()
                await asyncio.sleep(OPTIONS.sweep_ms / 1000)
        await _idle_until(w, lambda: _states(w, table_id)["CREATING"] == 1)
        (row,) = w.catalog.current_tablets(table_id)
        silent = tuple(p.node_id for p in row.config.peers[:2])
        for _ in range(3):
            w.shift_ms += 200_000
            await w.beat(silent=silent)
        w.shift_ms += 10_000
        await _idle_until(w, lambda: w.catalog.tablets[row.tablet_id].state == "REPLACED", silent)
