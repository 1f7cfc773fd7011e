"""Three masters on the in-memory port: who leads, what a follower and a replaced leader say, what a new leader knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from stele.master.background import Background
from stele.master.orders import Orders
from stele.master.port import put
from stele.master.records import ClaimRecord, TabletRecord
from stele.model.config import Configuration
from stele.model.errors import Code, NotLeader
from stele.model.ids import CATALOG_TABLET_ID, TabletId
from stele.rpc.convert import config_to_pb, id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    MASTERS,
    OPTIONS,
    Call,
    create_request,
    heartbeat,
    hex_of,
    in_force,
    made,
    one_tablet,
    ready,
    ready_again,
    refused,
    until,
    world,
)


async def test_followers_refuse_and_hint(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        follower = w.services[MASTERS[1]]
        error = await refused(follower.CreateTable(create_request("t"), None))
        assert isinstance(error, NotLeader) and error.leader_hint == MASTERS[0]
        listed = await follower.ListMasters(pb.ListMastersRequest(), None)
        assert [hex_of(m.node_id) for m in listed.masters] == MASTERS and hex_of(listed.leader) == MASTERS[0]
        assert isinstance(await refused(follower.GetClusterView(pb.GetClusterViewRequest(), None)), NotLeader)
        stale = await follower.GetClusterView(pb.GetClusterViewRequest(max_staleness_ms=5_000), None)
        assert hex_of(stale.leader) == MASTERS[0] and not stale.settled


async def test_a_follower_answers_what_is_no_older_than_its_caller_allows(tmp_path: Path) -> None:
    """One whose disk hung heard its leader on, and answered what was 15 s old where 2 s were allowed."""
    async with world(tmp_path) as w:
        follower, log = w.services[MASTERS[1]], w.group.members[MASTERS[1]]
        for behind_ms, allowed_ms, answers in (
            (15_000, 2_000, False),
            (2_001, 2_000, False),
            (2_000, 2_000, True),
            (15_000, 20_000, True),
            (100, 50, False),
            (None, 1 << 31, False),
        ):
            log.behind_ms = behind_ms
            call = follower.GetClusterView(pb.GetClusterViewRequest(max_staleness_ms=allowed_ms), None)
            if answers:
                assert hex_of((await call).leader) == MASTERS[0]
            else:
                assert isinstance(await refused(call), NotLeader), (behind_ms, allowed_ms)


async def test_a_leadership_begins_behind_a_barrier_and_ends_with_its_term(tmp_path: Path) -> None:
    """Its memory may lack what another leader wrote before, or between."""
    async with world(tmp_path) as w:
        lead, replaced = w.lead, w.leader
        w.add_nodes(1)
        await w.beat()
        (node,) = w.nodes.values()
        w.group.elect(MASTERS[1])
        assert not (await heartbeat(replaced, node.heartbeat(1))).is_leader, "which would clear its report"
        w.group.elect(MASTERS[0])
        assert isinstance(await refused(lead.commit([put(ClaimRecord("d", 1, 1))])), NotLeader)
        await w.elect(MASTERS[0])
        alone, log = w.masters[MASTERS[1]], w.group.members[MASTERS[1]]
        log.cut_off = (w.group.term + 1, MASTERS[1])
        with structlog.testing.capture_logs() as told:
            log.tell()
            await until(lambda: alone.lead is not None or any("cannot lead yet" in t["event"] for t in told))
        assert alone.lead is None


async def test_no_report_takes_a_configuration_back(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        await in_force(w, row.tablet_id, Configuration(12, row.config.peers[:2]), says=row.leader)
        for late, index in ((row.config.peers[2], 9), (row.config.peers[1], 12)):
            w.nodes[late.node_id].configs[row.tablet_id] = config_to_pb(
                Configuration(index, row.config.peers)
            )
        await w.beat()
        now = w.catalog.tablets[row.tablet_id]
        assert Background(w.lead, Orders(w.lead, w.pool))._changed(now) == now
        assert [p.replica_id for p in now.config.peers] == [1, 2]


async def test_a_new_leader_knows_all_that_was_acknowledged(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await w.elect(MASTERS[2])
        assert w.catalog.table_by_name["t"].table_id == table_id
        beat = next(iter(w.nodes.values())).heartbeat(10**6)
        beat.incremental, beat.has_report = True, False
        beat.ClearField("registration")
        answer = await heartbeat(w.leader, beat)
        assert answer.is_leader and answer.needs_full_report and answer.needs_reregister
        assert [hex_of(m.node_id) for m in answer.masters] == MASTERS


async def test_a_leader_that_led_before_knows_nothing_of_replicas_until_it_is_told_all(
    tmp_path: Path,
) -> None:
    """Another leader's answers have cleared what changed meanwhile; what is left would pass for all that there is, and
    replicas that it lacks for gone."""
    async with world(tmp_path, replace(OPTIONS, missing_after_ms=0)) as w:
        await ready(w)
        table_id = await made(w)
        await w.elect(MASTERS[1])
        await w.elect(MASTERS[0])
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        mine = [t for t in view.tablets if hex_of(t.table_id) == table_id]
        assert len(mine) == 4 and not any(t.replicas for t in mine), "neither there nor missing"
        beat = next(iter(w.nodes.values())).heartbeat(10**6)
        beat.incremental = True
        beat.ClearField("tablets")
        assert (await heartbeat(w.leader, beat)).needs_full_report


async def test_a_tablet_whose_leader_says_that_it_leads_no_more_has_none(tmp_path: Path) -> None:
    """Whoever asks where it is may be sent there all the same; but it takes no writes, and is not well."""
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)

        async def leader() -> str:
            await w.beat()
            view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
            return next(hex_of(t.leader_node) for t in view.tablets if hex_of(t.tablet_id) == row.tablet_id)

        assert await leader() == row.leader
        w.nodes[row.leader].replicas[row.tablet_id, row.config.peer_on(row.leader).replica_id] = False
        assert await leader() == ""


async def test_a_replica_counts_as_gone_once_its_node_has_lacked_it_for_a_while(tmp_path: Path) -> None:
    """A moment after a start not all that it has is opened."""
    async with world(tmp_path, replace(OPTIONS, missing_after_ms=60_000)) as w:
        await ready(w)
        row = await one_tablet(w)
        peer = row.config.peers[2]
        del w.nodes[peer.node_id].replicas[row.tablet_id, peer.replica_id]
        await w.beat()

        async def told() -> list[int]:
            view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
            (tablet,) = (t for t in view.tablets if hex_of(t.tablet_id) == row.tablet_id)
            return sorted(r.status.replica_id for r in tablet.replicas)

        assert await told() == sorted(p.replica_id for p in row.config.peers if p != peer)
        w.shift_ms += 60_000
        assert await told() == sorted(p.replica_id for p in row.config.peers)


async def test_a_leader_that_was_replaced_and_does_not_know_it_says_nothing_of_tables(tmp_path: Path) -> None:
    """What it knows is old: neither what it finds nor that it finds nothing is an answer, nor a reason to refuse."""
    async with world(tmp_path) as w:
        await ready(w)
        await w.leader.CreateTable(create_request("old"), None)
        stale = w.leader
        w.group.elect(MASTERS[1], unknown_to=MASTERS[0])
        await until(lambda: w.masters[MASTERS[1]].lead is not None)
        await ready_again(w)
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="old"), None)
        made = hex_of((await w.leader.CreateTable(create_request("new"), None)).table_id)
        (tablet,) = w.masters[MASTERS[1]].catalog.tablets_of_table(made)
        for asked in (
            stale.ListTables(pb.ListTablesRequest(), None),
            stale.GetTable(pb.GetTableRequest(name="old"), None),
            stale.GetTable(pb.GetTableRequest(name="new"), None),
            stale.GetTableLocations(pb.GetTableLocationsRequest(name="new"), None),
            stale.GetTabletLocations(
                pb.GetTabletLocationsRequest(tablet_ids=[id_to_pb(tablet.tablet_id)]), None
            ),
            stale.GetClusterView(pb.GetClusterViewRequest(), None),
            stale.CreateTable(create_request("old"), None),
            stale.DeleteTable(pb.DeleteTableRequest(name="new"), None),
        ):
            assert (await refused(asked)).code is Code.NO_QUORUM


async def test_a_leader_that_was_replaced_and_does_not_know_it_says_nothing_of_nodes_and_drivers(
    tmp_path: Path,
) -> None:
    """It told a node that was formed since that it never was, so that the node would have formatted an empty volume; and
    the driver that had claimed since that another had taken over, so that it stopped for good."""
    async with world(tmp_path) as w:
        await ready(w)
        w.add_nodes(1)
        node = list(w.nodes)[-1]
        register = pb.RegisterNodeRequest(node_id=id_to_pb(node), role="node")
        assert not (await w.leader.RegisterNode(register, Call())).formed
        w.group.elect(MASTERS[1], unknown_to=MASTERS[0])
        await until(lambda: w.masters[MASTERS[1]].lead is not None)
        await w.beat_until(lambda: w.masters[MASTERS[1]].catalog.nodes[node].formed)
        claim = (await w.leader.ClaimDriver(pb.ClaimDriverRequest(holder="d", ttl_ms=9_000), None)).claim
        stale = w.services[MASTERS[0]]
        assert w.masters[MASTERS[0]].lead is not None
        drained = pb.SetNodeStateRequest(node_id=id_to_pb(node), state=pb.DRAINING, epoch=claim.epoch)
        renewed = pb.ClaimDriverRequest(holder="d", ttl_ms=9_000, epoch=claim.epoch)
        for asked in (
            stale.RegisterNode(register, Call()),
            stale.SetNodeState(drained, None),
            stale.ClaimDriver(renewed, None),
            stale.BeginIntent(pb.BeginIntentRequest(epoch=claim.epoch), None),
            stale.EndIntent(pb.EndIntentRequest(epoch=claim.epoch), None),
        ):
            assert (await refused(asked)).code is Code.NO_QUORUM
        assert (await w.leader.RegisterNode(register, Call())).formed


@pytest.mark.parametrize("fate", ["lost", "unknown"])
async def test_a_proposal_without_an_answer_is_unknown_not_failed(tmp_path: Path, fate: str) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        w.group.lose_next = fate
        request = create_request("t", table_id="d" * 32)
        assert (await refused(w.leader_call("CreateTable", request))).code in (
            Code.UNKNOWN_OUTCOME,
            Code.NOT_LEADER,
        )
        await w.elect(MASTERS[1])
        await ready_again(w)
        await w.leader.CreateTable(request, None)  # the same id: harmless whichever it was
        assert len(w.catalog.tablets_of_table("d" * 32)) == 1
        await w.elect(MASTERS[0])  # who lost it rebuilds, and agrees
        assert w.catalog.table_by_name["t"].table_id == "d" * 32


async def test_passes_that_are_refused_again_and_again_are_told_of(tmp_path: Path) -> None:
    """Such a leader did nothing more, and its log had no word of it. A row that changed meanwhile is nothing to tell."""
    async with world(tmp_path) as w:
        await ready(w)
        lead = w.masters[MASTERS[0]].lead
        assert lead is not None
        parts = lead.catalog.tablets[CATALOG_TABLET_ID]
        only_in_memory = TabletRecord(
            TabletId("d" * 32), parts.table_id, 0, "CREATING", parts.partition, since_us=0
        )

        def passes(logged: Sequence[Mapping[str, Any]]) -> list[int]:
            told = [
                line for line in logged if line["event"] == "background passes keep failing with CAS_FAILED"
            ]
            assert all("tablet/dddd" in line["error"] and line["log_level"] == "warning" for line in told)
            return [line["passes"] for line in told]

        with structlog.testing.capture_logs() as logged:
            for told in ([8, 16], [8, 16, 8]):  # one that goes through begins the count anew
                lead.catalog.tablets[only_in_memory.tablet_id] = only_in_memory
                lead.look_at(only_in_memory.tablet_id)
                await until(lambda: passes(logged) == told)  # noqa: B023
                del lead.catalog.tablets[only_in_memory.tablet_id]
                swept = lead.now_ms() + 10 * OPTIONS.sweep_ms
                await until(lambda: not lead.dirty and lead.now_ms() > swept)  # noqa: B023
