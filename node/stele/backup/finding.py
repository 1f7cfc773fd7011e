"""The backups of a folder: complete, broken, unfinished, damaged, or remains of pruned ones. Reads, and changes nothing.

Invariants: a backup is complete if and only if its manifest is whole, and so are those of all that it builds on. One damaged
backup hides no other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum

from stele.backup.folder import Folder
from stele.backup.manifest import BACKUP_ID, MANIFEST, PLAN, Manifest
from stele.model.clock import physical_us, utc
from stele.model.errors import Code, Corrupt, Rejected, SteleError


class State(Enum):
    """What a backup's folder is. BROKEN: it is whole, but a backup that it builds on is not. UNKNOWN: a later release wrote
    it."""

    COMPLETE = "complete"
    BROKEN = "broken"
    UNFINISHED = "unfinished"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"
    REMAINS = "remains"


@dataclass(frozen=True, slots=True)
class Backup:
    """One backup in a folder. `manifest`: what it holds; of an unfinished one, what it will hold, without files.

    `fault`: why it is damaged, broken or unknown."""

    backup_id: str
    state: State
    manifest: Manifest | None = None
    fault: str = ""


def find_backups(folder: Folder) -> list[Backup]:
    """All backups of a folder, the newest first.

    Raises:
        Rejected: NOT_FOUND: there is no such folder. INVALID_ARGUMENT: it is the folder of a single backup.
    """
    if not folder.is_there():
        raise Rejected(f"{folder.shown}: there is no such folder; check its path", code=Code.NOT_FOUND)
    names = folder.entries("")
    if MANIFEST in names or PLAN in names:
        raise Rejected(f"{folder.shown} is one backup; give the folder above it, which holds all of them")
    found = [_look(folder, name) for name in names if BACKUP_ID.fullmatch(name)]
    return _chained(folder, sorted(found, key=_moment))[::-1]


def _chained(folder: Folder, backups: list[Backup]) -> list[Backup]:
    """The backups, the oldest first. Those that build on a backup that is not complete become BROKEN."""
    judged: dict[str, Backup] = {}
    for backup in backups:
        fault = _why_broken(folder, backup, judged) if backup.state is State.COMPLETE else ""
        judged[backup.backup_id] = replace(backup, state=State.BROKEN, fault=fault) if fault else backup
    return list(judged.values())


def _why_broken(folder: Folder, backup: Backup, older: Mapping[str, Backup]) -> str:
    """Say why a backup that is whole cannot be restored; "" if it can. `older`: all older backups, by id; the
    base should be one of them."""
    base = backup.manifest.base if backup.manifest is not None else None
    if base is None:
        return ""
    found = older.get(base.backup_id)
    if found is not None and found.state is State.BROKEN:
        return found.fault
    if found is None or found.state is State.REMAINS:
        why = f"is not in {folder.shown}"
    elif found.state is not State.COMPLETE or found.manifest is None:
        why = f"is {found.state.value}{f' ({found.fault})' if found.fault else ''}"
    elif found.manifest.digest != base.sha256:
        why = "is not the one that it was built on"
    else:
        return ""
    return (
        f"backup {backup.backup_id} builds on {base.backup_id}, which {why}; restore an earlier backup by its id, "
        "and make a full one"
    )


def _moment(backup: Backup) -> tuple[str, int, str]:
    """Return a key to sort backups by the time of their rows. The manifest has this time exactly; without one
    the name gives it to the second."""
    second = backup.backup_id.partition("-")[0]
    return second, backup.manifest.snapshot if backup.manifest is not None else 0, backup.backup_id


def _look(folder: Folder, backup_id: str) -> Backup:
    there = folder.entries(backup_id)
    for name, state in ((MANIFEST, State.COMPLETE), (PLAN, State.UNFINISHED)):
        if name not in there:
            continue
        path = f"{backup_id}/{name}"
        try:
            return Backup(
                backup_id, state, Manifest.of(bytes(folder.read(path)), folder.called(path), backup_id)
            )
        except Corrupt as exc:
            return Backup(backup_id, State.DAMAGED, fault=str(exc.args[0]))
        except SteleError as exc:
            if exc.code is not Code.UNSUPPORTED_VERSION:
                raise
            return Backup(backup_id, State.UNKNOWN, fault=str(exc.args[0]))
    return Backup(backup_id, State.REMAINS)


def with_key(folder: Folder, key: str) -> Manifest | None:
    """The complete backup that was made with this key; None if there is none."""
    for found in find_backups(folder):
        if found.state is State.COMPLETE and found.manifest is not None and found.manifest.key == key:
            return found.manifest
    return None


def newest_until(folder: Folder, moment: datetime, tables: Collection[str] = ()) -> str:
    """The id of the newest complete backup whose snapshot is at or before `moment`, and that has all `tables`.

    Raises:
        Rejected: NOT_FOUND: there is none.
    """
    latest_us = int(moment.timestamp() * 1e6)
    for found in find_backups(folder):
        manifest = found.manifest
        if found.state is not State.COMPLETE or manifest is None:
            continue
        if physical_us(manifest.snapshot) <= latest_us and _has(found, tables):
            return found.backup_id
    of = f" of {', '.join(tables)}" if tables else ""
    raise Rejected(
        f"{folder.shown} has no complete backup{of} from {utc(latest_us)} or before; "
        "`stele backup list` shows what it has",
        code=Code.NOT_FOUND,
    )


def choose(folder: Folder, called: str | None, tables: Collection[str] = ()) -> Manifest:
    """The complete backup that `called` names, by its id or the first digits of it; None: the newest.

    Raises:
        Rejected: NOT_FOUND: there is none, or it lacks one of `tables`; INVALID_ARGUMENT: several ids begin so.
        Corrupt: it is damaged.
    """
    backups = find_backups(folder)
    if called is None:
        chosen = [b for b in backups if b.state is not State.REMAINS and b.state is not State.UNFINISHED][:1]
        if not chosen:
            raise Rejected(
                f"{folder.shown} has no complete backup; check the folder, or make a backup there first",
                code=Code.NOT_FOUND,
            )
    else:
        chosen = [b for b in backups if called and b.backup_id.startswith(called)]
        if len(chosen) != 1:
            there = ", ".join(b.backup_id for b in backups[:5])
            code = Code.INVALID_ARGUMENT if chosen else Code.NOT_FOUND
            raise Rejected(
                f"{len(chosen)} backups in {folder.shown} begin with {called!r}; "
                f"there are {f'{there}; name one of them' if there else 'none'}",
                code=code,
            )
    (backup,) = chosen
    if backup.state is State.UNKNOWN:
        raise Rejected(backup.fault, code=Code.UNSUPPORTED_VERSION)
    if backup.state is State.BROKEN:
        raise Corrupt(backup.fault)
    if backup.state is State.DAMAGED:
        raise Corrupt(f"{backup.fault}; name another backup by its id")
    if backup.state is not State.COMPLETE or backup.manifest is None:
        raise Rejected(
            f"backup {backup.backup_id} in {folder.shown} is not complete: {backup.state.value}; "
            "name another backup by its id"
        )
    for name in tables:
        try:
            backup.manifest.table(name)
        except Rejected as exc:
            older = [b for b in backups if b is not backup and b.state is State.COMPLETE and _has(b, tables)][
                :1
            ]
            if called is not None or not older:
                raise
            raise Rejected(
                f"{exc.args[0]}. It is the newest backup; name {older[0].backup_id}, which has the table",
                code=exc.code,
            ) from None
    return backup.manifest


def _has(backup: Backup, tables: Collection[str]) -> bool:
    return backup.manifest is not None and set(tables) <= {t.name for t in backup.manifest.tables}
