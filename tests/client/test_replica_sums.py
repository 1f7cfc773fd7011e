"""`stele table verify`: real nodes sum up their own replicas while rows are written; one that differs, and one that is silent."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pyarrow as pa
import pytest

from stele.backup.manifest import unseal
from stele.cli.errors import NO, OK, TRY_AGAIN
from stele.client.replica_sums import compare_replicas
from stele.tablet.store import TabletStore
from tests.client.commands import runner
from tests.tserver.local import HASHED, SCHEMA, LocalCluster

ROWS = 3_000


async def test_replicas_are_compared_at_one_moment_while_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalCluster(tmp_path)
    run = runner(cluster, monkeypatch)
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await client.create_table("t", SCHEMA, HASHED, replication_factor=3)
            await table.write_arrow(pa.table({"id": range(ROWS), "name": ["x"] * ROWS}))

            async def write() -> None:
                for number in range(1_000_000):
                    await table.put({"id": number % ROWS, "name": f"later {number}"})

            writing = asyncio.create_task(write())
            try:
                for _ in range(3):
                    found = await compare_replicas(client, table)
                    assert all(each.equal for each in found), found
                    assert sum(each.rows for each in found) == ROWS
                    assert {len(each.replicas) for each in found} == {3} and len(found) > 1
            finally:
                writing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await writing

            proofs = tmp_path / "proofs"
            words = ("table", "verify", "t", "--record", str(proofs))
            code, out, err = await run(*words)
            assert code == OK and f"{ROWS:,} rows in" in out and "equal in all" in out, err
            (file,) = proofs.iterdir()
            proof = unseal(file.read_bytes(), str(file))
            assert proof["equal"] is True and proof["rows"] == ROWS and proof["id"] == table.info.table_id
            assert len({r["checksum"] for r in proof["tablets"][0]["replicas"]}) == 1

            # A follower has the rows of another tablet.
            node = next(node for name, node in cluster.running.items() if name != "master")
            mine = [r for r in node.replicas if isinstance(r.machine, TabletStore)]
            follower = next(r for r in mine if not r.is_leader)
            other = next(r for r in mine if r is not follower)
            assert follower.started is not None and other.machine is not None
            storage, kept = follower.started.storage, follower.started.storage.machine
            storage.machine = other.machine
            code, out, err = await run(*words, "--json")
            storage.machine = kept
            assert code == NO and f"tablet {follower.tablet_id[:8]}, node {node.node_id[:8]}: " in err, err
            told = json.loads(out)
            assert told["equal"] is False
            assert [t["id"] for t in told["tablets"] if not t["equal"]] == [follower.tablet_id]

            name = next(name for name in cluster.running if name != "master")
            await cluster.stop(name)
            code, out, err = await run(*words)
            assert code == TRY_AGAIN and "so nobody knows whether they are equal" in err, err
    finally:
        await cluster.close()
