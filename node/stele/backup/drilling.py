"""Restores a backup for practice: into tables of other names, compared with the backup, measured, deleted.

Invariants: no table of the cluster but those of the drill is changed. Their names say what they are. A drill that was killed
leaves tables that the next drill of the same backup deletes first.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass

from stele.backup.finding import choose
from stele.backup.folder import Folder, Location
from stele.backup.manifest import Manifest
from stele.backup.restoring import restore_async
from stele.backup.telling import Note, quiet
from stele.backup.verifying import OnRows, Report, compare_async, no_rows
from stele.client import arguments
from stele.client.async_client import AsyncClient
from stele.model.errors import Code, SteleError
from stele.rpc.threads import in_thread

_NAME_CHARS = 160


@dataclass(frozen=True, slots=True)
class Drilled:
    """Result of a drill. `rows`: rows restored. `report`: the comparison; no faults and no differences means passed.

    `restore_s`, `compare_s`: how long each took."""

    manifest: Manifest
    rows: int
    restore_s: float
    compare_s: float
    report: Report


async def drill_async(
    client: AsyncClient,
    folder: Location,
    backup: str | None = None,
    *,
    tables: str | list[str] | tuple[str, ...] = (),
    replication_factor: int | None = None,
    on_rows: OnRows = no_rows,
    on_note: Note = quiet,
) -> Drilled:
    """Restore a backup under other names, compare it, and delete what was restored. `backup`: None for the newest.

    Raises:
        Rejected, Corrupt, Retryable: what `restore_async` and `compare_async` raise. The tables of the drill
            are deleted, if the cluster can be reached.
    """
    place = await in_thread(Folder.at, folder)
    named = arguments.names(tables, "tables")
    manifest = await in_thread(choose, place, backup, named)
    chosen = [name for name in dict.fromkeys(named)] or [table.name for table in manifest.tables]
    names = {name: scratch_name(manifest, name) for name in chosen}
    there = {info.name for info in await client.list_tables()}
    for name in names.values():
        if name in there:
            on_note(f"deleting table {name}, which is left from a drill that did not end")
            await client.delete_table(name)
    started = time.monotonic()
    try:
        restored = await restore_async(
            client,
            folder,
            manifest.backup_id,
            tables=names,
            replication_factor=replication_factor,
            on_rows=on_rows,
            on_note=on_note,
        )
        between = time.monotonic()
        report = await compare_async(client, folder, manifest.backup_id, tables=names)
        ended = time.monotonic()
    finally:
        for name in names.values():
            await _delete(client, name, on_note)
    rows = sum(each.rows for each in restored)
    return Drilled(manifest, rows, between - started, ended - between, report)


def scratch_name(manifest: Manifest, table: str) -> str:
    """The name under which a drill restores a table of a backup."""
    digits = hashlib.sha256(f"drill/{manifest.backup_id}/{table}".encode()).hexdigest()[:8]
    return f"{table[:_NAME_CHARS]}.drill-{digits}"


async def _delete(client: AsyncClient, name: str, note: Note) -> None:
    with suppress(SteleError):
        try:
            await client.delete_table(name)
        except SteleError as exc:
            if exc.code is not Code.NOT_FOUND:
                note(
                    f"table {name} of the drill is left: {exc.args[0]}; `stele table delete {name}` removes it"
                )
