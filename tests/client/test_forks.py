"""Clients and forks, and clients and event loops: what cannot work is refused at once, with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.small import small_cluster
from tests.client.test_ends import SCHEMA, run

FORK = """
from stele.client import Client
from stele.model.errors import Rejected
def tried(what):
    try:
        what()
    except Rejected as error:
        assert "was forked from one that used Stele" in str(error), error
        print("refused", flush=True)
    else:
        print("done", flush=True)
def writes():
    with Client(masters) as own:
        own.open_table("t").put({"id": 2})
before = Client(masters)
table = before.open_table("t")
table.put({"id": 1})
"""
CHILD = """
if os.fork() == 0:
    for call in calls:
        tried(call)
    os._exit(0)
print(os.wait()[1])
"""
USES = 'calls = [writes, lambda: table.put({"id": 3}), lambda: list(table.scan().batches()), before.close]'
CLOSED = "table.scan().count(); before.close(); calls = [writes]"


@pytest.mark.parametrize(
    ("program", "told"),
    [(USES, ["refused", "refused", "refused", "done"]), (CLOSED, ["refused"])],
    ids=["open", "closed"],
)
async def test_a_process_forked_from_one_that_used_stele_is_told_so(
    tmp_path: Path, program: str, told: list[str]
) -> None:
    """It waited for ever, for a thread that only its parent has, or was ended by gRPC."""
    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("t", SCHEMA)
        code, lines, err = await run(cluster, f"{FORK}{program}{CHILD}")
        assert (code, lines) == (0, [*told, "0"]), err


TWO_LOOPS = """
import asyncio
from stele.client import AsyncClient
from stele.model.errors import Rejected
async def first():
    client = AsyncClient(masters)
    table = await client.open_table("t")
    await table.put({"id": 1})
    return client, table
async def second(client, table):
    for call in (table.put({"id": 2}), table.get(1), client.list_tables()):
        try:
            await call
        except Rejected as error:
            print(error)
asyncio.run(second(*asyncio.run(first())))
"""


async def test_a_client_used_in_another_event_loop_is_told(tmp_path: Path) -> None:
    """It said, after half a minute, that no leader was found."""
    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("t", SCHEMA)
        code, lines, err = await run(cluster, TWO_LOOPS)
        assert code == 0 and len(lines) == 3, (lines, err)
        assert all("this client belongs to another event loop" in line for line in lines), lines
