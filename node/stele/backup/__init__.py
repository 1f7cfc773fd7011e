"""Backups of tables: create, list, verify, restore, prune. A folder of any file system of pyarrow holds them.

    from stele import backup

    with stele.connect("HOST:PORT,HOST:PORT") as client:
        made = backup.create(client, "/backups", ["flights"])
        backup.restore(client, "/backups", tables={"flights": "flights_of_then"})

Imports stele.client, stele.model and stele.rpc. Invariants: a backup is complete if and only if its manifest is
whole. Then it has every row of its tables at its one snapshot.
"""

from __future__ import annotations

import asyncio
from typing import Any

from stele.backup.creating import Progress, create_async
from stele.backup.finding import Backup, State, find_backups
from stele.backup.folder import Folder, Location
from stele.backup.manifest import FileEntry, Manifest, TableEntry, TabletEntry
from stele.backup.pruning import Pruned, prune_async
from stele.backup.restoring import Restored, restore_async
from stele.backup.verifying import Report, TableReport, compare_async, verify
from stele.client.blocking import Client

__all__ = [
    "Backup",
    "FileEntry",
    "Folder",
    "Location",
    "Manifest",
    "Progress",
    "Pruned",
    "Report",
    "Restored",
    "State",
    "TableEntry",
    "TableReport",
    "TabletEntry",
    "compare",
    "compare_async",
    "create",
    "create_async",
    "list_backups",
    "prune",
    "prune_async",
    "restore",
    "restore_async",
    "verify",
]


def create(client: Client, folder: Location, tables: Any, **options: Any) -> Manifest:
    """`create_async` with a blocking client. Waits until the backup is complete."""
    return client.run(create_async(client.asynchronous, folder, tables, **options))


def list_backups(folder: Location) -> list[Backup]:
    """All backups of a folder, the newest first. Raises Rejected NOT_FOUND if there is no such folder."""
    return find_backups(Folder.at(folder))


def compare(client: Client, folder: Location, backup: str | None = None, **options: Any) -> Report:
    """`compare_async` with a blocking client."""
    return client.run(compare_async(client.asynchronous, folder, backup, **options))


def restore(client: Client, folder: Location, backup: str | None = None, **options: Any) -> list[Restored]:
    """`restore_async` with a blocking client. Waits until all tables have their names."""
    return client.run(restore_async(client.asynchronous, folder, backup, **options))


def prune(folder: Location, **options: Any) -> Pruned:
    """`prune_async` for programs without an event loop."""
    return asyncio.run(prune_async(folder, **options))
