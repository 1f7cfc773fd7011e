"""PrepareSnapshot and SplitKeys on real nodes in this process: every replica serves the prepared snapshot."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from stele.client import AsyncClient
from stele.client.locations import TabletPlace
from stele.client.tablet_scan import Prepared, ScanPlan, TabletScan
from stele.model.errors import Code, SteleError
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerAdminServiceStub, TabletServerServiceStub
from tests.tserver.local import HASHED, SCHEMA, LocalCluster

ROWS = 400


def read(client: AsyncClient, plan: ScanPlan, tablet: TabletPlace, timeout_s: float = 10.0) -> list[int]:
    """The ids of one tablet. Blocks."""
    scan = TabletScan(client._flight, plan, tablet, timeout_s, lambda: None)
    return [n for batch in scan if batch is not None for n in batch["id"].to_pylist()]


def alone(tablet: TabletPlace, number: int) -> TabletPlace:
    """The tablet with one of its replicas, which alone is asked."""
    return replace(tablet, replicas=(tablet.replicas[number],), leader=0)


async def test_every_replica_serves_a_prepared_snapshot(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await client.create_table("t", SCHEMA, HASHED)
            await table.write_arrow(pa.table({"id": range(ROWS), "name": ["x" * 20] * ROWS}))
            plan = table.scan(["id"], ordered=True).plan
            for tablet in plan.tablets:  # of some of them this client knows no leader, or a wrong one
                tablet.leader = 1
            await table.reads.prepare(plan)
            assert set(plan.prepared) == {tablet.tablet_id for tablet in plan.tablets}, "hints are followed"
            await table.write_arrow(pa.table({"id": range(ROWS, ROWS + 50), "name": ["later"] * 50}))
            for number in range(3):
                parts = [asyncio.to_thread(read, client, plan, alone(each, number)) for each in plan.tablets]
                assert sorted(n for part in await asyncio.gather(*parts) for n in part) == list(range(ROWS))

            tablet = plan.tablets[0]
            (place,) = (r for r in tablet.replicas if r == tablet.target())
            request = tserver_pb2.PrepareSnapshotRequest(
                snapshot=plan.snapshot, tablet_ids=[b"\1" * 16, id_to_pb(tablet.tablet_id)]
            )
            answer = await client.pool.unary(
                place.address, TabletServerServiceStub, "PrepareSnapshot", request
            )
            unknown, known = answer.tablets
            assert unknown.error.code == Code.NOT_FOUND and not unknown.index
            assert known.index or known.error.code == Code.NOT_LEADER
            for bad, code in [
                ({"snapshot": 0}, Code.INVALID_ARGUMENT),
                ({"tablet_ids": [n.to_bytes(16, "big") for n in range(1001)]}, Code.TOO_LARGE),
            ]:
                with pytest.raises(SteleError) as refused:
                    wrong = tserver_pb2.PrepareSnapshotRequest(
                        **{"snapshot": plan.snapshot, "tablet_ids": [], **bad}
                    )
                    await client.pool.unary(place.address, TabletServerServiceStub, "PrepareSnapshot", wrong)
                assert refused.value.code is code

            # An index of another incarnation of the tablet says nothing about this one.
            plan.prepared[tablet.tablet_id] = Prepared(1, 7)
            other = replace(alone(tablet, 0), incarnation=7)
            with pytest.raises(SteleError) as stale:
                await asyncio.to_thread(read, client, plan, other, 0.5)
            assert "is at incarnation 0, but the request names 0-0000000007" in str(stale.value)
    finally:
        await cluster.close()


async def test_keys_that_cut_a_tablet_come_from_its_files(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await client.create_table("t", SCHEMA)
            (tablet,) = table.scan().plan.tablets
            address = tablet.target().address

            async def split(part_bytes: int) -> list[bytes]:
                request = tserver_pb2.SplitKeysRequest(tablet_id=id_to_pb(tablet.tablet_id), bytes=part_bytes)
                answer = await client.pool.unary(address, TabletServerServiceStub, "SplitKeys", request)
                return list(answer.keys)

            assert await split(1) == []
            await table.write_arrow(pa.table({"id": range(100_000), "name": ["x" * 20] * 100_000}))
            flush = tserver_pb2.FlushTabletRequest(tablet_id=id_to_pb(tablet.tablet_id))
            await client.pool.unary(address, TabletServerAdminServiceStub, "FlushTablet", flush, timeout_s=60)
            keys = await split(1)
            assert len(keys) == 3 and keys == sorted(set(keys)), "groups have 32,768 rows"
            assert len(await split(2_000_000)) == 1 and await split(1 << 40) == []
            bounds = [b"", *keys, b""]
            found: list[int] = []
            for lower, upper in itertools.pairwise(bounds):
                plan = table.scan(["id"], ordered=True).plan
                part = replace(plan, spec=replace(plan.spec, lower_key=lower, upper_key=upper))
                found += await asyncio.to_thread(read, client, part, tablet)
            assert found == list(range(100_000))
            with pytest.raises(SteleError, match="parts of 0 bytes"):
                await split(0)
    finally:
        await cluster.close()
