"""The demo's programs: load, stream, health, verify, spark. Each prints one JSON object as its last line of output.

They speak to the masters they are given and to nothing of Kubernetes, so that they run beside the demo or in a Job.

Invariant: a row counts as acknowledged only after the cluster said so; checksums are made from such rows alone.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

import stele
from examples.demo import flights

_STREAM_CALLERS = 16
_STREAM_CHUNK = 400
_STAGE_TOLD_EVERY_S = 5.0


@click.group()
def main() -> None:
    """Programs of the demo."""


def _masters(function: Any) -> Any:
    return click.option("--masters", required=True, help="host:port of the masters, separated by commas.")(
        function
    )


def _result(**values: Any) -> None:
    print(json.dumps(values), flush=True)


@main.command()
@_masters
@click.option("--table", "name", default="flights", show_default=True)
def load(masters: str, name: str) -> None:
    """Load the flights, with a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with stele.connect(masters) as client:
        table = client.open_table(name)
        rows = flights.load(table.arrow_schema)
        console = Console(stderr=True)
        tell = _Teller(rows.num_rows) if not console.is_terminal else None
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=tell is not None) as progress:
            task = progress.add_task("rows acknowledged", total=rows.num_rows)
            started = time.monotonic()
            show = tell or (lambda count: progress.update(task, advance=count))
            written = table.write_arrow(rows, on_rows=show)
            seconds = time.monotonic() - started
        _result(
            rows=written.rows_written,
            seconds=round(seconds, 3),
            rows_per_s=round(written.rows_written / seconds),
            checksum=flights.checksum(rows),
            timestamp=written.timestamp,
        )


class _Teller:
    """A line a second, where there is no terminal for a bar."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._told = time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._told >= 1:
            self._told = time.monotonic()
            print(f"load: {self._done:,} of {self._total:,} rows acknowledged", file=sys.stderr, flush=True)


@main.command()
@_masters
@click.option("--lost", required=True, help="Name of the machine that is gone.")
def health(masters: str, lost: str) -> None:
    """Ask the masters until every tablet has all its voters, on machines other than the lost one."""
    from examples.demo.health import Checker

    told: list[str] = []
    with Checker(lambda: masters) as checker:
        while not checker.healed(lost):
            if checker.faults != told:
                told = list(checker.faults)
                print(
                    f"health: {len(told)} faults, such as: {told[0]}" if told else "health: none", flush=True
                )
            time.sleep(0.3)
        _result(healed=checker.summary())


@main.command()
@_masters
@click.option("--table", "name", default="flights", show_default=True)
@click.option("--rows-per-s", default=400, show_default=True, type=click.IntRange(1), help="At most so many.")
def stream(masters: str, name: str, rows_per_s: int) -> None:
    """Write made-up rows one by one, many callers at once, until SIGTERM; every one is acknowledged in the end."""
    asyncio.run(_stream(masters, name, rows_per_s))


async def _stream(masters: str, name: str, rows_per_s: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with stele.connect_async(masters) as client:
        writer = _StreamWriter(await client.open_table(name), stop, rows_per_s)
        await writer.run()
    acknowledged = flights.stream_rows(0, writer.rows, writer.schema)
    waits = writer.waits_ms or [0.0]
    _result(
        rows=writer.rows,
        checksum=flights.checksum(acknowledged),
        longest_wait_ms=round(max(waits)),
        median_ms=round(statistics.median(waits), 2),
        timestamp=writer.timestamp,
    )


class _StreamWriter:
    """Hands row numbers to its callers in order; when it ends, all numbers below `rows` are acknowledged."""

    def __init__(self, table: stele.AsyncTable, stop: asyncio.Event, rows_per_s: int) -> None:
        self._table = table
        self._rows_per_s = rows_per_s
        self._stop = stop
        self._pending: list[dict[str, Any]] = []
        self._started = time.monotonic()
        self.schema = table.arrow_schema
        self.rows = 0
        self.timestamp = 0
        self.waits_ms: list[float] = []

    async def run(self) -> None:
        """Until told to stop; what is under way is finished first."""
        teller = asyncio.create_task(self._tell())
        await asyncio.gather(*(self._caller() for _ in range(_STREAM_CALLERS)))
        teller.cancel()

    async def _caller(self) -> None:
        while not self._stop.is_set():
            ahead = self.rows / self._rows_per_s - (time.monotonic() - self._started)
            if ahead > 0:
                await asyncio.sleep(ahead)
                continue
            await self._write(self._next_row())

    def _next_row(self) -> dict[str, Any]:
        if not self._pending:
            chunk = flights.stream_rows(self.rows, _STREAM_CHUNK, self.schema)
            self._pending = list(reversed(chunk.to_pylist()))
        self.rows += 1
        return self._pending.pop()

    async def _write(self, row: dict[str, Any]) -> None:
        """Until acknowledged. An upsert of the same row may be tried again whatever became of the first."""
        started = time.monotonic()
        while True:
            try:
                self.timestamp = max(self.timestamp, await self._table.put(row))
                break
            except stele.Retryable as exc:
                print(f"stream: trying again: {exc}", file=sys.stderr, flush=True)
                await asyncio.sleep(0.05)
        self.waits_ms.append((time.monotonic() - started) * 1000)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(1)
            longest = max(self.waits_ms, default=0.0)
            print(
                f"stream: {len(self.waits_ms)} rows acknowledged, longest wait {longest:.0f} ms", flush=True
            )


@main.command()
@_masters
@click.option("--table", "name", default="flights", show_default=True)
@click.option("--at-least", default=0, help="A hybrid time: the snapshot is not below it.")
def verify(masters: str, name: str, at_least: int) -> None:
    """Read everything back at one snapshot; count and checksum."""
    with stele.connect(masters) as client:
        client.observe(at_least)
        table = client.open_table(name)
        snapshot = client.now()
        started = time.monotonic()
        rows = table.scan(snapshot=snapshot).to_table()
        seconds = time.monotonic() - started
        _result(
            rows=rows.num_rows,
            checksum=flights.checksum(rows),
            snapshot=snapshot,
            seconds=round(seconds, 3),
            rows_per_s=round(rows.num_rows / seconds),
        )


@contextmanager
def _stage(what: str) -> Iterator[None]:
    """Tell what is being done, and every few seconds that it still is."""
    over = threading.Event()
    started = time.monotonic()

    def remind() -> None:
        while not over.wait(_STAGE_TOLD_EVERY_S):
            _tell_stage(f"{what} ({time.monotonic() - started:.0f} s so far)")

    _tell_stage(what)
    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell_stage(text: str) -> None:
    print(f"spark: {text}", file=sys.stderr, flush=True)


@main.command()
@_masters
@click.option("--table", "name", default="flights", show_default=True)
@click.option("--sink", default="delays", show_default=True, help="Table for the delay by carrier.")
@click.option("--snapshot", type=int, required=True, help="The hybrid time to read at.")
def spark(masters: str, name: str, sink: str, snapshot: int) -> None:
    """Read the same snapshot from Spark, write the delay by carrier into another table, read that back."""
    from pyspark.sql import functions as F

    from stele_spark.session import session

    with _stage("starting Spark, a Java virtual machine"):
        engine = session("stele-demo", cores=2)
    try:
        with _stage(f"Spark runs; counting the rows of {name}"):
            source = engine.read.format("stele").options(masters=masters)
            frame = source.options(table=name, snapshot=str(snapshot)).load()
            count = frame.count()
        with _stage(f"{count:,} rows; computing the delay by carrier"):
            delays = (
                frame.groupBy("carrier")
                .agg(F.count("*").alias("flights"), F.round(F.avg("arr_delay"), 3).alias("mean_arr_delay"))
                .orderBy("carrier")
            )
            computed = [row.asDict() for row in delays.collect()]
        with _stage(f"{len(computed)} carriers; writing them into {sink}"):
            sunk = delays.coalesce(1).write.format("stele").options(masters=masters, table=sink)
            sunk.mode("append").save()
        with _stage(f"reading {sink} back"):
            again = engine.read.format("stele").options(masters=masters, table=sink).load()
            stored = [row.asDict() for row in again.orderBy("carrier").collect()]
    finally:
        engine.stop()
    _result(rows=count, delays=computed, same=stored == computed)


if __name__ == "__main__":
    main()
