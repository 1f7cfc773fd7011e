"""`python -m bench idle`: measures what tablets cost that nobody reads or writes.

Real processes: one master and three nodes or more, every log synced, three replicas of each tablet or more. Waits until all replicas
rest. Then counts the processor time of each process, and the frames between the nodes. Writes only below a temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
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
_SENT = re.compile(r'^stele_peer_frames_total\{channel="control",direction="sent"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Rest:
    """What the nodes of a cluster at rest cost together. `share`: of one core. `grown_bytes`: memory above
    that of the cluster without tablets."""

    replicas: int
    share: float
    grown_bytes: int


async def measure(
    directory: Path, nodes: int, factor: int, counts: list[int], seconds: float, settle_s: float
) -> None:
    """Measure one cluster without tablets, then with each of these numbers of tablets. Print lines for each
    step."""
    async with (
        Cluster(directory, masters=1, nodes=nodes, anew=True) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=300) as client,
    ):
        await _share(cluster, seconds)
        empty = [cluster.resident_bytes(node) for node in cluster.nodes]
        made, number, before = 0, 0, Rest(0, 0.0, 0)
        for count in counts:
            began_s = time.monotonic()
            while made < count:
                each = min(count - made, _TABLETS_EACH)
                partitioning = (
                    PartitionSchema((HashPartition((0,), each),)) if each > 1 else PartitionSchema()
                )
                await client.create_table(f"t{number}", _SCHEMA, partitioning, replication_factor=factor)
                made, number = made + each, number + 1
            await _until_all_rest(cluster, count * factor)
            print(f"{count:,} tablets rest after {time.monotonic() - began_s:.0f} s", flush=True)
            await asyncio.sleep(settle_s)
            share = await _share(cluster, seconds)
            grown = sum(cluster.resident_bytes(n) - at for n, at in zip(cluster.nodes, empty, strict=True))
            rest = Rest(count * factor, share, grown)
            _print(count, before, rest)
            before = rest


async def _share(cluster: Cluster, seconds: float) -> float:
    """Return the share of one core that the nodes take together. Prints the share of each process."""
    sent = await _total(cluster, _SENT)
    before = [cpu_s(member) for member in cluster.members]
    began_s = time.monotonic()
    await asyncio.sleep(seconds)
    passed_s = time.monotonic() - began_s
    spent = [cpu_s(member) - at for member, at in zip(cluster.members, before, strict=True)]
    sent = await _total(cluster, _SENT) - sent
    shares = ", ".join(
        f"{m.name} {100 * s / passed_s:.2f} %" for m, s in zip(cluster.members, spent, strict=True)
    )
    print(f"a core's share over {passed_s:.0f} s: {shares}", flush=True)
    share = sum(s for m, s in zip(cluster.members, spent, strict=True) if m in cluster.nodes) / passed_s
    count = len(cluster.nodes)
    print(
        f"a node, mean of {count}: {100 * share / count:.2f} % of a core, {sent / passed_s / count:.0f} frames sent a second",
        flush=True,
    )
    return share


def _print(tablets: int, before: Rest, now: Rest) -> None:
    replicas = now.replicas
    print(
        f"at rest, {tablets:,} tablets: {100 * now.share / replicas * 1000:.3f} % of a core for 1,000 replicas, the nodes' "
        f"own rest included; {now.grown_bytes / replicas / 1024:.1f} KiB of memory for each",
        flush=True,
    )
    if before.replicas:
        more = replicas - before.replicas
        print(
            f"from {before.replicas:,} to {replicas:,} replicas: {100 * (now.share - before.share) / more * 1000:.3f} % of a "
            f"core for 1,000 replicas more; {(now.grown_bytes - before.grown_bytes) / more / 1024:.1f} KiB of memory for each",
            flush=True,
        )


async def _until_all_rest(cluster: Cluster, wanted: int) -> None:
    """Wait until the nodes say that all replicas rest."""
    deadline_s = time.monotonic() + _REST_MAX_S
    while True:
        resting = await _total(cluster, _RESTING)
        if resting >= wanted:
            return
        if time.monotonic() > deadline_s:
            raise SystemExit(
                f"only {resting:,} of {wanted:,} replicas are at rest after {_REST_MAX_S:.0f} s; is the machine overrun?"
            )
        await asyncio.sleep(1)


async def _total(cluster: Cluster, metric: re.Pattern[str]) -> int:
    """The sum of a metric over the nodes."""
    texts = [text for node in cluster.nodes for _, text in [await cluster.http(node, "/metrics")]]
    return sum(int(float(found.group(1))) for text in texts if (found := metric.search(text)))


def cpu_s(member: Member) -> float:
    """Processor time of a member's process and of its children that have ended."""
    assert member.process is not None
    fields = Path(f"/proc/{member.process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICKS


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench idle", description=__doc__)
    parser.add_argument(
        "--tablets",
        type=int,
        nargs="+",
        default=[200, 1_000],
        help="how many tablets; several numbers are measured one after the other",
    )
    parser.add_argument("--nodes", type=int, default=_REPLICAS, help="how many nodes, three or more")
    parser.add_argument(
        "--replicas",
        type=int,
        default=_REPLICAS,
        help="replicas of each tablet; as many as nodes, so that all nodes share each tablet",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="how long processor time is counted")
    parser.add_argument(
        "--settle",
        type=float,
        default=0.0,
        help="how long to wait before that; stores are flushed after 120 s",
    )
    parser.add_argument("--directory", help="directory for the cluster's data, on a real disk")
    given = parser.parse_args(arguments)
    counts = sorted(set(given.tablets))
    if counts[0] < 1 or given.nodes < given.replicas or given.seconds <= 0 or given.settle < 0:
        wanted = (
            "1 or more --tablets, no fewer --nodes than --replicas, --seconds above 0, --settle of 0 or more"
        )
        print(f"python -m bench idle: expected {wanted}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="stele-idle-", dir=given.directory) as directory:
        asyncio.run(
            measure(Path(directory), given.nodes, given.replicas, counts, given.seconds, given.settle)
        )
