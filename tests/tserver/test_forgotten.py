"""`stele node forget`: what an administrator calls a node by, and what becomes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stele.client.admin import cluster_view, forget_node
from stele.client.health import examine
from stele.master.leadership import MasterOptions
from stele.model.errors import Code, Rejected, SteleError
from tests.client.commands import runner
from tests.tserver.local import LocalCluster


async def test_a_node_that_is_gone_is_forgotten_by_its_first_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalCluster(tmp_path, nodes=2, master_options=MasterOptions(alive_ms=1_000))
    try:
        await cluster.start()
        run = runner(cluster, monkeypatch)
        gone, there = cluster.ids["node-1"], cluster.ids["node-0"]
        await cluster.stop("node-1")
        async with cluster.client() as client:
            async with asyncio.timeout(60):
                while True:
                    try:
                        assert await forget_node(client.masters, gone[:8].upper()) == gone
                        break
                    except SteleError as exc:  # for a second it counts as heard
                        assert exc.code in (Code.UNSAFE_CHANGE, Code.NOT_READY), exc
                        await asyncio.sleep(0.1)
            nodes = {n.node_id: n.state for n in examine(await cluster_view(client.masters)).nodes}
            assert (nodes[gone], nodes[there]) == ("retired", "alive")
            with pytest.raises(Rejected, match="no node is called 'node-7'"):
                await forget_node(client.masters, "node-7")
        code, out, err = await run("node", "forget", there, "--yes")
        assert (code, out) == (2, "") and f"node {there[:8]} sends heartbeats" in err
        assert gone[:8] not in (await run("ksck"))[1]
        code, _, err = await run("node", "forget", gone)
        assert code == 2 and "add --yes" in err
    finally:
        await cluster.close()
