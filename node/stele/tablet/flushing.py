"""A flush of a store: the frozen rows become column files, with the exactly-once state in a file beside them.

Made by store.py; README.md has the rules of what may be dropped. `write` may run in any thread. Invariant: a
failed flush leaves no files and changes nothing that readers see.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c

from stele.model.errors import Corrupt
from stele.model.holds import Held
from stele.model.schema import Schema
from stele.tablet import exactly_once, jobs
from stele.tablet.checked import open_sealed, read_bytes, seal
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import NAME, FileMeta
from stele.tablet.colwriter import Format, write_layers
from stele.tablet.contents import Contents
from stele.tablet.manifest import Manifest
from stele.tablet.memtable import MemTable
from stele.tablet.progress import Progress
from stele.tablet.sorted_runs import Kept

_ONCE_MAGIC, _ONCE_VERSION = b"STLONCE1", 1
_WITH_JOBS_VERSION = 2
"""The version of an exactly-once file that begins with the jobs and a line end."""
_VERSION = struct.Struct("<I")
_RUN_BYTES = 64 << 20
"""Bytes of frozen rows that are sorted at a time. All of them may take far more memory
(`block_checks.complete`)."""


class StoreFlush:
    """Writes the frozen rows, the exactly-once state, and then the manifest that lists both.

    `frozen`: memtables, newest first. Each becomes a file with its own schema. `schema`: the newest one.
    `once`: the result of `ExactlyOnce.frozen`; `of_jobs`: that of `Jobs.frozen`. `mark`: versions that only
    snapshots below it see are dropped. `held`: the holds on history.
    `file_version`: the format of the column files."""

    def __init__(
        self,
        contents: Contents,
        frozen: Sequence[MemTable],
        schema: Schema,
        progress: Progress,
        once: Any,
        of_jobs: Any,
        mark: int,
        held: Held,
        file_version: int,
    ) -> None:
        self.opid = progress.applied
        self.failed = False
        self.frozen = frozen
        self.mark = mark
        self._held = held
        self._format = Format(file_version)
        self._schema = schema
        self._contents = contents
        self._ceiling = progress.max_ceiling
        self._timestamp = progress.last_timestamp
        self._once = once
        self._jobs = of_jobs

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
            numbers = [contents.reserve_number() for _ in self.frozen or (None,)]
            try:
                self._write_files(current, numbers)
            except Exception:
                # The flush will be tried again soon and often, so leftovers would fill the disk.
                made = (p.name for n in numbers for p in contents.directory.glob(f"{NAME}{n:08x}*"))
                contents.remove_unlisted(f"once-{numbers[0]:08x}", *made)
                raise

    def _write_files(self, current: Manifest, numbers: Sequence[int]) -> None:
        """Write the files of a flush. `numbers`: a file number for each memtable; at least one."""
        contents = self._contents
        once_name = f"once-{numbers[0]:08x}"
        once, of_jobs = exactly_once.encode(self._once), jobs.encode(self._jobs)
        if of_jobs:  # releases before jobs read every other file
            body = seal(_ONCE_MAGIC, _WITH_JOBS_VERSION, of_jobs + b"\n" + once)
        else:
            body = seal(_ONCE_MAGIC, _ONCE_VERSION, once)
        contents.files.write_new(contents.directory / once_name, [body])
        metas: tuple[FileMeta, ...] = ()
        for table, number in zip(reversed(self.frozen), numbers):
            metas = (*self._write_table(table, number, bottom=not (metas or current.files)), *metas)
        opened = tuple(ColumnFile(contents.directory / meta.name, meta) for meta in metas)
        new = replace(
            current,
            schemas=(self._schema,),
            opid=self.opid,
            max_ceiling=self._ceiling,
            last_timestamp=self._timestamp,
            history_mark=max(current.history_mark, self.mark),
            next_file=numbers[-1] + 1,  # a running merge has a name that no number gives
            once=once_name,
            once_size=len(body),
            once_crc=google_crc32c.value(body),
            files=(*metas, *current.files),
            held=self._held,
        )
        contents.install(new, slice(0), opened, self.frozen)
        if current.once:
            contents.files.remove(contents.directory / current.once)

    def _write_table(self, table: MemTable, number: int, *, bottom: bool) -> tuple[FileMeta, ...]:
        """The files of one memtable. `bottom`: nothing older can hold a row that a delete hides."""
        runs = table.view().runs()
        kept = Kept(runs, self.mark, bottom=bottom, as_applied=True, run_bytes=_RUN_BYTES)
        path = self._contents.directory / f"{NAME}{number:08x}"
        layers = ((kept.run(at) for at in layer if len(at)) for layer in kept.layers)
        return write_layers(self._contents.files, path, table.schema, layers, self._format)


def read_once(directory: Path, listed: Manifest) -> tuple[bytes, bytes]:
    """The exactly-once state that a flush wrote, for `ExactlyOnce.decode`, and the jobs, for `Jobs.decode`; b"" if there
    are none. `listed` must name a file.

    Raises:
        Corrupt: the file is missing, damaged, or not the one that the manifest lists. IO_ERROR: the disk failed.
        Rejected: UNSUPPORTED_VERSION.
    """
    data = read_bytes(directory / listed.once)
    with_jobs = data[8:12] == _VERSION.pack(_WITH_JOBS_VERSION)
    version = _WITH_JOBS_VERSION if with_jobs else _ONCE_VERSION
    body = open_sealed(data, _ONCE_MAGIC, version, listed.once)
    found = len(data), google_crc32c.value(data)
    if listed.once_crc is not None and found != (listed.once_size, listed.once_crc):
        raise Corrupt(
            f"{listed.once}: a whole file, but not the one that the manifest lists; "
            "a retry could be applied twice; copy the replica from a peer"
        )
    if not with_jobs:
        return body, b""
    of_jobs, end, once = body.partition(b"\n")
    if not end:
        raise Corrupt(f"{listed.once}: the list of jobs in it is cut off; copy the replica from a peer")
    return once, of_jobs
