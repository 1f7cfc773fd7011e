"""Which nodes a deletion waits for: those that could still be a majority of a tablet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stele.master.port import put
from stele.model.ids import TabletId
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    MASTERS,
    World,
    claimed,
    create_request,
    one_tablet,
    ready,
    ready_again,
    world,
)
from tests.master.test_following import commit


async def delete(w: World, wait_ms: int = 0) -> list[str]:
    """Delete the table; the nodes that may still acknowledge rows."""
    request = pb.DeleteTableRequest(table_id=id_to_pb(next(iter(w.catalog.tables))), wait_ms=wait_ms)
    return list((await w.leader.DeleteTable(request, None)).unreached)


def answered(w: World, tablet_id: TabletId, *nodes: str) -> None:
    """What the answers of these nodes to DeleteTablet would do."""
    for node_id in nodes:
        w.lead.removals.done(tablet_id, node_id)


async def test_a_deletion_waits_until_what_is_left_of_a_tablet_can_commit_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        first, second, third = (peer.node_id for peer in row.config.peers)
        assert await delete(w) == sorted((first, second, third))
        answered(w, row.tablet_id, first)
        assert await delete(w, wait_ms=20) == sorted((second, third))
        answered(w, row.tablet_id, third)
        assert await delete(w, wait_ms=60_000) == []


async def test_a_node_that_gets_a_replica_just_now_counts_too(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        first, second, third = (peer.node_id for peer in row.config.peers)
        target = next(n for n in w.nodes if n not in (first, second, third))
        intent = pb.IntentPB(
            tablet_id=id_to_pb(row.tablet_id),
            target_node=id_to_pb(target),
            source_node=id_to_pb(first),
            kind="add",
            config_index=row.config.opid_index,
        )
        await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=await claimed(w), intent=intent), None)
        assert await delete(w) == sorted((first, second, third, target))
        answered(w, row.tablet_id, first, second)
        assert await delete(w) == sorted((third, target)), (
            "they and a voter that was taken out would be two of three"
        )
        answered(w, row.tablet_id, third)
        assert await delete(w) == []


async def test_the_only_replica_must_answer(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await w.leader.CreateTable(create_request("t", rf=1), None)
        (table_id,) = w.catalog.tables
        await w.beat_until(lambda: {t.state for t in w.catalog.current_tablets(table_id)} == {"RUNNING"})
        (row,) = w.catalog.current_tablets(table_id)
        (peer,) = row.config.peers
        assert await delete(w, wait_ms=1) == [peer.node_id]
        answered(w, row.tablet_id, peer.node_id)
        assert await delete(w) == []


async def test_a_later_leader_waits_for_no_more_than_the_first_one_did(tmp_path: Path) -> None:
    """One node is silent: what it has alone is no majority, whichever master leads."""
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        first, second, third = (peer.node_id for peer in row.config.peers)
        await delete(w)
        w.add_nodes(1)
        await w.beat()
        await w.elect(MASTERS[1])
        await ready_again(w)
        assert await delete(w) == sorted((first, second, third)), "no answer to the leader before counts"
        answered(w, row.tablet_id, first, second)
        assert await delete(w) == []


async def test_of_a_row_that_names_no_members_every_node_is_asked(tmp_path: Path) -> None:
    """Masters of the version before kept no members of deleted tablets."""
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        await delete(w)
        commit(w, [put(replace(w.catalog.tablets[row.tablet_id], holders=(), harmless=0))])
        w.add_nodes(1)
        await w.beat()
        await w.elect(MASTERS[1])
        await ready_again(w)
        formed = [n.node_id for n in w.catalog.nodes.values() if n.role == "node" and n.formed]
        assert len(formed) >= 5 and await delete(w) == sorted(formed)
        answered(w, row.tablet_id, *formed)
        assert await delete(w) == []


async def test_a_tablet_that_no_node_was_told_of_is_not_waited_for(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        left = w.lead.removals
        left.begin(w.catalog, [replace(row, holders=(), harmless=1)])
        assert not left.unfinished(w.catalog, row.table_id)
