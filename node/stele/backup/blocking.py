"""Backups for programs without an event loop. Each call runs the asynchronous one and waits.

Invariant: a call has the arguments of the asynchronous one, and raises what that raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from stele.backup.creating import create_async
from stele.backup.drilling import Drilled, drill_async
from stele.backup.finding import Backup, find_backups
from stele.backup.folder import Folder, Location
from stele.backup.manifest import Manifest
from stele.backup.pruning import Pruned, prune_async
from stele.backup.removing import remove_async
from stele.backup.restoring import Restored, restore_async
from stele.backup.telling import Note, OnProgress, quiet
from stele.backup.verifying import OnRows, Report, compare_async, no_rows, verify_async
from stele.backup.workers import Workers
from stele.client.blocking import Client
from stele.client.partitioning import Partitionings
from stele.client.tablet_scan import PARALLEL_TABLETS


def create(
    client: Client,
    folder: Location,
    tables: str | Sequence[str],
    *,
    at: int | datetime | None = None,
    anew: bool = False,
    incremental: bool = False,
    full_if_needed: bool = False,
    hold_for_s: float | None = None,
    parallel: int = PARALLEL_TABLETS,
    key: str = "",
    workers: Workers | None = None,
    on_progress: OnProgress = quiet,
    on_note: Note = quiet,
) -> Manifest:
    """`create_async` with a blocking client. Waits until the backup is complete."""
    return client.run(
        create_async(
            client.asynchronous,
            folder,
            tables,
            at=at,
            anew=anew,
            incremental=incremental,
            full_if_needed=full_if_needed,
            hold_for_s=hold_for_s,
            parallel=parallel,
            key=key,
            workers=workers,
            on_progress=on_progress,
            on_note=on_note,
        )
    )


def list_backups(folder: Location) -> list[Backup]:
    """All backups of a folder, the newest first. Raises Rejected NOT_FOUND if there is no such folder."""
    return find_backups(Folder.at(folder))


def compare(
    client: Client,
    folder: Location,
    backup: str | None = None,
    *,
    tables: str | Sequence[str] | Mapping[str, str] = (),
    workers: Workers | None = None,
    on_rows: OnRows = no_rows,
) -> Report:
    """`compare_async` with a blocking client."""
    return client.run(
        compare_async(client.asynchronous, folder, backup, tables=tables, workers=workers, on_rows=on_rows)
    )


def verify(
    folder: Location,
    backup: str | None = None,
    *,
    tables: str | Sequence[str] = (),
    workers: Workers | None = None,
    on_rows: OnRows = no_rows,
) -> Report:
    """`verify_async` for programs without an event loop, and for notebooks, which have one. It needs no client."""
    checking = verify_async(folder, backup, tables=tables, workers=workers, on_rows=on_rows)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(checking)
    with ThreadPoolExecutor(1, "stele-verify") as thread:
        return thread.submit(asyncio.run, checking).result()


def restore(
    client: Client,
    folder: Location,
    backup: str | None = None,
    *,
    tables: str | Sequence[str] | Mapping[str, str] = (),
    partitioning: Partitionings | Mapping[str, Partitionings] = None,
    replication_factor: int | None = None,
    again: bool = False,
    workers: Workers | None = None,
    on_rows: OnRows = no_rows,
    on_note: Note = quiet,
) -> list[Restored]:
    """`restore_async` with a blocking client. Waits until all tables have their names."""
    return client.run(
        restore_async(
            client.asynchronous,
            folder,
            backup,
            tables=tables,
            partitioning=partitioning,
            replication_factor=replication_factor,
            again=again,
            workers=workers,
            on_rows=on_rows,
            on_note=on_note,
        )
    )


def prune(
    folder: Location,
    *,
    keep: int | None = None,
    keep_days: float | None = None,
    keep_full: int | None = None,
    dry_run: bool = False,
    on_note: Note = quiet,
) -> Pruned:
    """`prune_async` for programs without an event loop."""
    return asyncio.run(
        prune_async(
            folder,
            keep=keep,
            keep_days=keep_days,
            keep_full=keep_full,
            dry_run=dry_run,
            on_note=on_note,
        )
    )


def remove(folder: Location, backup: str = "", *, key: str = "", on_note: Note = quiet) -> list[str]:
    """`remove_async` for programs without an event loop."""
    return asyncio.run(remove_async(folder, backup, key=key, on_note=on_note))


def drill(
    client: Client,
    folder: Location,
    backup: str | None = None,
    *,
    tables: str | list[str] | tuple[str, ...] = (),
    replication_factor: int | None = None,
    on_rows: OnRows = no_rows,
    on_note: Note = quiet,
) -> Drilled:
    """`drill_async` with a blocking client. Waits until the tables of the drill are deleted."""
    return client.run(
        drill_async(
            client.asynchronous,
            folder,
            backup,
            tables=tables,
            replication_factor=replication_factor,
            on_rows=on_rows,
            on_note=on_note,
        )
    )
