"""A flush of a store: the frozen rows become column files, with the exactly-once state in a file beside them.

Made by store.py; README.md has the rules of what may be dropped. `write` may run in any thread. Invariant: a
failed flush leaves no files and changes nothing that readers see.
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
"""Bytes of frozen rows that are sorted at a time. All of them may take far more memory
(`block_checks.complete`)."""


class StoreFlush:
    """Writes the frozen rows, the exactly-once state, and then the manifest that lists both.

    `once`: the result of `ExactlyOnce.frozen`. `mark`: versions that only snapshots below it see are
    dropped."""

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
        """Write the files, then the manifest; then readers see the file instead of the memtable."""
        contents = self._contents
        with contents.manifest_lock:
            current = contents.state.manifest
            if current.opid == self.opid:
                return
            number = contents.reserve_number()
            try:
                self._write_files(current, number)
            except Exception:
                # The flush will be tried again soon and often, so leftovers would fill the disk.
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
            # Older files may hold the row that a delete hides, so drop deletes only if there are none.
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
            next_file=number + 1,  # a running merge has a name that no number gives
            once=once_name,
            once_size=len(body),
            once_crc=google_crc32c.value(body),
            files=(*metas, *current.files),
        )
        contents.install(new, slice(0), opened, flushed=True)
        if current.once:
            contents.files.remove(contents.directory / current.once)


def read_once(directory: Path, listed: Manifest) -> bytes:
    """The exactly-once state that a flush wrote, for `ExactlyOnce.decode`. `listed` must name one.

    Raises:
        Corrupt: missing, damaged, or another file than the manifest lists; or IO_ERROR.
        Rejected: UNSUPPORTED_VERSION.
    """
    data = read_bytes(directory / listed.once)
    body = open_sealed(data, _ONCE_MAGIC, _ONCE_VERSION, listed.once)
    found = len(data), google_crc32c.value(data)
    if listed.once_crc is not None and found != (listed.once_size, listed.once_crc):
        raise Corrupt(
            f"{listed.once}: a whole file, but not the one that the manifest lists; "
            "a retry could be applied twice; copy the replica from a peer"
        )
    return body
