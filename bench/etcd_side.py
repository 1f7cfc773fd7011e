"""Measures etcd, if it is on the path: three members on loopback with default settings, which sync.

The calls use its own gRPC API, from the same Python and with the same number of callers. Its messages are
encoded by hand: PutRequest {bytes key = 1; bytes value = 2}, TxnRequest {repeated RequestOp success = 2},
RequestOp {PutRequest request_put = 2}, RangeRequest {bytes key = 1}.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from bench.processes import Servers
from bench.report import Report, milliseconds, percentile

CALLERS = 64
TXN_ROWS = 128  # etcd's default limit of operations in a transaction
VALUE = b"x" * 92
_GET_KEYS = 64_000  # few, so that it never waits for a disk
PEER = "etcd"
KEYS = frozenset({"puts", "one", "gets", "bulk", "kill"})


class EtcdCluster:
    """Three etcd members with their data below `directory`."""

    def __init__(self, directory: Path) -> None:
        net = f"127.{random.SystemRandom().randrange(128, 192)}.1"
        self.hosts = [f"{net}.{n}" for n in (1, 2, 3)]
        self._directory = directory
        self._servers = Servers(directory)

    def start(self) -> None:
        """Start the three members."""
        members = ",".join(f"m{n}=http://{host}:2380" for n, host in enumerate(self.hosts))
        for number, host in enumerate(self.hosts):
            command = [
                *("etcd", "--name", f"m{number}"),
                *("--data-dir", str(self._directory / f"m{number}")),
                *("--listen-peer-urls", f"http://{host}:2380"),
                *("--initial-advertise-peer-urls", f"http://{host}:2380"),
                *("--listen-client-urls", f"http://{host}:2379"),
                *("--advertise-client-urls", f"http://{host}:2379"),
                *("--initial-cluster", members, "--initial-cluster-state", "new"),
                *("--log-level", "error"),
            ]
            self._servers.start(f"m{number}", command, {"ETCD_UNSUPPORTED_ARCH": "arm64"})

    def kill(self, number: int) -> None:
        """kill -9 of one member."""
        self._servers.kill(f"m{number}")

    def stop(self) -> None:
        """Stop all members."""
        self._servers.stop()


def _field(number: int, value: bytes) -> bytes:
    size, length = len(value), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + bytes(length) + value


def _put(key: bytes) -> bytes:
    return _field(1, key) + _field(2, VALUE)


def _txn(keys: list[bytes]) -> bytes:
    return b"".join(_field(2, _field(2, _put(key))) for key in keys)


async def measure(report: Report, directory: Path, keys: frozenset[str], seconds: float) -> None:
    """Puts with 64 callers and with one, transactions of 128 rows, and the leader killed once."""
    if not installed():
        report.notes.append("etcd is not on the path (Debian: etcd-server), so it is not compared.")
        return
    async with _started(directory) as (cluster, channels, puts):
        txns = [channel.unary_unary("/etcdserverpb.KV/Txn") for channel in channels]
        if "puts" in keys:
            rate, times = await _puts(puts, seconds)
            report.put_peer(PEER, "puts", f"{rate:,.0f}/s", rate)
            for key, share in (("p50", 0.5), ("p99", 0.99)):
                value = percentile(times, share)
                report.put_peer(PEER, key, milliseconds(value), value)
        if "one" in keys:
            _, times = await _for(lambda n: puts[0](_put(b"%016d" % n)), 1, seconds)
            value = percentile(times, 0.5)
            report.put_peer(PEER, "one", f"p50 {milliseconds(value)}", value)
        if "gets" in keys:
            ranges = [channel.unary_unary("/etcdserverpb.KV/Range") for channel in channels]
            for start in range(0, _GET_KEYS, TXN_ROWS):
                await txns[0](_txn([b"%016d" % n for n in range(start, start + TXN_ROWS)]))
            chosen = random.Random(0)
            rate, times = await _for(
                lambda n: ranges[n % 3](_field(1, b"%016d" % chosen.randrange(_GET_KEYS))), CALLERS, seconds
            )
            report.put_peer(PEER, "gets", f"{rate:,.0f}/s", rate)
            value = percentile(times, 0.5)
            report.put_peer(PEER, "get50", milliseconds(value), value)
        if "bulk" in keys:
            rate, _ = await _for(
                lambda n: txns[n % 3](_txn([b"%016d" % (n * TXN_ROWS + i) for i in range(TXN_ROWS)])),
                CALLERS,
                seconds,
            )
            report.put_peer(PEER, "bulk", f"{rate * TXN_ROWS:,.0f} rows/s", rate * TXN_ROWS)
        if "kill" in keys:
            found = await _fail_over(cluster, puts)
            report.put_peer(PEER, "kill", milliseconds(found), found)


def installed() -> bool:
    """Whether etcd is on the path."""
    return shutil.which("etcd") is not None


async def puts_alone(directory: Path, seconds: float) -> tuple[float, list[float]]:
    """(puts per second, the time of each) of 64 callers, in a cluster made for this."""
    async with _started(directory) as (_, _, puts):
        return await _puts(puts, seconds)


async def _puts(puts: list[Any], seconds: float) -> tuple[float, list[float]]:
    return await _for(lambda n: puts[n % 3](_put(b"%016d" % n)), CALLERS, seconds)


@asynccontextmanager
async def _started(directory: Path) -> AsyncIterator[tuple[EtcdCluster, list[Any], list[Any]]]:
    """A cluster that has taken its first write, with a channel to each member and the call Put of each."""
    cluster = EtcdCluster(directory)
    channels: list[Any] = []
    try:
        cluster.start()
        channels = [grpc.aio.insecure_channel(f"{host}:2379") for host in cluster.hosts]
        puts = [channel.unary_unary("/etcdserverpb.KV/Put") for channel in channels]
        await _first_write(puts[0])
        yield cluster, channels, puts
    finally:
        for channel in channels:
            await channel.close()
        cluster.stop()


async def _first_write(put: Any) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await put(_put(b"first"), timeout=2)
                return
            except grpc.RpcError:
                await asyncio.sleep(0.1)


async def _for(call: Any, callers: int, seconds: float) -> tuple[float, list[float]]:
    times: list[float] = []
    until = time.perf_counter() + seconds

    async def one(number: int) -> None:
        at = time.perf_counter()
        while at < until:
            await call(number)
            number += callers
            now = time.perf_counter()
            times.append(now - at)
            at = now

    started = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(callers)))
    return len(times) / (time.perf_counter() - started), times


async def _fail_over(cluster: EtcdCluster, puts: list[Any]) -> float:
    """Kill the leader, and measure the time until another member acknowledges a write. Status: leader = 4,
    header.member_id = 2."""
    leader = 0
    for number, host in enumerate(cluster.hosts):
        async with grpc.aio.insecure_channel(f"{host}:2379") as channel:
            status: Any = channel.unary_unary("/etcdserverpb.Maintenance/Status")
            raw = await status(b"")
        fields = _varints(raw)
        if fields.get((1, 2)) == fields.get((4,)):
            leader = number
    cluster.kill(leader)
    started = time.perf_counter()
    others = [put for number, put in enumerate(puts) if number != leader]
    while True:
        for put in others:
            try:
                await put(_put(b"after"), timeout=0.5)
                return time.perf_counter() - started
            except grpc.RpcError:
                await asyncio.sleep(0.005)


def _varints(raw: bytes, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    """The value of field 1 of a message, or of the first field in it."""
    found: dict[tuple[int, ...], int] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(raw):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            found[*path, number] = varint()
        else:
            size = varint()
            if number == 1 and not path:
                found.update(_varints(raw[at : at + size], (1,)))
            at += size
    return found
