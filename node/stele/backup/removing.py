"""Removes one backup that is no longer wanted.

Invariants: a backup on which another one builds stays. A backup that is being written stays, because removing claims the
folder. The manifest goes first, so what an interrupted removal leaves is never taken for a backup.
"""

from __future__ import annotations

from collections.abc import Sequence

from stele.backup.claim import Claim
from stele.backup.finding import Backup, State, find_backups
from stele.backup.folder import Folder, Location
from stele.backup.telling import Note, quiet
from stele.backup.unfinished import remove
from stele.model.errors import Code, Rejected
from stele.rpc.threads import in_thread


async def remove_async(
    folder: Location, backup: str = "", *, key: str = "", on_note: Note = quiet
) -> list[str]:
    """Remove one backup, or all that were begun with this `key`, complete or not. Returns the ids of those that were removed.

    `backup`: its id, or the first digits of it.

    Raises:
        Rejected: several ids begin with these digits; a complete backup builds on it; neither an id nor a key was given, or both.
            NOT_FOUND: no id begins so. If no backup has the key, that is no error. CHANGE_IN_PROGRESS: another process writes
            to the folder.
    """
    if bool(backup) == bool(key):
        raise Rejected("say what to remove: the id of a backup, or a key")
    place = await in_thread(Folder.at, folder)
    if key and not await in_thread(place.is_there):
        return []
    await in_thread(find_backups, place)  # refuses a wrong folder before anything is written to it
    async with Claim(place, "remove", on_note) as claim:
        going = _going(await in_thread(find_backups, place), backup, key)
        for found in going:
            await claim.check()
            await in_thread(remove, place, found.backup_id)
        return [b.backup_id for b in going]


async def to_remove_async(folder: Location, backup: str = "", *, key: str = "") -> list[Backup]:
    """Return what `remove_async` would remove now. Changes nothing. Raises what `remove_async` raises."""
    place = await in_thread(Folder.at, folder)
    if key and not await in_thread(place.is_there):
        return []
    return _going(await in_thread(find_backups, place), backup, key)


def _going(backups: Sequence[Backup], called: str, key: str) -> list[Backup]:
    """Return the backups with this id or key. Raises Rejected if no id or several begin so, or if another
    backup builds on one."""
    going = [b for b in backups if (_key(b) == key if key else b.backup_id.startswith(called))]
    if called and not going:
        there = ", ".join(b.backup_id for b in backups[:5])
        raise Rejected(
            f"no backup begins with {called}; there are {f'{there}; name one of them' if there else 'none'}",
            code=Code.NOT_FOUND,
        )
    if called and len(going) > 1:
        several = ", ".join(b.backup_id for b in going)
        raise Rejected(f"several backups begin with {called}: {several}; give more digits")
    ids = {b.backup_id for b in going}
    for other in backups:
        base = other.manifest.base if other.manifest is not None else None
        whole = other.state in (State.COMPLETE, State.BROKEN)
        if whole and other.backup_id not in ids and base and base.backup_id in ids:
            raise Rejected(
                f"backup {other.backup_id} builds on {base.backup_id}; remove {other.backup_id} first, or keep both",
                code=Code.INVALID_ARGUMENT,
            )
    return going


def _key(backup: Backup) -> str:
    return backup.manifest.key if backup.manifest is not None else ""
