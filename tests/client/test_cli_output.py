"""What the command line writes: to pipes that end, to full disks, to files, and back from them. Processes of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from tests.client.small import SmallCluster, small_cluster

pytestmark = pytest.mark.timeout(120)
SPREAD = PartitionSchema((HashPartition((0,), 4),))
WIDE = Schema.make([("id", "int64"), ("text", "string")], ["id"])


@asynccontextmanager
async def wide_table(directory: Path) -> AsyncIterator[SmallCluster]:
    """A table `wide` of some megabytes in several batches of several tablets."""
    async with small_cluster(directory) as (cluster, client):
        table = await client.create_table("wide", WIDE, SPREAD)
        await table.write_arrow(pa.table({"id": np.arange(300_000), "text": ["x" * 20] * 300_000}))
        yield cluster


async def shell(cluster: SmallCluster, line: str) -> tuple[int, str, str]:
    """A line of bash in which `stele` is ours: exit code, standard output and standard error."""
    variables = {
        **os.environ,
        "STELE_MASTERS": cluster.master_address,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    script = f'set -o pipefail; stele() {{ "{sys.executable}" -m stele.cli "$@"; }}; {line}'
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        script,
        env=variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    return int(process.returncode or 0), out.decode(), err.decode()


async def test_a_reader_that_leaves_ends_the_command_without_a_word(tmp_path: Path) -> None:
    async with wide_table(tmp_path) as cluster:
        for form in ("csv", "json", "arrow"):
            line = f"stele table scan wide --format {form} | head -c 100 | wc -c"
            assert await shell(cluster, line) == (0, "100\n", ""), form
        for short in (
            "table list",
            "table scan wide --count",
            "table scan wide",
            "table scan wide --format csv",
        ):
            code, _, err = await shell(cluster, f"stele {short} | true")
            assert code == 0 and err.strip().count("\n") == 0 and "Error" not in err, (short, err)


async def test_a_scan_of_a_program_that_fails_within_ends_with_the_program(tmp_path: Path) -> None:
    """Its threads wait for room that nobody will make."""
    program = """
import asyncio, os
from stele.client import AsyncClient
async def main():
    async with AsyncClient(os.environ["STELE_MASTERS"]) as client:
        async for batch in (await client.open_table("wide")).scan().batches():
            raise RuntimeError("enough")
for _ in range(10):
    try:
        asyncio.run(main())
    except RuntimeError as error:
        told = error
raise told
"""
    (tmp_path / "program.py").write_text(program)
    async with wide_table(tmp_path / "data") as cluster:
        code, _, err = await shell(cluster, f'"{sys.executable}" {tmp_path / "program.py"}')
        assert (code, err.splitlines()[-1]) == (1, "RuntimeError: enough")
