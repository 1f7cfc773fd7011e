"""Fakes at the two ports of whatever deals rows out: the masters, who tell the ranges, and the tablets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from stele.client.streams import settle
from stele.model.block import decode_block
from stele.model.keys import encode_tuple
from stele.model.partition import PartitionSchema
from stele.model.ranges import AddRange, DropRange, of_ranges, with_steps
from stele.model.schema import Schema

SCHEMA = Schema.make([("n", "int64"), ("text", "string")], ["n"])


def at(n: int) -> bytes:
    return encode_tuple([n], [pa.int64()])


FIRST = of_ranges((0,), [(at(0), at(10)), (at(10), at(20))])
DROP, ADD, LATER = DropRange(at(0), at(10)), AddRange(at(0), at(10)), AddRange(at(20), at(30))


class Places:
    """At the port to the masters: what they told last, and a question that waits until the test answers it."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(partition_schema=PartitionSchema((), FIRST))
        self.asked = 0
        self.answered = asyncio.Event()

    async def ask_anew(self, *, timeout_s: float) -> None:
        self.asked += 1
        await self.answered.wait()

    def tell(self, *steps: Any) -> None:
        told = with_steps(self.info.partition_schema.range, steps)
        self.info = SimpleNamespace(partition_schema=PartitionSchema((), told))


class Sent:
    """At the port to the tablets: the blocks that were sent, and who ends each."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, list[tuple[int, str]]]] = []
        self.end: list[Callable[[Any], None]] = []

    def tablet(self, ordinal: int) -> Any:
        def start_write(
            block: bytes, timeout_s: float, ended: Callable[[Any], None], durability: object = None
        ) -> Any:
            batch = decode_block(block, SCHEMA).batch
            self.blocks.append((ordinal, [tuple(row.values()) for row in batch.to_pylist()]))
            self.end.append(ended)
            return SimpleNamespace(cancel=lambda: None)

        async def write(
            block: bytes, *, timeout_s: float, attempt: object = None, durability: object = None
        ) -> Any:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            start_write(block, timeout_s, partial(settle, future))
            end = await future
            if isinstance(end, BaseException):
                raise end
            return end

        return SimpleNamespace(start_write=start_write, write=write)


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
