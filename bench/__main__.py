"""`python -m bench [--quick] [--only KEY,...]`: starts clusters on loopback with real syncs, prints the table.

Writes nothing but the table (and, below a temporary directory that it removes, what the clusters write).
Stele comes first, then each other system that is installed, one at a time. However it ends, no process of any
of them is left.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import uvloop

from bench import etcd_side, idle, kudu_side, large, machine, operator_side, rows, scale, stele_side, tablets
from bench.measures import KEYS, announced, chosen
from bench.report import Report
from stele.client import AsyncClient
from tests.harness import Cluster

BULK_ROWS, COPY_ROWS, SECONDS, KILLS, KUDU_KILLS = 4_000_000, 3_000_000, 5.0, 20, 5
FEW_SCANS = 200
MANY_CALLS = 10
_LEAST_DISK_BYTES = 8 << 30


class Bench:
    """The parameters of a run: amounts, times and places."""

    def __init__(
        self, directory: Path, report: Report, keys: frozenset[str], *, quick: bool, lease_ms: int
    ) -> None:
        self._directory = directory
        self._arguments = (f"--leader-lease-ms={lease_ms}",)
        self._report = report
        self._keys = keys
        self._row_divisor, self._divisor = (10, 5) if quick else (1, 1)
        self._seconds = SECONDS / self._divisor
        self._node_bytes = (0, 0)

    def run(self) -> None:
        """Run all chosen measures."""
        uvloop.run(self._stele())
        if "rest" in self._keys:
            self._at_rest()
        if self._keys & etcd_side.KEYS:
            uvloop.run(self._etcd())
        if self._keys & kudu_side.KEYS:
            asyncio.run(
                self._kudu()
            )  # it starts processes; with the variable unset, libuv would run gRPC's fork handlers

    async def _stele(self) -> None:
        """Run the measures, those without kills first."""
        report, keys = self._report, self._keys
        async with (
            Cluster(
                self._directory / "stele", masters=1, nodes=3, anew=True, arguments=self._arguments
            ) as cluster,
            AsyncClient(cluster.master_addresses, timeout_s=60) as client,
        ):
            table = await client.create_table("bench", rows.SCHEMA, rows.PARTITIONING)
            if "rest" in keys:
                self._node_bytes = await stele_side.at_rest(cluster)
            if "one" in keys:
                await stele_side.one_caller(report, table, self._seconds)
            if "puts" in keys:
                await stele_side.many_callers(report, table, self._seconds)
            count = BULK_ROWS // self._row_divisor
            if keys & {"bulk", "scan", "narrow", "few", "some", "gets", "many"}:
                await stele_side.bulk(report, table, count)
            if keys & {"scan", "narrow"}:
                await stele_side.scans(report, table)
            if "few" in keys:
                await stele_side.few(report, table, FEW_SCANS // self._divisor, count)
            if "some" in keys:
                await stele_side.some(report, table, FEW_SCANS // self._divisor, count)
            if "gets" in keys:
                await stele_side.gets(report, table, self._seconds, count)
            if "many" in keys:
                await stele_side.many(report, table, MANY_CALLS // self._divisor, count)
            if "copy" in keys:
                whole = await client.create_table("whole", rows.SCHEMA, rows.ONE_TABLET)
                await whole.write_arrow(rows.batches(COPY_ROWS // self._row_divisor, 65_536), timeout_s=120)
                await cluster.wait_ready(cluster.add_node())
                await stele_side.copy(report, client, whole, cluster)
                await client.delete_table("whole")
            if "kill" in keys:
                await stele_side.fail_over(report, table, cluster, KILLS // self._divisor)
        shutil.rmtree(self._directory / "stele", ignore_errors=True)

    def _at_rest(self) -> None:
        try:
            operator = f"{operator_side.at_rest(self._directory / 'local') / 1e6:.0f} MB"
        except RuntimeError as exc:
            operator = "not measured"
            self._report.notes.append(f"The operator was not measured: {exc}")
        resident, own = self._node_bytes
        shown = f"{resident / 1e6:.0f} MB ({own / 1e6:.0f} MB of it its own); {operator}"
        self._report.put("rest", shown, resident)
        shutil.rmtree(self._directory / "local", ignore_errors=True)

    async def _etcd(self) -> None:
        await etcd_side.measure(self._report, self._directory / "etcd", self._keys, self._seconds)
        shutil.rmtree(self._directory / "etcd", ignore_errors=True)

    async def _kudu(self) -> None:
        await kudu_side.measure(
            self._report,
            self._directory / "kudu",
            self._keys,
            bulk_rows=BULK_ROWS // self._row_divisor,
            seconds=self._seconds,
            kills=KUDU_KILLS // self._divisor,
        )


def _arguments() -> argparse.Namespace:
    keys = "\n".join(f"  {key:<8}{how}" for key, how in KEYS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure the speed and size of Stele on loopback with real syncs, and print a table.\n"
        "Also measures etcd if it is on the path, and Apache Kudu if KUDU_HOME names its unpacked binaries.",
        epilog=f"keys of --only:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="use a tenth of the rows and a fifth of the time; the figures are no measurement",
    )
    parser.add_argument(
        "--only", default="", metavar="KEY,...", help="run only these measures, for example puts,kill"
    )
    parser.add_argument("--directory", help="directory for the clusters' data, on a real disk")
    parser.add_argument(
        "--leader-lease-ms",
        type=int,
        default=0,
        help="start Stele's nodes with leases of leaders of this length, for example 300",
    )
    return parser.parse_args()


def _refuse(why: str) -> NoReturn:
    print(f"python -m bench: {why}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Run the command. Exit status: 0 with a table, 2 on a bad argument, 130 on Ctrl-C or SIGTERM."""
    if sys.argv[1:2] == ["scale"]:
        scale.main(sys.argv[2:])
        return
    if sys.argv[1:2] == ["tablets"]:
        tablets.main(sys.argv[2:])
        return
    if sys.argv[1:2] == ["large"]:
        large.main(sys.argv[2:])
        return
    if sys.argv[1:2] == ["idle"]:
        idle.main(sys.argv[2:])
        return
    arguments = _arguments()
    try:
        keys = chosen(arguments.only)
        directory = Path(tempfile.mkdtemp(prefix="stele-bench-", dir=arguments.directory))
    except ValueError as exc:
        _refuse(str(exc))
    except OSError as exc:
        _refuse(f"--directory {arguments.directory}: {exc.strerror}; name a directory that can be written to")
    # Also if a script started it in the background, where SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    report = announced(quick=arguments.quick)
    try:
        if shutil.disk_usage(directory).free < _LEAST_DISK_BYTES:
            sys.exit(f"{directory} has less than 8 GiB free; choose another with --directory")
        print(f"{machine.described()}; data in {directory.parent}", flush=True)
        print(machine.speed(directory), flush=True)
        Bench(directory, report, keys, quick=arguments.quick, lease_ms=arguments.leader_lease_ms).run()
        report.leave_out(keys)
        print(report.table())
    except KeyboardInterrupt:
        print("interrupted; everything is stopped", file=sys.stderr)
        sys.exit(130)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
