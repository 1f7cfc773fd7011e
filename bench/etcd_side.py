"""Measures etcd, where it is on the path: three members on loopback with their default settings, which sync.

Asked through its own gRPC API from the same Python and with the same number of callers. Its messages are encoded by
hand: PutRequest {bytes key = 1; bytes value = 2}, TxnRequest {repeated RequestOp success = 2}, RequestOp {PutRequest
request_put = 2}.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc

from bench.report import Report, milliseconds, percentile

CALLERS = 64
TXN_ROWS = 128  # etcd's default limit of operations in a transaction
VALUE = b"x" * 92
_LAUNCH = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


class EtcdCluster:
    """Three members below `directory`."""

    def __init__(self, directory: Path) -> None:
        net = f"127.{random.SystemRandom().randrange(128, 192)}.1"
        self.hosts = [f"{net}.{n}" for n in (1, 2, 3)]
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all three."""
        self._directory.mkdir(parents=True, exist_ok=True)
        members = ",".join(f"m{n}=http://{host}:2380" for n, host in enumerate(self.hosts))
        for number, host in enumerate(self.hosts):
            with (self._directory / f"m{number}.log").open("wb") as out:
                self._processes.append(
                    subprocess.Popen(
                        [
                            *(sys.executable, "-c", _LAUNCH, "etcd", "--name", f"m{number}"),
                            *("--data-dir", str(self._directory / f"m{number}")),
                            *("--listen-peer-urls", f"http://{host}:2380"),
                            *("--initial-advertise-peer-urls", f"http://{host}:2380"),
                            *("--listen-client-urls", f"http://{host}:2379"),
                            *("--advertise-client-urls", f"http://{host}:2379"),
                            *("--initial-cluster", members, "--initial-cluster-state", "new"),
                            *("--log-level", "error"),
                        ],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
                    )
                )

    def kill(self, number: int) -> None:
        """kill -9 of one member."""
        self._processes[number].kill()
        self._processes[number].wait()

    def stop(self) -> None:
        """End all."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


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


async def measure(report: Report, directory: Path, seconds: float) -> None:
    """Puts with 64 callers and with one, transactions of 128 rows, and the leader killed once."""
    if shutil.which("etcd") is None:
        return
    cluster = EtcdCluster(directory)
    channels: list[Any] = []
    try:
        cluster.start()
        channels = [grpc.aio.insecure_channel(f"{host}:2379") for host in cluster.hosts]
        puts = [channel.unary_unary("/etcdserverpb.KV/Put") for channel in channels]
        txns = [channel.unary_unary("/etcdserverpb.KV/Txn") for channel in channels]
        await _first_write(puts[0])
        rate, times = await _for(lambda n: puts[n % 3](_put(b"%016d" % n)), CALLERS, seconds)
        report.put_etcd("puts", f"{rate:,.0f}/s", rate)
        report.put_etcd("p50", milliseconds(percentile(times, 0.5)), percentile(times, 0.5))
        report.put_etcd("p99", milliseconds(percentile(times, 0.99)), percentile(times, 0.99))
        _, times = await _for(lambda n: puts[0](_put(b"%016d" % n)), 1, seconds)
        report.put_etcd("one", f"p50 {milliseconds(percentile(times, 0.5))}", percentile(times, 0.5))
        rate, _ = await _for(
            lambda n: txns[n % 3](_txn([b"%016d" % (n * TXN_ROWS + i) for i in range(TXN_ROWS)])),
            CALLERS,
            seconds,
        )
        report.put_etcd("bulk", f"{rate * TXN_ROWS:,.0f} rows/s", rate * TXN_ROWS)
        found = await _fail_over(cluster, puts)
        report.put_etcd("kill", milliseconds(found), found)
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
    """Kill the leader; the time until one of the others acknowledges a write. Status: leader = 4, header.member_id = 2."""
    leader = 0
    for number, host in enumerate(cluster.hosts):
        async with grpc.aio.insecure_channel(f"{host}:2379") as channel:
            raw = await channel.unary_unary("/etcdserverpb.Maintenance/Status")(b"")
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
    """The numbers of a message and of its first field, which is one, by their place."""
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
