"""Checks a backup: against itself, and against tables. Changes nothing.

Against itself: each file has the bytes that were written. Its columns and number of rows are right. Its keys ascend
without repetition, and belong to their tablet. Against a table: it has as many rows, and the same checksum over all values
(`stele.model.checksum`). The table that was backed up is read at the backup's time. Any other table is read
as it is now.

Invariant: everything that is wrong is reported, not only the first fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stele.backup.chain import Chain
from stele.backup.finding import choose
from stele.backup.folder import Folder, Location
from stele.backup.jobs import CheckTablet, Sum, SumTablet, alone, of_tablet
from stele.backup.manifest import Manifest, TableEntry
from stele.backup.unfinished import strays
from stele.backup.workers import Did, InProcess, Workers
from stele.client import arguments
from stele.client.async_client import AsyncClient
from stele.client.table import AsyncTable
from stele.client.tablet_scan import PARALLEL_TABLETS
from stele.model import checksum
from stele.model.errors import Code, Rejected
from stele.rpc.threads import in_thread

_PARALLEL_FILES = 4

OnRows = Callable[[str, int], None]


def no_rows(table: str, rows: int) -> None:
    """Do nothing, for callers that do not count rows."""


@dataclass(slots=True)
class TableReport:
    """What was found of one table. `faults`: empty if all is well. `compared`: with which table and when, in words.

    `differences`: how the table differs from the backup. `checksum`: over all values of all rows, None if it
    was not asked for. `rows` and `checksum` describe the rows in the files. For an incremental backup these
    are the rows of its whole chain."""

    table: str
    rows: int = 0
    bytes: int = 0
    files: int = 0
    checksum: int | None = None
    compared: str = ""
    faults: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What was found of a backup, and of the others that it builds on. `strays`: files in its folder that are no part
    of it; they harm nothing. `backups`: all that were read, the oldest first; the last one is `manifest`."""

    manifest: Manifest
    tables: list[TableReport]
    strays: list[str]
    backups: tuple[Manifest, ...] = ()

    @property
    def bases(self) -> int:
        """How many backups it builds on."""
        return max(0, len(self.backups) - 1)

    @property
    def faults(self) -> list[str]:
        """What is wrong with the files, of all tables."""
        return [fault for table in self.tables for fault in table.faults]

    @property
    def differences(self) -> list[str]:
        """How tables differ from the backup."""
        return [difference for table in self.tables for difference in table.differences]


async def verify_async(
    folder: Location,
    backup: str | None = None,
    *,
    tables: str | Sequence[str] = (),
    workers: Workers | None = None,
    on_rows: OnRows = no_rows,
) -> Report:
    """Check a backup against itself. Reads all its files; asks no cluster. `on_rows` is called in other threads.

    `backup`: its id or the first digits of it; None: the newest. `tables`: only these. `workers`: who reads the files; None:
    this process.

    Raises:
        Rejected: NOT_FOUND: no such folder, backup or table.
        Corrupt: the manifest is damaged. Faults of files do not raise: they are in the report.
    """
    place = await in_thread(Folder.at, folder)
    chosen = arguments.names(tables, "tables")
    manifest = await in_thread(choose, place, backup, chosen)
    chain, reports = await in_thread(Chain.of, place, manifest), []
    for table in _of(manifest, chosen):
        found = await _checked(place, chain, table, workers or InProcess(None), on_rows, sums=False)
        reports.append(_report(table, found, None))
    return Report(manifest, reports, await in_thread(strays, place, manifest), chain.backups)


async def compare_async(
    client: AsyncClient,
    folder: Location,
    backup: str | None = None,
    *,
    tables: str | Sequence[str] | Mapping[str, str] = (),
    workers: Workers | None = None,
    on_rows: OnRows = no_rows,
) -> Report:
    """Check a backup against itself, and against tables of a cluster.

    `tables`: some of its tables, by name; or a map from names in the backup to the tables to compare with. Default: all
    tables, under their own names. A table that was backed up is read as of the backup's time. Any other table, such as a
    restored one, is read as it is now.
    `workers`: who reads files and tablets; None: this process.

    Raises:
        Rejected: NOT_FOUND: no such table. SNAPSHOT_TOO_OLD: its rows of that time are gone, so it cannot be compared.
    """
    place = await in_thread(Folder.at, folder)
    others = named_tables(tables)
    manifest = await in_thread(choose, place, backup, list(others))
    chosen = _of(manifest, list(others))
    chain = await in_thread(Chain.of, place, manifest)
    opened = [await client.open_table(others.get(table.name, table.name)) for table in chosen]
    who = workers or InProcess(client, opened)
    reports = []
    for table, live in zip(chosen, opened, strict=True):
        found = await _checked(place, chain, table, who, on_rows, sums=True)
        report = _report(table, found, live)
        sums = {tablet.tablet_id: each for tablet, each in zip(table.tablets, found, strict=True)}
        await _compare(report, manifest, table, live, sums, who)
        reports.append(report)
    beside = await in_thread(strays, place, manifest)
    return Report(manifest, reports, beside, chain.backups)


def named_tables(given: str | Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return a map from each table's name in the backup to the name of the table to compare it with."""
    if isinstance(given, Mapping):
        arguments.names(list(given.values()), "tables")
        return dict(given)
    return {name: name for name in arguments.names(given, "tables")}


def _of(manifest: Manifest, names: Sequence[str]) -> list[TableEntry]:
    return [manifest.table(name) for name in dict.fromkeys(names)] if names else list(manifest.tables)


def _report(table: TableEntry, found: Sequence[Sum], live: AsyncTable | None) -> TableReport:
    faults = [fault for each in found for fault in each.faults]
    total = sum(each.checksum for each in found) & checksum.MASK if live is not None else None
    rows = sum(each.rows for each in found)
    return TableReport(table.name, rows, table.file_bytes, len(table.files), total, "", faults)


async def _checked(
    place: Folder, chain: Chain, table: TableEntry, workers: Workers, on_rows: OnRows, *, sums: bool
) -> list[Sum]:
    """Check the files of each tablet, also in the backups that this one builds on. Returns what was found."""
    jobs = [CheckTablet(place, alone(chain.parts(table, t)), table.schema, sums) for t in table.tablets]

    def tell(_: int, did: Did) -> None:
        if did.rows:
            on_rows(table.name, did.rows)

    return await workers.run(jobs, _PARALLEL_FILES, tell)


async def _compare(
    report: TableReport,
    manifest: Manifest,
    table: TableEntry,
    live: AsyncTable,
    sums: Mapping[str, Sum],
    workers: Workers,
) -> None:
    """Read the table, and say in the report how it differs."""
    same = live.info.table_id == table.table_id
    report.compared = f"table {live.name} {f'as of {manifest.time}' if same else 'as it is now'}"
    if differing := _columns(table, live):
        report.differences.append(f"{report.compared}: {differing}")
        return
    names = table.schema.to_arrow().names
    scan = live.scan(names, snapshot=manifest.snapshot if same else None, ordered=True).plan
    ids = [tablet.tablet_id for tablet in scan.tablets]
    jobs = [SumTablet(of_tablet(scan, t), table.schema, live.info.table_id, live.name) for t in ids]
    try:
        found = dict(zip(ids, await workers.run(jobs, PARALLEL_TABLETS, _unheard), strict=True))
    except Rejected as exc:
        if exc.code is not Code.SNAPSHOT_TOO_OLD:
            raise
        raise Rejected(
            f"{report.compared} cannot be compared, since its rows of that time are gone: {exc.args[0]}",
            code=exc.code,
        ) from exc
    rows, total = (
        sum(each.rows for each in found.values()),
        sum(s.checksum for s in found.values()) & checksum.MASK,
    )
    if rows != report.rows:
        report.differences.append(f"{report.compared}: it has {rows} rows, but the files have {report.rows}")
    elif total != report.checksum:
        report.differences.append(f"{report.compared}: it has as many rows, but other values")
    if same and report.differences and found.keys() == sums.keys():
        other = [tablet for tablet in found if replace(sums[tablet], faults=()) != found[tablet]]
        report.differences.append(
            f"{report.compared}: tablets that differ: {', '.join(other[:10]) or 'none'}"
        )


def _unheard(_: int, __: Did) -> None:
    """Ignore these rows: they were reported when the files were read."""


def _columns(table: TableEntry, live: AsyncTable) -> str:
    """Which columns of the backup the table lacks, or has with another type, in words; "" if none."""
    now = live.schema.by_name
    missing = [c.name for c in table.schema.columns if c.name not in now]
    other = [c.name for c in table.schema.columns if c.name in now and now[c.name].type != c.type]
    parts = [f"it has no column {', '.join(missing)}"] if missing else []
    parts += [f"it has column {', '.join(other)} with another type"] if other else []
    return "; ".join(parts)
