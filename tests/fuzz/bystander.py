"""`python -m tests.fuzz.bystander MASTERS`: a client that is nobody's enemy. Writes all the time, and measures its waits.

A process of its own, so that the fuzzer's load on its loop is not taken for a node's. On SIGTERM it reads all rows back and
prints one line of JSON. Invariant: what it says was acknowledged is compared with what the table then holds.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time

from stele.client import AsyncClient, AsyncTable
from stele.model.errors import Retryable
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema

TABLE = "bystander"
_CALLERS = 8
_SCHEMA = Schema.make([("id", "int64"), ("v", "int64")], ["id"])


class Bystander:
    """Its acknowledged rows, and the longest time in which none of its writes was acknowledged."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self.refused = 0
        self.longest_gap_s = 0.0
        self._last = time.monotonic()
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """End after the writes that are under way."""
        self._stop.set()

    async def write(self, table: AsyncTable, caller: int) -> list[int]:
        """Put rows one after the other until stopped; the keys that were acknowledged."""
        done, key = [], caller
        while not self._stop.is_set():
            try:
                await table.put({"id": key, "v": key * 7})
            except Retryable:
                self.refused += 1
                continue  # the same row again: an upsert, whatever became of it
            now = time.monotonic()
            self.longest_gap_s = max(self.longest_gap_s, now - self._last)
            self._last = now
            self.acknowledged += 1
            done.append(key)
            key += _CALLERS
        return done


async def _main(masters: list[str]) -> int:
    bystander = Bystander()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, bystander.stop)
    async with AsyncClient(masters, timeout_s=60, first_contact_s=60) as client:
        table = await client.create_table(TABLE, _SCHEMA, PartitionSchema((HashPartition((0,), 4, 0),), None))
        await table.put({"id": -1, "v": -7})
        print(json.dumps({"ready": True}), flush=True)
        bystander._last = time.monotonic()
        keys = await asyncio.gather(*(bystander.write(table, n) for n in range(_CALLERS)))
        rows = (await table.scan().to_table()).to_pydict()
        found = dict(zip(rows["id"], rows["v"], strict=True))
        lost = [key for part in keys for key in part if found.get(key) != key * 7]
    print(
        json.dumps(
            {
                "acknowledged": bystander.acknowledged,
                "refused": bystander.refused,
                "lost": lost[:10],
                "longest_gap_ms": round(bystander.longest_gap_s * 1000),
            }
        ),
        flush=True,
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(sys.argv[1].split(","))))
