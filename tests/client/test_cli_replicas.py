"""Replication factor, moves by hand and balance from the command line: what is printed, refused and done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stele.client.admin import cluster_view
from stele.driver.main import run as drive
from stele.driver.policy import Policy
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from tests.client.commands import runner
from tests.tserver.local import LocalCluster

NODES = 4
SCHEMA = Schema.make([("id", "int64")], ["id"])
TWO = PartitionSchema((HashPartition((0,), 2),))


@asynccontextmanager
async def driving(cluster: LocalCluster) -> AsyncIterator[None]:
    """A driver at work; it moves nothing for balance."""
    task = asyncio.create_task(drive([cluster.master_address], Policy(dead_after_ms=600_000), holder="d1"))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_factor_moves_and_balance(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cluster for all: starting it takes longer than any part."""
    run = runner(cluster, monkeypatch)
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, TWO, replication_factor=1)
        code, out, err = await run("table", "set-rf", "t", "3")
        assert code == 0 and out.splitlines() == [
            "t: replication factor 1 becomes 3",
            "0 of 2 tablets have the wanted replicas; 2 wait for more",
        ]
        assert err.startswith("no driver is at work now")
        _, out, _ = await run("table", "describe", "t")
        assert "replication factor 3: 0 of 2 tablets have the wanted replicas" in out
        code, _, err = await run("table", "set-rf", "t", "5")
        assert code == 2 and "only 4 machines have ACTIVE nodes" in err
        code, _, err = await run("table", "set-rf", "t", "2")
        assert code == 2 and "'2' is not one of '1', '3', '5', '7'" in err
        code, out, err = await run("table", "set-rf", "t", "1")
        assert code == 0 and err.splitlines()[0] == (
            "warning: once t has one replica, a lost node or disk loses its rows for good"
        )
        code, out, err = await run("table", "set-rf", "t", "1")
        assert out.startswith("t has replication factor 1 already") and "warning" not in err
        code, _, err = await run("table", "set-rf", "t", "3")
        assert code == 0 and "warning" not in err
        code, _, err = await run("table", "set-rf", "u", "3")
        assert code == 2 and "no table u" in err
        _, out, _ = await run("master", "list")
        header, master = (line.split() for line in out.splitlines())
        assert header == ["name", "id", "machine", "zone", "address", "seen"]
        assert cluster.master_address in master and master[-2:] == ["live", "leader"]
        async with driving(cluster):
            code, out, _ = await run("table", "set-rf", "t", "3", "--wait", "--wait-for", "120")
            assert code == 0 and out.splitlines()[0] == "t has replication factor 3 already"
            assert out.splitlines()[-1] == "2 of 2 tablets have the wanted replicas"
            view = await cluster_view(client.masters)
            tablet = next(t for t in view.tablets if t.table_name == "t")
            named = tablet.tablet_id.hex()
            members = [p.node_id.hex() for p in tablet.committed_config.peers]
            free = next(
                n.node_id.hex()
                for n in view.nodes
                if n.registration.role == "node" and n.node_id.hex() not in members
            )
            code, _, err = await run("tablet", "move", named, "--from", members[0], "--to", members[1])
            assert code == 2 and "already" in err
            code, _, err = await run("tablet", "move", named, "--from", free, "--to", members[1])
            assert code == 2 and "has no replica on node" in err
            code, out, err = await run(
                "tablet",
                "move",
                named[:8],
                "--from",
                members[0],
                "--to",
                free[:8],
                "--wait",
                "--reason",
                "why",
            )
            assert code == 0, err
            assert out.splitlines()[0].endswith(f"moves from {members[0]} to {free[:8]}")
            assert "done: " in out.splitlines()[-1]
            _, out, _ = await run("tablet", "describe", named)
            assert f"placed by hand: on {free[:8]}, not on {members[0][:8]}" in out and "(why)" in out
            code, out, _ = await run("tablet", "add-replica", named, "--wait", "--wait-for", "120")
            assert code == 0 and members[0][:8] in out.splitlines()[-1]  # no other node is left
            code, _, err = await run("tablet", "add-replica", named)
            assert code == 2 and "only 4 machines" in err
            code, out, _ = await run(
                "tablet", "remove-replica", named, "--from", members[1], "--wait", "--wait-for", "120"
            )
            assert code == 0 and members[1][:8] not in out.splitlines()[-1]
            code, _, err = await run("tablet", "remove-replica", named, "--from", members[2])
            assert code == 2 and "lower the factor" in err
            code, out, _ = await run("tablet", "release", named, "--wait", "--wait-for", "120")
            assert code == 0 and "is no longer placed by hand" in out
            _, out, _ = await run("tablet", "describe", named)
            assert "placed by hand" not in out
        code, out, _ = await run("rebalance", "--dry-run", "--json")
        told = json.loads(out)
        assert code == 0 and not told["waits"], told
        code, out, _ = await run("rebalance", "--dry-run")
        assert code == 0 and out.splitlines()[-1].startswith(
            f"{len(told['moves'])} replicas" if told["moves"] else ("nothing", "no replica")
        )


async def test_rebalance_drives_where_nobody_does(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = runner(cluster, monkeypatch)
    async with cluster.client() as client:
        eight = PartitionSchema((HashPartition((0,), 8),))
        await client.create_table("t", SCHEMA, eight, replication_factor=1)
        view = await cluster_view(client.masters)
        nodes = sorted(n.node_id.hex() for n in view.nodes if n.registration.role == "node")
        async with driving(cluster):
            for tablet in view.tablets:
                if tablet.table_name != "t":
                    continue
                held, named = tablet.committed_config.peers[0].node_id.hex(), tablet.tablet_id.hex()
                if held != nodes[0]:
                    code, _, err = await run("tablet", "move", named, "--from", held, "--to", nodes[0])
                    assert code == 0, err
                    await run(
                        "tablet",
                        "move",
                        named,
                        "--from",
                        held,
                        "--to",
                        nodes[0],
                        "--wait",
                        "--wait-for",
                        "120",
                    )
                code, _, err = await run("tablet", "release", named)
                assert code == 0, err
        _, out, _ = await run("rebalance", "--dry-run", "--json")
        assert len(json.loads(out)["moves"]) == 6
        _, out, _ = await run("rebalance", "--dry-run")
        assert out.splitlines()[-1].startswith("6 replicas would be moved")
        code, out, err = await run("rebalance")
        assert code == 0, err
        assert out.splitlines()[0].startswith("no driver is at work, so this command drives")
        assert out.splitlines()[-1].startswith("balanced after")
        view = await cluster_view(client.masters)
        counts = {n.node_id.hex(): n.replicas for n in view.nodes if n.registration.role == "node"}
        assert set(counts.values()) == {2}
        code, out, _ = await run("rebalance")
        assert (code, out) == (0, "nothing needs to move\n")
