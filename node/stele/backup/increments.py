"""Finds what an incremental backup builds on, and moves the hold that lets the next one follow.

Invariants: a base is complete, and has the same tables of the same cluster. The hold of a chain moves on only
after a newer backup is complete, which no longer needs the older history.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from stele.backup.finding import State, find_backups
from stele.backup.folder import Folder
from stele.backup.manifest import Base, Manifest
from stele.client.table import AsyncTable
from stele.model.errors import Code, Rejected, SteleError

LOST = frozenset((Code.SNAPSHOT_TOO_OLD, Code.CURSOR_LOST))
"""Codes of history that is gone."""


def newest_of(folder: Folder, table_ids: Collection[str], cluster_id: str) -> Manifest | None:
    """The newest complete backup of exactly these tables; None if there is none."""
    for found in find_backups(folder):
        manifest = found.manifest
        if (
            found.state is State.COMPLETE
            and manifest is not None
            and manifest.cluster_id == cluster_id
            and {table.table_id for table in manifest.tables} == set(table_ids)
        ):
            return manifest
    return None


def why_no_base(newest: Manifest | None, snapshot: int) -> str:
    """Say why an incremental backup of this moment cannot build on the newest backup; "" if it can."""
    if newest is None:
        return "there is no complete backup of these tables to build on"
    if newest.snapshot >= snapshot:
        return (
            f"the newest backup, {newest.backup_id}, is as of {newest.time}, so it is not older than this one"
        )
    return ""


def no_increment(why: str) -> Rejected:
    """The error for an incremental backup that cannot be made."""
    return Rejected(
        f"{why}; make a full backup: leave out --incremental, or add --full-if-needed", code=Code.CURSOR_LOST
    )


def base_of(manifest: Manifest | None) -> Base | None:
    """Return the entry by which a backup names its base."""
    return None if manifest is None else Base(manifest.backup_id, manifest.digest)


def known_tablets(base: Manifest | None) -> set[tuple[str, int]]:
    """Return the tablets of which only the changes are read: those of the base, in the incarnation that it
    read."""
    tables = () if base is None else base.tables
    return {(tablet.tablet_id, tablet.incarnation) for table in tables for tablet in table.tablets}


def chain_hold(before: Manifest | None, backup_id: str) -> str:
    """Return the name of the hold that lets another backup follow: that of the previous backup, or a new one."""
    return before.hold if before is not None and before.hold else f"chain-{backup_id}"


async def move_hold(
    tables: Collection[AsyncTable], made: Manifest, for_s: float, note: Callable[[str], None]
) -> None:
    """Hold the history since a complete backup for `for_s` more seconds. Call it while another hold still keeps that history.

    If it fails, the backup stays valid and `note` is called. Ranges added before the next backup are then read whole."""
    read = {table.table_id: [tablet.tablet_id for tablet in table.tablets] for table in made.tables}
    for table in tables:
        try:
            its = read[table.info.table_id]
            await table.hold(made.hold, made.snapshot, expires_in_s=for_s, tablets=its)
        except SteleError as exc:
            note(
                f"backup {made.backup_id} is complete, but the history of table {table.name} is not held, so the next one may have "
                f"to be a full one: {exc.args[0]}"
            )
