"""`python -m bench.spark [--rows N] [--rounds N] [--only KEY,...]`: Spark over Stele beside Spark over Parquet.

Starts one master and three nodes on loopback with every log synced, and a Spark with two cores. Prints the machine, the
command and a table; progress goes to standard error. However it ends, no process of it is left, and no file.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from bench import machine
from bench.spark import measures
from bench.spark.processor import Processor
from bench.spark.turns import Turns, to_stderr
from stele.client import Client
from stele_spark.session import session
from tests.harness.processes import Cluster
from tests.harness.standing import running

ROWS, ROUNDS, CORES = 1_000_000, 5, 2
_ROWS_LEAST = 1_000
_NOTES = (
    "Each cell: rows per second of the median run, then processor time for each row, of all processes, and in brackets of "
    "masters and nodes. Figures of one run can be compared, those of two runs cannot.",
    "A query begins with a frame that is loaded already; it includes planning. The fewer rows, the more that counts.",
)


def _arguments(given: list[str] | None) -> argparse.Namespace:
    keys = "\n".join(f"  {key:<12}{how}" for key, how in measures.KEYS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench.spark",
        description="Measure Spark over Stele, by turns with Spark over its own Parquet of the same rows.",
        epilog=f"keys of --only:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows of 100 bytes (default: {ROWS:,})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"runs of each (default: {ROUNDS})")
    parser.add_argument(
        "--only", default="", metavar="KEY,...", help="take only these measures, for example count,load"
    )
    parser.add_argument("--directory", help="directory for all data, on a real disk")
    arguments = parser.parse_args(given)
    if arguments.rows < _ROWS_LEAST:
        parser.error(f"--rows {arguments.rows}: expected {_ROWS_LEAST:,} or more")
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: expected 1 or more")
    try:
        arguments.keys = measures.chosen(arguments.only)
    except ValueError as exc:
        parser.error(str(exc))
    return arguments


def _run(folder: Path, arguments: argparse.Namespace) -> str:
    """All measures; the table."""
    report = measures.announced()
    report.notes.extend(_NOTES)
    with running(Cluster(folder / "stele", masters=1, nodes=3, anew=True)) as cluster:
        members = [m.process.pid for m in cluster.members if m.process is not None]
        turns = Turns(Processor(lambda: members), arguments.rounds, to_stderr)
        masters = ",".join(cluster.master_addresses)
        spark = session("stele-bench", cores=CORES, spark__sql__warehouse__dir=str(folder / "warehouse"))
        try:
            spark.sparkContext.setLogLevel("ERROR")
            with Client(masters, timeout_s=60) as client:
                setting = measures.Setting(spark, client, masters, folder, arguments.rows, turns, report)
                measures.run(setting, arguments.keys)
        finally:
            spark.stop()
    return report.table()


def main(given: list[str] | None = None) -> None:
    """Run the command. Exit status: 0 with a table, 2 on a bad argument, 130 on Ctrl-C or SIGTERM."""
    arguments = _arguments(given)
    try:
        folder = Path(tempfile.mkdtemp(prefix="stele-bench-spark-", dir=arguments.directory))
    except OSError as exc:
        print(f"python -m bench.spark: --directory {arguments.directory}: {exc.strerror}", file=sys.stderr)
        sys.exit(2)
    # Also if a script started it in the background, where SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        print(f"{machine.described()}; data in {folder.parent}", flush=True)
        print(machine.speed(folder), flush=True)
        words = sys.argv[1:] if given is None else given
        print(f"repeat: {shlex.join(['python', '-m', 'bench.spark', *words])}", flush=True)
        print(f"{arguments.rows:,} rows, {arguments.rounds} rounds, local[{CORES}]\n", flush=True)
        print(_run(folder, arguments))
    except KeyboardInterrupt:
        print("interrupted; everything is stopped", file=sys.stderr)
        sys.exit(130)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
