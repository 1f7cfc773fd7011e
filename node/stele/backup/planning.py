"""Plans what a backup will hold, and decides whether an interrupted backup can be continued.

Invariant: a backup that is continued reads the same tablets of the same tables, with the same columns, from the same base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from stele import __version__
from stele.backup.finding import Backup, State
from stele.backup.increments import base_of, known_tablets
from stele.backup.manifest import Manifest, TableEntry, TabletEntry, new_backup_id
from stele.client.admin import cluster_view
from stele.client.async_client import AsyncClient
from stele.client.health import examine
from stele.client.sizes import size_of
from stele.client.table import AsyncTable
from stele.client.tablet_scan import ScanPlan
from stele.model.errors import SteleError
from stele.model.ids import new_id

_VIEW_TIMEOUT_S = 10.0


async def rows_expected(client: AsyncClient, opened: Mapping[str, AsyncTable]) -> dict[str, int]:
    """About how many rows these tables have, by id, as their leaders say. A table is left out if not all of
    its leaders answer."""
    found: dict[str, int] = {}
    with suppress(SteleError):  # it is only for a display
        health = examine(await cluster_view(client.masters, timeout_s=_VIEW_TIMEOUT_S))
        nodes = {node.node_id: node for node in health.nodes}
        for table_id in opened:
            its = [tablet for tablet in health.tablets if tablet.table_id == table_id]
            size = await size_of(client.pool, its, nodes)
            if its and not size.unknown:
                found[table_id] = size.rows
    return found


def plan_of(
    client: AsyncClient,
    opened: dict[str, AsyncTable],
    scans: dict[str, ScanPlan],
    snapshot: int,
    base: Manifest | None,
    key: str = "",
) -> Manifest:
    """The plan of a backup of these tables: of all their rows, or of what changed since `base`."""
    entries, known = [], known_tablets(base)
    for table_id, table in opened.items():
        info, scan = table.info, scans[table_id]
        entries.append(
            TableEntry(
                info.name,
                table_id,
                f"{info.name.translate(_Harmless())[:80].strip('-') or 'table'}-{table_id[:8]}",
                scan.schema,
                table.partition_schema,
                info.replication_factor,
                tuple(
                    TabletEntry(
                        t.tablet_id,
                        t.ordinal,
                        incarnation=t.incarnation,
                        whole=(t.tablet_id, t.incarnation) not in known,
                    )
                    for t in scan.tablets
                ),
                info.owner,
                info.comment,
            )
        )
    return Manifest(
        new_backup_id(snapshot, new_id()),
        client.identity.cluster_id,
        snapshot,
        datetime.now(UTC),
        None,
        f"stele {__version__}",
        tuple(entries),
        base_of(base),
        key=key,
    )


class _Harmless(dict[int, str]):
    """Maps each character of a table's name to one that is safe in a folder's name."""

    def __missing__(self, key: int) -> str:
        character = chr(key)
        return character if character.isascii() and (character.isalnum() or character == "_") else "-"


def unfinished(backups: Sequence[Backup], table_ids: set[str]) -> list[Manifest]:
    """Return the plans of the unfinished backups among `backups` that have exactly these tables, in the same
    order."""
    return [
        found.manifest
        for found in backups
        if found.state is State.UNFINISHED
        and found.manifest is not None
        and {table.table_id for table in found.manifest.tables} == table_ids
    ]


def why_not(old: Manifest, new: Manifest, *, anew: bool, at: object) -> str:
    """Say why an unfinished backup is not continued; "" if it can be."""
    if anew:
        return "the caller asked to begin anew"
    if at is not None and old.snapshot != new.snapshot:
        return f"it has the rows of another moment, {old.time}"
    if old.key != new.key:
        return "it was begun with another key" if old.key else "it was begun without a key"
    if old.cluster_id != new.cluster_id:
        return "it is of another cluster"
    if old.base != new.base:
        return f"it is {_told_kind(old)}, and this is {_told_kind(new)}"
    now = {table.table_id: table for table in new.tables}
    for table in old.tables:
        other = now[table.table_id]
        if _shape(table) != _shape(other):
            return f"table {other.name} was changed since"
    return ""


def _told_kind(manifest: Manifest) -> str:
    return "a full one" if manifest.base is None else f"built on {manifest.base.backup_id}"


def _shape(table: TableEntry) -> tuple[object, ...]:
    """Return what must not change in a table until its backup is finished. The history retention may change:
    a longer one gives the backup time to finish."""
    return table.schema.columns, table.schema.key_column_ids, table.partitioning, table.tablets
