"""`python -m bench scale`: measures the load of many tablets on the masters and the operator.

Real master processes with their catalog on disk, and a process with the operator's code and without a Kubernetes
(scale_driver.py); nodes are simulated behind the real calls (scale_nodes.py). Prints each figure as it is measured; writes
only below a temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.scale_driver import POLICY
from bench.scale_nodes import Nodes
from stele.driver.keeping import pages_of, whole_view
from stele.driver.policy import StandingPolicy
from stele.driver.wire import standing_to_pb
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
_IDLE_PASSES, _PASSES_MAX, _TOLD_EACH = 8, 1_000, 25
_TOLERANT_MAX_S, _WHOLE_MAX_S = 900, 2_400


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the operator, as scale_driver.py reports it. `hold_ms`: the longest step of its event loop,
    or the longest collection of its interpreter, in processor time. `holds`: what that was. The last four are
    sums over all passes: events of the cluster by reason, writes of its status, tables whose status was
    written, and all those writes."""

    seconds: float
    cpu: float
    steps: int
    first: str
    rss: int
    hold_ms: float
    holds: str
    events: Mapping[str, int]
    statuses: int
    tables: int
    of_tables: int

    def __str__(self) -> str:
        return (
            f"{self.seconds * 1000:.0f} ms (CPU {self.cpu * 1000:.0f} ms), {self.steps} steps, "
            f"{self.rss / 1e6:.0f} MB"
        )


class Scale:
    """One run of the measurement."""

    def __init__(self, directory: Path, tables: int, tablets: int, nodes: int, masters: int) -> None:
        self._tables, self._tablets, self._count = tables, tablets, nodes
        self._cluster = Cluster(directory, masters=masters, nodes=0, anew=True)
        self._log = directory / "operator.log"

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
        # An operator is at work soon, so the masters need not drive meanwhile.
        left_alone = StandingPolicy(
            *(POLICY.dead_after_ms, POLICY.max_lost_nodes, POLICY.max_copies, POLICY.bytes_per_second),
            drive_after_ms=0,
        )
        request = master_pb2.SetDriverPolicyRequest(policy=standing_to_pb(left_alone))
        await self._masters.call("SetDriverPolicy", request)
        wanted = 0
        for number in range(self._tables):
            asked = master_pb2.CreateTableRequest(
                name=f"t{number:05}",
                schema=schema,
                partitioning=partitioning,
                replication_factor=3,
                table_id=id_to_pb(new_id()),
            )
            await self._masters.call("CreateTable", asked, timeout_s=60)
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
        made = (",".join(addresses), self._cluster.cluster_id)
        with self._log.open("wb") as log:
            driver = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.scale_driver", *made, stdout=asyncio.subprocess.PIPE, stderr=log
            )
        try:
            await self._idle(driver)
            await self._lost(driver)
        finally:
            driver.kill()
            await driver.wait()
        print(await self._masters_now(), flush=True)

    async def _next(self, driver: asyncio.subprocess.Process) -> Pass:
        assert driver.stdout is not None
        while True:
            async with asyncio.timeout(300):
                line = await driver.stdout.readline()
            if not line:
                raise RuntimeError(f"the operator's process ended: {self._log.read_text()[-2_000:]}")
            found = json.loads(line)
            if "error" not in found:
                return Pass(**found)
            print("operator:", found["error"], flush=True)

    async def _idle(self, driver: asyncio.subprocess.Process) -> None:
        first = await self._next(driver)
        print(f"the first pass, the whole view: {first}", flush=True)
        idle: list[Pass] = []
        batches, orders = await self._batches(), self._nodes.orders.total()
        working = 0
        for _ in range(_PASSES_MAX):
            found = await self._next(driver)
            if found.steps:
                idle.clear()
                working += 1
                if working % _TOLD_EACH == 1:
                    print(f"still at work: {found} {found.first}", flush=True)
                batches, orders = await self._batches(), self._nodes.orders.total()
            else:
                idle.append(found)
            if len(idle) == _IDLE_PASSES:
                break
        print(
            f"{len(idle)} passes that find nothing to do: the median one {_median(idle)}; the longest step of the "
            f"operator's loop {_longest(idle)}; orders {self._nodes.orders.total() - orders}, catalog "
            f"batches {await self._batches() - batches:.0f}; {await self._masters_now()}",
            flush=True,
        )

    async def _lost(self, driver: asyncio.subprocess.Process) -> None:
        nodes = self._nodes
        victim = max(nodes.nodes, key=lambda n: len(n.replicas))
        held, batches, orders = set(victim.replicas), await self._batches(), nodes.orders.copy()
        before = await self._next(driver)
        await nodes.lose(victim)
        began = time.monotonic()
        passes: list[Pass] = []
        print(
            f"a node with {len(held):,} replicas is lost: {nodes.fragile():,} tablets tolerate no further loss",
            flush=True,
        )
        while nodes.fragile() and time.monotonic() - began < _TOLERANT_MAX_S:
            passes.append(await self._next(driver))
            if len(passes) % _TOLD_EACH == 0:
                print(f"{nodes.fragile():,} left: {passes[-1]} {passes[-1].first}", flush=True)
        tolerant_s = time.monotonic() - began
        print(
            f"every tablet can lose a voter again after {tolerant_s:.0f} s ({POLICY.dead_after_ms // 1000} s of them the "
            f"time-out), {nodes.fragile()} left",
            flush=True,
        )
        while nodes.without_rows() and time.monotonic() - began < _WHOLE_MAX_S:
            passes.append(await self._next(driver))
            if len(passes) % _TOLD_EACH == 0:
                print(f"{nodes.without_rows():,} without rows: {passes[-1]} {passes[-1].first}", flush=True)
        last = await self._next(driver)
        made = {what: count for what, count in (nodes.orders - orders).items() if count}
        each = ", ".join(f"{what} {count / len(held):.2f}" for what, count in made.items())
        print(
            f"every tablet has all its replicas again after {time.monotonic() - began:.0f} s, {nodes.without_rows()} left: "
            f"{len(passes)} passes, CPU {sum(p.cpu for p in passes):.1f} s, the largest {max(passes, key=lambda p: p.cpu)}; "
            f"{last.rss / 1e6:.0f} MB\n"
            f"for each replica lost: catalog batches {(await self._batches() - batches) / len(held):.2f}, {each}\n"
            f"the longest step of the operator's loop {_longest(passes)}\n"
            f"the operator writes: events {_since(last.events, before.events)}, {last.statuses - before.statuses} writes of "
            f"the cluster's status, {last.of_tables - before.of_tables} of the statuses of {last.tables} tables; "
            f"{await self._masters_now()}",
            flush=True,
        )


def _since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {what: count - before.get(what, 0) for what, count in now.items() if count > before.get(what, 0)}


def _longest(passes: list[Pass]) -> str:
    """Describe the longest step of the loop: in the median pass, and in the three passes where it was
    longest, with what ran."""
    found = sorted(passes, key=lambda p: -p.hold_ms)
    told = "; then ".join(f"{p.hold_ms:.1f} ms: {p.holds}" for p in found[:3])
    return f"{found[len(found) // 2].hold_ms:.1f} ms in the median pass; {told}"


def _median(passes: list[Pass]) -> Pass:
    return sorted(passes, key=lambda p: p.cpu)[len(passes) // 2]


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__)
    parser.add_argument("--tables", type=int, default=1_000)
    parser.add_argument("--tablets", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=20, help="simulated nodes, at most 2,000 replicas each")
    parser.add_argument("--masters", type=int, default=1, choices=(1, 3, 5))
    parser.add_argument("--directory", help="directory for the masters' catalog, on a real disk")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="stele-scale-", dir=given.directory) as directory:
        asyncio.run(Scale(Path(directory), given.tables, given.tablets, given.nodes, given.masters).run())
