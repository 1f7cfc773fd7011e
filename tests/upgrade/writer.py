"""A program that writes and reads all the time, and believes nothing. Run with either release on its path.

python tests/upgrade/writer.py NAME MASTERS     with stele of that release on PYTHONPATH

Uses only what release 0.1.0 has. Lines on its standard input say what to do: "phase NAME" (from here on, waits are counted under
that name), "table NAME" (make a table, use it, drop it), "end". Each is answered on standard output by one line of JSON. A call
that fails, or an answer that contradicts what was acknowledged, ends it with a traceback.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa

import stele
from stele.client import AsyncClient
from stele.client.partitioning import hash as hashed
from stele.model.schema import Schema

TIMEOUT_S = 240.0
"""Of a call. Far more than the default: on a busy machine a process needs long to start."""
BATCH = 20
_PAUSE_S = 0.05

Row = dict[str, Any]


class Writer:
    """One client at work. `rows` and `keys` are what was acknowledged."""

    def __init__(self, name: str, client: AsyncClient) -> None:
        self.name = name
        self.client = client
        self.rows: dict[str, Row] = {}
        self.keys: dict[bytes, bytes] = {}
        self.in_doubt: set[str] = set()
        """Keys of rows of which a change is under way."""
        self.waits_s: dict[str, list[float]] = defaultdict(list)
        self.phase = ""
        self.reads = 0
        self.ending = False

    @asynccontextmanager
    async def waited(self) -> AsyncIterator[None]:
        """Measure one write."""
        began = time.monotonic()
        yield
        self.waits_s[self.phase].append(time.monotonic() - began)

    def row(self, k: str, n: int) -> Row:
        """A row of the table."""
        return {"k": k, "owner": self.name, "n": n, "text": f"{k} ä" if n % 3 else None}

    async def single_rows(self) -> None:
        """Insert, update, read back, and delete some."""
        table = await self.client.open_table("rows")
        number = 0
        while not self.ending:
            k = f"{self.name}-{number:08}"
            self.in_doubt.add(k)
            self.rows[k] = self.row(k, number)
            async with self.waited():
                await table.insert(self.rows[k])
            if number % 3 == 0:
                async with self.waited():
                    await table.update({"k": k, "n": -number})
                self.rows[k]["n"] = -number
            if number % 4 == 0:
                found = await table.get(k, ["k", "owner", "n", "text"])
                assert found == self.rows[k], (found, self.rows[k])
                self.reads += 1
            if number % 5 == 0:
                async with self.waited():
                    await table.delete({"k": k})
                del self.rows[k]
            self.in_doubt.discard(k)
            number += 1
            await asyncio.sleep(_PAUSE_S)

    async def batches(self) -> None:
        """Arrow data and sessions in turn, as inserts: what is written twice is refused."""
        table = await self.client.open_table("rows")
        number = 0
        while not self.ending:
            rows = {k: self.row(k, number) for k in (f"{self.name}-b{number:06}-{n}" for n in range(BATCH))}
            self.in_doubt |= rows.keys()
            async with self.waited():
                if number % 2:
                    columns = {name: [r[name] for r in rows.values()] for name in ("k", "owner", "n", "text")}
                    await table.write_arrow(pa.table(columns), "insert")
                else:
                    session = table.new_session(flush_interval_s=0)
                    for row in rows.values():
                        await session.insert(row)
                    (await session.flush()).raise_for_errors()
            self.rows |= rows
            self.in_doubt -= rows.keys()
            number += 1
            await asyncio.sleep(10 * _PAUSE_S)

    async def single_keys(self) -> None:
        """Insert, replace, delete and read keys."""
        space = await self.client.keyspace("keys")
        number = 0
        while not self.ending:
            key = f"{self.name}-{number:08}".encode()
            async with self.waited():
                await space.insert(key, b"first")
            if number % 2:
                async with self.waited():
                    await space.replace(key, b"second")
            wanted = b"second" if number % 2 else b"first"
            assert await space.read(key) == wanted, key
            if number % 5:
                self.keys[key] = wanted
            else:
                async with self.waited():
                    await space.delete(key)
            number += 1
            self.reads += 1
            await asyncio.sleep(5 * _PAUSE_S)

    async def scans(self) -> None:
        """Each row that was acknowledged before a scan is in it. Once it is not in doubt, it is not changed again."""
        while not self.ending:
            settled = {k: dict(r) for k, r in self.rows.items() if k not in self.in_doubt}
            found = await self.scanned()
            for k, row in settled.items():
                assert found.get(k) == row, (k, row, found.get(k))
            self.reads += 1
            await asyncio.sleep(50 * _PAUSE_S)

    async def scanned(self) -> dict[str, Row]:
        """All of this program's rows."""
        table = await self.client.open_table("rows")
        scan = table.scan(["k", "owner", "n", "text"], ("owner", "=", self.name))
        return {row["k"]: row for row in (await scan.to_table()).to_pylist()}

    async def catalog(self, name: str) -> None:
        """Make a table, write and read it, and drop it."""
        schema = Schema.make([("k", "int64"), ("v", "string", True)], key=["k"])
        table = await self.client.create_table(
            name, schema, [hashed("k", buckets=2)], replication_factor=3, timeout_s=TIMEOUT_S
        )
        for k in range(10):
            await table.put({"k": k, "v": name})
        assert await table.scan().count() == 10
        assert name in [t.name for t in await self.client.list_tables()]
        await self.client.delete_table(name, timeout_s=TIMEOUT_S)

    async def obey(self, lines: asyncio.StreamReader) -> None:
        """Until "end", or until nobody is there to say it."""
        while not self.ending:
            words = (await lines.readline()).decode().split()
            match words:
                case ["phase", name]:
                    self.phase = name
                case ["table", name]:
                    await self.catalog(name)
                case _:
                    self.ending = True
            if not self.ending:
                say({"done": words})

    async def compare(self) -> None:
        """Read all once more."""
        found = await self.scanned()
        assert found == self.rows, sorted(
            k for k in found.keys() | self.rows.keys() if found.get(k) != self.rows.get(k)
        )
        space = await self.client.keyspace("keys")
        assert dict(await space.list(f"{self.name}-")) == self.keys

    def told(self) -> Row:
        """What it did."""
        return {
            "rows": self.rows,
            "keys": {k.decode(): v.decode() for k, v in self.keys.items()},
            "waits_s": self.waits_s,
            "reads": self.reads,
        }


def say(what: Row) -> None:
    """One line for whoever started this program."""
    print(json.dumps(what), flush=True)


async def main(name: str, masters: str) -> None:
    """Work until told to end."""
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with AsyncClient(masters, timeout_s=TIMEOUT_S) as client:
        writer = Writer(name, client)
        say({"program": stele.__file__})
        work: list[Coroutine[Any, Any, None]] = [
            writer.single_rows(),
            writer.batches(),
            writer.single_keys(),
            writer.scans(),
            writer.obey(lines),
        ]
        tasks = [asyncio.create_task(w) for w in work]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        await writer.compare()
        say(writer.told())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
