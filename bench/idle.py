"""`python -m bench idle`: measures what tablets cost that nobody reads or writes.

Real processes: one master and three nodes, every log synced, three replicas of each tablet. Waits until all replicas rest,
and then counts the processor time of each process. Writes only below a temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from stele.client import AsyncClient
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from tests.harness import Cluster
from tests.harness.processes import Member

_SCHEMA = Schema.make([("id", "int64"), ("name", "string", True)], ["id"])
_TABLETS_EACH = 100
_REPLICAS = 3
_REST_MAX_S = 900.0
_TICKS = os.sysconf("SC_CLK_TCK")
_RESTING = re.compile(r"^stele_replicas_resting (\S+)$", re.MULTILINE)


async def measure(directory: Path, tablets: int, seconds: float) -> None:
    """Measure one cluster, and print a line for each step."""
    async with (
        Cluster(directory, masters=1, nodes=_REPLICAS, anew=True) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=300) as client,
    ):
        empty = [cluster.resident_bytes(node) for node in cluster.nodes]
        began_s, left, number = time.monotonic(), tablets, 0
        while left:
            each = min(left, _TABLETS_EACH)
            partitioning = PartitionSchema((HashPartition((0,), each),)) if each > 1 else PartitionSchema()
            await client.create_table(f"t{number}", _SCHEMA, partitioning)
            left, number = left - each, number + 1
        await _until_all_rest(cluster, tablets)
        print(f"{tablets:,} tablets were made, and rest after {time.monotonic() - began_s:.0f} s", flush=True)
        before = [_cpu_s(member) for member in cluster.members]
        began_s = time.monotonic()
        await asyncio.sleep(seconds)
        passed_s = time.monotonic() - began_s
        spent = [_cpu_s(member) - at for member, at in zip(cluster.members, before, strict=True)]
        for member, cpu_s in zip(cluster.members, spent, strict=True):
            print(f"{member.name}: {100 * cpu_s / passed_s:.2f} % of a core", flush=True)
        nodes = sum(s for m, s in zip(cluster.members, spent, strict=True) if m in cluster.nodes)
        replicas = tablets * _REPLICAS
        grown = sum(cluster.resident_bytes(n) - at for n, at in zip(cluster.nodes, empty, strict=True))
        print(
            f"at rest, {tablets:,} tablets: {100 * nodes / passed_s / replicas * 1000:.3f} % of a core for 1,000 "
            f"replicas, over {passed_s:.0f} s; {grown / replicas / 1024:.1f} KiB of memory for each",
            flush=True,
        )


async def _until_all_rest(cluster: Cluster, wanted: int) -> None:
    """Wait until each node says that all its replicas rest."""
    deadline_s = time.monotonic() + _REST_MAX_S
    while True:
        resting = [await _resting(cluster, node) for node in cluster.nodes]
        if min(resting) >= wanted:
            return
        if time.monotonic() > deadline_s:
            raise SystemExit(
                f"after {_REST_MAX_S:.0f} s the nodes have {resting} replicas at rest, not {wanted} each"
            )
        await asyncio.sleep(1)


async def _resting(cluster: Cluster, node: Member) -> int:
    _, text = await cluster.http(node, "/metrics")
    found = _RESTING.search(text)
    return int(float(found.group(1))) if found else 0


def _cpu_s(member: Member) -> float:
    """Processor time of a member's process and of its children that have ended."""
    assert member.process is not None
    fields = Path(f"/proc/{member.process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICKS


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench idle", description=__doc__)
    parser.add_argument("--tablets", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long processor time is counted")
    parser.add_argument("--directory", help="directory for the cluster's data, on a real disk")
    given = parser.parse_args(arguments)
    if given.tablets < 1 or given.seconds <= 0:
        print("python -m bench idle: expected 1 tablet or more, and some seconds", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="stele-idle-", dir=given.directory) as directory:
        asyncio.run(measure(Path(directory), given.tablets, given.seconds))
