"""Three masters on the in-memory port: tables, leadership, intents, claims, node states."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele.master.background import TABLETS_AT_ONCE, Background
from stele.master.leadership import MasterOptions
from stele.master.liveness import Liveness
from stele.master.orders import ORDERS_PER_NODE, Orders, fate_of
from stele.master.records import TabletRecord
from stele.master.service import MasterService
from stele.model.config import Configuration, MemberType, Peer
from stele.model.errors import Code, NotLeader, Rejected, Retryable, SteleError
from stele.model.ids import CATALOG_TABLET_ID, NodeId, ReplicaId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import config_to_pb, id_to_pb
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    MASTERS,
    OPTIONS,
    World,
    create_request,
    hex_of,
    no_formation,
    until,
    world,
)


async def made(w: World, name: str = "t", *, rf: int = 3, buckets: int = 4) -> str:
    """A table whose tablets all run; its id."""
    answer = await w.leader.CreateTable(create_request(name, rf=rf, buckets=buckets), None)
    table_id = hex_of(answer.table_id)

    def runs() -> bool:
        rows = w.catalog.current_tablets(table_id)
        return bool(rows) and all(r.state == "RUNNING" for r in rows)

    await w.beat_until(runs)
    return table_id


async def refused(call: object) -> SteleError:
    """The error that a call ends with."""
    with pytest.raises(SteleError) as caught:
        await call  # type: ignore[misc]
    return caught.value


async def ready(w: World, nodes: int = 5) -> None:
    """Nodes registered and the leader settled."""
    w.add_nodes(nodes)
    await w.beat_until(lambda: sum(n.role == "node" for n in w.catalog.nodes.values()) == nodes)
    lead = w.masters[w.group.leader].lead
    await w.beat_until(lambda: lead is not None and lead.settled)


async def test_a_table_is_made_listed_located_and_removed(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        located = await w.leader.GetTableLocations(pb.GetTableLocationsRequest(name="t"), None)
        assert [list(t.partition.hash_buckets) for t in located.tablets] == [[0], [1], [2], [3]]
        assert all(len({r.machine for r in t.replicas}) == 3 for t in located.tablets)
        assert all(sum(r.role == common_pb2.LEADER for r in t.replicas) == 1 for t in located.tablets)
        assert located.table.tablets_running == 4 and located.table.state == "RUNNING"
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="t"), None)
        await w.leader.DeleteTable(pb.DeleteTableRequest(table_id=id_to_pb(table_id)), None)
        assert not (await w.leader.ListTables(pb.ListTablesRequest(), None)).tables
        kept = await w.leader.ListTables(pb.ListTablesRequest(include_removed=True), None)
        assert [t.state for t in kept.tables] == ["REMOVED"]
        assert {t.state for t in w.catalog.tablets_of_table(table_id)} == {"DELETED"}
        await made(w, "t")  # the name is free again


async def test_create_is_idempotent_by_table_id(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        request = create_request("t", table_id="d" * 32)
        answers = await asyncio.gather(*(w.leader.CreateTable(request, None) for _ in range(5)))
        assert {hex_of(a.table_id) for a in answers} == {"d" * 32}
        assert len(w.catalog.tablets_of_table("d" * 32)) == 1
        other = await refused(w.leader.CreateTable(create_request("u", table_id="d" * 32), None))
        assert other.code is Code.ALREADY_PRESENT
        again = await refused(w.leader.CreateTable(create_request("t"), None))
        assert again.code is Code.ALREADY_PRESENT


async def test_a_create_that_is_tried_again_after_the_table_was_deleted_is_not_told_that_it_was_never_done(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        request = create_request("t", table_id="d" * 32)
        await w.leader.CreateTable(request, None)
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="t"), None)
        again = await refused(w.leader.CreateTable(request, None))
        assert again.code is Code.TABLET_DELETED
        other = await refused(w.leader.CreateTable(create_request("u", table_id="d" * 32), None))
        assert other.code is Code.ALREADY_PRESENT


async def test_bad_tables_are_refused_with_every_fault(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w, 3)
        for rf, words in ((2, "odd"), (5, "machines")):
            error = await refused(w.leader.CreateTable(create_request("t", rf=rf), None))
            assert error.code is Code.INVALID_ARGUMENT and words in str(error)
        bad = create_request("", buckets=1)
        bad.kind = "heap"
        error = await refused(w.leader.CreateTable(bad, None))
        assert "name" in str(error) and "heap" in str(error)
        one_bucket = await refused(w.leader.CreateTable(create_request("t", buckets=1), None))
        assert "buckets" in str(one_bucket)
        many = await refused(w.leader.CreateTable(create_request("t", buckets=5_000), None))
        assert many.code is Code.INVALID_ARGUMENT and "at most 2000 each" in str(many)
        large = create_request("t")
        large.schema.columns[0].default_value = b"x" * (9 << 20)
        assert (await refused(w.leader.CreateTable(large, None))).code is Code.TOO_LARGE
        assert not w.catalog.tables


async def test_a_table_with_too_many_tablets_for_one_batch_is_refused_whole(tmp_path: Path) -> None:
    async with world(tmp_path, replace(OPTIONS, create_bytes_max=10_000)) as w:
        await ready(w)
        error = await refused(w.leader.CreateTable(create_request("t", buckets=100), None))
        assert error.code is Code.TOO_LARGE and "too many tablets" in str(error)
        assert not w.catalog.tables and set(w.catalog.tablets) <= {CATALOG_TABLET_ID}
        await made(w, "t", buckets=10)


async def test_nothing_is_placed_before_the_leader_has_settled(tmp_path: Path) -> None:
    slow = MasterOptions(heartbeat_interval_ms=60_000, sweep_ms=30)
    async with world(tmp_path, slow) as w:
        error = await refused(w.leader.CreateTable(create_request("t"), None))
        assert isinstance(error, Retryable) and error.code is Code.NOT_READY


async def test_a_master_says_what_most_clocks_say(tmp_path: Path) -> None:
    """Of those it hears, each by what it measured on this master's monotonic clock; not before it can have heard all."""
    async with world(tmp_path, replace(OPTIONS, alive_ms=300)) as w:
        w.add_nodes(4)
        master = w.masters[w.group.leader]
        hour_us = 3_600_000_000
        answers: dict[str, pb.TSHeartbeatResponse] = {}

        async def beat(*aheads_us: int) -> None:
            for node, ahead_us in zip(w.nodes.values(), aheads_us, strict=True):
                request = node.heartbeat(next(w._sequence))
                if answer := answers.get(node.node_id):
                    request.clock_id = answer.clock_id
                    request.wall_base_us = answer.wall_us - answer.clock_us + ahead_us
                    request.wall_ahead_us = ahead_us
                answers[node.node_id] = await w.leader.TSHeartbeat(request, None)

        def said() -> int | None:
            answer = answers[next(reversed(w.nodes))]
            return answer.wall_agreed_us - answer.wall_us if answer.HasField("wall_agreed_us") else None

        await beat(0, 0, 0, 0)
        assert said() is None
        await until(lambda: master.now_ms() - master.liveness.began_ms >= 300)
        await beat(hour_us, hour_us, hour_us, 0)  # this master's own is wrong, and one node's
        assert said() is not None and abs(said() - hour_us) < 1_000_000  # type: ignore[operator]
        await beat(0, hour_us, -hour_us, 0)
        assert said() is not None and abs(said()) < 1_000_000  # type: ignore[arg-type]
        await beat(hour_us, hour_us, hour_us // 2, 0)
        assert said() is None
        w.shift_ms += 60_000  # it hears nobody any more: its own clock alone is no majority
        await beat(hour_us, hour_us, hour_us, hour_us)
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        assert sorted(n.wall_ahead_us for n in view.nodes if n.HasField("wall_ahead_us")) == [hour_us] * 4


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


async def test_a_new_leader_knows_all_that_was_acknowledged(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await w.elect(MASTERS[2])
        assert w.catalog.table_by_name["t"].table_id == table_id
        beat = next(iter(w.nodes.values())).heartbeat(10**6)
        beat.incremental, beat.has_report = True, False
        beat.ClearField("registration")
        answer = await w.leader.TSHeartbeat(beat, None)
        assert answer.is_leader and answer.needs_full_report and answer.needs_reregister
        assert [hex_of(m.node_id) for m in answer.masters] == MASTERS


async def test_a_master_knows_where_its_callers_are_also_if_it_does_not_lead(tmp_path: Path) -> None:
    """Whoever registered before it started is asked again; a start that it refuses changes nothing."""
    async with world(tmp_path) as w:
        await ready(w, 1)
        (node,) = w.nodes.values()
        follower = next(n for n in MASTERS if n != w.group.leader)
        service = MasterService(w.masters[follower], no_formation, book := PeerBook())
        w.masters[follower].liveness = Liveness(0)

        async def beat(incarnation: int, address: str = "") -> bool:
            request = node.heartbeat(1)
            request.incarnation = incarnation
            request.registration.address = address
            if not address:
                request.ClearField("registration")
            answer = await service.TSHeartbeat(request, None)
            assert not answer.is_leader
            return bool(answer.needs_reregister)

        assert await beat(7) and book.address(node.node_id) == ""
        assert not await beat(7, "h7:1") and book.address(node.node_id) == "h7:1"
        assert not await beat(7) and book.address(node.node_id) == "h7:1"
        assert (await refused(beat(6, "h6:1"))).code is Code.STALE_INCARNATION
        assert book.address(node.node_id) == "h7:1"
        assert not await beat(8, "h8:1") and book.address(node.node_id) == "h8:1"


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
        assert not (await w.leader.RegisterNode(register, None)).formed
        w.group.elect(MASTERS[1], unknown_to=MASTERS[0])
        await until(lambda: w.masters[MASTERS[1]].lead is not None)
        await w.beat_until(lambda: w.masters[MASTERS[1]].catalog.nodes[node].formed)
        claim = (await w.leader.ClaimDriver(pb.ClaimDriverRequest(holder="d", ttl_ms=9_000), None)).claim
        stale = w.services[MASTERS[0]]
        assert w.masters[MASTERS[0]].lead is not None
        drained = pb.SetNodeStateRequest(node_id=id_to_pb(node), state=pb.DRAINING, epoch=claim.epoch)
        renewed = pb.ClaimDriverRequest(holder="d", ttl_ms=9_000, epoch=claim.epoch)
        for asked in (
            stale.RegisterNode(register, None),
            stale.SetNodeState(drained, None),
            stale.ClaimDriver(renewed, None),
            stale.BeginIntent(pb.BeginIntentRequest(epoch=claim.epoch), None),
            stale.EndIntent(pb.EndIntentRequest(epoch=claim.epoch), None),
        ):
            assert (await refused(asked)).code is Code.NO_QUORUM
        assert (await w.leader.RegisterNode(register, None)).formed


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


async def ready_again(w: World) -> None:
    lead = w.masters[w.group.leader].lead
    await w.beat_until(lambda: lead is not None and lead.settled)


async def test_creating_in_vain_is_replaced(tmp_path: Path) -> None:
    options = MasterOptions(heartbeat_interval_ms=20, sweep_ms=30, create_timeout_ms=300)
    async with world(tmp_path, options) as w:
        await ready(w)
        answer = await w.leader.CreateTable(create_request("t"), None)
        table_id = hex_of(answer.table_id)
        for _ in range(300):  # nobody makes the replicas
            await w.beat()
            if any(t.state == "REPLACED" for t in w.catalog.tablets_of_table(table_id)):
                break
            await asyncio.sleep(0.01)
        await w.beat_until(lambda: [t.state for t in w.catalog.current_tablets(table_id)] == ["RUNNING"])


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
        answer = await w.leader.CreateTable(create_request("t"), None)
        table_id = hex_of(answer.table_id)
        await until(lambda: [t.state for t in w.catalog.current_tablets(table_id)] == ["CREATING"])
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


async def claimed(w: World) -> int:
    answer = await w.leader.ClaimDriver(pb.ClaimDriverRequest(holder="d1", ttl_ms=60_000), None)
    return int(answer.claim.epoch)


async def test_a_sweep_over_all_tablets_gives_others_their_turns_and_leaves_out_what_is_gone(
    tmp_path: Path,
) -> None:
    """It took one step of the event loop for all: 170 ms each second for 3,000 tablets, and more for those of all tables
    that were ever deleted."""

    class Considered(Orders):
        def consider(self, row: TabletRecord) -> None:
            seen.append(row.tablet_id)

    seen: list[str] = []
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w, buckets=4 * TABLETS_AT_ONCE)
        lead = w.masters[w.group.leader].lead
        assert lead is not None
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


async def test_one_driver_at_a_time(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        epoch = await claimed(w)
        other = pb.ClaimDriverRequest(holder="d2", ttl_ms=60_000)
        refusal = await refused(w.leader.ClaimDriver(other, None))
        assert refusal.code is Code.NOT_READY
        w.shift_ms += 3_000
        assert str(await refused(w.leader.ClaimDriver(other, None))) == str(refusal)  # one event, not many
        renewed = pb.ClaimDriverRequest(holder="d1", ttl_ms=60_000, epoch=epoch)
        assert (await w.leader.ClaimDriver(renewed, None)).claim.epoch == epoch
        again = await claimed(w)  # the same driver after a restart
        assert again == epoch + 1
        assert (await refused(w.leader.ClaimDriver(renewed, None))).code is Code.STALE_EPOCH
        await w.leader.ClaimDriver(pb.ClaimDriverRequest(holder="d1", epoch=again, release=True), None)
        assert (await w.leader.ClaimDriver(other, None)).claim.epoch == again + 1


@pytest.mark.parametrize("ahead_ms", [0, 7_200_000, -7_200_000], ids=["right", "ahead", "behind"])
async def test_no_wall_clock_decides_how_long_a_killed_drivers_claim_lasts(
    tmp_path: Path, ahead_ms: int
) -> None:
    """A claim that a master with a clock two hours ahead had granted outlived its driver by two hours."""
    async with world(tmp_path) as w:
        w.wall_ahead_ms = ahead_ms
        await claimed(w)
        other = pb.ClaimDriverRequest(holder="d2", ttl_ms=60_000)
        assert (await refused(w.leader.ClaimDriver(other, None))).code is Code.NOT_READY
        w.wall_ahead_ms = 0
        await w.elect(MASTERS[1])
        assert (await refused(w.leader.ClaimDriver(other, None))).code is Code.NOT_READY
        w.shift_ms += 60_000
        taken = (await w.leader.ClaimDriver(other, None)).claim
        assert (taken.holder, taken.epoch) == ("d2", 2)
        w.wall_ahead_ms = 7_200_000  # set right under a leader: nobody's claim ends by it
        third = pb.ClaimDriverRequest(holder="d3", ttl_ms=60_000)
        assert (await refused(w.leader.ClaimDriver(third, None))).code is Code.NOT_READY


async def test_intents(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        (row,) = w.catalog.current_tablets(await made(w, buckets=0))
        epoch = await claimed(w)
        held = {p.node_id for p in row.config.peers}
        target, spare = sorted(n for n in w.nodes if n not in held)

        def begin(node: str, **fields: int) -> pb.BeginIntentRequest:
            intent = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(node), **fields)
            return pb.BeginIntentRequest(epoch=epoch, intent=intent)

        stale = begin(target)
        stale.epoch = epoch + 5
        assert (await refused(w.leader.BeginIntent(stale, None))).code is Code.STALE_EPOCH
        assert (await refused(w.leader.BeginIntent(begin(min(held)), None))).code is Code.INVALID_ARGUMENT
        drain = pb.SetNodeStateRequest(epoch=epoch, node_id=id_to_pb(spare), state=pb.DRAINING)
        await w.leader.SetNodeState(drain, None)
        assert "DRAINING" in str(await refused(w.leader.BeginIntent(begin(spare), None)))
        intent = (await w.leader.BeginIntent(begin(target), None)).intent
        assert intent.replica_id == 4 and intent.config_index == -1
        assert (await refused(w.leader.BeginIntent(begin(target), None))).code is Code.CHANGE_IN_PROGRESS
        taken = (await w.leader.BeginIntent(begin(target, replica_id=4), None)).intent
        assert taken.replica_id == 4

        def end(config: Configuration) -> pb.EndIntentRequest:
            return pb.EndIntentRequest(
                epoch=epoch,
                tablet_id=id_to_pb(row.tablet_id),
                replica_id=4,
                committed_config=config_to_pb(config),
                term=1,
            )

        assert (await refused(w.leader.EndIntent(end(row.config), None))).code is Code.CAS_FAILED
        await w.leader.EndIntent(end(Configuration(9, row.config.peers)), None)
        assert not w.catalog.intents and w.catalog.tablets[row.tablet_id].config.opid_index == 9
        await w.leader.EndIntent(end(Configuration(9, row.config.peers)), None)  # again: nothing
        assert (await w.leader.BeginIntent(begin(target), None)).intent.replica_id == 5


async def test_a_node_retires_only_when_nothing_names_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w, 5)
        (row,) = w.catalog.current_tablets(await made(w, buckets=0))
        named = row.config.peers[0].node_id

        async def move(node: str, state: pb.NodeStatePB.ValueType) -> None:
            await w.leader.SetNodeState(pb.SetNodeStateRequest(node_id=id_to_pb(node), state=state), None)

        assert (await refused(move(named, pb.RETIRED))).code is Code.INVALID_ARGUMENT
        await move(named, pb.DRAINING)
        assert (await refused(move(named, pb.RETIRED))).code is Code.UNSAFE_CHANGE
        free = next(n for n in w.nodes if row.config.peer_on(n) is None)
        await move(free, pb.DRAINING)
        await move(free, pb.RETIRED)
        assert (await refused(move(free, pb.ACTIVE))).code is Code.INVALID_ARGUMENT
        master = await refused(move(MASTERS[0], pb.RETIRED))
        assert master.code is Code.INVALID_ARGUMENT
        await move(MASTERS[0], pb.DRAINING)
        assert (await refused(move(MASTERS[0], pb.RETIRED))).code is Code.UNSAFE_CHANGE


async def test_a_registered_node_is_formed_once_it_was_heard(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.add_nodes(1)
        (node,) = w.nodes
        register = pb.RegisterNodeRequest(node_id=id_to_pb(node), role="node", name="n-1")
        assert not (await w.leader.RegisterNode(register, None)).formed
        assert not (await w.leader.RegisterNode(register, None)).formed
        await w.beat_until(lambda: w.catalog.nodes[node].formed)
        assert (await w.leader.RegisterNode(register, None)).formed
        other = pb.RegisterNodeRequest(node_id=id_to_pb(node), role="master")
        assert isinstance(await refused(w.leader.RegisterNode(other, None)), Rejected)


async def test_a_node_that_does_not_answer_holds_up_no_orders_to_others(tmp_path: Path) -> None:
    class Nodes(ChannelPool):
        """The first node's CreateTablet never returns."""

        async def unary(self, address: str, stub: Any, method: str, request: Any, **how: Any) -> Any:
            made.append((bytes(request.tablet_id), how["to_node"]))
            await asyncio.sleep(0.001 if how["to_node"] != slow else 3600)

    made: list[tuple[bytes, str]] = []
    async with world(tmp_path, replace(OPTIONS, order_retry_ms=10_000)) as w:
        await ready(w)
        slow = min(w.nodes)
        answer = await w.leader.CreateTable(create_request("t", buckets=64), None)
        await until(lambda: {r.state for r in tablets(w, answer)} == {"CREATING"})
        lead = w.masters[w.group.leader].lead
        assert lead is not None
        orders = Orders(lead, Nodes(Identity()))
        wanted = [p.node_id for r in tablets(w, answer) for p in r.config.peers]
        for _ in range(5):
            for row in tablets(w, answer):
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
        for task in list(orders._running)[:ORDERS_PER_NODE]:
            task.cancel()
        await asyncio.sleep(0.05)
        assert not made, "what is not due any more is not sent"
        await orders.close()


def tablets(w: World, created: pb.CreateTableResponse) -> list[TabletRecord]:
    return list(w.catalog.current_tablets(hex_of(created.table_id)))


async def test_which_replicas_are_tombstoned(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        (row,) = w.catalog.current_tablets(await made(w, buckets=0))
        lead = w.masters[w.group.leader].lead
        assert lead is not None
        evicted = row.config.peers[2]
        node = w.nodes[evicted.node_id]
        report = lead.liveness.report(row.tablet_id, evicted.node_id, evicted.replica_id)
        assert report is not None and fate_of(lead, row, report) == "keep"
        assert fate_of(lead, None, report) == "keep"  # a tablet nobody knows
        smaller = Configuration(12, row.config.peers[:2])
        w.nodes[row.config.peers[0].node_id].configs[row.tablet_id] = config_to_pb(smaller)
        await w.beat_until(lambda: w.catalog.tablets[row.tablet_id].config.opid_index == 12)
        row = w.catalog.tablets[row.tablet_id]
        assert fate_of(lead, row, report) == "tombstone"
        # A change that it proposed itself as a leader, and that lost: nobody will ever tell it so.
        told = common_pb2.ReplicaStatusPB()
        told.CopyFrom(report.status)
        told.pending_config.CopyFrom(config_to_pb(Configuration(14, row.config.peers)))
        assert fate_of(lead, row, replace(report, status=told)) == "tombstone"
        told.committed_config.opid_index = 13
        assert fate_of(lead, row, replace(report, status=told)) == "keep"
        newer = Peer(NodeId(node.node_id), ReplicaId(3), "", MemberType.VOTER)
        node.configs[row.tablet_id] = config_to_pb(Configuration(15, (*smaller.peers, newer)))
        await w.beat_until(lambda: w.catalog.tablets[row.tablet_id].config.opid_index == 15)
        assert fate_of(lead, w.catalog.tablets[row.tablet_id], report) == "keep"
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="t"), None)
        assert fate_of(lead, w.catalog.tablets[row.tablet_id], report) == "delete"


async def test_the_view_shows_the_catalog_itself(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await made(w)
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        catalog = next(t for t in view.tablets if hex_of(t.tablet_id) == CATALOG_TABLET_ID)
        assert catalog.replication_factor == 3 and hex_of(catalog.leader_node) == MASTERS[0]
        assert [hex_of(p.node_id) for p in catalog.committed_config.peers] == MASTERS
        assert {n.registration.role for n in view.nodes} == {"master", "node"}
        assert len(view.tablets) == 5 and view.settled
