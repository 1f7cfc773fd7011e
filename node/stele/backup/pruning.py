"""Removes old backups, and what is left of unfinished ones.

Invariants: the newest complete backup of each table stays. If a backup stays, all that it builds on stays. A backup that is
being written stays, because pruning claims the folder. Of each backup the manifest goes first, so what an interrupted
removal leaves is never taken for a backup.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from stele.backup.claim import Claim
from stele.backup.finding import Backup, State, find_backups
from stele.backup.folder import Folder, Location
from stele.backup.telling import Note, quiet
from stele.backup.unfinished import remove
from stele.client.arguments import refusal, whole_number
from stele.model.clock import physical_us
from stele.model.errors import Rejected
from stele.rpc.threads import in_thread

_KEEP_MAX = 1_000_000
_DAYS_MAX = 36_500.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """`removed`: what is gone, or would go. `kept`: what is there still. Both with the newest first."""

    removed: list[Backup]
    kept: list[Backup]


async def prune_async(
    folder: Location,
    *,
    keep: int | None = None,
    keep_days: float | None = None,
    keep_full: int | None = None,
    dry_run: bool = False,
    on_note: Note = quiet,
) -> Pruned:
    """Remove complete backups except the newest `keep` and those of the last `keep_days` days.

    `keep_full`: this many of the newest full backups of each set of tables stay, with all backups newer than
    the oldest of these. Give at least one of `keep`, `keep_days` and `keep_full`.

    The newest backup of each table stays, by the table's name, and what an incremental backup that stays builds on.
    `on_note` is called for each that stays only because a table has no newer one.

    Unfinished backups go once a complete one is newer; remains go at once. Damaged ones stay, as do broken ones with
    what is left of their chain, and those of later releases.

    Raises:
        Rejected: nothing says what to keep; CHANGE_IN_PROGRESS: another process writes to the folder.
    """
    place = await in_thread(Folder.at, folder)
    if keep is None and keep_days is None and keep_full is None:
        raise Rejected("say what to keep: a number of backups, of full ones, or of days")
    full = 0 if keep_full is None else whole_number(keep_full, "keep_full", least=1, most=_KEEP_MAX)
    count = 1 if keep is None else whole_number(keep, "keep", least=1, most=_KEEP_MAX)
    days = 0.0 if keep_days is None else _days(keep_days)
    since = datetime.now(UTC) - timedelta(days=days)
    await in_thread(find_backups, place)  # refuses a wrong folder before anything is written to it
    if dry_run:
        return _chosen(await in_thread(find_backups, place), count, since, full, on_note)
    async with Claim(place, "prune", on_note) as claim:
        chosen = _chosen(await in_thread(find_backups, place), count, since, full, on_note)
        for backup in reversed(chosen.removed):
            await claim.check()
            await in_thread(remove, place, backup.backup_id)
    return chosen


def _days(given: object) -> float:
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given <= _DAYS_MAX:
        return float(given)
    raise refusal("keep_days", given, "a number of days above 0")


def _of_newest_full(complete: list[Backup], full: int) -> set[str]:
    """Return the newest `full` full backups of each set of tables, and all backups newer than the oldest of
    these."""
    staying, seen = set[str](), Counter[frozenset[str]]()
    for backup in complete:
        assert backup.manifest is not None
        tables = frozenset(table.table_id for table in backup.manifest.tables)
        if seen[tables] < full:
            staying.add(backup.backup_id)
            seen[tables] += backup.manifest.base is None
    return staying


def _newest_of_tables(complete: list[Backup]) -> dict[str, list[str]]:
    """Return, by backup id, the names of the tables of which that backup is the newest."""
    found, seen = dict[str, list[str]](), set[str]()
    for backup in complete:
        assert backup.manifest is not None
        new = [table.name for table in backup.manifest.tables if table.name not in seen]
        if new:
            found[backup.backup_id] = new
            seen.update(new)
    return found


def _chosen(backups: list[Backup], keep: int, since: datetime, full: int, note: Note) -> Pruned:
    complete = [b for b in backups if b.state is State.COMPLETE]
    staying = {b.backup_id for number, b in enumerate(complete) if number < keep or _moment(b) >= since}
    staying |= _of_newest_full(complete, full)
    for backup_id, tables in _newest_of_tables(complete).items():
        if backup_id not in staying:
            staying.add(backup_id)
            note(f"backup {backup_id} stays: no newer one has table {', '.join(tables)}")
    order = [b.backup_id for b in backups]
    newer = set(order[: order.index(complete[0].backup_id)] if complete else order)
    by_id = {b.backup_id: b for b in backups}
    broken = [b.backup_id for b in backups if b.state is State.BROKEN]
    left = [*staying, *newer, *broken]
    while left:
        found = by_id.get(left.pop())
        base = found.manifest.base if found is not None and found.manifest is not None else None
        if base is not None and base.backup_id not in staying:
            staying.add(base.backup_id)
            left.append(base.backup_id)

    def goes(backup: Backup) -> bool:
        match backup.state:
            case State.COMPLETE:
                return backup.backup_id not in staying
            case State.UNFINISHED:
                return backup.backup_id not in newer
            case State.REMAINS:
                return True
            case State.DAMAGED | State.BROKEN | State.UNKNOWN:
                return False

    return Pruned([b for b in backups if goes(b)], [b for b in backups if not goes(b)])


def _moment(backup: Backup) -> datetime:
    assert backup.manifest is not None  # it is complete
    return datetime.fromtimestamp(physical_us(backup.manifest.snapshot) / 1e6, UTC)
