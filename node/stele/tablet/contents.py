"""What a store consists of at one moment: rows in memory, column files, the manifest. Only this file changes any
of them.

Used by store.py, flushing.py and merging.py. Readers take the immutable `state` once. Whoever changes files
holds `manifest_lock` from reading the manifest until the new one is on disk, which may take long. `state` is
swapped under `swap_lock`, which is held only for a moment.

Invariant: readers see a file only after the manifest that lists it is on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stele.model.schema import Schema
from stele.tablet import manifest
from stele.tablet.colfile import ColumnFile
from stele.tablet.files import Files
from stele.tablet.manifest import Manifest
from stele.tablet.memtable import MemTable


@dataclass(frozen=True, slots=True)
class State:
    """What readers see. `frozen`: memtables that get no more rows, newest first: those being flushed, and
    those that wait for it because the schema has changed. `files`: newest first, as in the manifest.

    Each memtable has the schema of its rows; that of `active` is the newest."""

    active: MemTable
    frozen: tuple[MemTable, ...]
    files: tuple[ColumnFile, ...]
    manifest: Manifest


class Contents:
    """The state of one store, and changes of it. Any thread."""

    def __init__(self, directory: Path, files: Files, state: State) -> None:
        self.directory = directory
        self.files = files
        self.state = state
        self.swap_lock = threading.Lock()
        self.manifest_lock = threading.Lock()

    def freeze(self, schema: Schema) -> None:
        """Start a new memtable with this schema. The old one, if it has rows, now waits for a flush."""
        with self.swap_lock:
            old = self.state
            frozen = (old.active, *old.frozen) if old.active.rows else old.frozen
            self.state = replace(old, active=MemTable(schema), frozen=frozen)

    def reserve_number(self) -> int:
        """A number for file names. It is never given twice, so a listed file is never overwritten."""
        with self.swap_lock:
            current = self.state.manifest
            self.state = replace(self.state, manifest=replace(current, next_file=current.next_file + 1))
        return current.next_file

    def install(
        self,
        new: Manifest,
        place: slice,
        opened: Sequence[ColumnFile],
        flushed: Sequence[MemTable] = (),
    ) -> None:
        """Make `new` the durable manifest; then readers see `opened` in place of the files at `place`.

        They also no longer see the `flushed` memtables. Call with `manifest_lock` held.

        Raises:
            Retryable: DISK_FULL; readers see the same as before.
            Corrupt: IO_ERROR.
        """
        manifest.write(self.files, self.directory, new)
        with self.swap_lock:
            files = list(self.state.files)
            files[place] = opened
            frozen = tuple(table for table in self.state.frozen if table not in flushed)
            self.state = replace(self.state, frozen=frozen, files=tuple(files), manifest=new)

    def remove_unlisted(self, *names: str) -> None:
        """Remove those of the just written files that the manifest on disk does not list. Call with
        `manifest_lock` held."""
        listed = manifest.read(self.directory).file_names()
        for name in names:
            if name not in listed:
                self.files.remove(self.directory / name)

    def release(self) -> None:
        """Drop everything from memory, because the store is closed."""
        with self.swap_lock:
            self.state = replace(self.state, active=MemTable(self.state.active.schema), frozen=(), files=())
