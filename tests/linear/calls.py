"""The calls of the public client that a user can make for one row or a few, by kind. Called by workload.py; keeps nothing.

A row of the table has two values; a key of the key space has one, which stands for both. A name in the catalog is taken
or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from stele.client import AsyncClient, AsyncKeySpace, AsyncTable, WriteResult
from stele.client.jobs import JobPart
from stele.model.block import RowOp
from stele.model.errors import Code, Rejected
from stele.model.schema import Schema
from tests.linear.history import Kind, State

SCHEMA = Schema.make(
    [("key", "string"), ("a", "int64"), ("b", "int64"), ("filling", "binary", True)], key=["key"]
)
THERE = (1, 1)
"""The state of a name in the catalog that is taken."""
COLUMNS = ["key", "a", "b"]
WRITES: tuple[Kind, ...] = tuple(kind for kind in Kind if kind not in (Kind.READ, Kind.SWAP))
"""What a table's rows can be written by."""

_ROW_OPS = {kind: RowOp.UPSERT if kind is Kind.PUT else RowOp[kind.name] for kind in WRITES}


async def of_table(table: AsyncTable, key: str, kind: Kind, value: tuple[int, int]) -> tuple[int, State]:
    """(hybrid time of a write, what a read found)."""
    row = _row(key, kind, value)
    match kind:
        case Kind.READ:
            found = await table.get(key, COLUMNS)
            return 0, None if found is None else (found["a"], found["b"])
        case Kind.PUT:
            if (
                value[0] % 2
            ):  # some are content with memory; no process that is killed may lose what they were told
                return (await table.put(row, durability="memory")).timestamp, None
            return await table.put(row), None
        case Kind.INSERT:
            return await table.insert(row), None
        case Kind.UPDATE:
            return await table.update(row), None
        case Kind.DELETE:
            return await table.delete(row), None
        case _:
            return await table.apply(_ROW_OPS[kind], row), None


async def of_space(space: AsyncKeySpace, key: str, kind: Kind, value: tuple[int, int]) -> State:
    """What a read found."""
    match kind:
        case Kind.READ:
            return from_bytes(await space.read(key))
        case Kind.PUT:
            await space.replace(key, str(value[0]))
        case Kind.INSERT:
            await space.insert(key, str(value[0]))
        case _:
            await space.delete(key)
    return None


async def swap(space: AsyncKeySpace, key: str, expected: State, value: State) -> None:
    """Set a key that must have the expected state."""
    wanted, present = (None if state is None else str(state[0]) for state in (value, expected))
    await space.write({key: wanted}, when={key: present})


async def of_session(
    table: AsyncTable, keys: Sequence[str], kinds: Sequence[Kind], values: Sequence[tuple[int, int]]
) -> WriteResult:
    """Write rows in this order through a session."""
    enough = "memory" if values and values[0][0] % 2 else "synced"
    session = table.new_session(flush_interval_s=0, durability=enough)
    for key, kind, value in zip(keys, kinds, values):
        await session.apply(_ROW_OPS[kind], _row(key, kind, value))
    return await session.flush()


async def of_part(
    table: AsyncTable, kind: Kind, rows: Sequence[tuple[str, tuple[int, int]]], part: JobPart
) -> WriteResult:
    """An attempt at a part of a job: these rows, all by one operation."""
    columns = pa.Table.from_pylist([_row(key, kind, value) for key, value in rows])
    return await table.write_arrow(columns, _ROW_OPS[kind], part=part)


async def of_catalog(client: AsyncClient, name: str, kind: Kind, timeout_s: float) -> State:
    """A key space made or deleted, or whether it is there; which of those that had its name is not told apart."""
    match kind:
        case Kind.INSERT:
            try:
                await client.create_keyspace(name, wait=False, timeout_s=timeout_s)
            except Rejected as exc:
                if exc.code is not Code.NOT_FOUND:  # it was made, and is deleted already
                    raise
        case Kind.READ:
            try:
                await client.describe(name)
            except Rejected as exc:
                if exc.code is Code.NOT_FOUND:
                    return None
                raise
            return THERE
        case _:
            await client.delete_table(name)
    return None


def from_bytes(raw: bytes | None) -> State:
    """A value of the key space."""
    return None if raw is None else (int(raw), int(raw))


def _row(key: str, kind: Kind, value: tuple[int, int]) -> dict[str, Any]:
    if kind in (Kind.DELETE, Kind.DELETE_IGNORE):
        return {"key": key}
    if kind in (Kind.UPDATE, Kind.UPDATE_IGNORE):
        return {"key": key, "b": value[1]}
    return {"key": key, "a": value[0], "b": value[1]}
