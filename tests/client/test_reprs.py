"""`repr` of what a client gives: what it is, its name, its cluster. No row, key or condition, and nobody is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import stele
from stele.client import Client
from stele.client.reprs import named
from stele.model.errors import Closed
from tests.client.small import EIGHT, SCHEMA, SmallCluster, small_cluster


async def test_each_says_what_it_is_and_asks_nobody(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        where, of = cluster.master_address, f"; cluster {cluster.cluster_id[:8]}>"
        assert repr(client) == f"<stele.AsyncClient of masters {where}; no cluster has answered yet>"
        table = await client.create_table("t", SCHEMA, EIGHT)
        space = await client.create_keyspace("s")
        await cluster.stop()
        assert repr(client) == f"<stele.AsyncClient of masters {where}{of}"
        assert repr(table) == f"<stele.AsyncTable t: 3 columns, 8 tablets{of}"
        assert repr(space) == f"<stele.AsyncKeySpace s{of}"
        scan = repr(table.scan(["id", "n"], ("name", "=", "secret"), lower=[987_654]))
        assert scan.startswith(
            "<stele.AsyncScanner of table t: columns id, n; 8 tablets, 1 range of keys at 20"
        )
        assert scan.endswith(f" UTC{of}") and "secret" not in scan and "987" not in scan
        session = table.new_session(flush_interval_s=0)
        await session.upsert({"id": 987_654, "name": "secret"})
        assert repr(session) == f"<stele.AsyncSession of table t: 1 row not acknowledged yet{of}"
        session._unsettled.discard(session)


async def test_the_blocking_ones_say_the_same(tmp_path: Path) -> None:
    def use(cluster: SmallCluster) -> None:
        with Client(cluster.master_address) as client:
            of = f"; cluster {cluster.cluster_id[:8]}>"
            table = client.open_table("Async\x1b[2J")
            assert repr(table) == f"<stele.Table Async\\x1b[2J: 3 columns, 8 tablets{of}"
            assert repr(table.scan()).startswith("<stele.Scanner of table Async")
            assert "; 8 tablets at" in repr(table.scan(predicates=("n", ">", 5)))
            few = table.scan(predicates=[("id", "in", [4, 5, 9])])
            assert ", 2 ranges of keys at" in repr(few) and ", 2 ranges of keys at" in few._repr_html_()
            assert repr(client.create_keyspace("s")) == f"<stele.KeySpace s{of}"
            with table.new_session() as session:
                assert repr(session).startswith("<stele.Session of table Async")
        assert repr(client) == f"<stele.Client of masters {cluster.master_address} (closed){of}"
        try:
            table.get(1)
        except Closed:
            assert repr(table).startswith("<stele.Table Async")

    async with small_cluster(tmp_path) as (cluster, client):
        await client.create_table("Async\x1b[2J", SCHEMA, EIGHT)
        await asyncio.to_thread(use, cluster)


def test_a_schema_is_shown_as_its_columns() -> None:
    columns = [
        stele.column("day", "date"),
        stele.column("name", "string", nullable=True),
        stele.column("stars", "int8", default=3),
    ]
    assert repr(stele.Schema.make(columns, key=["day"])) == (
        "<stele.Schema day:date, name:string?, stars:int8 = 3; key day; version 1>"
    )
    wide = stele.Schema.make([(f"c{n}", "int64") for n in range(25)], key=["c0"])
    assert ", c19:int64, and 5 more; key c0;" in repr(wide)


def test_of_many_names_the_first_are_shown() -> None:
    assert named(["a", "b"]) == "a, b"
    assert named([str(i) for i in range(7)]) == "0, 1, 2, 3, 4 and 2 more"
