"""Faults of masters, for `tests/sim/bugs.py`. Each docstring says which rule it breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from stele.master.following import Following
from stele.master.leadership import Leadership
from stele.master.locks import Locks
from stele.master.master import Master
from stele.master.records import TabletRecord
from stele.model.config import Configuration
from stele.model.ids import OpId
from stele.model.kvop import KeyOperation


async def answers_unconfirmed(master: Master) -> Leadership:
    """A leader answers without asking a majority whether it still leads."""
    return master.require_lead()


@asynccontextmanager
async def holds_nobody(
    locks: Locks, tables: Iterable[str] = (), tablets: Iterable[str] = ()
) -> AsyncIterator[None]:
    """Operations on one table run beside each other."""
    yield


async def ends_with_its_caller(lead: Leadership, operation: Coroutine[Any, Any, Any]) -> Any:
    """An operation ends when its caller stops waiting, and releases its locks while its batch is under way."""
    return await operation


async def commits_whoever_holds(lead: Leadership, epoch: int, batch: Sequence[KeyOperation]) -> None:
    """A driver's order compares its epoch with memory alone, not at its place in the log."""
    await lead.commit(batch)


def sees_nothing_while_it_reads(
    following: Following, key: bytes, old: bytes | None, new: bytes | None, opid: OpId
) -> None:
    """What is applied before all rows are read is missing in memory."""
    if not following._ended and following.complete:
        following.catalog.applied(key, old, new, opid)


def above_what_is_in_force(row: TabletRecord, config: Configuration, reports: object) -> int:
    """A new replica's id is above those of the configuration alone; ids of intents that ended are given again."""
    return max((peer.replica_id for peer in config.peers), default=0) + 1


async def says_not_leader(what: str, waiting: Awaitable[Any]) -> Any:
    """A change is on record, and its caller is told that this master does not lead: so nothing was done."""
    return await waiting
