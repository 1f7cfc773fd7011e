"""`stele node list`, `drain`, `park`, `retire` on real nodes: what an administrator sees, and what a driver makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stele.client.admin import list_nodes, what_drain_waits_for
from stele.driver.main import run as drive
from stele.driver.policy import Policy
from stele.driver.view import Wanted
from tests.client.commands import Run, runner
from tests.consensus.cluster import WAIT_S
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, count, fill

POLICY = Policy(dead_after_ms=2_000, lost_after_ms=2_000)


@contextlib.asynccontextmanager
async def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int = 4
) -> AsyncIterator[tuple[LocalCluster, Run]]:
    """Nodes with a table of four tablets, and no driver."""
    cluster = LocalCluster(tmp_path, nodes=nodes)
    try:
        await cluster.start()
        async with cluster.client() as client:
            await client.create_table("t", SCHEMA, HASHED)
            await fill(client, 50)
        yield cluster, runner(cluster, monkeypatch)
    finally:
        await cluster.close()


@contextlib.asynccontextmanager
async def driving(cluster: LocalCluster) -> AsyncIterator[None]:
    """A driver that works as `stele driver run` does."""
    task = asyncio.create_task(drive([cluster.master_address], POLICY))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def listed(run: Run) -> dict[str, dict[str, Any]]:
    """Nodes by id."""
    code, out, err = await run("node", "list", "--json")
    assert code == 0, err
    return {n["node_id"]: n for n in json.loads(out) if n["role"] == "node"}


async def test_a_node_is_drained_shown_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with made(tmp_path, monkeypatch) as (cluster, run):
        before = await listed(run)
        assert sum(n["replicas"] for n in before.values()) == 12
        assert sum(n["leaders"] for n in before.values()) == 4
        assert {n["wanted"] for n in before.values()} == {"IN_SERVICE"}
        node = max(before.values(), key=lambda n: n["replicas"])["node_id"]
        async with driving(cluster):
            code, out, err = await run("node", "drain", node, "--reason", "new disk", "--wait")
        assert code == 0, err
        assert out.splitlines()[-1].endswith("is drained: it has no replicas left")
        now = (await listed(run))[node]
        assert (now["replicas"], now["leaders"], now["copies"], now["wanted"]) == (0, 0, 0, "DRAINED")
        code, out, _ = await run("node", "list")
        row = next(line for line in out.splitlines() if node[:8] in line)
        assert "drained" in row and "administrator" in row and "new disk" in row
        code, out, _ = await run("node", "drain", node)
        assert code == 0 and "as it was before" in out
        assert (await run("node", "unpark", node))[0] == 2
        code, out, _ = await run("node", "undrain", node)
        assert code == 0 and "in service" in out
        async with cluster.client() as client:
            assert await count(client) == 50


async def test_a_drain_that_cannot_end_is_refused_with_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with made(tmp_path, monkeypatch, nodes=3) as (_, run):
        node = next(iter(await listed(run)))
        for verb in (["drain"], ["retire", "--yes"]):
            code, out, err = await run("node", *verb, node)
            assert (code, out) == (2, "")
            assert "3 replicas need a machine each" in err and "add a node on another machine" in err
        assert (await listed(run))[node]["wanted"] == "IN_SERVICE"
        code, _, err = await run("node", "park", node)
        assert code == 2 and "--for" in err
        for wrong in ("2 weeks", "0s", "-1h", "1.5h", "h"):
            code, _, err = await run("node", "park", node, "--for", wrong)
            assert code == 2 and "90s, 30m, 2h" in err, err


async def test_a_parked_node_is_away_and_back_and_nothing_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with made(tmp_path, monkeypatch) as (cluster, run):
        before = await listed(run)
        node = max(before.values(), key=lambda n: n["replicas"])["node_id"]
        name = next(n for n, node_id in cluster.ids.items() if node_id == node)
        code, out, _ = await run("node", "park", node, "--for", "2h", "--reason", "new memory")
        assert code == 0 and ("is parked for 1 h 59 min" in out or "is parked for 2 h" in out)
        other = next(n for n in before if n != node)
        code, _, err = await run("node", "park", other, "--for", "2h")
        assert code == 2 and "too few voters would be left" in err
        async with driving(cluster), cluster.client() as client:
            async with asyncio.timeout(WAIT_S):
                while (await listed(run))[node]["leaders"]:
                    await asyncio.sleep(0.1)
            await cluster.stop(name)
            await asyncio.sleep(2 * POLICY.dead_after_ms / 1_000)
            await fill(client, 60)
            now = (await listed(run))[node]
            assert now["replicas"] == before[node]["replicas"] and now["wanted"] == "PARKED"
            assert all(not n["copies"] for n in (await listed(run)).values())
            await cluster.launch(name)
            assert (await run("node", "unpark", node))[0] == 0
            async with asyncio.timeout(WAIT_S):
                while (await listed(run))[node]["seen"] != "live":
                    await asyncio.sleep(0.1)
            assert await count(client) == 60


async def test_a_drain_that_nobody_carries_out_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No driver runs; then the machines that it counted on are gone. Interrupted, the wish stays."""
    monkeypatch.setattr("stele.cli.wanted.STILL_S", 0.5)
    async with made(tmp_path, monkeypatch) as (cluster, run):
        before = await listed(run)
        node = max(before.values(), key=lambda n: n["replicas"])["node_id"]
        waiting = asyncio.create_task(run("node", "drain", node, "--wait"))
        await asyncio.sleep(3)
        assert (await run("node", "undrain", node))[0] == 0
        code, out, err = await waiting
        assert code == 2 and "somebody cancelled the drain" in err
        assert "is a driver at work?" in out
        async with cluster.client() as client:
            assert (await run("node", "drain", node))[0] == 0
            assert await what_drain_waits_for(client.masters, node) == ()
            reasons: list[str] = []
            for other in (n for n in before if n != node):  # one of them is the only place for some tablet
                await run("node", "park", other, "--for", "1h")
                reasons += await what_drain_waits_for(client.masters, node)
                await run("node", "unpark", other)
            assert any("waits for an ACTIVE node" in r for r in reasons), reasons


async def test_a_node_is_retired_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with made(tmp_path, monkeypatch) as (cluster, run):
        node = next(iter(await listed(run)))
        code, _, err = await run("node", "retire", node)
        assert code == 2 and "add --yes" in err
        async with driving(cluster):
            code, out, err = await run("node", "retire", node, "--yes", "--wait")
        assert code == 0, err
        assert out.splitlines()[-1].endswith("is retired: it has no replicas left")
        assert node not in await listed(run)
        code, _, err = await run("node", "undrain", node)
        assert code == 2 and "final" in err
        async with cluster.client() as client:
            assert {n.wanted for n in await list_nodes(client.masters)} == {Wanted.IN_SERVICE}
            assert await count(client) == 50
