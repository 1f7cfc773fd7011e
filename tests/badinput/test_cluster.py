"""Bad rows and a damaged replica on real processes: told, the rest goes on, healed from the peers."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pyarrow as pa

from stele.client import AsyncClient
from stele.model.schema import Schema
from tests.harness import Cluster

SCHEMA = Schema.make([("id", "int64"), ("n", "int32", True)], ["id"])


async def stele(cluster: Cluster, *arguments: str) -> tuple[int, str]:
    """Exit code and all that a command prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stele.cli", *arguments),
        env={**os.environ, "STELE_MASTERS": ",".join(cluster.master_addresses)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(40):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode()


async def test_bad_rows_bad_files_and_a_damaged_replica(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path / "c", masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        table = await client.create_table("t", SCHEMA)
        rows = tmp_path / "t.csv"
        rows.write_text("id,n\n1,1\n,2\n4,4\n9,many\n\n4,5\n6\n7,7\n")
        code, out = await stele(cluster, "table", "load", "t", str(rows), "--op", "insert")
        assert code == 2 and "3 rows written" in out, out
        assert "t.csv line 3: INVALID_ARGUMENT column id is null" in out, out
        assert "t.csv line 5: INVALID_ARGUMENT column n: 'many' is no int32" in out, out
        assert "t.csv line 7: ALREADY_PRESENT" in out, out
        assert "t.csv line 8: INVALID_ARGUMENT 1 values; expected 2" in out, out
        assert out.endswith("4 of 7 rows were refused, the others are written\n"), out
        garbage = tmp_path / "t.parquet"
        garbage.write_bytes(b"garbage" * 100)
        code, out = await stele(cluster, "table", "load", "t", str(garbage))
        assert code == 2 and str(garbage) in out.replace("\n", "") and "Traceback" not in out, out

        await table.write_arrow(pa.table({"id": pa.array(range(10, 1_010), pa.int64())}))
        node = cluster.nodes[1]
        await cluster.stop(node)
        (manifest,) = node.directory.glob("tablets/*/*/store/MANIFEST")
        data = bytearray(manifest.read_bytes())
        data[len(data) // 2] ^= 0xFF
        manifest.write_bytes(bytes(data))
        cluster.restart(node)
        await cluster.wait_ready(node)
        async with asyncio.timeout(20):
            while "FAILED: CORRUPT: MANIFEST" not in (await stele(cluster, "ksck"))[1]:
                await asyncio.sleep(0.2)
        assert await table.scan().count() == 1_003
        code, out = await stele(cluster, "driver", "run", "--until-healthy", "--dead-after", "5")
        assert code == 0, out
        async with asyncio.timeout(20):
            while (await stele(cluster, "ksck"))[0] != 0:
                await asyncio.sleep(0.2)
        assert node.running and await table.scan().count() == 1_003
