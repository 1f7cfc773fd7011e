"""`python -m bench large`: measures what shows only with many rows, wide rows or many busy tablets.

Real processes: one master and three nodes, every log synced, three replicas of each tablet. Rows of 100 bytes are loaded in
an order that looks random, into eight tablets. Each measure prints a line of a table. Writes only below a temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import uvloop

from bench import machine, rows, stele_side
from bench.processes import own_and_mapped
from bench.report import milliseconds, percentile
from stele.client import AsyncClient, AsyncTable
from stele.model.block import RowOp
from stele.model.partition import HashPartition, PartitionSchema, assign
from stele.model.schema import Schema
from tests.harness import Cluster

KEYS = ("load", "keys", "writes", "wide", "busy")
_BATCH = 65_536
_END_ROWS = 10_000_000
_LOOK_S = 0.5
_SCANS = 200
_RANGE = 1_000
_CHANGED_ROWS = 1_000_000
_WIDE_COLUMNS, _WIDE_ROWS = 300, 20_000
_ODD, _BITS = 0x9E3779B97F4A7C15, 40
"""Products with an odd number, cut off at so many bits, differ from each other."""


def keys_of(first: int, count: int) -> npt.NDArray[np.int64]:
    """The ids of the rows with these numbers: all different, in an order that looks random."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return ((numbers * np.uint64(_ODD)) & np.uint64((1 << _BITS) - 1)).astype(np.int64)


def batches(first: int, count: int) -> Iterator[pa.RecordBatch]:
    """`count` rows from number `first` on, in batches of _BATCH rows that are made while they are read."""
    text = rows.batches(_BATCH, _BATCH)[0].column("text")
    for start in range(first, first + count, _BATCH):
        ids = keys_of(start, min(_BATCH, first + count - start))
        kinds = (ids % 1_000).astype(np.int32)
        columns = [ids, ids * 0.5, kinds, text.slice(0, len(ids))]
        yield pa.record_batch(columns, schema=rows.SCHEMA.to_arrow())


class Large:
    """The measures, on one cluster. `count`: the rows that are loaded."""

    def __init__(self, cluster: Cluster, client: AsyncClient, count: int, seconds: float) -> None:
        self._cluster = cluster
        self._client = client
        self._count = count
        self._seconds = seconds
        self._own_bytes = self._all_bytes = 0

    async def run(self, keys: list[str], tablets: int) -> None:
        """Measure, in the order of KEYS."""
        _line("measure", "result")
        _line("---", "---")
        if {"load", "keys", "writes"} & set(keys):
            table = await self._client.create_table("rows", rows.SCHEMA, rows.PARTITIONING)
            await self._load(table)
            if "keys" in keys:
                await self._keys(table)
            if "writes" in keys:
                await self._writes(table)
            await self._client.delete_table("rows")
        if "wide" in keys:
            await self._wide()
        if "busy" in keys:
            await self._busy(tablets)

    async def _load(self, table: AsyncTable) -> None:
        """Load all rows. Print how fast the first and the last of them were written, and how much memory and
        disk the nodes took."""
        ends = min(_END_ROWS, self._count // 2)
        written, at = [0], [(0, time.perf_counter())]

        def on_rows(more: int) -> None:
            written[0] += more
            at.append((written[0], time.perf_counter()))

        watch = asyncio.create_task(self._watch())
        reader = pa.RecordBatchReader.from_batches(rows.SCHEMA.to_arrow(), batches(0, self._count))
        await table.write_arrow(reader, timeout_s=600, on_rows=on_rows)
        watch.cancel()
        first = next(when for done, when in at if done >= ends)
        last = next(when for done, when in at if done >= self._count - ends)
        _line(f"load of {self._count:,} rows: the first {ends:,}", f"{ends / (first - at[0][1]):,.0f} rows/s")
        _line(f"... the last {ends:,}", f"{ends / (at[-1][1] - last):,.0f} rows/s")
        _line("... all", f"{self._count / (at[-1][1] - at[0][1]):,.0f} rows/s")
        memory = f"{self._own_bytes / 1e6:,.0f} MB; {self._all_bytes / 1e6:,.0f} MB"
        _line("... a node's own memory, at most; with the files that it maps", memory)
        raw = self._count * rows.ROW_BYTES
        _line(
            "... bytes on a node's disk to bytes of the rows, right after the load",
            f"{self._on_disk() / raw:.2f}",
        )
        started = time.perf_counter()
        found = await table.scan(rows.NARROW).count()
        assert found == self._count
        _line("count of all rows, right after the load", milliseconds(time.perf_counter() - started))

    async def _watch(self) -> None:
        while True:
            for node in self._cluster.nodes:
                assert node.process is not None
                own, mapped = own_and_mapped(node.process.pid)
                self._own_bytes, self._all_bytes = (
                    max(self._own_bytes, own),
                    max(self._all_bytes, own + mapped),
                )
            await asyncio.sleep(_LOOK_S)

    def _on_disk(self) -> int:
        return max(
            sum(path.stat().st_blocks * 512 for path in node.directory.rglob("*") if path.is_file())
            for node in self._cluster.nodes
        )

    async def _keys(self, table: AsyncTable) -> None:
        """Measure scans of one key and of a range of keys, and gets."""
        chosen = random.Random(1)
        for what, wide in (("id = x", 0), (f"id >= a AND id < b, {_RANGE:,} rows", _RANGE)):
            width = 1 if wide == 0 else (wide << _BITS) // self._count
            times = []
            for _ in range(_SCANS):
                low = int(keys_of(chosen.randrange(self._count), 1)[0])
                predicates = (
                    [("id", "=", low)] if wide == 0 else [("id", ">=", low), ("id", "<", low + width)]
                )
                started = time.perf_counter()
                found = await table.scan(predicates=predicates).to_table()
                times.append(time.perf_counter() - started)
                assert found.num_rows, "a row that was loaded is not found"
            _line(f"{what}: median, worst of {_SCANS}", _two(times))
        times = []
        until = time.perf_counter() + self._seconds

        async def call() -> None:
            while (started := time.perf_counter()) < until:
                key = int(keys_of(chosen.randrange(self._count), 1)[0])
                row = await table.get(key)
                assert row is not None and row["id"] == key
                times.append(time.perf_counter() - started)

        await asyncio.gather(*(call() for _ in range(stele_side.CALLERS)))
        _line(
            f"gets of {stele_side.CALLERS} callers",
            f"{len(times) / self._seconds:,.0f}/s, p50 {_middle(times)}",
        )

    async def _writes(self, table: AsyncTable) -> None:
        """Measure writes of rows that are there already."""
        count = min(_CHANGED_ROWS, self._count)
        for op in (RowOp.INSERT_IGNORE, RowOp.UPDATE, RowOp.UPSERT):
            first = random.Random(op.value).randrange(self._count - count + 1)
            reader = pa.RecordBatchReader.from_batches(rows.SCHEMA.to_arrow(), batches(first, count))
            started = time.perf_counter()
            await table.write_arrow(reader, op, timeout_s=600)
            rate = count / (time.perf_counter() - started)
            _line(f"{op.name.lower()} of {count:,} rows that are there", f"{rate:,.0f} rows/s")

    async def _wide(self) -> None:
        """Measure updates of one column, in rows that have many columns."""
        names = [f"c{number}" for number in range(_WIDE_COLUMNS - 1)]
        schema = Schema.make([("id", "int64"), *((name, "double") for name in names)], ["id"])
        table = await self._client.create_table("wide", schema, rows.PARTITIONING)
        ids = np.arange(_WIDE_ROWS)
        await table.write_arrow(
            pa.record_batch([ids, *(ids * 0.5 for _ in names)], schema=schema.to_arrow()), timeout_s=120
        )
        chosen = random.Random(2)
        times: list[float] = []
        until = time.perf_counter() + self._seconds

        async def call() -> None:
            while (started := time.perf_counter()) < until:
                await table.update({"id": chosen.randrange(_WIDE_ROWS), chosen.choice(names): 1.5})
                times.append(time.perf_counter() - started)

        await asyncio.gather(*(call() for _ in range(stele_side.CALLERS)))
        _line(
            f"updates of one of {_WIDE_COLUMNS} columns, {stele_side.CALLERS} callers",
            f"{len(times) / self._seconds:,.0f}/s, p50 {_middle(times)}",
        )
        await self._client.delete_table("wide")

    async def _busy(self, tablets: int) -> None:
        """Kill a node while each of many tablets is written to all the time."""
        partitioning = PartitionSchema((HashPartition((0,), tablets),))
        table = await self._client.create_table("busy", rows.SCHEMA, partitioning)
        numbers = np.arange(tablets * 32)
        batch = pa.record_batch(
            [numbers, numbers * 0.5, numbers.astype(np.int32), pa.array(["x"] * len(numbers))],
            schema=rows.SCHEMA.to_arrow(),
        )
        found, at = np.unique(assign(batch, rows.SCHEMA, partitioning), return_index=True)
        assert len(found) == tablets, "some tablet has no row"
        killed, ended = [0.0], [False]
        back: dict[int, float] = {}
        count = [0]

        async def call(number: int) -> None:
            while not ended[0]:
                started = time.perf_counter()
                await table.put(rows.row(number))
                count[0] += 1
                if killed[0] and started >= killed[0] and number not in back:
                    back[number] = time.perf_counter() - killed[0]

        callers = [asyncio.create_task(call(int(number))) for number in at]
        await asyncio.sleep(2 * self._seconds)
        before, began = count[0], time.perf_counter()
        await asyncio.sleep(self._seconds)
        _line(
            f"puts to {tablets:,} tablets, a caller each",
            f"{(count[0] - before) / (time.perf_counter() - began):,.0f}/s",
        )
        led = {place.target().node_id for place in table.locations.by_ordinal(range(tablets))}
        victim = self._cluster.member(sorted(led)[0])
        lost = [
            o for o in range(tablets) if table.locations.by_ordinal([o])[0].target().node_id == victim.node_id
        ]
        self._cluster.kill(victim)
        killed[0] = time.perf_counter()
        while len(back) < tablets:
            await asyncio.sleep(0.05)
            for each in callers:
                if each.done():
                    each.result()
        ended[0] = True
        await asyncio.gather(*callers)
        after = sorted(back[int(at[ordinal])] for ordinal in lost)
        _line(
            f"kill -9 of a node that leads {len(lost):,} of {tablets:,} busy tablets: to the next write, median and last",
            _two(after),
        )
        self._cluster.restart(victim)
        await self._cluster.wait_ready(victim)


def _middle(times: list[float]) -> str:
    return milliseconds(percentile(times, 0.5))


def _two(times: list[float]) -> str:
    return f"{_middle(times)}, {milliseconds(max(times))}"


def _line(what: str, result: str) -> None:
    print(f"| {what} | {result} |", flush=True)


async def measure(directory: Path, keys: list[str], count: int, tablets: int, seconds: float) -> None:
    """Start a cluster, and measure."""
    print(machine.described(), flush=True)
    print(machine.speed(directory), flush=True)
    async with (
        Cluster(directory / "stele", masters=1, nodes=3, anew=True) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=60) as client,
    ):
        await Large(cluster, client, count, seconds).run(keys, tablets)


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench large", description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=20_000_000, help="how many rows are loaded; 100M take 15 minutes"
    )
    parser.add_argument(
        "--tablets", type=int, default=1_000, help="how many tablets are busy when a node is killed"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="how long measures with callers take")
    parser.add_argument(
        "--only", default=",".join(KEYS), help=f"of {', '.join(KEYS)}; keys and writes load first"
    )
    parser.add_argument("--directory", help="directory for the cluster's data, on a real disk")
    given = parser.parse_args(arguments)
    keys = given.only.split(",")
    if (
        not set(keys) <= set(KEYS)
        or given.rows < 1_000
        or not 3 <= given.tablets <= 1_024
        or given.seconds <= 0
    ):
        parser.error(
            f"expected keys of {', '.join(KEYS)}, 1,000 rows or more, 3 to 1,024 tablets, and --seconds above 0"
        )
    with tempfile.TemporaryDirectory(prefix="stele-large-", dir=given.directory) as directory:
        free = shutil.disk_usage(directory).free
        if free < given.rows * rows.ROW_BYTES * 8:
            parser.error(
                f"{directory} has {free >> 30} GiB free, too little for three replicas of {given.rows:,} rows and merges"
            )
        uvloop.run(measure(Path(directory), keys, given.rows, given.tablets, given.seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
