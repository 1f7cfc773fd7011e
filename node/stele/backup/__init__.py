"""Backups of tables: create, list, verify, restore, drill, remove, prune. A folder of any file system of pyarrow holds them.

    from stele import backup

    with stele.connect("HOST:PORT,HOST:PORT") as client:
        made = backup.create(client, "/backups", ["flights"])
        backup.restore(client, "/backups", tables={"flights": "flights_of_then"})

Imports stele.client, stele.model and stele.rpc. Invariants: a backup is complete if and only if its manifest is
whole. Then it has every row of its tables at its one snapshot.
"""

from __future__ import annotations

from stele.backup.blocking import compare, create, drill, list_backups, prune, remove, restore, verify
from stele.backup.creating import create_async
from stele.backup.drilling import Drilled, drill_async
from stele.backup.finding import Backup, State
from stele.backup.folder import Folder, Location
from stele.backup.manifest import FileEntry, Manifest, TableEntry, TabletEntry
from stele.backup.pruning import Pruned, prune_async
from stele.backup.removing import remove_async
from stele.backup.restoring import Restored, restore_async
from stele.backup.telling import Progress
from stele.backup.verifying import Report, TableReport, compare_async, verify_async
from stele.backup.workers import InProcess, Workers

__all__ = [
    "Backup",
    "FileEntry",
    "Drilled",
    "Folder",
    "InProcess",
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
    "Workers",
    "compare",
    "compare_async",
    "create",
    "create_async",
    "drill",
    "drill_async",
    "list_backups",
    "prune",
    "prune_async",
    "remove",
    "remove_async",
    "restore",
    "restore_async",
    "verify",
    "verify_async",
]
