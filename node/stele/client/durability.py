"""How durable a write is when it returns: what a caller asks for, and what the write got.

Invariant: a write never gets less than its caller asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from stele.model.errors import Rejected
from stele.rpc.proto import tserver_pb2


class Durability(StrEnum):
    """How durable a write is when it returns.

    - `SYNCED`: a majority of the tablet's replicas has synced it. It is lost only if a majority loses its disks.
    - `MEMORY`: every voting replica has written it to its log, and the disks have it soon. It is lost only if a majority of the
      machines loses power before that.

    Example:
        >>> stele.Durability("memory")
        <Durability.MEMORY: 'memory'>
    """

    SYNCED = "synced"
    MEMORY = "memory"


class Written(NamedTuple):
    """A row was written. Returned by `put` with `durability`.

    Attributes:
        timestamp: The hybrid time of the write.
        durability: What the write got: what was asked for, or more.

    Example:
        >>> written = table.put({"day": date(2024, 5, 2), "name": "well", "value": 7.0}, durability="memory")
        >>> written.durability in ("memory", "synced")
        True
    """

    timestamp: int
    durability: Durability


ASKED = {Durability.SYNCED: tserver_pb2.SYNCED, Durability.MEMORY: tserver_pb2.MEMORY}


def durability_of(durability: Any) -> Durability:
    """Parse the durability that a caller asks for. Raises Rejected for anything but "synced" and "memory"."""
    try:
        return Durability(durability)
    except ValueError:
        raise Rejected(f'durability {durability!r}: expected "synced" or "memory"') from None


def got(answer: tserver_pb2.WriteResponse) -> Durability:
    """Return the durability that a write got, by its leader's answer. A leader of an earlier release says
    nothing, because it always waits for the commit."""
    return Durability.MEMORY if answer.durability == tserver_pb2.MEMORY else Durability.SYNCED


class Row(asyncio.Future[Any]):
    """The future of a row whose caller asked for a durability. Its result is a Written."""

    def __init__(self, durability: Durability) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.durability = durability


def enough_for(rows: Sequence[asyncio.Future[Any]]) -> Durability:
    """The durability for a block of these rows: the highest that one of them asks for."""
    if all(type(row) is Row and row.durability is Durability.MEMORY for row in rows):
        return Durability.MEMORY
    return Durability.SYNCED


def written(answer: tserver_pb2.WriteResponse) -> Written:
    """The result of a `Row`."""
    return Written(answer.timestamp, got(answer))
