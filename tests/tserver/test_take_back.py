"""A volume that masters refused as an older copy, used again by an administrator's order."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stele.tserver import startup
from stele.tserver.node import Node
from stele.tserver.options import EXIT_USAGE, EXIT_VOLUME_OLD
from stele.tserver.volume import Fate
from tests.consensus.cluster import wait_until
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, count, fill, master_of

FLAG = "--may-lose-acknowledged-writes"


async def take_back(directory: Path, *flags: str) -> tuple[int, str]:
    """Exit code and what it printed."""
    command = (sys.executable, "-m", "stele.cli", "local", "take-back", "--data-dir", str(directory), *flags)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    return process.returncode or 0, " ".join(out.decode().split())


async def test_a_refused_volume_is_taken_back_by_an_order_that_says_what_it_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await LocalCluster(tmp_path).start()
    directory, copy = tmp_path / "node-0", tmp_path / "copy"
    liveness = master_of(cluster.running["master"]).liveness

    def noted(node: Node) -> bool:
        told = liveness.nodes[node.node_id].last_start
        return told is not None and told[::2] == (node.incarnation, node.log.synced_place)

    try:
        async with cluster.client() as client:
            await client.create_table("t", SCHEMA, HASHED)
            await fill(client, 10)
            await cluster.stop("node-0")
            shutil.copytree(directory, copy)
            node = await cluster.launch("node-0")
            await wait_until(lambda: not node.health.ready())
            await fill(client, 20)
            await wait_until(lambda: noted(node))
            await cluster.stop("node-0")
            shutil.rmtree(directory)
            copy.rename(directory)

            node = await cluster.launch("node-0")
            await wait_until(node.failed.done)
            await cluster.stop("node-0")
            with pytest.raises(Fate, match="stele local take-back") as again:
                await cluster.launch("node-0")
            assert again.value.exit_code == EXIT_VOLUME_OLD

            code, out = await take_back(directory)
            assert code == EXIT_USAGE and "acknowledged rows" in out and FLAG in out
            why = json.loads((directory / "node.json").read_text())["refused"]
            assert why
            code, out = await take_back(directory, FLAG)
            assert code == 0 and "the next start of the node uses" in out
            record = json.loads((directory / "node.json").read_text())
            assert not record["refused"] and record["accepting"] and record["taken_back"][0].endswith(why)

            for accepted_s in (60.0, 0.0, 60.0):  # the last start has nothing to ask for
                monkeypatch.setattr(startup, "ACCEPTED_S", accepted_s)
                node = await cluster.launch("node-0")
                await wait_until(lambda n=node: not n.health.ready() or n.failed.done())
                assert not node.failed.done(), node.failed.result()
                await wait_until(lambda n=node: n.admission.admitted)
                await wait_until(lambda n=node: noted(n))
                await wait_until(lambda n=node, s=accepted_s: s > 0 or not n.volume.record.accepting)
                assert await count(client) == 20
                await cluster.stop("node-0")
            code, out = await take_back(directory, FLAG)
            assert code == EXIT_USAGE and "nothing to take back" in out
    finally:
        await cluster.close()


async def test_it_touches_nothing_that_is_in_use_or_no_volume(tmp_path: Path) -> None:
    assert "no Stele volume is there" in (await take_back(tmp_path, FLAG))[1]
    cluster = await LocalCluster(tmp_path, nodes=1).start()
    directory = tmp_path / "node-0"
    try:
        cluster.running["node-0"].volume.update(lambda record: replace(record, refused="for a test"))
        code, out = await take_back(directory, FLAG)
        assert code == EXIT_USAGE and "another process uses it" in out
        record = json.loads((directory / "node.json").read_text())
        assert record["refused"] and not record["taken_back"]
    finally:
        await cluster.close()
