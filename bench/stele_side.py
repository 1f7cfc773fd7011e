"""Measures a Stele cluster: one master and three nodes on loopback, three replicas, every log synced.

Called by __main__; each function measures one thing and adds it to the report.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from bench import rows
from bench.processes import own_and_mapped
from bench.report import Report, milliseconds, percentile
from stele.client import AsyncClient, AsyncTable
from stele.model.block import RowOp
from stele.model.errors import SteleError
from stele.model.partition import assign
from stele.model.rows import batch_from_rows
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import consensus_pb2, tserver_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from stele.rpc.proto.tserver_pb2_grpc import TabletServerAdminServiceStub
from tests.harness import Cluster

CALLERS = 64
_STRANGER_REPLICA = 1_000_000  # an id that no configuration has: the copy is made only to be timed
_COPY_TIMEOUT_S = 120.0
_WARM_UP, SCANS = 10, 9
_MANY = 10_000


async def at_rest(cluster: Cluster) -> tuple[int, int]:
    """Return the memory of the largest node some seconds after its start, with an empty table: (resident
    bytes, the bytes of these that are its own)."""
    await asyncio.sleep(3)
    found = [own_and_mapped(node.process.pid) for node in cluster.nodes if node.process is not None]
    return max((own + mapped, own) for own, mapped in found)


async def one_caller(report: Report, table: AsyncTable, seconds: float) -> None:
    """Measure puts of one caller, one at a time, once the tablets have leaders and connections are open."""
    await put_for(table.put, 1, min(1.0, seconds), first=1 << 39)
    _, times = await put_for(table.put, 1, seconds, first=1 << 40)
    report.put("one", f"p50 {milliseconds(percentile(times, 0.5))}", percentile(times, 0.5))


async def many_callers(report: Report, table: AsyncTable, seconds: float) -> None:
    """Measure 64 callers, each with one put at a time."""
    await put_for(table.put, CALLERS, min(1.0, seconds), first=1 << 41)
    rate, times = await put_for(table.put, CALLERS, seconds, first=1 << 42)
    report.put("puts", f"{rate:,.0f}/s", rate)
    report.put("p50", milliseconds(percentile(times, 0.5)), percentile(times, 0.5))
    report.put("p99", milliseconds(percentile(times, 0.99)), percentile(times, 0.99))


async def put_for(
    put: Callable[[dict[str, object]], Awaitable[object]], callers: int, seconds: float, first: int
) -> tuple[float, list[float]]:
    """Put with this many callers, each with one put at a time, for `seconds`. Returns (puts per second, the
    seconds that each put took)."""
    times: list[float] = []
    until = time.perf_counter() + seconds

    async def call(number: int) -> None:
        at = time.perf_counter()
        while at < until:
            await put(rows.row(number))
            number += callers
            now = time.perf_counter()
            times.append(now - at)
            at = now

    started = time.perf_counter()
    await asyncio.gather(*(call(first + number) for number in range(callers)))
    return len(times) / (time.perf_counter() - started), times


async def bulk(report: Report, table: AsyncTable, count: int) -> None:
    """Measure a load of Arrow batches, in blocks of 8,192 rows."""
    batches = rows.batches(count, 65_536)
    started = time.perf_counter()
    result = await table.write_arrow(batches, timeout_s=120)
    seconds = time.perf_counter() - started
    report.put("bulk", f"{result.rows_written / seconds:,.0f} rows/s", result.rows_written / seconds)


async def scans(report: Report, table: AsyncTable) -> None:
    """Measure scans of each kind: the median of nine, after one that is not counted. A merge right after the
    load slows single scans down."""
    for key, columns in (("scan", None), ("narrow", rows.NARROW)):
        await table.scan(columns).to_table()
        rates = []
        for _ in range(SCANS):
            started = time.perf_counter()
            found = await table.scan(columns).to_table()
            rates.append(found.num_rows / (time.perf_counter() - started))
        rate = percentile(rates, 0.5)
        report.put(key, f"{rate / 1e6:.1f}M rows/s", rate)


async def gets(report: Report, table: AsyncTable, seconds: float, rows_there: int) -> None:
    """Measure 64 callers, each with one get of a random row at a time."""
    await get_for(table, CALLERS, min(1.0, seconds), rows_there)
    rate, times = await get_for(table, CALLERS, seconds, rows_there)
    report.put("gets", f"{rate:,.0f}/s", rate)
    report.put("get50", milliseconds(percentile(times, 0.5)), percentile(times, 0.5))


async def get_for(
    table: AsyncTable, callers: int, seconds: float, rows_there: int
) -> tuple[float, list[float]]:
    """(gets per second, the time of each) of random rows, with this many callers for this long."""
    times: list[float] = []
    until = time.perf_counter() + seconds

    async def call(seed: int) -> None:
        chosen = random.Random(seed)
        at = time.perf_counter()
        while at < until:
            key = chosen.randrange(rows_there)
            row = await table.get(key)
            assert row is not None and row["id"] == key
            now = time.perf_counter()
            times.append(now - at)
            at = now

    started = time.perf_counter()
    await asyncio.gather(*(call(number) for number in range(callers)))
    return len(times) / (time.perf_counter() - started), times


async def many(report: Report, table: AsyncTable, times: int, rows_there: int) -> None:
    """Measure calls of `get_many`, after one that is not counted."""
    chosen, started, count = random.Random(0), 0.0, 0
    for number in range(times + 1):
        if number == 1:
            started = time.perf_counter()
        keys = [chosen.randrange(rows_there) for _ in range(_MANY)]
        found = await table.get_many(keys)
        assert [row and row["id"] for row in found] == keys
        count += _MANY if number else 0
    rate = count / (time.perf_counter() - started)
    report.put("many", f"{rate:,.0f} keys/s", rate)


async def few(report: Report, table: AsyncTable, times: int, rows_there: int) -> None:
    """Measure scans of two rows each, after some that are not counted. Without key ranges each scan would
    read the whole table."""
    await _repeated(report, table, "few", times, rows_there, lambda first: ("id", first, first + 2), 2)


async def some(report: Report, table: AsyncTable, times: int, rows_there: int) -> None:
    """Measure scans of 1,000 rows each, by a column whose value is half the id. Without bounds of groups each
    scan would read the whole table."""
    await _repeated(
        report,
        table,
        "some",
        times,
        rows_there,
        lambda first: ("amount", first * 0.5, first * 0.5 + 500),
        1_000,
    )


async def _repeated(
    report: Report,
    table: AsyncTable,
    key: str,
    times: int,
    rows_there: int,
    between: Callable[[int], tuple[str, float, float]],
    expected: int,
) -> None:
    """Scan several times for `expected` rows, each time from another id `first` on. Reports the median and
    the worst time. `between(first)`: the column to compare, and the bounds that select these rows."""
    found = []
    for number in range(times + _WARM_UP):
        first = number * ((rows_there - expected) // (times + _WARM_UP))
        column, low, high = between(first)
        started = time.perf_counter()
        rows_found = await table.scan(predicates=[(column, ">=", low), (column, "<", high)]).to_table()
        found.append(time.perf_counter() - started)
        if rows_found.num_rows != expected:
            report.put(key, f"failed: {rows_found.num_rows} rows from id {first} on, instead of {expected}")
            return
    median, worst = percentile(found[_WARM_UP:], 0.5), max(found[_WARM_UP:])
    report.put(key, f"{milliseconds(median)}, {milliseconds(worst)}", median)


async def copy(report: Report, client: AsyncClient, table: AsyncTable, cluster: Cluster) -> None:
    """Measure the time to copy one flushed tablet to the node that has none of it, and does not know the
    table yet."""
    (place,) = table.locations.by_ordinal([0])
    leader = place.target()
    tablet_id = id_to_pb(place.tablet_id)
    await client.pool.unary(
        leader.address,
        TabletServerAdminServiceStub,
        "FlushTablet",
        tserver_pb2.FlushTabletRequest(tablet_id=tablet_id),
        timeout_s=60,
    )
    holders = {replica.node_id for replica in place.replicas}
    (target,) = (node for node in cluster.nodes if node.node_id not in holders)
    request = consensus_pb2.StartTabletCopyRequest(
        tablet_id=tablet_id,
        replica_id=_STRANGER_REPLICA,
        source_node=id_to_pb(leader.node_id),
        source_address=leader.address,
        table_id=id_to_pb(table.locations.table_id),
    )
    started = time.perf_counter()
    while True:
        answer = await client.pool.unary(target.address, ConsensusServiceStub, "StartTabletCopy", request)
        progress = answer.progress
        seconds = time.perf_counter() - started
        if progress.state == "Done":
            break
        if progress.state == "Failed" or seconds > _COPY_TIMEOUT_S:
            report.put("copy", f"failed: {progress.error or progress.state}")
            return
        await asyncio.sleep(0.01)
    rate = progress.bytes_total / seconds
    report.put("copy", f"{rate / 1e6:,.0f} MB/s ({progress.bytes_total / 1e6:.0f} MB)", rate)


async def fail_over(report: Report, table: AsyncTable, cluster: Cluster, times: int) -> None:
    """Measure the time from kill -9 of a tablet's leader until the next write to that tablet is acknowledged."""
    found: list[float] = []
    for number in range(times):
        ordinal = number % len(table.locations.tablets)
        (place,) = table.locations.by_ordinal([ordinal])
        row = _row_of(table, ordinal, (1 << 50) + number * 10_000)
        await table.put(row)
        victim = cluster.member(place.target().node_id)
        cluster.kill(victim)
        started = time.perf_counter()
        await table.put(row)
        found.append(time.perf_counter() - started)
        cluster.restart(victim)
        await cluster.wait_ready(victim)
        await _settle(table)
    median, worst = percentile(found, 0.5), max(found)
    report.put("kill", f"{milliseconds(median)}, {milliseconds(worst)}", median)


def _row_of(table: AsyncTable, ordinal: int, first: int) -> dict[str, object]:
    """A row that belongs to this tablet."""
    wanted = [rows.row(first + n) for n in range(64 * rows.TABLETS)]
    batch, _, _, _ = batch_from_rows(wanted, table.schema, RowOp.UPSERT)
    ordinals: list[int] = assign(batch, table.schema, table.partition_schema).tolist()
    return wanted[ordinals.index(ordinal)]


async def _settle(table: AsyncTable) -> None:
    """Wait until the tablet could lose its next leader as well: all its replicas have caught up."""
    await asyncio.sleep(1.5)
    try:
        await table.locations.refresh()
    except SteleError:
        await asyncio.sleep(1.0)
