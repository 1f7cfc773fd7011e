"""`stele backup drill` and `stele backup remove`."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import click

from stele.cli.backup import described, note
from stele.cli.errors import NO
from stele.cli.follow import Following, follow_option, moment_of, refuse_both
from stele.cli.options import json_option, masters_option, replication_option, timeout_option, with_client
from stele.cli.output import confirm, say, show_done, show_json
from stele.model.amounts import plural
from stele.model.errors import Corrupt

if TYPE_CHECKING:
    from stele.backup import Drilled
    from stele.client import AsyncClient


@click.command()
@click.argument("folder")
@click.argument("backup", required=False)
@click.option(
    "--table", "tables", multiple=True, metavar="NAME", help="Only this table; may be given several times."
)
@replication_option(default=None)
@masters_option
@timeout_option
@follow_option
@json_option
def drill(
    folder: str,
    backup: str | None,
    tables: tuple[str, ...],
    replication_factor: int | None,
    masters: str,
    timeout_s: float,
    follow: bool,
    as_json: bool,
) -> None:
    """Practise a restore: make the tables under other names, compare them with the backup, and delete them.
    Says how long it took.

    BACKUP is an id, or its first digits [default: the newest]. The tables are called NAME.drill-... meanwhile. Exit code 5:
    files are damaged; 1: a restored table differs.

    Example: stele backup drill /backups
    """
    from stele.backup import drill_async

    refuse_both(follow, as_json)
    with Following(follow) as following:
        lock, done = threading.Lock(), [0]

        def tell(_: str, rows: int) -> None:
            with lock:
                done[0] += rows
                following.progress(rows=done[0])

        async def work(client: AsyncClient) -> Drilled:
            return await drill_async(
                client,
                folder,
                backup,
                tables=tables,
                replication_factor=replication_factor,
                on_rows=tell,
                on_note=note,
            )

        found = with_client(masters, work, timeout_s)
        report = found.report
        for line in (*report.faults, *report.differences):
            say(line, err=True)
        if report.faults:
            raise Corrupt(f"backup {found.manifest.backup_id} is damaged: {report.faults[0]}")
        following.result(_result(found))
        if as_json:
            show_json(_result(found) | {"differences": report.differences})
        if report.differences:
            click.get_current_context().exit(NO)
    if not (follow or as_json):
        say(
            f"backup {found.manifest.backup_id}: {plural(len(report.tables), 'table')} with {plural(found.rows, 'row')} restored in "
            f"{found.restore_s:.1f} s, compared in {found.compare_s:.1f} s, and deleted"
        )


def _result(found: Drilled) -> dict[str, Any]:
    return {
        "backup": found.manifest.backup_id,
        "time": moment_of(found.manifest.snapshot),
        "tables": len(found.report.tables),
        "rows": found.rows,
        "restoreSeconds": round(found.restore_s, 3),
        "compareSeconds": round(found.compare_s, 3),
        "differences": found.report.differences[:3],
    }


@click.command()
@click.argument("folder")
@click.argument("backup", required=False)
@click.option(
    "--key", default="", metavar="TEXT", help="Remove the backups that were begun with this --key instead."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@follow_option
@json_option
def remove(folder: str, backup: str | None, key: str, yes: bool, follow: bool, as_json: bool) -> None:
    """Remove one backup for good, complete or not. BACKUP is its id, or the first digits of it.

    A backup on which another one builds is refused. With --key, it is no error if there is nothing to remove.

    Example: stele backup remove /backups 20260501T120000Z-1a2b3c4d --yes
    """
    from stele.backup import remove_async
    from stele.backup.removing import to_remove_async

    if bool(backup) == bool(key):
        raise click.UsageError("give either BACKUP or --key")
    refuse_both(follow, as_json)
    if not yes and (found := asyncio.run(to_remove_async(folder, backup or "", key=key))):
        each = ", ".join(f"{one.backup_id} ({described(one)})" for one in found)
        confirm(f"Remove backup {each} for good?", f"remove {backup or f'what has the key {key}'}")
        backup = found[0].backup_id if backup else None
    with Following(follow) as following:
        gone = asyncio.run(remove_async(folder, backup or "", key=key, on_note=note))
        following.result({"removed": gone[:50]})
    if not follow:
        said = f"removed {', '.join(gone)}" if gone else "nothing was begun with this key"
        show_done(said, as_json, {"removed": gone})
