"""`stele backup create`, `list`, `prune`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import click

from stele.cli.follow import Following, follow_option, moment_of, refuse_both
from stele.cli.options import json_option, masters_option, timeout_option, with_client, workers_for
from stele.cli.output import confirm, say, show_done, show_json, show_table
from stele.cli.pace import Pace
from stele.cli.wanted import seconds_of
from stele.model import texts
from stele.model.amounts import byte_size, plural
from stele.model.errors import Rejected, SteleError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from stele.backup import Backup, Manifest, Progress, Pruned
    from stele.client import AsyncClient


@click.command()
@click.argument("folder")
@click.argument("tables", nargs=-1, metavar="[TABLE]...")
@click.option("--all", "every", is_flag=True, help="All tables of the cluster; key spaces are left out.")
@click.option(
    "--at",
    metavar="TIME",
    default="",
    help="Back up the rows of this hybrid time or ISO 8601 time (UTC unless it has a zone) [default: now].",
)
@click.option(
    "--incremental",
    is_flag=True,
    help="Back up only what changed since the newest complete backup of the same tables.",
)
@click.option(
    "--full-if-needed",
    is_flag=True,
    help="With --incremental: make a full backup where no incremental one is possible.",
)
@click.option(
    "--hold-for",
    "hold_for_s",
    metavar="TIME",
    default=None,
    callback=seconds_of,
    help="Keep the tables' history this long, so that an incremental backup can follow: 36h, 8d [default: 2d with --incremental].",
)
@click.option("--anew", is_flag=True, help="Remove an unfinished backup of the same tables, and begin anew.")
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Tablets that are read at once; each takes about 100 MiB of memory here.",
)
@click.option(
    "--key",
    default="",
    metavar="TEXT",
    help="Make this backup once: a later run with the same key finds or continues it.",
)
@click.option(
    "--keep-full",
    type=click.IntRange(1, 1_000_000),
    default=None,
    help="Then prune: keep this many of the newest full backups, and what is newer.",
)
@click.option(
    "--keep-days",
    type=click.FloatRange(0, 36_500, min_open=True),
    default=None,
    help="Then prune: keep backups that are at most this many days old.",
)
@masters_option
@timeout_option
@json_option
@follow_option
def create(
    folder: str,
    tables: tuple[str, ...],
    every: bool,
    at: str,
    incremental: bool,
    full_if_needed: bool,
    hold_for_s: float | None,
    anew: bool,
    parallel: int,
    key: str,
    keep_full: int | None,
    keep_days: float | None,
    masters: str,
    timeout_s: float,
    as_json: bool,
    follow: bool,
) -> None:
    """Back up tables into a folder, all at one moment. FOLDER is a path, or a URI such as s3://bucket/backups.

    If a backup was interrupted, the same command goes on with it. It is complete once the command ends with 0.

    An incremental backup has what changed since the backup before it, deletes too. A restore of it needs both. Each backup
    holds the history that the next one needs. If that history is gone, the next backup ends with CURSOR_LOST.

    \b
    Examples:
      stele backup create /backups flights planes
      stele backup create /backups flights planes --incremental --full-if-needed --hold-for 36h
      stele backup create s3://bucket/stele --all
    """
    from stele.backup import create_async
    from stele.cli.progress import tablets_progress

    if every == bool(tables):
        raise click.UsageError(
            "name tables or give --all, not both" if every else "name the tables to back up, or give --all"
        )
    if full_if_needed and not incremental:
        raise click.UsageError("--full-if-needed needs --incremental; add it")
    refuse_both(follow, as_json)
    started = time.monotonic()
    with Following(follow) as following, tablets_progress() as progress:
        moment, workers = _moment(at), workers_for(masters)
        lines: dict[str, TaskID] = {}
        told: dict[str, Progress] = {}
        pace = Pace()

        def tell(now: Progress) -> None:
            told[now.table] = now
            sums = {word: sum(getattr(p, word) for p in list(told.values())) for word in _SUMS}
            all_expected = all(p.rows_expected for p in list(told.values()))
            expected = max(sums["rows_expected"], sums["rows"]) if all_expected else None
            following.progress(
                rows=sums["rows"],
                bytes=sums["bytes"],
                done=sums["tablets_done"],
                total=sums["tablets"],
                rowsExpected=expected,
                etaSeconds=pace.left_s(sums["rows"], expected),
                holds=list(now.holds),
            )
            if follow:
                return
            if now.table not in lines:
                lines[now.table] = progress.add_task(now.table, rows=0, tablets="")
            done, of = now.tablets_done, now.tablets
            if now.rows_expected and done < of:  # the last row of an estimate is not the last one
                done, of = now.rows, max(now.rows_expected, now.rows + 1)
            progress.update(
                lines[now.table],
                total=of,
                completed=done,
                rows=now.rows,
                tablets=f"{now.tablets_done}/{now.tablets}",
            )

        async def work(client: AsyncClient) -> Manifest:
            named = await _all_tables(client) if every else list(tables)
            return await create_async(
                client,
                folder,
                named,
                at=moment,
                anew=anew,
                incremental=incremental,
                full_if_needed=full_if_needed,
                hold_for_s=hold_for_s,
                parallel=parallel,
                key=key,
                workers=workers,
                on_progress=tell,
                on_note=note,
            )

        made = with_client(masters, work, timeout_s)
        pruned = _pruned(folder, keep_full, keep_days)
        following.result(_result(made) | pruned)
    if follow:
        return
    if as_json:
        show_json(manifest_as_json(made))
        return
    files = sum(len(table.files) for table in made.tables)
    since = "" if made.base is None else f" since {made.base.backup_id}"
    say(
        f"backup {made.backup_id} of {plural(len(made.tables), 'table')} as of {made.time}: "
        f"{plural(made.rows, 'row' if made.base is None else 'change')}{since}, "
        f"{plural(files, 'file')}, {byte_size(made.file_bytes)}, in {time.monotonic() - started:.1f} s"
    )


_SUMS = ("rows", "bytes", "tablets_done", "tablets", "rows_expected")


def _result(made: Manifest) -> dict[str, Any]:
    """The result for --json-progress of a complete backup."""
    return {
        "backup": made.backup_id,
        "kind": made.kind,
        "base": made.base.backup_id if made.base is not None else "",
        "time": moment_of(made.snapshot),
        "tables": len(made.tables),
        "rows": made.rows,
        "bytes": made.file_bytes,
        "holds": [made.hold] if made.hold else [],
    }


def _pruned(folder: str, keep_full: int | None, keep_days: float | None) -> dict[str, Any]:
    """Remove old backups, if that was asked for. If this fails, only print a note, because the new backup is
    complete."""
    from stele.backup import prune_async

    if keep_full is None and keep_days is None:
        return {}
    try:
        gone = asyncio.run(
            prune_async(folder, keep_days=keep_days, keep_full=keep_full, on_note=note)
        ).removed
    except SteleError as exc:
        note(f"old backups are not pruned: {exc.args[0]}")
        return {"pruneError": str(exc.args[0])[:500]}
    if gone:
        note(f"pruned {plural(len(gone), 'backup')}, the oldest {gone[-1].backup_id}")
    return {"pruned": len(gone)}


@click.command()
@click.argument("folder")
@json_option
def list_all(folder: str, as_json: bool) -> None:
    """List the backups of a folder, the newest first. FOLDER is a path, or a URI such as s3://bucket/backups.

    Only complete ones can be restored. `stele backup create` goes on with an unfinished one. An incremental one builds on the
    next older one of the same tables; its rows are changes.

    Example: stele backup list /backups
    """
    from stele.backup import list_backups

    found = list_backups(folder)
    if as_json:
        show_json([_as_json(backup) for backup in found])
        return
    if not found:
        say(f"no backups in {folder}")
        return
    headers = ("backup", "rows of", "kind", "state", "rows", "size", "tables")
    show_table(headers, [_line(b) for b in found], whole=1)
    for backup in found:
        if backup.fault:
            say(f"{backup.backup_id}: {backup.fault}", err=True)


@click.command()
@click.argument("folder")
@click.option("--keep", type=click.IntRange(1, 1_000_000), default=None, help="Keep this many of the newest.")
@click.option(
    "--keep-days",
    type=click.FloatRange(0, 36_500, min_open=True),
    default=None,
    help="Keep backups that are at most this many days old. A backup stays if any of these options keeps it.",
)
@click.option(
    "--keep-full",
    type=click.IntRange(1, 1_000_000),
    default=None,
    help="Keep this many of the newest full ones of each set of tables, and what is newer.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def prune(
    folder: str,
    keep: int | None,
    keep_days: float | None,
    keep_full: int | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove old backups for good. FOLDER is a path, or a URI such as s3://bucket/backups.

    The newest complete backup always stays. So does each backup that an incremental one builds on, while that
    one stays. An unfinished one goes once a complete one is newer. Damaged ones stay, for a person to look
    at.

    \b
    Examples:
      stele backup prune /backups --keep 7 --dry-run
      stele backup prune s3://bucket/stele --keep 3 --keep-days 30 --yes
    """
    from stele.backup import prune_async

    if keep is None and keep_days is None and keep_full is None:
        raise click.UsageError("say what to keep: add --keep, --keep-days or --keep-full")

    def run(*, dry: bool) -> Pruned:
        return asyncio.run(
            prune_async(
                folder,
                keep=keep,
                keep_days=keep_days,
                keep_full=keep_full,
                dry_run=dry,
                on_note=note,
            )
        )

    found = run(dry=True)
    if not found.removed:
        show_done(
            f"nothing to remove; {plural(len(found.kept), 'backup')} in {folder}",
            as_json,
            _prune_as_json(found),
        )
        return
    for backup in found.removed:
        say(
            f"{'would remove' if dry_run else 'removing'} {backup.backup_id} ({described(backup)})",
            err=as_json,
        )
    if dry_run:
        if as_json:
            show_json(_prune_as_json(found))
        return
    if not yes:
        what = plural(len(found.removed), "backup")
        confirm(f"Remove {what} for good?", f"remove {what}")
    done = run(dry=False)
    show_done(
        f"removed {plural(len(done.removed), 'backup')}; {len(done.kept)} left", as_json, _prune_as_json(done)
    )


def _prune_as_json(found: Pruned) -> dict[str, Any]:
    return {
        "removed": [backup.backup_id for backup in found.removed],
        "kept": [backup.backup_id for backup in found.kept],
    }


def note(text: str) -> None:
    """Print a note about something unusual, on standard error."""
    say(f"note: {text}", err=True)


def manifest_as_json(manifest: Manifest) -> dict[str, Any]:
    """What a backup holds, for programs. A snapshot is text, since some readers of JSON round large numbers."""
    return {
        "id": manifest.backup_id,
        "kind": manifest.kind,
        "base": None if manifest.base is None else manifest.base.backup_id,
        "hold": manifest.hold,
        "cluster": manifest.cluster_id,
        "snapshot": str(manifest.snapshot),
        "time": manifest.time,
        "begun": manifest.begun.isoformat(),
        "finished": None if manifest.finished is None else manifest.finished.isoformat(),
        "rows": manifest.rows,
        "bytes": manifest.file_bytes,
        "tables": [
            {
                "name": table.name,
                "id": table.table_id,
                "rows": table.rows,
                "bytes": table.file_bytes,
                "files": len(table.files),
                "tablets": len(table.tablets),
                "replicationFactor": table.replication_factor,
            }
            for table in manifest.tables
        ],
    }


async def _all_tables(client: AsyncClient) -> list[str]:
    infos = await client.list_tables()
    found = [info.name for info in infos if info.kind == "table"]
    if left := [info.name for info in infos if info.kind != "table"]:
        note(f"backups hold tables only; left out: key space {', '.join(left)}")
    if not found:
        raise Rejected("the cluster has no tables")
    return found


def _moment(text: str) -> int | None:
    try:
        return texts.snapshot(text) if text else None
    except ValueError as exc:
        raise Rejected(f"--at {text}: expected a hybrid time or an ISO 8601 time ({exc})") from exc


def _as_json(backup: Backup) -> dict[str, Any]:
    found = {"id": backup.backup_id, "state": backup.state.value}
    if backup.manifest is not None:
        return found | manifest_as_json(backup.manifest)
    return found | ({"fault": backup.fault} if backup.fault else {})


def _line(backup: Backup) -> tuple[Any, ...]:
    manifest = backup.manifest
    if manifest is None:
        return (backup.backup_id, "-", "-", backup.state.value, "-", "-", "-")
    names = ", ".join(table.name for table in manifest.tables)
    if manifest.finished is None:  # a plan knows no files
        return (backup.backup_id, manifest.time, manifest.kind, backup.state.value, "-", "-", names)
    size = byte_size(manifest.file_bytes)
    rows = f"{manifest.rows:,}"
    return (backup.backup_id, manifest.time, manifest.kind, backup.state.value, rows, size, names)


def described(backup: Backup) -> str:
    """Describe a backup: its state, and the moment of its rows."""
    manifest = backup.manifest
    return backup.state.value if manifest is None else f"{backup.state.value}, rows of {manifest.time}"
