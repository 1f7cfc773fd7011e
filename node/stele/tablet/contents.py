"""What a store consists of at one moment: rows in memory, column files, the manifest. All changes of that
happen here.

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

from stele.tablet import manifest
from stele.tablet.colfile import ColumnFile
from stele.tablet.files import Files
from stele.tablet.manifest import Manifest
from stele.tablet.memtable import MemTable


@dataclass(frozen=True, slots=True)
class State:
    """What readers see. `frozen`: the memtable that is being flushed. `files`: newest first, as in the
    manifest."""

    active: MemTable
    frozen: MemTable | None
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

    def freeze(self) -> None:
        """Start a new memtable; the old one is now the one to flush."""
        with self.swap_lock:
            old = self.state
            self.state = replace(old, active=MemTable(old.manifest.schema), frozen=old.active)

    def reserve_number(self) -> int:
        """A number for file names. It is never given twice, so a listed file is never overwritten."""
        with self.swap_lock:
            current = self.state.manifest
            self.state = replace(self.state, manifest=replace(current, next_file=current.next_file + 1))
        return current.next_file

    def install(
        self, new: Manifest, place: slice, opened: Sequence[ColumnFile], *, flushed: bool = False
    ) -> None:
        """Make `new` the durable manifest; then readers see `opened` in place of the files at `place`.

        `flushed`: they also no longer see the memtable that was flushed. Call with `manifest_lock` held.

        Raises:
            Retryable: DISK_FULL; readers see the same as before.
            Corrupt: IO_ERROR.
        """
        manifest.write(self.files, self.directory, new)
        with self.swap_lock:
            files = list(self.state.files)
            files[place] = opened
            frozen = None if flushed else self.state.frozen
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
            self.state = replace(
                self.state, active=MemTable(self.state.manifest.schema), frozen=None, files=()
            )
