"""Parts of jobs that are tried again: on a small cluster, and on real processes of which one is killed in between."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import stele
from stele.client import AsyncClient, AsyncTable, Job, RowErrors
from stele.model.cluster_version import FIRST_CLUSTER_VERSION
from stele.model.errors import Code, Rejected
from stele.model.partition import HashPartition, PartitionSchema
from tests.client.small import EIGHT, SCHEMA, small_cluster
from tests.harness import Cluster
from tests.tserver.local import LocalCluster

FOUR = PartitionSchema((HashPartition((0,), 4),))


def rows(first: int, end: int, name: str = "ours") -> pa.Table:
    return pa.table({"id": np.arange(first, end), "name": [name] * (end - first)})


async def names(table: AsyncTable) -> dict[int, str]:
    found = await table.scan(["id", "name"]).to_table()
    return dict(zip(found["id"].to_pylist(), found["name"].to_pylist()))


async def test_a_part_that_is_written_again_changes_nothing(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        job = pickle.loads(pickle.dumps(Job.new()))
        await table.write_arrow(rows(0, 100), part=job.part(0))
        await table.write_arrow(rows(0, 50, "theirs"))
        await table.write_arrow(pa.table({"id": np.arange(50, 60)}), "delete")
        before = await names(table)
        for _ in range(2):
            written = await table.write_arrow(rows(0, 200), part=job.part(0))
            assert (written.rows_written, written.row_errors) == (200, [])
        assert await names(table) == before | dict.fromkeys(range(100, 200), "ours")
        assert stele.Job is Job


async def test_an_insert_that_is_tried_again_is_refused_for_rows_of_others_alone(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        part = Job.new().part(7)
        await table.insert({"id": 100, "name": "ours"})
        for _ in range(2):
            with pytest.raises(RowErrors) as caught:
                await table.write_arrow(rows(0, 101), "insert", part=part)
            assert [(e.row, e.code) for e in caught.value.errors] == [(100, Code.ALREADY_PRESENT)]
            assert caught.value.result.rows_written == 100


async def test_a_plan_takes_along_whether_jobs_may_be_written(tmp_path: Path) -> None:
    """A task asks no master."""
    async with small_cluster(tmp_path) as (small, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        plan = table.plan_write()
        assert client.open_planned(plan).takes_jobs
        earlier = client.open_planned(replace(plan, cluster_version=FIRST_CLUSTER_VERSION))
        with pytest.raises(Rejected, match="needs cluster version 2, but the cluster has 1") as caught:
            await earlier.write_arrow(rows(0, 1), part=Job.new().part(0))
        assert caught.value.code is Code.UNSUPPORTED_VERSION
        small.cluster_version = 0  # as a master of the release before
        async with AsyncClient([small.master_address]) as other:
            assert not (await other.open_table("t")).takes_jobs


@pytest.mark.parametrize("wrong", [7, "job", Job.new()], ids=["number", "text", "job"])
async def test_what_is_not_a_part_is_refused(tmp_path: Path, wrong: Any) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        with pytest.raises(Rejected, match="expected a part of a job"):
            await table.write_arrow(rows(0, 1), part=wrong)
    with pytest.raises(Rejected, match="part -1"):
        Job.new().part(-1)


async def test_every_block_names_the_job(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (small, client):
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        (tablet,) = small.tablets_of("t")
        await table.write_arrow(rows(0, 20_000), part=Job.new().part(3))
        sent = [request.attempt for request in tablet.attempts]
        assert len(sent) > 2 and len({a.SerializeToString() for a in sent}) == 1
        assert sent[0].part == 3 and len(sent[0].job) == 16 and sent[0].number


async def test_a_block_that_is_made_anew_is_of_the_same_attempt(cluster: LocalCluster) -> None:
    """Its column was dropped on its way. The second attempt knows the new columns."""
    async with cluster.client() as client, cluster.client() as other:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        old, part = await other.open_table("t"), Job.new().part(0)
        await table.alter(drop=["name"])
        given = pa.table(
            {"id": np.arange(3), "name": pa.nulls(3, pa.string()), "n": pa.array([1] * 3, pa.int32())}
        )
        await old.write_arrow(given, part=part)
        assert old.schema.version == 2
        await table.put({"id": 1, "n": 2})
        await table.write_arrow(given.drop_columns(["name"]), part=part)
        assert (await table.scan(["n"], ordered=True).to_table())["n"].to_pylist() == [1, 2, 1]


async def test_real_nodes_know_a_job_also_when_others_lead(tmp_path: Path) -> None:
    """Every leader is killed between the attempts."""
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        table = await client.create_table("t", SCHEMA, FOUR)
        job = Job.new()
        await table.write_arrow(rows(0, 5_000), part=job.part(0))
        await table.write_arrow(rows(0, 2_000, "theirs"))
        await table.write_arrow(pa.table({"id": np.arange(2_000, 3_000)}), "delete")
        before = await names(table)
        far = replace(job, made_us=job.made_us + 3_600_000_000, id=bytes(16))
        with pytest.raises(Rejected, match="the job was made at") as caught:
            await table.write_arrow(rows(0, 1), part=far.part(0))
        assert caught.value.code is Code.CLOCK_AHEAD
        for node in cluster.nodes:
            cluster.kill(node)
            cluster.restart(node)
            await cluster.wait_ready(node)
            written = await table.write_arrow(rows(0, 6_000), "insert", part=job.part(0), timeout_s=60)
            assert written.rows_written == 6_000
        assert await names(table) == before | dict.fromkeys(range(5_000, 6_000), "ours")
