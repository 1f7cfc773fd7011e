"""Promises that one line of the masters keeps, each asked for by itself: recoveries, rows that follow reports, rows that go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stele.master.forgetting import Forgetting
from stele.master.leadership import Leadership
from stele.master.liveness import Liveness, Report
from stele.master.orders import fate_of
from stele.master.port import insert
from stele.master.records import IntentRecord
from stele.model.config import Configuration, Peer
from stele.model.errors import Code
from stele.model.ids import NodeId, ReplicaId, TabletId
from stele.model.incarnation import RECOVERIES_AHEAD_MAX, raised
from stele.rpc.convert import config_to_pb, id_to_pb
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    OPTIONS,
    Call,
    World,
    claimed,
    in_force,
    one_tablet,
    ordered,
    ready,
    refused,
    world,
)
from tests.master.test_following import commit
from tests.master.test_forgetting import HOUR_MS, deleted, erase
from tests.master.test_recovering import ALIVE_MS, OPTIONS_, request_for, two_lost


def says(w: World, node_id: str, change: Callable[[common_pb2.ReplicaStatusPB], None]) -> None:
    """From now on this node's replicas say of themselves what `change` makes of it."""
    node = w.nodes[node_id]
    plain = node.status

    def status(tablet_id: TabletId, replica_id: int) -> common_pb2.ReplicaStatusPB:
        told = plain(tablet_id, replica_id)
        change(told)
        return told

    node.status = status  # type: ignore[method-assign]


# Recoveries


async def test_a_recovery_that_was_planned_before_another_is_refused(tmp_path: Path) -> None:
    """It would give up what was written since."""
    async with world(tmp_path, OPTIONS_) as w:
        row, survivor, lost = await two_lost(w)
        await w.leader.RecoverTablet(request_for(row, survivor), None)
        recovered = w.catalog.tablets[row.tablet_id]
        w.shift_ms += 2 * ALIVE_MS
        await w.beat(silent=(survivor,))
        error = await refused(w.leader.RecoverTablet(request_for(row, lost[1]), None))
        assert error.code is Code.CAS_FAILED
        assert w.catalog.tablets[row.tablet_id] == recovered


async def test_a_leader_that_has_not_heard_the_nodes_recovers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, OPTIONS_) as w:
        row, survivor, _ = await two_lost(w)
        monkeypatch.setattr(Leadership, "settled", False)
        error = await refused(w.leader.RecoverTablet(request_for(row, survivor), None))
        assert error.code is Code.NOT_READY and "has not heard from all nodes" in str(error)
        assert not w.catalog.recoveries


async def test_a_failed_replica_is_no_survivor(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS_) as w:
        row, survivor, lost = await two_lost(w)
        says(w, survivor, lambda told: setattr(told, "state", common_pb2.FAILED))
        await w.beat(silent=lost)
        error = await refused(w.leader.RecoverTablet(request_for(row, survivor), None))
        assert "has FAILED" in str(error) and not w.catalog.recoveries


async def test_the_term_of_a_recovery_is_above_all_that_were_reported(tmp_path: Path) -> None:
    """Else a leader of the old configuration could lead in the same term."""
    async with world(tmp_path, OPTIONS_) as w:
        row, survivor, lost = await two_lost(w)
        says(w, survivor, lambda told: setattr(told, "term", 50))
        await w.beat(silent=lost)
        await w.leader.RecoverTablet(request_for(row, survivor), None)
        assert w.catalog.recoveries[row.tablet_id].term == 51


async def test_a_voter_whose_node_is_back_and_has_not_told_of_it_may_be_there(tmp_path: Path) -> None:
    async with world(tmp_path, OPTIONS_) as w:
        row, survivor, lost = await two_lost(w)
        node = w.nodes[lost[0]]
        node.incarnation += 1
        request = node.heartbeat(1_000_000)
        request.has_report = False
        del request.tablets[:]
        await w.leader.TSHeartbeat(request, Call(NodeId(node.node_id), node.incarnation))
        error = await refused(w.leader.RecoverTablet(request_for(row, survivor), None))
        assert error.code is Code.UNSAFE_CHANGE and not w.catalog.recoveries


# Rows that follow reports


async def test_the_configuration_of_a_row_never_goes_back(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        first, *_, last = sorted(p.node_id for p in row.config.peers)
        await in_force(w, row.tablet_id, Configuration(90, row.config.peers), says=first)
        w.nodes[last].configs[row.tablet_id] = config_to_pb(Configuration(50, row.config.peers[:2]))
        for _ in range(10):
            await w.beat()
            await asyncio.sleep(0.01)
        assert w.catalog.tablets[row.tablet_id].config.opid_index == 90


async def test_an_incarnation_that_is_out_of_reach_changes_no_row(tmp_path: Path) -> None:
    """No administrator asked for so many recoveries: the number is damaged."""
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        node_id = row.config.peers[0].node_id
        far = 0
        for _ in range(RECOVERIES_AHEAD_MAX + 1):
            far = raised(far, 1)
        w.nodes[node_id].incarnations[row.tablet_id] = far
        w.nodes[node_id].configs[row.tablet_id] = config_to_pb(Configuration(90, row.config.peers[:1], far))
        for _ in range(10):
            await w.beat()
            await asyncio.sleep(0.01)
        assert w.catalog.tablets[row.tablet_id].config == row.config


async def test_a_tablet_runs_once_its_leader_does(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        for node_id in w.nodes:
            says(w, node_id, lambda told: setattr(told, "state", common_pb2.BOOTSTRAPPING))
        table_id = await ordered(w)
        for _ in range(10):
            w.create_replicas()
            await w.beat()
            await asyncio.sleep(0.01)
        assert {t.state for t in w.catalog.current_tablets(table_id)} == {"CREATING"}


async def test_a_tablet_that_got_no_leader_in_time_is_there_once(tmp_path: Path) -> None:
    """What was to replace it came beside it, and both had the same keys."""
    options = replace(OPTIONS, create_timeout_ms=1_000)
    async with world(tmp_path, options) as w:
        await ready(w)
        table_id = await ordered(w)
        (late,) = w.catalog.current_tablets(table_id)
        w.shift_ms += 2_000
        await w.beat_until(
            lambda: {t.tablet_id for t in w.catalog.tablets_of_table(table_id)} > {late.tablet_id},
            silent=tuple(p.node_id for p in late.config.peers),
        )
        assert w.catalog.tablets[late.tablet_id].state == "REPLACED"


def test_a_new_leader_goes_by_full_reports_alone() -> None:
    liveness = Liveness(0)
    node_id = "1" * 32
    life = liveness.heard(pb.TSHeartbeatRequest(node_id=id_to_pb(node_id), incarnation=1), 1)
    life.full = True
    assert liveness.all_full([node_id])
    liveness.begin_leading(2)
    liveness.heard(pb.TSHeartbeatRequest(node_id=id_to_pb(node_id), incarnation=1), 3)
    assert not liveness.all_full([node_id])


@pytest.mark.parametrize("newest", [1, 2])
async def test_of_two_leaders_the_one_of_the_newer_term_counts(newest: int) -> None:
    liveness = Liveness(0)
    tablet = "a" * 32
    for number in (1, 2):
        status = common_pb2.ReplicaStatusPB(
            tablet_id=id_to_pb(tablet),
            replica_id=number,
            role=common_pb2.LEADER,
            term=7 if number == newest else 5,
        )
        request = pb.TSHeartbeatRequest(
            node_id=id_to_pb(f"{number}" * 32), incarnation=1, sequence=1, has_report=True, tablets=[status]
        )
        liveness.heard(request, 1)
        await liveness.merge(request, 1)
    assert liveness.leader_of(tablet) == (7, f"{newest}" * 32)


# Replicas, intents and operations


async def test_a_replica_that_the_catalog_never_counted_is_kept(tmp_path: Path) -> None:
    """The catalog may be of an older backup than it."""
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        spare = next(n for n in w.nodes if row.config.peer_on(NodeId(n)) is None)

        def fate(replica_id: int) -> str:
            status = common_pb2.ReplicaStatusPB(
                tablet_id=id_to_pb(row.tablet_id), replica_id=replica_id, data_state=common_pb2.READY
            )
            status.committed_config.CopyFrom(config_to_pb(Configuration(-1, ())))
            return fate_of(w.lead, row, Report(spare, replica_id, status.SerializeToString(), 0))

        assert fate(row.next_replica_id) == "keep"
        assert fate(row.next_replica_id - 1) == "tombstone"


async def test_the_end_of_one_intent_ends_no_other(tmp_path: Path) -> None:
    """A driver that was slow says that what it had begun is over, and another has begun since."""
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        spare = next(n for n in w.nodes if row.config.peer_on(NodeId(n)) is None)
        asked = pb.IntentPB(
            tablet_id=id_to_pb(row.tablet_id),
            target_node=id_to_pb(spare),
            source_node=id_to_pb(row.config.peers[0].node_id),
            kind="add",
            config_index=row.config.opid_index,
        )
        epoch = await claimed(w)
        begun = await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=asked), None)
        number = begun.intent.replica_id
        joined = Configuration(
            90, (*row.config.peers, Peer(NodeId(spare), ReplicaId(number), "10.0.0.9:7050"))
        )
        for replica_id, there in ((number + 1, True), (number, False)):
            request = pb.EndIntentRequest(
                epoch=epoch,
                tablet_id=id_to_pb(row.tablet_id),
                replica_id=replica_id,
                committed_config=config_to_pb(joined),
                term=1,
            )
            await w.leader.EndIntent(request, None)
            assert (row.tablet_id in w.catalog.intents) is there


async def test_an_operation_goes_on_although_its_caller_has_gone(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        go, done = asyncio.Event(), asyncio.Event()

        async def operation() -> None:
            await go.wait()
            done.set()

        caller = asyncio.create_task(w.lead.do(operation()))
        await asyncio.sleep(0.01)
        caller.cancel()
        await asyncio.sleep(0.01)
        go.set()
        async with asyncio.timeout(10):
            await done.wait()


async def test_of_four_voters_two_could_still_commit(tmp_path: Path) -> None:
    """A change under way may have taken one of them out. So a deletion waits for three."""
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        spare = next(n for n in w.nodes if row.config.peer_on(NodeId(n)) is None)
        four = Configuration(90, (*row.config.peers, Peer(NodeId(spare), ReplicaId(4), "10.0.0.9:7050")))
        await in_force(w, row.tablet_id, four, says=row.config.peers[0].node_id)
        (table_id,) = w.catalog.tables
        await w.leader.DeleteTable(pb.DeleteTableRequest(table_id=id_to_pb(table_id)), None)
        assert w.catalog.tablets[row.tablet_id].harmless == 1


# Rows that go

STILL = replace(OPTIONS, sweep_ms=3_600_000)


class Under:
    """Orders that are under way."""

    def __init__(self, *tablets: str) -> None:
        self.tablets = set(tablets)

    def under_way(self) -> set[str]:
        return self.tablets


async def gone_for_an_hour(w: World) -> list[TabletId]:
    """Two tablets of a table that was deleted long ago; their replicas are gone, too."""
    await ready(w)
    gone = await deleted(w, "t")
    erase(w, gone)
    w.shift_ms += HOUR_MS
    await w.beat()
    return gone


def left(w: World, gone: list[TabletId]) -> list[bool]:
    return [t in w.catalog.tablets for t in gone]


async def forget(w: World, *ordered: str) -> None:
    await Forgetting(w.lead, Under(*ordered)).step()  # type: ignore[arg-type]


async def test_a_row_that_an_intent_names_stays(tmp_path: Path) -> None:
    async with world(tmp_path, STILL) as w:
        gone = await gone_for_an_hour(w)
        intent = IntentRecord(gone[0], ReplicaId(9), NodeId(min(w.nodes)), "add", 1, 7, 99)
        commit(w, [insert(intent)])
        await forget(w)
        assert left(w, gone) == [True, False]


async def test_a_row_about_which_an_order_is_under_way_stays(tmp_path: Path) -> None:
    async with world(tmp_path, STILL) as w:
        gone = await gone_for_an_hour(w)
        await forget(w, gone[0])
        assert left(w, gone) == [True, False]
        await forget(w)
        assert left(w, gone) == [False, False]


async def test_the_row_of_a_table_goes_with_that_of_its_last_tablet(tmp_path: Path) -> None:
    async with world(tmp_path, STILL) as w:
        gone = await gone_for_an_hour(w)
        table_id = w.catalog.tablets[gone[0]].table_id
        await forget(w, gone[0])
        assert left(w, gone) == [True, False] and table_id in w.catalog.tables
        await forget(w)
        assert table_id not in w.catalog.tables


async def test_a_node_that_falls_silent_at_the_last_moment_holds_rows_back(tmp_path: Path) -> None:
    async with world(tmp_path, STILL) as w:
        gone = await gone_for_an_hour(w)
        async with w.lead.locks.hold(tablets=gone):
            step = asyncio.create_task(forget(w))
            await asyncio.sleep(0.05)
            w.shift_ms += 10 * OPTIONS.alive_ms
        await step
        assert left(w, gone) == [True, True]
