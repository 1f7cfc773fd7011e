"""What one store consists of at a time: rows in memory, column files, the manifest; and the one place where that changes. Used by
store.py, flushing.py and merging.py.

Readers take `state`, which is immutable, once. Who changes files holds `manifest_lock` from when it looks at the manifest until
the new one stands, which may last; `state` is swapped under `swap_lock`, which is held for a moment.

Invariant: readers see a file only once the manifest that lists it is on the disk.
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
    """What readers see. `frozen`: memory under flush. `files` newest first, as in the manifest."""

    active: MemTable
    frozen: MemTable | None
    files: tuple[ColumnFile, ...]
    manifest: Manifest


class Contents:
    """The state of one store, and its changes. Any thread."""

    def __init__(self, directory: Path, files: Files, state: State) -> None:
        self.directory = directory
        self.files = files
        self.state = state
        self.swap_lock = threading.Lock()
        self.manifest_lock = threading.Lock()

    def freeze(self) -> None:
        """New rows go to fresh memory; what was there is under flush."""
        with self.swap_lock:
            old = self.state
            self.state = replace(old, active=MemTable(old.manifest.schema), frozen=old.active)

    def reserve_number(self) -> int:
        """A number for file names; never the same twice, so that a listed file is never written again."""
        with self.swap_lock:
            current = self.state.manifest
            self.state = replace(self.state, manifest=replace(current, next_file=current.next_file + 1))
        return current.next_file

    def install(
        self, new: Manifest, place: slice, opened: Sequence[ColumnFile], *, flushed: bool = False
    ) -> None:
        """Make `new` the manifest, durably; then readers see `opened` where the files at `place` were. `flushed`: and no more the
        memory under flush. Called with `manifest_lock` held.

        Raises:
            Retryable: DISK_FULL; readers see what they saw.
            Corrupt: IO_ERROR.
        """
        manifest.write(self.files, self.directory, new)
        with self.swap_lock:
            files = list(self.state.files)
            files[place] = opened
            frozen = None if flushed else self.state.frozen
            self.state = replace(self.state, frozen=frozen, files=tuple(files), manifest=new)

    def remove_unlisted(self, *names: str) -> None:
        """Remove those of the files just written that the manifest on the disk does not list. Called with `manifest_lock` held."""
        listed = manifest.read(self.directory).file_names()
        for name in names:
            if name not in listed:
                self.files.remove(self.directory / name)

    def let_go(self) -> None:
        """The store is closed: nothing of it stays in memory."""
        with self.swap_lock:
            self.state = replace(
                self.state, active=MemTable(self.state.manifest.schema), frozen=None, files=()
            )
