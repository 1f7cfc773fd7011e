"""`stele backup restore`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from stele.cli.backup import note
from stele.cli.errors import NO
from stele.cli.follow import Following, follow_option, moment_from, moment_of, refuse_both
from stele.cli.options import (
    json_option,
    masters_option,
    replication_option,
    timeout_option,
    with_client,
    workers_for,
)
from stele.cli.output import say, show_json
from stele.cli.pace import Pace
from stele.cli.verify import table_names
from stele.model.amounts import plural
from stele.model.errors import Rejected
from stele.model.nearest import did_you_mean

if TYPE_CHECKING:
    from stele.backup import Manifest, Report, Restored
    from stele.backup.manifest import TableEntry
    from stele.client import AsyncClient
    from stele.model.partitioning import Partitioning


@click.command()
@click.argument("folder")
@click.argument("backup", required=False)
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="NAME[=NEW]",
    help="Only this table, under its name or a new one; may be given several times.",
)
@click.option("--hash", "hashes", multiple=True, metavar="NAME,...:BUCKETS", help="Other hash partitions.")
@click.option(
    "--range",
    "ranges",
    multiple=True,
    metavar="NAME,...:FROM..TO",
    help="Other range partitions, one with each option, like day:2024-01-01..2024-02-01 or id:1000.. for no upper bound.",
)
@click.option(
    "--partitioning",
    "like",
    metavar="FILE",
    help="The partitioning of this file: a TabletGroup, or output of `stele table describe --json`.",
)
@replication_option(default=None)
@click.option(
    "--at",
    metavar="TIME",
    default="",
    help="The newest backup with rows of this time or before: a hybrid time or ISO 8601 (UTC unless it has a zone).",
)
@click.option("--verify", is_flag=True, help="Compare the restored tables with the backup at the end.")
@click.option(
    "--again",
    is_flag=True,
    help="A table that exists already counts as restored if it has exactly the rows of the backup.",
)
@masters_option
@timeout_option
@follow_option
@json_option
def restore(
    folder: str,
    backup: str | None,
    tables: tuple[str, ...],
    hashes: tuple[str, ...],
    ranges: tuple[str, ...],
    like: str | None,
    replication_factor: int | None,
    at: str,
    verify: bool,
    again: bool,
    masters: str,
    timeout_s: float,
    follow: bool,
    as_json: bool,
) -> None:
    """Make tables from a backup, as new ones: a table that exists is never changed. FOLDER is a path or URI.

    BACKUP is an id, or its first digits [default: the newest]. A table gets its name once it has all its rows; until then it
    is called NAME.restoring-... Partitions and replication factor are those of the backup, unless others are given. A row
    that is in no range ends the restore. With --verify, exit code 1 means that a restored table differs.

    \b
    Examples:
      stele backup restore /backups
      stele backup restore s3://bucket/stele 20260501 --table flights=flights_of_may --hash id:16
      stele backup restore /backups --range id:..1000000 --range id:1000000..
    """
    from stele.cli.progress import rows_progress

    refuse_both(follow, as_json)
    names = table_names(tables)
    if at and backup:
        raise click.UsageError("BACKUP and --at exclude each other; give one of them")
    parts = _parts(hashes, ranges, like)
    started = time.monotonic()
    with Following(follow) as following, rows_progress() as progress:
        shown: dict[str, Any] = {}
        done, compared = [0], [0]
        manifest = _manifest(folder, backup, at, list(names))
        total = _rows(manifest, list(names))
        pace, lock = Pace(), threading.Lock()
        work_rows = None if total is None else total * (2 if verify else 1)
        partitioning = parts.of([t for t in manifest.tables if not names or t.name in names])
        full = manifest.base is None
        rows_of = {table.name: table.rows for table in manifest.tables} if full else {}
        workers = workers_for(masters)

        def tell(table: str, rows: int) -> None:
            with lock:
                done[0] += rows
                left_s = pace.left_s(done[0] + compared[0], work_rows)
                following.progress(
                    rows=done[0], done=done[0] + compared[0], total=work_rows, etaSeconds=left_s
                )
                if follow:
                    return
                if table not in shown:
                    shown[table] = progress.add_task(table, total=rows_of.get(table))
                progress.advance(shown[table], rows)

        def tell_compared(table: str, rows: int) -> None:
            with lock:
                compared[0] += rows
            tell(table, 0)

        async def work(client: AsyncClient) -> tuple[list[Restored], Report | None]:
            from stele.backup import compare_async, restore_async

            made = await restore_async(
                client,
                folder,
                manifest.backup_id,
                tables=names,
                partitioning=partitioning,
                replication_factor=replication_factor,
                again=again,
                workers=workers,
                on_rows=tell,
                on_note=note,
            )
            if not verify:
                return made, None
            called = {each.table: each.name for each in made}
            return made, await compare_async(
                client,
                folder,
                manifest.backup_id,
                tables=called,
                workers=workers,
                on_rows=tell_compared,
            )

        made, report = with_client(masters, work, timeout_s)
        differences = [] if report is None else [*report.faults, *report.differences]
        result = _result(manifest, made, verify, differences)
        following.result(result)
    if as_json:
        show_json(result | {"tables": [_restored(each) for each in made], "differences": differences})
    elif not follow:
        _show(made, time.monotonic() - started, verify and not differences)
    if differences:
        for line in differences:
            say(line, err=True)
        click.get_current_context().exit(NO)


def _restored(each: Restored) -> dict[str, Any]:
    return {"name": each.name, "of": each.table, "rows": each.rows}


def _show(made: list[Restored], seconds: float, equal: bool) -> None:
    for each in made:
        of = "" if each.table == each.name else f" from {each.table}"
        same = "; it has the rows of the backup" if equal else ""
        say(f"restored table {each.name}{of}: {plural(each.rows, 'row')}{same}")
    say(f"{plural(len(made), 'table')} in {seconds:.1f} s")


def _manifest(folder: str, backup: str | None, at: str, tables: list[str]) -> Manifest:
    """The backup to restore."""
    from stele.backup.finding import choose, newest_until
    from stele.backup.folder import Folder

    place = Folder.at(folder)
    if at:
        backup = newest_until(place, moment_from(at), tables)
    return choose(place, backup, tables)


def _rows(manifest: Manifest, tables: list[str]) -> int | None:
    """Return how many rows will be written; None for an incremental backup, which does not say."""
    chosen = [t for t in manifest.tables if not tables or t.name in tables]
    return sum(table.rows for table in chosen) if manifest.base is None else None


def _result(
    manifest: Manifest, made: list[Restored], verified: bool, differences: list[str]
) -> dict[str, Any]:
    """The result for --json-progress of a restore."""
    return {
        "backup": manifest.backup_id,
        "time": moment_of(manifest.snapshot),
        "tables": [{"name": each.name, "rows": each.rows} for each in made[:40]],
        "tableCount": len(made),
        "rows": sum(each.rows for each in made),
        "verified": verified,
        "differences": [line[:300] for line in differences[:3]],
    }


@dataclass(frozen=True, slots=True)
class _Parts:
    """The partitioning that was asked for. `given`: the partitioning from --hash or the file; None if there
    is neither. `columns`, `ranges`: those of --range, with the text of both ends of each."""

    given: list[Partitioning] | None
    columns: tuple[str, ...] = ()
    ranges: Sequence[tuple[str, str]] = ()

    def of(self, tables: Sequence[TableEntry]) -> dict[str, list[Partitioning]] | list[Partitioning] | None:
        """Return the partitioning for these tables; None: as in the backup. Raises Rejected."""
        if not self.ranges:
            return self.given
        return {table.name: [*(self.given or ()), self._of(table)] for table in tables}

    def _of(self, table: TableEntry) -> Partitioning:
        from stele.cli.range_text import bounds_for
        from stele.model.partitioning import RangePartitioning

        known = table.schema.by_name
        if unknown := [name for name in self.columns if name not in known]:
            hint = did_you_mean(unknown[0], known) or f"; columns are {', '.join(known)}"
            raise Rejected(f"--range: table {table.name} has no column {unknown[0]!r}{hint}")
        ids = [known[name].id for name in self.columns]
        bounds = bounds_for(table.schema, ids, f"--range {','.join(self.columns)}:", self.ranges)
        return RangePartitioning(self.columns, (), tuple((start, end) for start, end in bounds))


def _parts(hashes: tuple[str, ...], ranges: tuple[str, ...], like: str | None) -> _Parts:
    from stele.cli.range_text import parse_partition
    from stele.cli.schema_file import table_from_file
    from stele.model.partitioning import HashPartitioning, by_names

    if (hashes or ranges) and like:
        raise click.UsageError("--partitioning excludes --hash and --range; leave it out, or leave these out")
    if like:
        given = table_from_file(like)
        return _Parts(list(by_names(given.partitioning, given.schema)))
    found: list[Partitioning] = []
    for text in hashes:
        names, _, buckets = text.rpartition(":")
        if not names or not buckets.isdecimal() or int(buckets) < 2:
            raise Rejected(f"--hash {text}: expected NAME,...:BUCKETS with 2 buckets or more, like id:8")
        found.append(HashPartitioning(tuple(names.split(",")), int(buckets)))
    return _Parts(found or None, *parse_partition("--range", ranges))
