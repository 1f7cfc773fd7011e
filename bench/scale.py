"""`python -m bench scale`: measures the load of many tablets on the masters and the driver.

Real master processes with their catalog on disk, and a real driver process; nodes are simulated behind the real
calls (scale_nodes.py). Prints each figure as it is measured; writes only below a temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from bench.processes import resident_bytes
from bench.scale_nodes import Nodes
from stele.driver.executor import Executor
from stele.driver.keeping import pages_of, whole_view
from stele.driver.policy import Policy
from stele.model.errors import SteleError
from stele.model.ids import new_id
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.convert_schema import partitioning_to_pb, schema_to_pb
from stele.rpc.identity import Identity
from stele.rpc.masters import Masters
from stele.rpc.proto import master_pb2
from tests.harness import Cluster

_SCHEMA = Schema.make([("id", "int64"), ("name", "string", True), ("value", "double", True)], ["id"])
_IDLE_PASSES = 8
_POLICY = Policy(dead_after_ms=10_000, max_copies=8, balance_leaders=True, rebalance=True)


class Holds:
    """Measures the longest time for which the event loop did not turn, in ms."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self.longest_ms = max(self.longest_ms, (time.perf_counter() - before) * 1000 - 1)

    def take(self) -> float:
        """The longest time since the last call."""
        found, self.longest_ms = self.longest_ms, 0.0
        return found


async def drive(masters: list[str], seconds: float) -> None:
    """The driver process. It runs passes for `seconds`, and prints a line of JSON for each."""
    pool = ChannelPool(Identity())
    driver = Executor(pool, masters, holder="bench")
    holds, until = Holds(), time.monotonic() + seconds
    while time.monotonic() < until:
        began, cpu = time.perf_counter(), time.process_time()
        try:
            report = await driver.run_once(_POLICY)
        except SteleError as exc:
            print(json.dumps({"error": str(exc)}), flush=True)
            await asyncio.sleep(1)
            continue
        print(
            json.dumps(
                {
                    "seconds": time.perf_counter() - began,
                    "cpu": time.process_time() - cpu,
                    "steps": len(report.outcomes),
                    "records": len(report.progress),
                    "first": f"{report.progress[0].step}: {report.progress[0].reason}"
                    if report.progress
                    else "",
                    "rss": resident_bytes(os.getpid()),
                    "hold_ms": holds.take(),
                }
            ),
            flush=True,
        )
        await asyncio.sleep(0.5)
    await driver.release()
    await pool.close()


class Scale:
    """One run of the measurement."""

    def __init__(self, directory: Path, tables: int, tablets: int, nodes: int, masters: int) -> None:
        self._tables, self._tablets, self._count = tables, tablets, nodes
        self._cluster = Cluster(directory, masters=masters, nodes=0)

    async def run(self) -> None:
        async with self._cluster as cluster:
            addresses = cluster.master_addresses
            self._nodes = nodes = Nodes(cluster.cluster_id, addresses, self._count)
            pool = ChannelPool(Identity())
            self._masters = Masters(pool, addresses)
            await nodes.start()
            try:
                await self._create()
                await self._measure(addresses)
            finally:
                await nodes.stop()
                await pool.close()

    async def _create(self) -> None:
        began, each = time.monotonic(), self._tablets // self._tables
        schema = schema_to_pb(_SCHEMA)
        partitioning = partitioning_to_pb(PartitionSchema((HashPartition((0,), each),) if each > 1 else ()))
        for _ in range(120):
            view = await whole_view(pages_of(self._masters, timeout_s=60))
            if sum(n.formed and n.registration.role == "node" for n in view.nodes) == self._count:
                break
            await asyncio.sleep(1)
        wanted = 0
        for number in range(self._tables):
            request = master_pb2.CreateTableRequest(
                name=f"t{number:05}",
                schema=schema,
                partitioning=partitioning,
                replication_factor=3,
                table_id=id_to_pb(new_id()),
            )
            await self._masters.call("CreateTable", request, timeout_s=60)
            wanted += each
            await self._nodes.made((wanted - 1_000) * 3)
        await self._nodes.made(wanted * 3)
        await asyncio.sleep(5)
        print(
            f"{self._tables:,} tables, {wanted:,} tablets, {wanted * 3:,} replicas on {self._count} nodes: "
            f"made in {time.monotonic() - began:.0f} s",
            flush=True,
        )

    async def _masters_now(self) -> str:
        rss = [self._cluster.resident_bytes(m) for m in self._cluster.masters]
        return f"masters hold {', '.join(f'{r / 1e6:.0f} MB' for r in rss)}"

    async def _batches(self) -> float:
        total = 0.0
        for master in self._cluster.masters:
            _, body = await self._cluster.http(master, "/metrics")
            lines = (line for line in body.splitlines() if line.startswith("stele_master_batches_total"))
            total += sum(float(line.rsplit(" ", 1)[1]) for line in lines)
        return total

    async def _measure(self, addresses: list[str]) -> None:
        print(await self._masters_now(), flush=True)
        driver = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench",
            "scale",
            "--drive",
            ",".join(addresses),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            await self._idle(driver)
            await self._lost(driver)
        finally:
            driver.kill()
            await driver.wait()
        print(await self._masters_now(), flush=True)

    async def _next(self, driver: asyncio.subprocess.Process) -> dict[str, object]:
        assert driver.stdout is not None
        while True:
            async with asyncio.timeout(300):
                line = await driver.stdout.readline()
            if not line:
                raise RuntimeError("the driver ended")
            if not line.startswith(b"{"):
                continue  # the driver's log
            found: dict[str, object] = json.loads(line)
            if "error" not in found:
                return found
            print("driver:", found["error"], flush=True)

    async def _idle(self, driver: asyncio.subprocess.Process) -> None:
        first = await self._next(driver)
        print(f"the first pass, which reads the whole view: {_pass(first)}", flush=True)
        idle: list[dict[str, object]] = []
        batches, orders = await self._batches(), self._nodes.orders.total()
        for _ in range(200):
            found = await self._next(driver)
            if found["steps"]:
                idle.clear()
                print(f"still at work: {_pass(found)} {found['first']}", flush=True)
                batches, orders = await self._batches(), self._nodes.orders.total()
            else:
                idle.append(found)
            if len(idle) == _IDLE_PASSES:
                break
        print(
            f"{len(idle)} passes that find nothing to do: the median one {_pass(_median(idle))}; longest "
            f"hold of the loop "
            f"{max(float(str(p['hold_ms'])) for p in idle):.0f} ms; orders "
            f"{self._nodes.orders.total() - orders}, "
            f"catalog batches {await self._batches() - batches:.0f} (the claim is renewed, nodes' log "
            f"positions noted)",
            flush=True,
        )

    async def _lost(self, driver: asyncio.subprocess.Process) -> None:
        nodes = self._nodes
        victim = max(nodes.nodes, key=lambda n: len(n.replicas))
        held, batches, orders = len(victim.replicas), await self._batches(), nodes.orders.copy()
        await nodes.lose(victim)
        began, passes = time.monotonic(), []
        fragile = nodes.fragile()
        print(
            f"a node with {held:,} replicas is lost: {fragile:,} tablets tolerate no further loss", flush=True
        )
        while nodes.fragile() and time.monotonic() - began < 900:
            passes.append(await self._next(driver))
        after_s = time.monotonic() - began
        made = nodes.orders - orders
        print(
            f"every tablet can lose a voter again after {after_s:.0f} s ({_POLICY.dead_after_ms // 1000} s "
            f"of them the time-out): "
            f"{len(passes)} passes, the largest "
            f"{_pass(max(passes, key=lambda p: float(str(p['seconds']))))}; left {nodes.fragile()}; "
            f"catalog batches {await self._batches() - batches:.0f}; orders {dict(made)}",
            flush=True,
        )


def _pass(found: dict[str, object]) -> str:
    return (
        f"{float(str(found['seconds'])) * 1000:.0f} ms (CPU {float(str(found['cpu'])) * 1000:.0f} ms), "
        f"{found['steps']} steps, "
        f"{int(str(found['rss'])) / 1e6:.0f} MB"
    )


def _median(passes: list[dict[str, object]]) -> dict[str, object]:
    return sorted(passes, key=lambda p: float(str(p["seconds"])))[len(passes) // 2]


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__)
    parser.add_argument("--tables", type=int, default=100)
    parser.add_argument("--tablets", type=int, default=1_000)
    parser.add_argument("--nodes", type=int, default=8, help="simulated, at most 2,000 replicas each")
    parser.add_argument("--masters", type=int, default=1, choices=(1, 3, 5))
    parser.add_argument("--directory", help="directory for the masters' catalog, on a real disk")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.drive:
        asyncio.run(drive(given.drive.split(","), 3_600))
        return
    with tempfile.TemporaryDirectory(prefix="stele-scale-", dir=given.directory) as directory:
        asyncio.run(Scale(Path(directory), given.tables, given.tablets, given.nodes, given.masters).run())
