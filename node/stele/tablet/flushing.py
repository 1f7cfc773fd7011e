"""A flush of a store: the rows under flush become column files, the exactly-once state a file beside them. Made by store.py,
which tells README.md's rules of what may be dropped; `write` may run on any thread.

Invariant: a flush that failed leaves no files, and changes nothing that readers see.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c

from stele.model.errors import Corrupt
from stele.tablet import exactly_once
from stele.tablet.checked import open_sealed, read_bytes, seal
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import NAME, FileMeta
from stele.tablet.colwriter import write_layers
from stele.tablet.contents import Contents
from stele.tablet.manifest import Manifest
from stele.tablet.memtable import MemTable
from stele.tablet.progress import Progress
from stele.tablet.sorted_runs import Kept

_ONCE_MAGIC, _ONCE_VERSION = b"STLONCE1", 1
_RUN_BYTES = 64 << 20
"""So much of the memory under flush is put in order at a time: it may be far more than it takes (`block_checks.complete`)."""


class StoreFlush:
    """Writes the frozen rows as a column file, the exactly-once state beside it, and the manifest that lists both. `once`: what
    `ExactlyOnce.frozen` gave. `mark`: what snapshots below it alone see is dropped."""

    def __init__(
        self, contents: Contents, frozen: MemTable, progress: Progress, once: Any, mark: int
    ) -> None:
        self.opid = progress.applied
        self.failed = False
        self.frozen = frozen
        self._contents = contents
        self._ceiling = progress.max_ceiling
        self._timestamp = progress.last_timestamp
        self._once = once
        self._mark = mark

    def write(self) -> None:
        """See FlushJob."""
        try:
            self._write()
        except BaseException:
            self.failed = True
            raise

    def _write(self) -> None:
        """Files, then the manifest, then readers see the file instead of memory."""
        contents = self._contents
        with contents.manifest_lock:
            current = contents.state.manifest
            if current.opid == self.opid:
                return
            number = contents.reserve_number()
            try:
                self._write_files(current, number)
            except Exception:
                # It is tried again soon, and as long as it takes: what it left would fill what room there is.
                made = (path.name for path in contents.directory.glob(f"{NAME}{number:08x}*"))
                contents.remove_unlisted(f"once-{number:08x}", *made)
                raise

    def _write_files(self, current: Manifest, number: int) -> None:
        contents = self._contents
        once_name = f"once-{number:08x}"
        body = seal(_ONCE_MAGIC, _ONCE_VERSION, exactly_once.encode(self._once))
        contents.files.write_new(contents.directory / once_name, [body])
        metas: tuple[FileMeta, ...] = ()
        if self.frozen.rows:
            # Files that are older may hold what a delete hides, so a delete goes only when there are none.
            runs, bottom = self.frozen.view().runs(), not current.files
            kept = Kept(runs, self._mark, bottom=bottom, as_applied=True, run_bytes=_RUN_BYTES)
            path = contents.directory / f"{NAME}{number:08x}"
            layers = ((kept.run(at) for at in layer if len(at)) for layer in kept.layers)
            metas = write_layers(contents.files, path, current.schema, layers)
        opened = tuple(ColumnFile(contents.directory / meta.name, meta) for meta in metas)
        new = replace(
            current,
            opid=self.opid,
            max_ceiling=self._ceiling,
            last_timestamp=self._timestamp,
            history_mark=max(current.history_mark, self._mark),
            next_file=number + 1,  # a merge that is under way has a name no number can take
            once=once_name,
            once_size=len(body),
            once_crc=google_crc32c.value(body),
            files=(*metas, *current.files),
        )
        contents.install(new, slice(0), opened, flushed=True)
        if current.once:
            contents.files.remove(contents.directory / current.once)


def read_once(directory: Path, listed: Manifest) -> bytes:
    """The exactly-once state that a flush wrote, as `ExactlyOnce.decode` takes it. `listed` names one.

    Raises:
        Corrupt: missing or damaged (or IO_ERROR), or not the file that the manifest means.
        Rejected: UNSUPPORTED_VERSION.
    """
    data = read_bytes(directory / listed.once)
    body = open_sealed(data, _ONCE_MAGIC, _ONCE_VERSION, listed.once)
    found = len(data), google_crc32c.value(data)
    if listed.once_crc is not None and found != (listed.once_size, listed.once_crc):
        raise Corrupt(
            f"{listed.once}: not the file that the manifest lists, though a whole one; with it a retry would be taken for "
            "a new write; copy the replica from a peer"
        )
    return body
