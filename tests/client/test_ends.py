"""Programs that end while the client is at work, in processes of their own: they end, and lose nothing without a word."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.model.schema import Schema
from tests.client.small import SmallCluster, small_cluster

SCHEMA = Schema.make([("id", "int64"), ("text", "string", True)], ["id"])
FEW, MANY = 10, 400_000
"""Rows: of a scan that has been read when its reader takes the first batch, and of one that waits for its reader."""


async def run(cluster: SmallCluster, program: str) -> tuple[int, list[str], str]:
    """Exit code, lines and standard error of a program that has `masters`."""
    program = f"import os\nmasters = os.environ['STELE_MASTERS']\n{program}"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        env={
            **os.environ,
            "STELE_MASTERS": cluster.master_address,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(300):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return int(process.returncode or 0), out.decode().splitlines(), err.decode()


BLOCKING = """
from stele.client import Client
client = Client(masters)
batches = client.open_table("t").scan().batches()
next(batches)
print("end")
"""
ASYNCHRONOUS = """
import asyncio
from stele.client import AsyncClient
async def main():
    table = await AsyncClient(masters).open_table("t")
    batches = table.scan().batches()
    await anext(batches)
    return batches
loop = asyncio.new_event_loop()
batches = loop.run_until_complete(main())
print("end")
"""
FINALIZED = """
from stele.client import Client
from stele.model.errors import SteleError
class Holder:
    def __init__(self):
        self.client = Client(masters)
    def __del__(self, SteleError=SteleError):
        try:
            self.client.list_tables()
        except SteleError as error:
            print(error)
        self.client.close()
        print("end")
holder = Holder()
"""


@pytest.mark.parametrize("rows", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("program", [BLOCKING, ASYNCHRONOUS], ids=["blocking", "asynchronous"])
async def test_a_program_that_leaves_a_scan_half_read_ends(tmp_path: Path, program: str, rows: int) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA)
        await table.write_arrow(pa.table({"id": np.arange(rows), "text": ["x" * 50] * rows}))
        code, lines, err = await run(cluster, program)
        assert (code, lines) == (0, ["end"]), err


async def test_a_call_when_the_interpreter_is_gone_ends(tmp_path: Path) -> None:
    """As an object that is freed last makes it: the client's own thread has been stopped by then."""
    async with small_cluster(tmp_path) as (cluster, _):
        code, lines, err = await run(cluster, FINALIZED)
        assert (code, lines[-1]) == (0, "end"), err
        assert "the main thread of this program has ended" in lines[0]


async def test_a_thread_that_outlives_the_main_one_reads_its_scan_to_the_end(tmp_path: Path) -> None:
    program = """
import threading
from stele.client import Client
client = Client(masters)
batches = client.open_table("t").scan().batches()
first = next(batches).num_rows
def read():
    threading.main_thread().join()
    print(first + sum(batch.num_rows for batch in batches))
threading.Thread(target=read).start()
"""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA)
        await table.write_arrow(pa.table({"id": np.arange(MANY), "text": ["x" * 50] * MANY}))
        assert await run(cluster, program) == (0, [str(MANY)], "")


async def test_a_thread_that_outlives_the_main_one_is_told_why_it_cannot_go_on(tmp_path: Path) -> None:
    """Python has other words for it where the threads of an executor had been used."""
    program = """
import threading
import pyarrow as pa
from stele.client import Client
from stele.model.errors import SteleError
client = Client(masters)
table = client.open_table("t")
table.scan().count()
def use():
    threading.main_thread().join()
    for name, call in {
        "put": lambda: table.put({"id": 5}),
        "count": lambda: table.scan().count(),
        "write_arrow": lambda: table.write_arrow(pa.table({"id": [6]})),
        "close": client.close,
        "get": lambda: table.get(5),
    }.items():
        try:
            call()
            print(name, "is done")
        except SteleError as error:
            print(name, type(error).__name__, error)
threading.Thread(target=use).start()
"""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA)
        ended = (
            "INVALID_ARGUMENT: the main thread of this program has ended, so Python starts no more threads; "
            "join your threads before that"
        )
        assert await run(cluster, program) == (
            0,
            [
                "put is done",
                f"count Rejected {ended}",
                "write_arrow is done",
                "close is done",
                "get Closed CLOSED: this client was closed; create another one",
            ],
            "",
        )
        assert await table.scan().count() == 2


async def test_a_client_that_is_closed_as_the_program_exits_loses_no_row(tmp_path: Path) -> None:
    """Nor does its event loop stand still while pyarrow, which is given the first row, looks for pandas."""
    program = """
import atexit, sys, threading
from stele.client import Client
def audit(event, arguments):
    if event == "import" and arguments[0] == "pandas":
        print("pandas is looked for by", threading.current_thread().name)
sys.addaudithook(audit)
client = Client(masters)
table = client.open_table("t")
table.scan().count()
session = table.new_session(flush_interval_s=0)
for number in range(10):
    session.upsert({"id": number})
atexit.register(client.close)
"""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA)
        assert await run(cluster, program) == (0, [], "")
        assert await table.scan().count() == 10
