"""The catalog in memory: read a slice at a time while it changes, and followed from then on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from stele.master.catalog import Catalog
from stele.master.following import ROWS_AT_ONCE
from stele.master.master import Master
from stele.master.port import drop, insert, swap
from stele.master.records import TableRecord, TabletRecord
from stele.model import writeop
from stele.model.errors import SteleError
from stele.model.ids import TableId, TabletId
from stele.model.kvop import KeyOperation, encode_operations
from stele.model.partition import Partition, PartitionSchema
from stele.model.writeop import BodyKind, WriteHeader
from stele.rpc.proto import master_pb2 as pb
from tests.master.harness import MASTERS, OPTIONS, World

TABLES, TABLETS_EACH = 300, 10
PARTITIONING = PartitionSchema().to_json()


def gone_table(number: int) -> tuple[TableRecord, list[TabletRecord]]:
    """A table that was removed, and its tablets."""
    table = TableRecord(TableId(f"{number:032x}"), "t", "REMOVED", "", PARTITIONING, 3, "keyspace", 1)
    ids = (TabletId(f"{(number << 16) + n:032x}") for n in range(TABLETS_EACH))
    return table, [TabletRecord(t, table.table_id, n, "DELETED", Partition(), 1) for n, t in enumerate(ids)]


def commit(w: World, batch: list[KeyOperation]) -> None:
    """A batch that every master applies."""
    body = encode_operations(batch)
    header = WriteHeader(writeop.NO_CLIENT, 0, 0, 0, writeop.digest(body), kind=BodyKind.KEYSPACE)
    entry = w.group.append(writeop.encode(header, body))
    for member in w.group.members.values():
        assert not member.apply(entry)[1]


def same(left: Catalog, right: Catalog) -> bool:
    """Whether two catalogs say the same, in whatever order they learned it."""
    fields = [name for name in vars(left) if name != "_listeners"]
    return all(_content(getattr(left, f)) == _content(getattr(right, f)) for f in fields)


def _content(value: Any) -> Any:
    return {k: v for k, v in value.items() if v != 0} if isinstance(value, dict) else value


async def turns_until(done: Any) -> int:
    """How often the event loop turned until `done()`."""
    turns = 0
    while not done():
        turns += 1
        assert turns < 1_000_000
        await asyncio.sleep(0)
    return turns


async def test_the_loop_turns_while_a_large_catalog_is_read_and_changes_meanwhile_are_in_it(
    tmp_path: Path,
) -> None:
    w = World(tmp_path, OPTIONS)
    tables = [gone_table(number) for number in range(1, TABLES + 1)]
    for table, tablets in tables:
        commit(w, [*(insert(t) for t in tablets), insert(table)])
    for master in w.masters.values():
        master.start()
    first = w.masters[MASTERS[0]]
    w.group.elect(MASTERS[0])
    try:
        for _ in range(TABLES * (TABLETS_EACH + 1) // ROWS_AT_ONCE // 2):
            await asyncio.sleep(0)
        # One that was read, one that was not yet, a new table of the name that all had.
        (early, _), (late, late_tablets) = tables[0], tables[-1]
        commit(w, [*(drop(t) for t in late_tablets), drop(late)])
        commit(w, [swap(early, replace(early, replication_factor=5))])
        commit(w, [insert(replace(early, table_id=TableId("f" * 32), state="RUNNING"))])
        rest = await turns_until(lambda: first.lead is not None)
        assert rest >= TABLES * TABLETS_EACH // ROWS_AT_ONCE // 4
        key_space = w.group.members[MASTERS[0]].key_space
        assert key_space is not None
        assert same(first.catalog, Catalog(key_space.list(), key_space.applied))
        listed = await w.leader.ListTables(pb.ListTablesRequest(), None)
        assert [t.name for t in listed.tables] == ["t"]

        # The next leader has followed all the while: nothing is read again, whatever there is.
        next_one = w.masters[MASTERS[1]]
        await turns_until(lambda: _is_read(next_one))
        followed = next_one.catalog
        await w.elect(MASTERS[1])
        assert next_one.lead is not None and next_one.lead.catalog is followed
        listed = await w.leader.ListTables(pb.ListTablesRequest(), None)
        assert [t.name for t in listed.tables] == ["t"]
        key_space = w.group.members[MASTERS[1]].key_space
        assert key_space is not None and same(followed, Catalog(key_space.list(), key_space.applied))
    finally:
        for master in w.masters.values():
            await master.stop()
        await w.pool.close()


def _is_read(master: Master) -> bool:
    try:
        return bool(master.catalog)
    except SteleError:
        return False
