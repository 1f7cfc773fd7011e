"""A backup that is being written: its plan, and a record of each file that is whole. A killed backup goes on from these.

Invariants: a record is written once its file is durable, so a file without a record counts as nothing. The
files of a tablet that `load` returns were read again and are whole, and no row lies between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from stele.backup.folder import Folder
from stele.backup.manifest import (
    MANIFEST,
    PLAN,
    FileEntry,
    Manifest,
    TableEntry,
    TabletEntry,
    file_from_json,
    file_to_json,
    seal,
    unseal,
)
from stele.backup.row_files import checked_bytes
from stele.model.errors import Code, Corrupt, Rejected, SteleError

_RECORDS = "unfinished"


@dataclass(frozen=True, slots=True)
class Done:
    """What is already written of a tablet. `last_key`: the encoded key of the last row in its files; None if
    there is no file.

    `next_number`: the number of its next file. `whole`: no row is missing."""

    files: tuple[FileEntry, ...] = ()
    last_key: bytes | None = None
    next_number: int = 0
    whole: bool = False


class Unfinished:
    """The folder of one backup while it is written. `run`: tells the files of one attempt from those of others."""

    def __init__(self, folder: Folder, plan: Manifest, run: str) -> None:
        self._folder = folder
        self.plan = plan
        self._run = run

    def begin(self) -> None:
        """Write the plan, and make all folders."""
        backup = self.plan.backup_id
        for name in (_RECORDS, *(table.folder for table in self.plan.tables)):
            self._folder.make(f"{backup}/{name}")
        self._folder.put(f"{backup}/{PLAN}", self.plan.sealed())

    def load(self, table: TableEntry, tablet: TabletEntry) -> Done:
        """Return what is already written of a tablet, up to its first damaged file. Reads its files. Raises
        SteleError if they cannot be read now."""
        done = Done()
        while not done.whole and self._is_recorded(tablet, done.next_number):
            try:
                done = self._with_next(table, tablet, done)
            except Corrupt:
                break
        return done

    def _with_next(self, table: TableEntry, tablet: TabletEntry, done: Done) -> Done:
        name = self._record(tablet, done.next_number)
        try:
            content = unseal(bytes(self._folder.read(name)), self._folder.called(name))
            file = None if content["file"] is None else file_from_json(content["file"])
            after_key, last_key = (_key(content[name]) for name in ("afterKey", "lastKey"))
            whole = bool(content["whole"])
        except (ValueError, TypeError, KeyError) as exc:
            raise Corrupt(f"{name}: {exc!r}") from exc
        if after_key != done.last_key:
            # An earlier run wrote it, after a file that was damaged since and written anew with another end.
            raise Corrupt(f"{name}: it does not follow the file before")
        if file is not None:
            checked_bytes(self._folder, self.plan.name_of(table, file), file)
        files = done.files if file is None else (*done.files, file)
        return Done(files, last_key, done.next_number + 1, whole)

    def file_name(self, table: TableEntry, tablet: TabletEntry, number: int) -> str:
        """The name of a tablet's next file."""
        return f"{self.plan.backup_id}/{table.folder}/{tablet.tablet_id}-{number:05}-{self._run}.parquet"

    def record(
        self,
        tablet: TabletEntry,
        before: Done,
        file: FileEntry | None,
        last_key: bytes | None,
        *,
        whole: bool,
    ) -> Done:
        """Record the tablet's next file, which is on the disk; `file` None: no rows were left for one.

        `before`: what was recorded already. `last_key`: the last key of the file. `whole`: the tablet has no
        more rows. Returns what is recorded now."""
        content = {
            "file": None if file is None else file_to_json(file),
            "afterKey": None if before.last_key is None else before.last_key.hex(),
            "lastKey": None if last_key is None else last_key.hex(),
            "whole": whole,
        }
        self._folder.put(self._record(tablet, before.next_number), seal(content))
        files = before.files if file is None else (*before.files, file)
        return Done(files, last_key, before.next_number + 1, whole)

    def _is_recorded(self, tablet: TabletEntry, number: int) -> bool:
        return self._folder.size(self._record(tablet, number)) is not None

    def _record(self, tablet: TabletEntry, number: int) -> str:
        return f"{self.plan.backup_id}/{_RECORDS}/{tablet.tablet_id}-{number:05}.json"

    def publish(self, manifest: Manifest) -> None:
        """Make it a complete backup. Then remove what is not part of it.

        Raises:
            Rejected: ALREADY_PRESENT: another process has finished it.
        """
        backup = manifest.backup_id
        name = f"{backup}/{MANIFEST}"
        if self._folder.size(name) is not None:
            raise Rejected(
                f"{self._folder.called(name)}: another process finished it", code=Code.ALREADY_PRESENT
            )
        self._folder.put(name, manifest.sealed())
        with suppress(SteleError):  # it is complete, whatever remains beside it
            for stray in strays(self._folder, manifest):
                self._folder.delete(f"{backup}/{stray}")
            self._folder.delete_all(f"{backup}/{_RECORDS}")


def _key(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def strays(folder: Folder, manifest: Manifest) -> list[str]:
    """Files in a complete backup's folder that are no part of it, with names relative to it."""
    own = {f"{table.folder}/{file.name}" for table in manifest.tables for file in table.files}
    return sorted(set(folder.files(manifest.backup_id)) - own - {MANIFEST})


def never_began(folder: Folder, backup_id: str) -> bool:
    """Whether a folder without manifest and plan is left from a backup that was killed before its plan was
    written. Such a folder has no file but a partial plan. A folder with other files may be a copy under way,
    whose manifest comes last."""
    return all(name.startswith(f".{PLAN}.") for name in folder.files(backup_id))


def remove(folder: Folder, backup_id: str, names: Sequence[str] = (MANIFEST, PLAN)) -> None:
    """Remove a backup. `names` go first: without them, what an interrupted removal leaves is not taken for a backup."""
    for name in names:
        folder.delete(f"{backup_id}/{name}")
    folder.delete_all(backup_id)
