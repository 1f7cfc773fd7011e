"""What the catalog keeps of a replica that a driver made: it waits, it is equal, it differs; and nobody else may say so."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

from stele.driver.wire import copy_record_from_pb
from stele.master.records import TabletRecord
from stele.master.row_encoding import decode, encode
from stele.model.config import Configuration, MemberType, Peer
from stele.model.copies import CopyRecord, of_members, with_made, with_record
from stele.model.errors import Code
from stele.model.ids import NodeId, ReplicaId
from stele.rpc.convert import config_to_pb, id_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import MASTERS, World, claimed, one_tablet, ready, refused, world

LARGE = (1 << 64) - 1


async def with_replica_four(w: World, index: int = 9) -> tuple[TabletRecord, int]:
    """A tablet that has replica 4 in the place of replica 3, and the epoch of the driver that did so."""
    row, epoch = await one_tablet(w), await claimed(w)
    target = min(n for n in w.nodes if row.config.peer_on(n) is None)
    asked = pb.IntentPB(tablet_id=id_to_pb(row.tablet_id), target_node=id_to_pb(target), cause="heal/1")
    await w.leader.BeginIntent(pb.BeginIntentRequest(epoch=epoch, intent=asked), None)
    peers = (*(p for p in row.config.peers if p.replica_id != 3), Peer(NodeId(target), ReplicaId(4), ""))
    request = pb.EndIntentRequest(
        epoch=epoch,
        tablet_id=id_to_pb(row.tablet_id),
        replica_id=4,
        committed_config=config_to_pb(Configuration(index, peers)),
        term=1,
    )
    await w.leader.EndIntent(request, None)
    return w.catalog.tablets[row.tablet_id], epoch


def compared(row: TabletRecord, epoch: int, replica: int = 4, other: int = 1, **sums: int) -> object:
    told = {"rows": 7, "checksum": LARGE, "other_rows": 7, "other_checksum": LARGE, "snapshot": LARGE >> 1}
    copy = pb.CopyRecordPB(replica_id=replica, other_replica=other, **{**told, **sums})
    return pb.RecordCheckRequest(epoch=epoch, tablet_id=id_to_pb(row.tablet_id), copy=copy)


async def seen(w: World, row: TabletRecord) -> list[CopyRecord]:
    view = await w.leader.GetClusterView(pb.GetClusterViewRequest(), None)
    (told,) = (t for t in view.tablets if t.tablet_id == id_to_pb(row.tablet_id))
    return [copy_record_from_pb(c) for c in told.copies]


async def test_a_new_replica_waits_until_it_is_compared_and_the_record_outlives_the_leader(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row, epoch = await with_replica_four(w)
        assert await seen(w, row) == [CopyRecord(4, "heal/1")] and row.copies[0].result == "Waits"

        differs = await w.leader.RecordCheck(compared(row, epoch, other_rows=6), None)
        (told,) = await seen(w, row)
        assert told == copy_record_from_pb(differs.copy)
        assert (told.result, told.cause, told.rows, told.other_rows) == ("Differs", "heal/1", 7, 6)
        assert told.checksum == LARGE and told.at_us

        await w.elect(MASTERS[1])
        assert await seen(w, row) == [told], "another leader has it"
        await w.leader.RecordCheck(compared(row, epoch, other=2), None)
        (told,) = await seen(w, row)
        assert (told.result, told.other_id, told.cause) == ("Equal", 2, "heal/1")


async def test_only_the_driver_in_force_records_and_only_members(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        row, epoch = await with_replica_four(w)
        before = await seen(w, row)

        async def code(request: object) -> Code:
            return (await refused(w.leader_call("RecordCheck", request))).code

        later = await claimed(w)
        assert await code(compared(row, epoch)) is Code.STALE_EPOCH
        assert await code(compared(row, 0)) is Code.STALE_EPOCH
        assert await code(compared(row, later, other=3)) is Code.CAS_FAILED, "replica 3 was replaced"
        assert await code(compared(row, later, replica=5)) is Code.CAS_FAILED
        for replica, other in ((0, 1), (4, 0), (4, 4)):
            assert await code(compared(row, later, replica, other)) is Code.INVALID_ARGUMENT
        nowhere = pb.RecordCheckRequest(epoch=later, tablet_id=b"x" * 16)
        nowhere.copy.CopyFrom(compared(row, later).copy)  # type: ignore[attr-defined]
        assert await code(nowhere) is Code.NOT_FOUND
        assert await seen(w, row) == before


def configuration(*replicas: int) -> Configuration:
    return Configuration(
        9, tuple(Peer(NodeId(f"{r:032x}"), ReplicaId(r), "", MemberType.VOTER) for r in replicas)
    )


def test_differences_and_what_waits_stay_and_of_equal_ones_the_newest() -> None:
    config = configuration(1, 4, 5, 6)
    equal, later = CopyRecord(4, "", 1, 10), CopyRecord(5, "", 1, 11)
    differs, waits = CopyRecord(6, "", 1, 12, rows=1), CopyRecord(1)
    copies = with_record((), equal, config)
    copies = with_record(copies, differs, config)
    copies = with_record(copies, waits, config)
    copies = with_record(copies, later, config)
    assert copies == (differs, waits, later)
    assert with_made(copies, 6, "again", config) == copies, "known already"
    mended = replace(differs, other_rows=1, at_us=13)
    assert with_record(copies, mended, config) == (waits, mended)
    smaller = configuration(1, 5, 7)
    assert of_members(copies, smaller) == (waits, later)
    assert with_made(copies, 7, "heal/2", smaller) == (waits, later, CopyRecord(7, "heal/2")), (
        "what left is forgotten"
    )


def test_a_row_keeps_each_kind_of_record_and_the_release_before_reads_it(tmp_path: Path) -> None:
    copies = (
        CopyRecord(4, "heal/1"),
        CopyRecord(5, "heal/2", 1, 10, LARGE, 12, 7, LARGE, 7, LARGE),
        CopyRecord(6, "", 2, 11, 3, 0, 7, 8, 9, 10),
    )
    kinds = {f.name: f for f in dataclasses.fields(TabletRecord)}
    assert list(kinds)[-1] == "copies", "at the end, so that an earlier program keeps it as it is"
    row = _row()
    longer = encode(replace(row, copies=copies))
    assert decode(TabletRecord, longer).copies == copies
    assert decode(TabletRecord, encode(row)).copies == ()


def _row() -> TabletRecord:
    from stele.model.ids import TableId, TabletId
    from stele.model.partition import Partition

    return TabletRecord(
        TabletId("a" * 32), TableId("b" * 32), 0, "RUNNING", Partition(), 1, configuration(1, 4)
    )
