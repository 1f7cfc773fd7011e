"""Links the files of a store into another directory for a copy, and reads them whole to check them. Called by
store.py.

Any thread may call; both block. Invariant: a checkpoint has the files that one manifest lists, whatever flushes and
merges do meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from stele.model.errors import Code, Corrupt, Rejected
from stele.tablet import manifest
from stele.tablet.colfile import ColumnFile
from stele.tablet.contents import Contents
from stele.tablet.files import translate
from stele.tablet.flushing import read_once
from stele.tablet.machine import Checkpoint


def checkpoint(contents: Contents, directory: Path) -> Checkpoint:
    """Link the files of a store into an empty directory. See StateMachine."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise translate(exc, f"making {directory.name}") from exc
    if any(directory.iterdir()):
        raise Rejected(f"checkpoint: {directory.name} is not empty", code=Code.ALREADY_PRESENT)
    files = contents.files
    with contents.manifest_lock:
        on_disk = manifest.read(contents.directory)
        names = (*on_disk.file_names(), manifest.NAME)
        for name in names:
            files.link(contents.directory / name, directory / name)
    files.sync_directory(directory)
    return Checkpoint(on_disk.opid, names)


def verify(contents: Contents, read: Callable[[int], None], compared: Collection[str]) -> None:
    """Read the files of a store and check them. See StateMachine."""
    with contents.manifest_lock:
        listed = manifest.read(contents.directory)
        if listed.once:
            read_once(contents.directory, listed)
    for meta in listed.files:
        try:
            file = ColumnFile(contents.directory / meta.name, meta)
            if meta.name not in compared:
                file.verify(read)
        except Corrupt:
            if meta in contents.state.manifest.files:  # otherwise a merge has replaced the file meanwhile
                raise
