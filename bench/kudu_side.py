"""Measures Apache Kudu, where KUDU_HOME names its unpacked binaries: three masters and three tablet servers on loopback.

Logs and votes are synced, which is not Kudu's default. All loads run through Kudu's own tool, a C++ client
that makes the rows itself. It prints the time of a whole load, never that of one put.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from pathlib import Path
from typing import Any

from bench import rows
from bench.processes import Servers
from bench.report import Report, milliseconds, percentile

CALLERS, SCANS = 64, 9
MASTER_PORT, SERVER_PORT = 7051, 7050
MEMBERS = (1, 2, 3)
_BULK_THREADS = 4
_PILOT_ROWS = 100
_START_S, _WELL_S, _LOAD_S, _ASK_S = 60.0, 180.0, 600.0, 30.0
KEYS = frozenset({"bulk", "puts", "one", "kill", "scan", "narrow", "rest"})
_TABLES = {
    "pilot": rows.TABLETS,
    "single": rows.TABLETS,
    "puts": rows.TABLETS,
    "bulk": rows.TABLETS,
    "kill": 1,
}
_GLOG_NOISE = re.compile(r"[IW]\d{8} ")


class KuduFailed(Exception):
    """A piece of Kudu is missing, or a step of it failed. The message says which, in one line."""


class KuduCluster:
    """Three masters and three tablet servers with their data below `directory`."""

    def __init__(self, home: Path, directory: Path) -> None:
        home = home.absolute()
        self._bin = home / "bin"
        self._directory = directory
        self._servers = Servers(directory)
        self._net = f"127.{random.SystemRandom().randrange(192, 254)}"
        self.masters = ",".join(f"{self._net}.1.{n}:{MASTER_PORT}" for n in MEMBERS)
        # The binaries bring their own libraries and SASL plugins. Without these settings they would also load
        # the system's.
        self._environment = {
            "LD_LIBRARY_PATH": str(home / "lib"),
            "SASL_PATH": os.environ.get("SASL_PATH") or str(home / "lib" / "sasl2"),
        }

    def missing(self) -> str:
        """What is missing, and what to do about it; empty if nothing is."""
        for name in ("kudu", "kudu-master", "kudu-tserver"):
            program = self._bin / name
            if not program.is_file():
                return f"{program} is not there; KUDU_HOME must name an unpacked kudu-binary"
            if not os.access(program, os.X_OK):
                return f"{program} cannot be executed; try chmod +x {self._bin}/*"
        sasl = Path(self._environment["SASL_PATH"])
        if not any(sasl.glob("libplain.so*")):
            return (
                f"{sasl} has no SASL plugin `plain`; install libsasl2-modules and set SASL_PATH to its folder"
            )
        return ""

    async def version(self) -> str:
        """The version of Kudu's command-line tool.

        Raises:
            KuduFailed: if a piece is missing.
        """
        if missing := self.missing():
            raise KuduFailed(missing)
        found = re.match(r"kudu (\S+)", await self.ask("--version"))
        return found[1] if found else "of unknown version"

    async def start(self) -> None:
        """Start three masters and three tablet servers. Wait until the masters know all tablet servers.

        Raises:
            KuduFailed: one ends, or the masters do not know the servers in time.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for number in MEMBERS:
            self._launch("kudu-master", f"master-{number}", f"{self._net}.1.{number}:{MASTER_PORT}")
            self.launch(number)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                told = json.loads(await self.ask("tserver", "list", self.masters, "--format=json"))
            except KuduFailed as exc:
                told, why = [], str(exc)
            else:
                why = f"the masters know {len(told)} of {len(MEMBERS)} tablet servers"
            if len(told) == len(MEMBERS):
                return
            if ended := self._servers.ended():
                raise KuduFailed(ended)
            if time.monotonic() > deadline:
                raise KuduFailed(f"Kudu's cluster is not up after {_START_S:.0f} s: {why}")
            await asyncio.sleep(0.5)

    def launch(self, number: int) -> None:
        """Start a tablet server, the first time or again on its data."""
        self._launch("kudu-tserver", f"server-{number}", f"{self._net}.2.{number}:{SERVER_PORT}")

    def _launch(self, program: str, name: str, address: str) -> None:
        where = self._directory / name
        logs = self._directory / f"{name}.logs"
        logs.mkdir(exist_ok=True)
        masters = "--master_addresses" if program == "kudu-master" else "--tserver_master_addrs"
        command = [
            str(self._bin / program),
            *(f"--fs_wal_dir={where}", f"--fs_data_dirs={where}", f"--log_dir={logs}"),
            *(f"--rpc_bind_addresses={address}", f"{masters}={self.masters}", "--webserver_enabled=false"),
            *("--log_force_fsync_all=true", "--cmeta_force_fsync=true"),
            # All are on one machine and share its clock, so it need not be synchronised.
            *("--unlock_unsafe_flags", "--time_source=system_unsync"),
        ]
        self._servers.start(name, command, self._environment)

    def kill(self, number: int) -> None:
        """kill -9 of one tablet server."""
        self._servers.kill(f"server-{number}")

    def stop(self) -> None:
        """Stop all servers."""
        self._servers.stop()

    def resident_bytes(self) -> int:
        """Resident memory of the largest tablet server."""
        return max(self._servers.resident_bytes(f"server-{number}") for number in MEMBERS)

    async def ask(self, *arguments: str) -> str:
        """Run the tool for a short request."""
        return await self.tool(*arguments, timeout_s=_ASK_S)

    async def tool(self, *arguments: str, timeout_s: float, check: bool = True) -> str:
        """The output of `kudu ...`.

        Raises:
            KuduFailed: if it fails (and `check`), or does not end in time.
        """
        what = f"`kudu {' '.join(arguments[:2])}`"
        process = await asyncio.create_subprocess_exec(
            str(self._bin / "kudu"),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self._environment},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate()
        except TimeoutError:
            raise KuduFailed(f"{what} had not ended after {timeout_s:.0f} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if check and process.returncode != 0:
            said = [line for line in err.decode(errors="replace").splitlines() if not _GLOG_NOISE.match(line)]
            raise KuduFailed(f"{what} ended with {process.returncode}: {(said or ['it said nothing'])[-1]}")
        return out.decode(errors="replace")

    async def create_table(self, name: str, tablets: int) -> None:
        """A table for the rows that all systems are measured with."""
        columns = [
            {"column_name": c.name, "column_type": c.type.upper(), "is_nullable": c.nullable}
            for c in rows.SCHEMA.columns
        ]
        # Kudu refuses a hash of one bucket; a range without bounds is one tablet.
        partition: dict[str, Any] = {"range_partition": {"columns": ["id"], "range_bounds": []}}
        if tablets > 1:
            partition = {"hash_partitions": [{"columns": ["id"], "num_buckets": tablets}]}
        table = {
            "table_name": name,
            "schema": {"columns": columns, "key_column_names": ["id"]},
            "partition": partition,
            "num_replicas": len(MEMBERS),
        }
        await self.tool("table", "create", self.masters, json.dumps(table), timeout_s=_START_S)

    async def load(self, table: str, threads: int, rows_per_thread: int, *flags: str) -> float:
        """The seconds that a load took, as the tool prints it: upserts of random keys, with text of the
        length of Stele's rows."""
        said = await self.tool(
            *("perf", "loadgen", self.masters, f"--table_name={table}", "--use_upsert", "--use_random_pk"),
            *(f"--string_len={rows.TEXT_BYTES}", f"--num_threads={threads}"),
            *(f"--num_rows_per_thread={rows_per_thread}", *flags),
            timeout_s=_LOAD_S,
        )
        return _number(r"time total: ([\d.]+) ms", said) / 1_000

    async def put(self, table: str, threads: int, rows_per_thread: int) -> float:
        """Load with single puts. One client has some threads; each thread has one row in flight, because its
        buffer holds only one row."""
        flags = ("--flush_per_n_rows=1", "--buffers_num=1", "--nouse_client_per_thread")
        return await self.load(table, threads, rows_per_thread, *flags)

    async def leader(self, table: str) -> int:
        """The number of the server that leads the only tablet of `table`, once all three replicas are
        healthy.

        Raises:
            KuduFailed: if they are not in time.
        """
        deadline = time.monotonic() + _WELL_S
        while True:
            said = await self.tool(
                *("cluster", "ksck", self.masters, f"--tables={table}", "--ksck_format=json_compact"),
                timeout_s=_ASK_S,
                check=False,  # the tool fails as long as anything is unhealthy, but prints all the same
            )
            for tablet in json.loads(said or "{}").get("tablet_summaries", ()):
                leaders = [r["ts_address"] for r in tablet["replicas"] if r.get("is_leader")]
                if tablet["health"] == "HEALTHY" and leaders:
                    return int(leaders[0].split(":")[0].rsplit(".", 1)[1])
            if time.monotonic() > deadline:
                raise KuduFailed(f"the tablet of table {table} is not healthy after {_WELL_S:.0f} s")
            await asyncio.sleep(0.25)


async def measure(
    report: Report, directory: Path, keys: frozenset[str], *, bulk_rows: int, seconds: float, kills: int
) -> None:
    """Measure what KEYS asks for. If that is not possible, a note in the report says why."""
    home = os.environ.get("KUDU_HOME")
    if not home:
        report.notes.append("KUDU_HOME is not set (bench/README.md tells more), so Kudu is not compared.")
        return
    cluster = KuduCluster(Path(home), directory)
    try:
        peer = f"Kudu {await cluster.version()}"
        await cluster.start()
        for table, tablets in _TABLES.items():
            await cluster.create_table(table, tablets)
        if "rest" in keys:
            await asyncio.sleep(3)
            size = cluster.resident_bytes()
            report.put_peer(peer, "rest", f"{size / 1e6:.0f} MB", size)
        if "one" in keys:
            found = await _put_for(cluster, "single", 1, seconds)
            report.put_peer(peer, "one", f"mean {milliseconds(1 / found)}")
        if "puts" in keys:
            found = await _put_for(cluster, "puts", CALLERS, seconds)
            report.put_peer(peer, "puts", f"{found:,.0f}/s", found)
        if keys & {"bulk", "scan", "narrow"}:
            found = await _bulk(cluster, bulk_rows)
            if "bulk" in keys:
                report.put_peer(peer, "bulk", f"{found:,.0f} rows/s", found)
        for key, columns in (("scan", ()), ("narrow", (f"--columns={','.join(rows.NARROW)}",))):
            if key in keys:
                found = await _scan(cluster, *columns)
                report.put_peer(peer, key, f"{found / 1e6:.1f}M rows/s", found)
        if "kill" in keys:
            times = await _fail_over(cluster, kills)
            median = percentile(times, 0.5)
            report.put_peer(peer, "kill", f"{milliseconds(median)}, {milliseconds(max(times))}", median)
        report.notes.append(
            f"{peer} is measured with its own tool, in C++. It prints no time of a single put (one caller: "
            f"the mean). Its scans end in the client's memory, not in Arrow. A fail-over ends with the end "
            f"of a process of the tool."
        )
    except (KuduFailed, OSError) as exc:
        report.notes.append(f"the measurement of Kudu failed: {exc}")
    finally:
        cluster.stop()


async def _put_for(cluster: KuduCluster, table: str, threads: int, seconds: float) -> float:
    """Puts per second, over about this long. The tool takes a number of rows, so a small load comes first to
    estimate it."""
    pilot_s = await cluster.put("pilot", threads, _PILOT_ROWS)
    count = max(_PILOT_ROWS, int(seconds / pilot_s * _PILOT_ROWS))
    return threads * count / await cluster.put(table, threads, count)


async def _bulk(cluster: KuduCluster, count: int) -> float:
    """Rows per second with the tool's own buffers, two of 4 MiB a thread; more and larger ones were no faster."""
    each = count // _BULK_THREADS
    return each * _BULK_THREADS / await cluster.load("bulk", _BULK_THREADS, each)


async def _scan(cluster: KuduCluster, *flags: str) -> float:
    """Rows per second, the median of nine scans after one that is not counted, with a thread for each tablet."""
    rates = []
    for _ in range(1 + SCANS):
        said = await cluster.tool(
            *("perf", "table_scan", cluster.masters, "bulk", f"--num_threads={rows.TABLETS}", *flags),
            timeout_s=_LOAD_S,
        )
        rates.append(_number(r"Total count (\d+)", said) / _number(r"cost ([\d.]+) seconds", said))
    return percentile(rates[1:], 0.5)


async def _fail_over(cluster: KuduCluster, times: int) -> list[float]:
    """Measure the time from kill -9 of the server that leads a tablet until a load of one row to that tablet
    has ended."""
    found = []
    await cluster.put("kill", 1, 1)
    for _ in range(times):
        victim = await cluster.leader("kill")
        cluster.kill(victim)
        started = time.perf_counter()
        await cluster.put("kill", 1, 1)
        found.append(time.perf_counter() - started)
        cluster.launch(victim)
    return found


def _number(pattern: str, said: str) -> float:
    found = re.search(pattern, said)
    if found is None:
        raise KuduFailed(f"the output of Kudu's tool has no {pattern!r}; it ends with {said[-300:]!r}")
    return float(found[1])
