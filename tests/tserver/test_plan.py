"""`stele plan --lose` against real nodes in this process: one of them, two, and names that nothing has."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from stele.cli.plan import lost_nodes
from stele.model.errors import Rejected
from tests.client.commands import runner
from tests.driver.test_known import cluster_of
from tests.tserver.local import LocalCluster


def test_that_no_node_has_a_zone_is_said() -> None:
    view = cluster_of(1)
    without = replace(view, nodes=tuple(replace(n, zone="") for n in view.nodes))
    with pytest.raises(Rejected, match="there is no zone z1; no node has a zone"):
        lost_nodes(["zone/z1"], without, {})


async def test_what_a_loss_would_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster(tmp_path, nodes=3)
    try:
        await cluster.start()
        run = runner(cluster, monkeypatch)
        made = await run("table", "create", "t", "--column", "id:int64", "--key", "id", "--hash", "id:4")
        assert made[0] == 0, made
        async with asyncio.timeout(60):
            while (await run("ksck"))[0]:
                await asyncio.sleep(0.1)
        first, *rest = (cluster.ids[f"node-{number}"] for number in range(3))

        code, out, err = await run("plan", "--lose", f"node/{first[:8]}")
        assert (code, err) == (1, ""), "three nodes and three replicas: there is nowhere to copy to"
        assert "4 replicas are on them" in out
        assert "4 tablets would serve, but could not lose another voter until a new one votes:" in out
        assert "2 of 3 voters would be left" in out
        assert "4 tablets would stay short of a replica:" in out and "waits for an ACTIVE node" in out
        assert "would stop" not in out and "OK" not in out

        both = [word for node in rest for word in ("--lose", f"node/{node}")]
        code, out, _ = await run("plan", *both, "--json")
        told = json.loads(out)
        assert code == 1 and len(told["stopped"]) == 4 and not told["copies"]
        assert told["stopped"][0]["reason"] == "1 of 3 voters would be left"
        assert "2 nodes would be silent at once, more than maxLostNodes (1)" in told["healing_stops"]

        code, out, err = await run("plan", "--lose", "machine/nowhere")
        assert code == 2 and "there is no machine nowhere" in err and not out
        code, _, err = await run("plan", "--lose", first)
        assert code == 2 and "expected node/NAME, machine/NAME or zone/NAME" in err
        code, _, err = await run("plan")
        assert code == 2 and "--lose" in err
    finally:
        await cluster.close()
