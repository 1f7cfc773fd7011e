"""`python -m bench [--quick] [--only KEY,...]`: starts a cluster on loopback with real syncs, prints the table.

Writes nothing but the table (and, below a temporary directory that it removes, what the clusters write).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

import uvloop

from bench import etcd_side, rows, stele_side
from bench.report import Report
from stele.client import AsyncClient
from tests.harness import Cluster

BULK_ROWS, COPY_ROWS, SECONDS, KILLS = 4_000_000, 3_000_000, 5.0, 20
_LEAST_DISK_BYTES = 8 << 30


def announced() -> Report:
    """The measures, as the plan of the project names them."""
    report = Report()
    report.add("bulk", "bulk load, RF 3, rows of 100 bytes in blocks of 8,192", "300k rows/s", "1M rows/s")
    report.add("puts", "puts with 64 callers on 8 tablets", "15k/s", "40k/s")
    report.add("p50", "... p50", "", "1.6 ms", rate=False)
    report.add("p99", "... p99", "", "4 ms", rate=False)
    report.add("one", "one caller", "p50 1.5 ms", "p50 0.75 ms", rate=False)
    report.add("kill", "kill -9 of a leader to the next write: median, worst", "0.6 s", "0.25 s", rate=False)
    report.add("copy", "tablet copy", "200 MB/s", "380 MB/s")
    report.add("scan", "scan to Arrow, all columns", "5M rows/s", "15M rows/s")
    report.add("narrow", "scan to Arrow, two narrow columns", "10M rows/s", "40M rows/s")
    report.add("rest", "a node at rest", "150 MB", "120 MB", rate=False)
    return report


async def run(directory: Path, report: Report, only: set[str], *, quick: bool) -> None:
    """Measure what is asked for, the harmless first."""
    divisor = 10 if quick else 1
    seconds, kills = SECONDS / (5 if quick else 1), KILLS // (5 if quick else 1)

    def wanted(*keys: str) -> bool:
        return not only or not only.isdisjoint(keys)

    async with (
        Cluster(directory / "stele", masters=1, nodes=4) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=60) as client,
    ):
        table = await client.create_table("bench", rows.SCHEMA, rows.PARTITIONING)
        if wanted("rest"):
            await stele_side.at_rest(report, cluster)
        if wanted("one"):
            await stele_side.one_caller(report, table, seconds)
        if wanted("puts", "p50", "p99"):
            await stele_side.many_callers(report, table, seconds)
        if wanted("bulk", "scan", "narrow"):
            await stele_side.bulk(report, table, BULK_ROWS // divisor)
        if wanted("scan", "narrow"):
            await stele_side.scans(report, table)
        if wanted("copy"):
            whole = await client.create_table("whole", rows.SCHEMA, rows.ONE_TABLET)
            await whole.write_arrow(rows.batches(COPY_ROWS // divisor, 65_536), timeout_s=120)
            await stele_side.copy(report, client, whole, cluster)
            await client.delete_table("whole")
        if wanted("kill"):
            await stele_side.fail_over(report, table, cluster, kills)
    await etcd_side.measure(report, directory / "etcd", seconds)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, a fifth of the time")
    parser.add_argument("--only", default="", help="measures by key, for example puts,kill")
    parser.add_argument(
        "--directory", default=None, help="where the clusters keep their data; on a real disk"
    )
    arguments = parser.parse_args()
    only = {key for key in arguments.only.split(",") if key}
    report = announced()
    if only - set(report.measures):
        parser.error(
            f"unknown measures {sorted(only - set(report.measures))}; there are {list(report.measures)}"
        )
    directory = Path(tempfile.mkdtemp(prefix="stele-bench-", dir=arguments.directory))
    try:
        if shutil.disk_usage(directory).free < _LEAST_DISK_BYTES:
            sys.exit(f"{directory} has less than 8 GiB free; name another place with --directory")
        print(
            f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}, ", end=""
        )
        print(f"Python {platform.python_version()}; data in {directory.parent}", flush=True)
        uvloop.run(run(directory, report, only, quick=arguments.quick))
        for key in report.measures:
            if only and {"p50": "puts", "p99": "puts"}.get(key, key) not in only:
                report.measures[key].result = "not asked for"
        print(report.table())
        if shutil.which("etcd") is None:
            print("etcd is not on the path (Debian: etcd-server), so there is no peer to compare with")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
