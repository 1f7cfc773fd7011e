"""Real processes: two of three volumes of a table are wiped under writes. `stele tablet recover` brings it
back, with every row that it promised. Then one of the volumes is found again: its replica is refused, and
copied anew."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

from stele.client import AsyncClient
from stele.client.admin import list_replicas
from stele.driver.progress import Progress
from stele.model.clock import physical_us
from stele.model.errors import SteleError
from stele.model.ids import CATALOG_TABLET_ID
from stele.model.incarnation import recoveries
from stele.rpc.proto import common_pb2
from tests.driver.test_moves_on_processes import POLICY, SCHEMA, at_rest, driving, until
from tests.harness import Cluster
from tests.harness.commands import stele

DEAD_SOON = replace(POLICY, dead_after_ms=5_000)
"""The leader's node never returns, and the driver replaces it only once it is dead."""


class Writer:
    """Puts rows one at a time; records when each was acknowledged, in µs."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.acknowledged_us: dict[int, int] = {}
        self.task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        table = await self._client.open_table("t")
        number = 0
        while True:
            try:
                await table.put({"id": number, "n": number * 7})
                self.acknowledged_us[number] = time.time_ns() // 1_000
            except SteleError:
                pass  # without a majority: unknown, or refused
            number += 1
            await asyncio.sleep(0.02)


async def test_a_lost_majority_is_recovered_and_an_old_member_that_returns_is_copied_anew(
    tmp_path: Path,
) -> None:
    told: list[Progress] = []
    async with (
        Cluster(tmp_path, masters=1, nodes=4) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=20) as client,
    ):
        await client.create_table("t", SCHEMA, replication_factor=3)
        view = await until(client, lambda view: at_rest(view, 3))
        tablet = next(t for t in view.tablets if t.tablet_id != CATALOG_TABLET_ID)
        code, said = await stele(cluster, "tablet", "recover", tablet.tablet_id[:8], "--accept-data-loss")
        assert code == 2 and "3 of 3 voters answer, which is a majority: nothing is lost" in said, said
        for more in ((), ("--accept-data-loss", "--reason", "none")):
            deadline = time.monotonic() + 60
            while (
                "the leading master is new"
                in (answer := await stele(cluster, "tablet", "recover", "--all-lost", *more))[1]
            ):
                assert time.monotonic() < deadline, answer
                await asyncio.sleep(1)
            assert answer == (0, "no tablet has lost its majority\n")

        writer = Writer(client)
        deadline = time.monotonic() + 60
        while len(writer.acknowledged_us) < 100:
            assert time.monotonic() < deadline, "too few rows are acknowledged"
            await asyncio.sleep(0.1)
        members = [cluster.member(p.node_id) for p in tablet.config.peers]
        leader = cluster.member(tablet.leader_node)
        lost = [leader, *(m for m in members if m is not leader)][:2]
        returns = lost[1]
        for member in lost:
            cluster.kill(member)
        aside = shutil.copytree(returns.directory, tmp_path / "aside")
        for member in lost:
            cluster.lose(member)
        await asyncio.sleep(7)  # until the masters consider them silent

        code, said = await stele(cluster, "tablet", "recover", "--table", "t", "--json")
        assert code == 0, said
        (found,) = json.loads(said[said.index("[") : said.rindex("]") + 1])
        assert [v["lost"] for v in found["voters"]].count(True) == 2 and len(found["survivors"]) == 1
        newest_us = physical_us(found["survivors"][0]["newest"])
        code, said = await stele(cluster, "tablet", "recover", tablet.tablet_id[:8])
        print(said)
        assert code == 0 and "2 of 3 voters are lost, incarnation 0" in said and "nothing was changed" in said
        assert (
            "may be lost: writes that only the lost voters had acknowledged, after" in said
            and "last heard: " in said
        )

        began = time.monotonic()
        code, said = await stele(
            cluster, "tablet", "recover", "--all-lost", "--accept-data-loss", "--reason", "two volumes gone"
        )
        print(said)
        assert code == 0 and "is made its only voter, incarnation 1-" in said, said
        assert "1 tablets serve again" in said, said
        print(f"serves again after {time.monotonic() - began:.1f} s")
        table = await client.open_table("t")
        await table.put({"id": 1 << 40, "n": 1})
        there = {row["id"] async for row in table.scan()}
        assured = {i for i, at_us in writer.acknowledged_us.items() if at_us <= newest_us}
        assert assured and assured <= there
        code, said = await stele(cluster, "tablet", "describe", tablet.tablet_id[:8])
        assert "recovered at " in said and "(two volumes gone): incarnation 1-" in said, said

        aside.rename(returns.directory)
        cluster.launch(returns)
        await cluster.wait_ready(returns)

        async def gone() -> bool:
            mine = [
                r
                for r in await list_replicas(client.pool, returns.address)
                if r.tablet_id.hex() == tablet.tablet_id
            ]
            return all(r.data_state == common_pb2.TOMBSTONED for r in mine)

        deadline = time.monotonic() + 60
        while not await gone():
            assert time.monotonic() < deadline, "the old member is not removed"
            await asyncio.sleep(0.2)
        async with driving(cluster.master_addresses, told, DEAD_SOON):
            view = await until(client, lambda view: at_rest(view, 3))
        now = next(t for t in view.tablets if t.tablet_id == tablet.tablet_id)
        again = now.config.peer_on(returns.node_id)
        assert recoveries(now.config.incarnation) == 1 and again is not None
        assert again.replica_id >= 4, "as a new replica"
        writer.task.cancel()
        await asyncio.gather(writer.task, return_exceptions=True)
        rows = {row["id"] async for row in table.scan()}
        assert there <= rows and 1 << 40 in rows
        since = {i for i, at_us in writer.acknowledged_us.items() if at_us > newest_us + 30_000_000}
        assert since <= rows
        print(f"{len(assured)} rows assured, {len(writer.acknowledged_us)} acknowledged, {len(rows)} there")
