"""What an administrator asks of one tablet's replicas: recorded, shown, refused with the reason, harmless twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stele.master.records import TabletRecord
from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.model.errors import Code
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import (
    MASTERS,
    OPTIONS,
    World,
    in_force,
    one_tablet,
    ready,
    ready_again,
    refused,
    world,
)

QUICK = replace(OPTIONS, alive_ms=500)
"""Silence is seen soon."""


def free_node(w: World, row: TabletRecord) -> str:
    """A node without a replica."""
    return next(n for n in w.nodes if row.config.peer_on(n) is None)


def request(row: TabletRecord, what: pb.PlacingPB.ValueType, **fields: object) -> pb.PlaceTabletRequest:
    """A request about a tablet; nodes by id."""
    ids = {k: id_to_pb(str(v)) if k.endswith("_node") else v for k, v in fields.items()}
    return pb.PlaceTabletRequest(tablet_id=id_to_pb(row.tablet_id), what=what, **ids)  # type: ignore[arg-type]


def now(w: World, row: TabletRecord) -> TabletRecord:
    """The row as it is now."""
    found: TabletRecord = w.catalog.tablets[row.tablet_id]
    return found


async def test_a_move_is_recorded_shown_and_kept_by_the_next_leader(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        source, target = row.config.peers[1].node_id, free_node(w, row)
        asked = request(row, pb.MOVE_REPLICA, from_node=source, to_node=target, owner="ann", reason="r" * 300)
        answer = await w.leader.PlaceTablet(asked, None)
        assert answer.by_hand.owner == "ann" and len(answer.by_hand.reason) == 200
        stored = now(w, row).by_hand
        await w.leader.PlaceTablet(asked, None)
        assert now(w, row).by_hand == stored, "a repeated request changes nothing"
        await w.elect(MASTERS[1])
        await ready_again(w)
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        (hand,) = [t.by_hand for t in view.tablets if t.HasField("by_hand")]
        assert (list(hand.pinned), list(hand.avoided)) == ([id_to_pb(target)], [id_to_pb(source)])
        await w.leader.PlaceTablet(request(row, pb.RELEASE_PLACEMENT), None)
        assert now(w, row).by_hand == NOT_BY_HAND


async def test_replicas_are_added_and_removed_and_the_view_wants_as_many(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        for _ in range(2):  # the second time is a retry
            await w.leader.PlaceTablet(request(row, pb.ADD_REPLICA, replicas=4), None)
        assert now(w, row).by_hand.extra == 1 and w.catalog.replication_factor(now(w, row)) == 4
        view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
        assert [t.replication_factor for t in view.tablets if t.tablet_id == id_to_pb(row.tablet_id)] == [4]
        for _ in range(2):
            await w.leader.PlaceTablet(
                request(row, pb.REMOVE_REPLICA, replicas=3, from_node=row.config.peers[0].node_id), None
            )
        assert now(w, row).by_hand.extra == 0
        assert now(w, row).by_hand.avoided == (row.config.peers[0].node_id,)
        error = await refused(
            w.leader.PlaceTablet(
                request(row, pb.REMOVE_REPLICA, replicas=2, from_node=row.config.peers[1].node_id), None
            )
        )
        assert error.code is Code.INVALID_ARGUMENT and "lower the factor" in str(error)


async def test_one_more_replica_may_be_where_none_was_wanted_if_no_other_place_is_left(
    tmp_path: Path,
) -> None:
    """Its place was not to be used, so nothing was ever as asked for, and `--wait` never ended."""
    async with world(tmp_path) as w:
        await ready(w, 4)
        row = await one_tablet(w)
        source, target = row.config.peers[1].node_id, free_node(w, row)
        await w.leader.PlaceTablet(request(row, pb.MOVE_REPLICA, from_node=source, to_node=target), None)
        peers = tuple(replace(p, node_id=target) if p.node_id == source else p for p in row.config.peers)
        moved = replace(row.config, opid_index=9, peers=peers)
        await in_force(w, row.tablet_id, moved, says=row.config.peers[0].node_id)
        await w.leader.PlaceTablet(request(row, pb.ADD_REPLICA, replicas=4), None)
        assert now(w, row).by_hand.avoided == () and now(w, row).by_hand.pinned == (target,)


async def test_a_node_that_got_a_replica_by_hand_is_refused_as_the_target_of_another(tmp_path: Path) -> None:
    """It was recorded, and the second replica went to a node that nobody had named."""
    async with world(tmp_path) as w:
        await ready(w, 5)
        row = await one_tablet(w)
        first, source, other = (p.node_id for p in row.config.peers)
        target = free_node(w, row)
        await w.leader.PlaceTablet(request(row, pb.MOVE_REPLICA, from_node=source, to_node=target), None)
        peers = tuple(replace(p, node_id=target) if p.node_id == source else p for p in row.config.peers)
        await in_force(w, row.tablet_id, replace(row.config, opid_index=9, peers=peers), says=first)
        before = now(w, row).by_hand
        second = request(row, pb.MOVE_REPLICA, from_node=other, to_node=target)
        assert "already" in str(await refused(w.leader.PlaceTablet(second, None)))
        assert now(w, row).by_hand == before


async def test_a_request_that_counts_from_an_older_state_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        error = await refused(w.leader.PlaceTablet(request(row, pb.ADD_REPLICA, replicas=5), None))
        assert error.code is Code.CAS_FAILED and "is to have 3 replicas" in str(error)


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("same", Code.INVALID_ARGUMENT, "the same node"),
        ("no member", Code.NOT_FOUND, "has no replica on node"),
        ("member", Code.INVALID_ARGUMENT, "has a replica on node"),
        ("unknown", Code.NOT_FOUND, "there is no node"),
        ("machine", Code.INVALID_ARGUMENT, "choose a node on another machine"),
        ("draining", Code.INVALID_ARGUMENT, "is DRAINING"),
        ("parked", Code.INVALID_ARGUMENT, "is parked"),
        ("silent", Code.NOT_READY, "sends no heartbeats"),
        ("full", Code.INVALID_ARGUMENT, "has no room"),
        ("nothing", Code.INVALID_ARGUMENT, "does not say what to do"),
        ("catalog", Code.INVALID_ARGUMENT, "cannot be placed by hand"),
        ("many", Code.INVALID_ARGUMENT, "at most 7"),
        ("machines", Code.INVALID_ARGUMENT, "only 5 machines"),
    ],
)
async def test_what_cannot_be_is_refused_with_the_reason(
    tmp_path: Path, case: str, code: Code, words: str
) -> None:
    async with world(tmp_path, QUICK if case == "silent" else OPTIONS) as w:
        await ready(w)
        row = await one_tablet(w)
        source, target = row.config.peers[1].node_id, free_node(w, row)
        asked = request(row, pb.MOVE_REPLICA, from_node=source, to_node=target)
        match case:
            case "same":
                asked.to_node = asked.from_node
            case "no member":
                asked.from_node = id_to_pb(next(n for n in w.nodes if n not in (target, *_members(row))))
            case "member":
                asked.to_node = id_to_pb(row.config.peers[0].node_id)
            case "unknown":
                asked.to_node = id_to_pb("e" * 32)
            case "machine":
                w.nodes[target].machine = w.nodes[source].machine
                await w.beat_until(lambda: w.catalog.nodes[target].machine == w.nodes[source].machine)
            case "draining":
                await w.move(target, pb.DRAINING)
            case "parked":
                wish = pb.WantNodeRequest(node_id=id_to_pb(target), wanted=pb.WANTED_PARKED, for_ms=60_000)
                await w.leader.WantNode(wish, None)
            case "silent":
                node = w.catalog.nodes[target]
                await w.beat_until(lambda: not w.lead.is_alive(node), silent=(target,))
            case "full":
                w.nodes[target].disk_free_bytes = 1 << 20
                await w.beat()
            case "nothing":
                asked.what = pb.PLACING_UNSPECIFIED
            case "catalog":
                asked.tablet_id = id_to_pb(CATALOG_TABLET_ID)
            case "many":
                asked = request(row, pb.ADD_REPLICA, replicas=8)
            case "machines":
                full = replace(row, by_hand=ByHand(extra=2))
                w.catalog.tablets[row.tablet_id] = full
                asked = request(row, pb.ADD_REPLICA, replicas=6)
        error = await refused(w.leader.PlaceTablet(asked, None))
        assert error.code is code and words in str(error), error


def _members(row: TabletRecord) -> set[str]:
    return {p.node_id for p in row.config.peers}


async def test_a_removal_that_would_lose_the_majority_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path, QUICK) as w:
        await ready(w)
        row = await one_tablet(w)
        await w.leader.PlaceTablet(request(row, pb.ADD_REPLICA, replicas=4), None)
        first, *others = (p.node_id for p in row.config.peers)
        nodes = [w.catalog.nodes[n] for n in others]
        await w.beat_until(lambda: not any(map(w.lead.is_alive, nodes)), silent=tuple(others))
        error = await refused(
            w.leader.PlaceTablet(request(row, pb.REMOVE_REPLICA, replicas=3, from_node=first), None)
        )
        assert error.code is Code.UNSAFE_CHANGE and "would lose its majority" in str(error)


async def test_a_deleted_table_forgets_what_was_asked(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row = await one_tablet(w)
        await w.leader.PlaceTablet(request(row, pb.ADD_REPLICA, replicas=4), None)
        await w.leader.DeleteTable(pb.DeleteTableRequest(name="t"), None)
        assert now(w, row).by_hand == NOT_BY_HAND
