"""Ranges that are added and dropped: one batch, and a leader that dies between any two steps."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stele.model.errors import Code, Rejected
from stele.model.ids import new_id
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.ranges import AddRange, DropRange, RangeStep, of_ranges
from stele.model.steps import AddColumn
from stele.rpc.convert import id_to_pb
from stele.rpc.convert_schema import partitioning_to_pb, steps_to_pb
from stele.rpc.proto import master_pb2 as pb
from tests.consensus.cluster import WAIT_S
from tests.master.harness import (
    MASTERS,
    OPTIONS,
    World,
    create_request,
    ready,
    ready_again,
    refused,
    until,
    world,
)


def request_of(*steps: RangeStep, name: str = "t") -> pb.AlterTableRequest:
    return pb.AlterTableRequest(name=name, alter_id=id_to_pb(new_id()), steps=steps_to_pb(steps))


async def made(w: World, name: str = "t") -> str:
    request = create_request(name)
    ranged = of_ranges((0,), [(b"a", b"f"), (b"f", b"m")])
    request.partitioning.CopyFrom(partitioning_to_pb(PartitionSchema((HashPartition((0,), 2),), ranged)))
    await w.leader.CreateTable(request, None)
    table_id = w.catalog.table_by_name[name].table_id
    await w.beat_until(lambda: runs(w, table_id))
    return str(table_id)


def runs(w: World, table_id: str) -> bool:
    return {t.state for t in w.catalog.current_tablets(table_id)} == {"RUNNING"}


def spans(w: World, table_id: str) -> dict[int, tuple[bytes, bytes]]:
    rows = w.catalog.current_tablets(table_id)
    return {row.ordinal: (row.partition.range_start, row.partition.range_end) for row in rows}


async def test_tablets_of_new_ranges_are_placed_and_those_of_dropped_ones_deleted(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        before = {row.ordinal: row.tablet_id for row in w.catalog.current_tablets(table_id)}
        assert sorted(before) == [0, 1, 2, 3]
        answer = await w.leader.AlterTable(request_of(AddRange(b"m", b""), DropRange(b"a", b"f")), None)
        assert answer.tablets_left == 2 and answer.unreached
        assert spans(w, table_id) == {1: (b"f", b"m"), 3: (b"f", b"m"), 4: (b"m", b""), 5: (b"m", b"")}
        after = {row.ordinal: row.tablet_id for row in w.catalog.current_tablets(table_id)}
        assert (after[1], after[3]) == (before[1], before[3]), "the others are not touched"
        gone = [w.catalog.tablets[before[n]] for n in (0, 2)]
        assert {row.state for row in gone} == {"DELETED"}
        assert all(w.lead.removals.nodes_left(row.tablet_id) for row in gone)
        await w.beat_until(lambda: runs(w, table_id))
        located = await w.leader.GetTableLocations(pb.GetTableLocationsRequest(name="t"), None)
        assert len(located.tablets) == located.table.tablets == 4


async def test_a_new_tablet_that_is_replaced_before_it_runs_holds_up_no_change_of_columns(
    tmp_path: Path,
) -> None:
    """Ranges and columns in one change; nobody makes the new tablets in time, so others take their place."""
    async with world(tmp_path, replace(OPTIONS, create_timeout_ms=300)) as w:
        await ready(w)
        table_id = await made(w)
        old = {row.tablet_id for row in w.catalog.current_tablets(table_id)}
        steps = steps_to_pb([AddColumn("stars", "int8", False, "0"), AddRange(b"m", b"")])
        request = pb.AlterTableRequest(name="t", alter_id=id_to_pb(new_id()), steps=steps)
        await w.leader.AlterTable(request, None)
        async with asyncio.timeout(WAIT_S):
            while sum(t.state == "REPLACED" for t in w.catalog.tablets_of_table(table_id)) < 2:
                await w.beat()
                await asyncio.sleep(0.01)
        for node in w.nodes.values():
            node.versions |= dict.fromkeys(old, 2)
        await w.beat_until(lambda: runs(w, table_id))
        for node in w.nodes.values():
            node.versions |= {tablet_id: 2 for tablet_id, _ in node.replicas}
        await w.beat_until(lambda: not w.catalog.altering)


@pytest.mark.parametrize("fate", ["lost", "unknown"])
async def test_a_leader_dies_with_the_batch(tmp_path: Path, fate: str) -> None:
    """The caller sends the same request again, to the next leader: it is done once."""
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        request = request_of(AddRange(b"m", b""), DropRange(b"a", b"f"))
        w.group.lose_next = fate
        assert (await refused(w.leader.AlterTable(request, None))).code is Code.UNKNOWN_OUTCOME
        await w.elect(MASTERS[1])
        await ready_again(w)
        assert (4 in spans(w, table_id)) == (fate == "unknown")
        for _ in range(2):
            answer = await w.leader.AlterTable(request, None)
            assert answer.tablets_left == 2, "this leader asks the nodes again"
        assert sorted(spans(w, table_id)) == [1, 3, 4, 5]
        assert len([t for t in w.catalog.tablets.values() if t.table_id == table_id]) == 6
        await w.beat_until(lambda: runs(w, table_id))


@pytest.mark.parametrize("beats", [0, 1, 2])
async def test_a_leader_dies_while_the_tablets_are_placed(tmp_path: Path, beats: int) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await w.leader.AlterTable(request_of(AddRange(b"m", b"q"), DropRange(b"f", b"m")), None)
        for _ in range(beats):
            await w.beat()
        await w.elect(MASTERS[2])
        await ready_again(w)
        await w.beat_until(lambda: runs(w, table_id))
        assert set(spans(w, table_id).values()) == {(b"a", b"f"), (b"m", b"q")}


async def test_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        opid = w.catalog.opid
        error = await refused(w.leader.AlterTable(request_of(AddRange(b"b", b"c")), None))
        assert error.code is Code.INVALID_ARGUMENT and "overlaps" in str(error)
        error = await refused(w.leader.AlterTable(request_of(DropRange(b"a", b"m")), None))
        assert "there is no range" in str(error) and w.catalog.opid == opid
        await w.leader.CreateTable(create_request("u", buckets=2), None)
        request = request_of(AddRange(b"b", b"c"))
        request.name = "u"
        assert "no range partitions" in str(await refused(w.leader.AlterTable(request, None)))
        keys = [b"m" + n.to_bytes(2) for n in range(200)]
        steps = [AddRange(key, key + b"x") for key in keys]
        w.lead.options = replace(w.lead.options, tablets_per_node_max=20)
        error = await refused(w.leader.AlterTable(request_of(*steps), None))
        assert "more replicas would make" in str(error)
        assert len(spans(w, table_id)) == 4


async def test_ranges_that_are_added_at_once_keep_to_what_nodes_may_have(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        await made(w, "t")
        await made(w, "u")
        w.lead.options = replace(w.lead.options, tablets_per_node_max=6)  # 30 on five nodes, and 24 are there
        step = AddRange(b"m", b"n")
        told = await asyncio.gather(
            *(w.leader.AlterTable(request_of(step, name=name), None) for name in "tu"), return_exceptions=True
        )
        (error,) = [error for error in told if isinstance(error, Rejected)]
        assert "6 more replicas would make 36 on 5 nodes" in str(error)


async def test_one_change_after_another_needs_no_tablet_that_runs(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await ready(w)
        table_id = await made(w)
        await w.leader.AlterTable(request_of(AddRange(b"m", b"q")), None)
        await w.leader.AlterTable(request_of(DropRange(b"m", b"q")), None)
        await w.leader.AlterTable(request_of(AddRange(b"m", b"q")), None)
        assert sorted(spans(w, table_id)) == [0, 1, 2, 3, 6, 7], "ordinals are never used again"
        await w.beat_until(lambda: runs(w, table_id))
        await until(lambda: not w.catalog.altering)
