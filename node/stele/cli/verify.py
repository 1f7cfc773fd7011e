"""`stele backup verify`."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from stele.cli.backup import manifest_as_json, note
from stele.cli.errors import NO
from stele.cli.options import json_option, masters_option, timeout_option, with_client, workers_for
from stele.cli.output import say, show_json
from stele.cli.proof import keep, record_option
from stele.model.amounts import byte_size, plural
from stele.model.errors import Corrupt

if TYPE_CHECKING:
    from stele.backup import Manifest, Report
    from stele.client import AsyncClient


def table_names(given: tuple[str, ...]) -> dict[str, str]:
    """Parse each --table NAME or NAME=OTHER. Returns a map from the name in the backup to the other name."""
    found: dict[str, str] = {}
    for text in given:
        name, separator, other = text.partition("=")
        if not name or (separator and not other):
            raise click.UsageError(f"--table {text}: expected NAME, or NAME=OTHER")
        if name in found:
            raise click.UsageError(f"--table {name} is given twice; give it once")
        found[name] = other or name
    return found


@click.command()
@click.argument("folder")
@click.argument("backup", required=False)
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="NAME[=OTHER]",
    help="Only this table; may be given several times.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Also compare with the tables of the cluster; --table NAME=OTHER compares with another one.",
)
@record_option
@masters_option
@timeout_option
@json_option
def verify(
    folder: str,
    backup: str | None,
    tables: tuple[str, ...],
    compare: bool,
    record: str,
    masters: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Read a backup whole and check it: checksums, columns, numbers of rows, order of keys. It asks no cluster.

    Of an incremental backup, all that it builds on is checked too.

    BACKUP is an id, or its first digits [default: the newest]. With --compare, a table that was backed up is read as it was
    then; another one, such as a restored one, as it is now. Exit code 5: files are damaged; 1: a table differs.

    \b
    Examples:
      stele backup verify /backups
      stele backup verify /backups 20260501 --compare --table flights=flights_restored
    """
    from stele.backup import compare_async
    from stele.backup import verify as verify_files
    from stele.cli.progress import rows_progress

    names = table_names(tables)
    if not compare and (renamed := [text for text in tables if "=" in text]):
        raise click.UsageError(f"--table {renamed[0]} names another table to compare with; add --compare")
    workers = workers_for(masters)
    with rows_progress() as progress:
        shown: dict[str, Any] = {}
        lock, done = threading.Lock(), Counter[str]()

        def tell(table: str, rows: int) -> None:
            with lock:
                if table not in shown:
                    shown[table] = progress.add_task(table, total=None)
                done[table] += rows
                progress.update(shown[table], completed=done[table])

        async def work(client: AsyncClient) -> Report:
            return await compare_async(client, folder, backup, tables=names, workers=workers, on_rows=tell)

        if compare:
            report = with_client(masters, work, timeout_s)
        else:
            report = verify_files(folder, backup, tables=list(names), workers=workers, on_rows=tell)
    file = keep(record, f"backup-{report.manifest.backup_id}", _proof(report)) if record else ""
    _show(report, as_json, file)


def _proof(report: Report) -> dict[str, Any]:
    """Return what --record keeps of a check: the checksum of what was read, the tables compared, and the
    result."""
    return _as_json(report) | {
        "sha256": report.manifest.digest,
        "whole": not report.faults,
        "checked": [
            {"table": t.table, "rows": t.rows, "compared": t.compared}
            | ({} if t.checksum is None else {"checksum": f"{t.checksum:016x}"})
            for t in report.tables
        ],
    }


def _as_json(report: Report) -> dict[str, Any]:
    return manifest_as_json(report.manifest) | {
        "faults": report.faults,
        "differences": report.differences,
        "strays": report.strays,
        "rowsRestored": {table.table: table.rows for table in report.tables},
        "chain": [_in_chain(each) for each in report.backups],
    }


def _show(report: Report, as_json: bool, file: str) -> None:
    manifest = report.manifest
    if as_json:
        show_json(_as_json(report) | ({"record": file} if file else {}))
    for line in (*report.faults, *report.differences):
        say(line, err=True)
    if report.strays:
        note(
            f"{plural(len(report.strays), 'file')} in its folder are no part of it, such as {report.strays[0]}"
        )
    if report.faults:
        raise Corrupt(
            f"backup {manifest.backup_id} is damaged: {plural(len(report.faults), 'fault')}; make a new one, and keep "
            "this one as long as it has rows that nothing else has"
        )
    if report.differences:
        click.get_current_context().exit(NO)
    if as_json:
        return
    for table in report.tables:
        equal = f"; {table.compared} has the same rows" if table.compared else ""
        files = f" in {_files(table.files, table.bytes)}"
        say(f"{table.table}: {plural(table.rows, 'row')}{'' if report.bases else files}{equal}")
        for each in report.backups if report.bases else ():
            for entry in each.tables:
                if entry.name == table.table:
                    what = "row" if each.base is None else "change"
                    kept = _files(len(entry.files), entry.file_bytes)
                    say(f"  {each.backup_id}, {each.kind}: {plural(entry.rows, what)} in {kept}")
    with_bases = f", with the {plural(report.bases, 'backup')} that it builds on" if report.bases else ""
    say(f"backup {manifest.backup_id} is whole{with_bases}")
    if file:
        say(f"recorded in {file}")


def _files(count: int, size: int) -> str:
    return f"{plural(count, 'file')}, {byte_size(size)}"


def _in_chain(manifest: Manifest) -> dict[str, Any]:
    whole = manifest_as_json(manifest)
    return {name: whole[name] for name in ("id", "kind", "rows", "bytes", "tables")}
