"""`python -m bench tablets`: measures what puts and gets cost when a table has more tablets.

Real processes: one master and three nodes, every log synced, three replicas of each tablet, rows of 100 bytes. For each number of
tablets it makes a table, and measures 64 callers and 256 in one client, and 64 callers in four client processes. Between
two numbers it measures etcd's puts, if etcd is on the path. Writes only below a temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import uvloop

from bench import etcd_side, idle, machine, rows, stele_side
from bench.report import milliseconds, percentile
from stele.client import AsyncClient, AsyncTable
from stele.model.partition import HashPartition, PartitionSchema
from tests.harness import Cluster

_CALLERS = (64, 256)
_PROCESSES = 4
_ROWS = 200_000
_WARM_UP_S = 1.0


async def measure(directory: Path, counts: list[int], seconds: float) -> None:
    """Measure a new cluster with each of these numbers of tablets, and print a line for each measure."""
    print(machine.described(), flush=True)
    print(
        "| tablets | callers | puts/s | p50 | p99 | processor time of a put | gets/s | of a get |", flush=True
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for count in counts:
        async with (
            Cluster(directory / "stele", masters=1, nodes=3, anew=True) as cluster,
            AsyncClient(cluster.master_addresses, timeout_s=60) as client,
        ):
            partitioning = PartitionSchema((HashPartition((0,), count),)) if count > 1 else rows.ONE_TABLET
            table = await client.create_table("bench", rows.SCHEMA, partitioning)
            await table.write_arrow(rows.batches(_ROWS, 65_536))
            for callers in _CALLERS:
                await _one_client(cluster, table, count, callers, seconds)
            await _many_clients(cluster, count, seconds)
        shutil.rmtree(directory / "stele", ignore_errors=True)
        if etcd_side.installed():
            rate, times = await etcd_side.puts_alone(directory / "etcd", seconds)
            print(f"| etcd | {stele_side.CALLERS} | {rate:,.0f} | {_tails(times)} | | | |", flush=True)
            shutil.rmtree(directory / "etcd", ignore_errors=True)


async def _one_client(
    cluster: Cluster, table: AsyncTable, tablets: int, callers: int, seconds: float
) -> None:
    first = callers << 32
    await stele_side.put_for(table.put, callers, _WARM_UP_S, first=first)
    before = _cpu_s(cluster)
    rate, times = await stele_side.put_for(table.put, callers, seconds, first=first)
    put_us = (_cpu_s(cluster) - before) / len(times) * 1e6
    await stele_side.get_for(table, callers, _WARM_UP_S, _ROWS)
    before = _cpu_s(cluster)
    get_rate, got = await stele_side.get_for(table, callers, seconds, _ROWS)
    get_us = (_cpu_s(cluster) - before) / len(got) * 1e6
    print(
        f"| {tablets} | {callers} | {rate:,.0f} | {_tails(times)} | {put_us:.0f} us | {get_rate:,.0f} | {get_us:.0f} us |",
        flush=True,
    )


async def _many_clients(cluster: Cluster, tablets: int, seconds: float) -> None:
    each = stele_side.CALLERS // _PROCESSES
    command = [sys.executable, "-m", "bench.tablets", "--caller", ",".join(cluster.master_addresses)]
    started = [
        await asyncio.create_subprocess_exec(
            *command, str(each), str(seconds), str(number), stdout=asyncio.subprocess.PIPE
        )
        for number in range(1, _PROCESSES + 1)
    ]
    rate = sum([float((await process.communicate())[0]) for process in started])
    print(f"| {tablets} | {_PROCESSES} processes of {each} | {rate:,.0f} | | | | | |", flush=True)


async def _call(masters: str, callers: int, seconds: float, number: int) -> None:
    """What one of several client processes does. Prints its puts per second."""
    async with AsyncClient(masters.split(","), timeout_s=60) as client:
        table = await client.open_table("bench")
        first = (1_000 + number) << 32
        await stele_side.put_for(table.put, callers, 2 * _WARM_UP_S, first=first)
        rate, _ = await stele_side.put_for(table.put, callers, seconds, first=first)
        print(rate)


def _cpu_s(cluster: Cluster) -> float:
    """Processor time of the nodes and of this process."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return sum(idle.cpu_s(node) for node in cluster.nodes) + mine.ru_utime + mine.ru_stime


def _tails(times: list[float]) -> str:
    return f"{milliseconds(percentile(times, 0.5))} | {milliseconds(percentile(times, 0.99))}"


def main(arguments: list[str]) -> None:
    """Run the command."""
    if arguments[:1] == ["--caller"]:
        masters, callers, seconds, number = arguments[1:]
        uvloop.run(_call(masters, int(callers), float(seconds), int(number)))
        return
    parser = argparse.ArgumentParser(prog="python -m bench tablets", description=__doc__)
    parser.add_argument(
        "--tablets",
        type=int,
        nargs="+",
        default=[1, 8, 32, 96],
        help="numbers of tablets, measured one after the other",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each measure takes")
    parser.add_argument("--directory", help="directory for the clusters' data, on a real disk")
    given = parser.parse_args(arguments)
    if min(given.tablets) < 1 or max(given.tablets) > 1_024 or given.seconds <= 0:
        parser.error("expected 1 to 1,024 --tablets, and --seconds above 0")
    with tempfile.TemporaryDirectory(prefix="stele-tablets-", dir=given.directory) as directory:
        uvloop.run(measure(Path(directory), given.tablets, given.seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
