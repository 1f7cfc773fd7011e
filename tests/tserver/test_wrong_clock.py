"""Processes whose wall clocks are set: tables go on being written and scanned, and it is told whose clock is wrong."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stele.cli import ksck
from stele.cli.health import cluster_health
from stele.client import AsyncClient, AsyncTable
from stele.client.health import ClusterHealth
from stele.model.clock import physical_us
from stele.model.errors import SteleError
from stele.model.schema import Schema
from tests.harness.processes import Cluster, Member

HOUR_S = 3_600.0
SCHEMA = Schema.make([("id", "int64"), ("name", "string")], ["id"])


async def until(look: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> None:
    """Until it is so."""
    give_up = time.monotonic() + seconds
    while not await look():
        assert time.monotonic() < give_up, "it never came"
        await asyncio.sleep(0.2)


async def health_of(client: AsyncClient) -> ClusterHealth:
    return await cluster_health(client, timeout_s=60)


async def compared(client: AsyncClient) -> None:
    """Until each node and master knows what the clocks say."""

    async def known() -> bool:
        health = await health_of(client)
        return all(node.clock_ahead_ms is not None for node in health.nodes)

    await until(known)


async def leader_of(client: AsyncClient, cluster: Cluster, name: str) -> Member:
    """Of the one tablet of a table."""

    async def led() -> bool:
        return all(t.led for t in (await health_of(client)).tablets)

    await until(led)
    health = await health_of(client)
    return cluster.member(next(t.leader for t in health.tablets if t.table_name == name))


async def write_and_scan(client: AsyncClient, table: AsyncTable, ids: range) -> None:
    """What was written is there at the present, and not in the future."""
    for i in ids:
        await table.put({"id": i, "name": "x"})
    assert abs(physical_us(client.now()) - time.time_ns() // 1_000) < 30_000_000
    found = (await table.scan().to_table()).column("id").to_pylist()
    assert sorted(found) == list(range(ids.stop))


async def test_a_clock_is_set_wrong_and_right_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One cluster for all stories: none leaves anything in the future or the past."""
    async with (
        Cluster(tmp_path / "c", masters=1, nodes=3, clocks=True) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        await a_leaders_clock(cluster, client, "ahead", HOUR_S, capsys)
        await a_leaders_clock(cluster, client, "behind", -HOUR_S, capsys)
        await the_only_masters_clock(cluster, client)


async def a_leaders_clock(
    cluster: Cluster, client: AsyncClient, name: str, ahead_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour ahead: no client that had touched the tablet could scan anything. An hour behind: no new program could
    write, and no scan was served, for as long as it lasted."""
    table = await client.create_table(name, SCHEMA)
    await compared(client)
    await write_and_scan(client, table, range(3))
    wrong = await leader_of(client, cluster, name)
    cluster.set_clock(wrong, ahead_s)
    await write_and_scan(client, table, range(6))
    async with AsyncClient(cluster.master_addresses) as other:
        await write_and_scan(other, await other.open_table(name), range(9))

    async def told() -> bool:
        return [n.node_id for n in (await health_of(client)).wrong_clocks] == [wrong.node_id]

    await until(told)

    async def leads_no_more() -> bool:
        return await leader_of(client, cluster, name) is not wrong

    await until(leads_no_more)
    capsys.readouterr()
    assert ksck.show(await health_of(client)) == 1
    out = capsys.readouterr().out
    told_s = re.search(
        rf"node {wrong.node_id[:8]} \(.*\): its clock is ([0-9.]+) s (ahead of|behind) what most", out
    )
    assert told_s is not None and told_s[2] == ("ahead of" if ahead_s > 0 else "behind")
    assert 3_590 < float(told_s[1]) < 3_610
    assert "WARNING: 1 of 4 nodes and masters with a wrong clock, all tablets healthy\n" in out

    async def measured() -> bool:
        _, metrics = await cluster.http(wrong, "/metrics")
        (gauge,) = [m for m in metrics.splitlines() if m.startswith("stele_clock_ahead_seconds ")]
        return abs(float(gauge.split()[1]) - ahead_s) < 10

    await until(measured)
    cluster.kill(wrong)
    cluster.restart(wrong)  # the clock is as wrong as before
    await cluster.wait_ready(wrong)
    await write_and_scan(client, table, range(12))
    await until(told)
    cluster.set_clock(wrong, 0)

    async def well() -> bool:
        return not (await health_of(client)).wrong_clocks

    await until(well)
    await write_and_scan(client, table, range(15))


async def the_only_masters_clock(cluster: Cluster, client: AsyncClient) -> None:
    """Nodes compare theirs with those of each other, through it; only the catalog waits."""
    table = await client.create_table("t", SCHEMA)
    master = cluster.masters[0]
    cluster.set_clock(master, HOUR_S)

    async def told() -> bool:
        return [n.node_id for n in (await health_of(client)).wrong_clocks] == [master.node_id]

    await until(told)
    await write_and_scan(client, table, range(5))
    with pytest.raises(SteleError, match=f"the clock of node {master.node_id[:8]} says"):
        await client.create_table("u", SCHEMA, timeout_s=8)
    cluster.set_clock(master, 0)
    await client.create_table("u", SCHEMA)


async def test_what_was_stamped_in_the_future_ends_no_scan_of_the_present(tmp_path: Path) -> None:
    """All clocks were wrong, so nobody could know. The present was history for that tablet, and CLOCK_AHEAD for all others
    to each client that had touched it."""
    async with (
        Cluster(tmp_path / "c", masters=1, nodes=3, clocks=True) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        table = await client.create_table("t", SCHEMA)
        await compared(client)
        await write_and_scan(client, table, range(3))
        for ahead_s in (HOUR_S, 0.0):
            for member in cluster.members:
                cluster.set_clock(member, ahead_s)

            async def agreed() -> bool:
                health = await health_of(client)
                return not health.wrong_clocks and all(t.led for t in health.tablets)

            await until(agreed)
            if ahead_s:
                async with AsyncClient(cluster.master_addresses) as writer:
                    await (await writer.open_table("t")).put({"id": 3, "name": "future"})
        assert (await table.get({"id": 3})) is not None
        assert (await table.scan().to_table()).num_rows == 4  # what the client itself has written is there
        other = await client.create_table("u", SCHEMA)
        await write_and_scan(client, other, range(3))
        async with AsyncClient(cluster.master_addresses) as fresh:
            rows = await (await fresh.open_table("t")).scan().to_table()
        assert sorted(rows.column("id").to_pylist()) == [0, 1, 2]
