"""The measures of Spark over Stele, each by turns with Spark over its own Parquet. Called by __main__.

Each function takes one measure and puts it into the report. Invariant: both systems have the same rows, in the same session,
and every result is checked.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F

from bench import rows
from bench.report import Report, milliseconds
from bench.spark.turns import Median, System, Turns
from stele.client import Client
from stele_spark import backup
from stele_spark.session import JAR

PARQUET = "Spark's Parquet"
PYTHON, JVM = READERS = ("python", "jvm")
TABLE = "bench"
_BATCH_ROWS, _FILES = 65_536, 8
_CHANGED = 100
"""One of so many rows is changed for the difference scan."""

KEYS = {
    "count": "count() of all rows",
    "sum": "the sum of one column of 8 bytes",
    "all": "all columns to Spark's sink noop",
    "load": "rows in Parquet into a new table of 8 tablets at factor 3",
    "write": "all rows of the table to Parquet, by Spark's own writer",
    "backup": "stele_spark.backup.create of the table",
    "restore": "stele_spark.backup.restore into a new table at factor 3",
    "difference": "the changes of 1 % of the rows, beside a scan of all; both by the Python client",
}
READS = ("count", "sum", "all", "write")


def chosen(text: str) -> frozenset[str]:
    """The measures that `--only` names, separated by commas; all for an empty text.

    Raises: ValueError: for unknown keys; one line that names the known ones.
    """
    named = [key.strip() for key in text.split(",") if key.strip()]
    unknown = [key for key in dict.fromkeys(named) if key not in KEYS]
    if unknown:
        raise ValueError(f"--only: no measure is called {', '.join(unknown)}; choose from {', '.join(KEYS)}")
    return frozenset(named or KEYS)


def announced() -> Report:
    """All measures, with nothing measured yet."""
    report = Report()
    wanted = {"count": ("7M", "as Parquet"), "sum": ("6M", "as Parquet"), "all": ("3.1M", "6M")}
    names = {"count": "count", "sum": "sum of one column", "all": "all columns to noop"}
    names["write"] = "all columns to Parquet, by Spark's writer"
    for key, name in names.items():
        for reader in READERS:
            least, design = wanted.get(key, ("", "")) if reader == JVM else ("", "")
            report.add(f"{key}-{reader}", f"{name}; {reader} reader", least, design, of=key)
    report.add("load", "load at factor 3", "0.45M", "0.9M")
    report.add("backup", "backup to Parquet", "0.8M", "1.5M per core")
    report.add("restore", "restore at factor 3", "0.4M", "0.7M")
    report.add("difference", "difference scan of 1 %, against a full scan", "10x", "30x")
    return report


@dataclass(frozen=True, slots=True)
class Setting:
    """What all measures share."""

    spark: Any
    client: Client
    masters: str
    folder: Path
    count: int
    turns: Turns
    report: Report

    @property
    def readers(self) -> tuple[str, ...]:
        """The readers that are there."""
        return READERS if JAR.exists() else (PYTHON,)

    def fill(self) -> None:
        """Make the table, and Spark's own Parquet of the same rows."""
        batches = rows.batches(self.count, _BATCH_ROWS)
        raw = self.folder / "raw"
        raw.mkdir()
        each = -(-len(batches) // _FILES)
        for number, part in enumerate(_groups(batches, each)):
            pq.write_table(pa.Table.from_batches(part), raw / f"part-{number}.parquet")
        self.spark.read.parquet(str(raw)).write.parquet(str(self.folder / "own"))
        table = self.client.create_table(TABLE, rows.SCHEMA, rows.PARTITIONING)
        table.write_arrow(batches, timeout_s=120)

    def parquet(self) -> Any:
        """A frame of Spark's own Parquet."""
        return self.spark.read.parquet(str(self.folder / "own"))

    def table(self, reader: str) -> Any:
        """A frame of the table."""
        self.spark.conf.set("spark.stele.reader", reader)
        return self.spark.read.format("stele").options(masters=self.masters, table=TABLE).load()

    def put(self, key: str, name: str, found: dict[str, Median]) -> None:
        """Report the result of one system, and the result of Parquet beside it if Parquet was measured."""
        self.report.put(key, found[name].told(self.count), self.count / found[name].wall_s)
        if PARQUET in found:
            other = found[PARQUET]
            self.report.put_peer(PARQUET, key, other.told(self.count), self.count / other.wall_s)


def read(setting: Setting, key: str) -> None:
    """Measure queries. `load()` runs before and is not timed; planning is timed."""
    written = setting.folder / "written"
    total = 0.5 * setting.count * (setting.count - 1) / 2
    actions: dict[str, tuple[Callable[[Any], object], object]] = {
        "count": (lambda frame: frame.count(), setting.count),
        "sum": (lambda frame: frame.agg(F.sum("amount")).collect()[0][0], total),
        "all": (lambda frame: frame.write.format("noop").mode("overwrite").save(), None),
        "write": (lambda frame: frame.write.parquet(str(written)), None),
    }
    action, expected = actions[key]
    frames: dict[str, Any] = {}

    def system(name: str, load: Callable[[], Any]) -> System:
        def before() -> None:
            shutil.rmtree(written, ignore_errors=True)
            frames[name] = load()

        return System(name, lambda: action(frames[name]), expected, before)

    systems = [system(reader, lambda reader=reader: setting.table(reader)) for reader in setting.readers]
    found = setting.turns.take(key, [*systems, system(PARQUET, setting.parquet)])
    for reader in setting.readers:
        setting.put(f"{key}-{reader}", reader, found)


def load(setting: Setting) -> None:
    """Measure loads: Spark reads Parquet, and writes a new table or other Parquet."""
    name, copy = "loaded", setting.folder / "copy"

    def make() -> None:
        setting.client.create_table(name, rows.SCHEMA, rows.PARTITIONING)

    def to_stele() -> None:
        sink = setting.parquet().write.format("stele").options(masters=setting.masters, table=name)
        sink.mode("append").save()

    def check() -> None:
        there = setting.client.open_table(name).scan(["id"]).to_table().num_rows
        _ensure(there == setting.count, f"{there:,} rows were loaded")
        setting.client.delete_table(name)

    systems = [
        System("stele", to_stele, None, make, check),
        System(
            PARQUET,
            lambda: setting.parquet().write.parquet(str(copy)),
            after=lambda: shutil.rmtree(copy),
        ),
    ]
    setting.put("load", "stele", setting.turns.take("load", systems))


def back_up(setting: Setting) -> None:
    """Measure a full backup, as tasks of Spark; then restores of it."""
    folder = setting.folder / "backups"

    def create() -> int:
        return backup.create(setting.spark, setting.masters, folder, TABLE).rows

    system = System("stele", create, setting.count, before=lambda: shutil.rmtree(folder, ignore_errors=True))
    setting.put("backup", "stele", setting.turns.take("backup", [system]))


def restore(setting: Setting) -> None:
    """Measure the restore of a backup into a new table."""
    folder, name = setting.folder / "restored", "restored"
    backup.create(setting.spark, setting.masters, folder, TABLE)

    def again() -> int:
        (made,) = backup.restore(setting.spark, setting.masters, folder, tables={TABLE: name})
        return made.rows

    system = System("stele", again, setting.count, after=lambda: setting.client.delete_table(name))
    setting.put("restore", "stele", setting.turns.take("restore", [system]))


def difference(setting: Setting) -> None:
    """Write random rows again, then measure reading them as changes."""
    table = setting.client.open_table(TABLE)
    begin = setting.client.now()
    changed = setting.count // _CHANGED
    batches = rows.batches(setting.count, _BATCH_ROWS, seed=2)
    some = pa.Table.from_batches(batches).slice(0, changed)
    table.write_arrow(some)
    systems = [
        System("changes", lambda: table.changes(begin).to_table().num_rows, changed),
        System("full", lambda: table.scan().to_table().num_rows, setting.count),
    ]
    found = setting.turns.take("difference", systems)
    few, full = found["changes"], found["full"]
    setting.report.put(
        "difference",
        f"{full.wall_s / few.wall_s:.1f}x: {milliseconds(few.wall_s)}, {milliseconds(full.wall_s)}; "
        f"processors {few.processor_s:.2f} s, {full.processor_s:.2f} s",
    )


def run(setting: Setting, keys: frozenset[str]) -> None:
    """Take the chosen measures: reads first, while all rows are in files."""
    setting.fill()
    for key in READS:
        if key in keys:
            read(setting, key)
    steps = {"load": load, "backup": back_up, "restore": restore, "difference": difference}
    for key, step in steps.items():
        if key in keys:
            step(setting)
    if setting.readers[-1] == PYTHON:
        setting.report.notes.append("The JVM reader was not measured, because it is not built: `make jar`.")
    setting.report.leave_out(keys)


def _groups(batches: list[pa.RecordBatch], each: int) -> Iterator[list[pa.RecordBatch]]:
    for at in range(0, len(batches), each):
        yield batches[at : at + each]


def _ensure(condition: bool, otherwise: str) -> None:
    if not condition:
        raise RuntimeError(otherwise)
