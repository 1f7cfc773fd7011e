"""Files that will become segments: recycled ones or new ones. Owned by base.py; used by keeper, collection,
recovery.

A file from here gets a segment's name only after its content is written and synced.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from pathlib import Path

from stele.model.ids import NodeId
from stele.wal.files import File, Files
from stele.wal.format import SegmentHeader
from stele.wal.options import LogOptions
from stele.wal.segment import (
    Ready,
    new_segment_id,
    prepared_name,
    segment_name,
    write_header,
    write_zeros,
)

WAITING_SHARE = 16
"""Files that wait for reuse take at most this fraction (one over the number) of the volume."""


class Pool:
    """Collected segments, whose blocks are already written, and new files. Any thread may call.

    Invariant: a file that is handed out has no second name, even after power loss. Otherwise writes to it
    would show up under that name.
    """

    def __init__(self, files: Files, directory: Path, options: LogOptions, node_id: NodeId) -> None:
        self._files = files
        self._directory = directory
        self._node_id = node_id
        self._segment_bytes = options.segment_bytes
        self._segments_max = options.pool_segments_max
        self._low_space_bytes = options.low_space_bytes
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: list[Path] = []
        self._unsynced = False
        self.recycled = 0

    def adopt(self, path: Path, *, sound: bool = True) -> None:
        """Keep a file for reuse, or remove it if it does not fit. Its content must no longer be needed. Syncs
        no name.

        `sound`: the disk can read all of it. Files with a bad sector do not fit: a write next to the sector has to
        read it first, and would fail the log.

        Raises:
            OSError: the file is where it was.
        """
        with self._lock:
            self._unsynced = True
            if sound and len(self._waiting) < self._waiting_max() and self._has_space() and self._fit(path):
                self._number += 1
                new = self._directory / prepared_name(self._number)
                self._files.rename(path, new)
                self._waiting.append(new)
            else:
                self._files.unlink(path)

    def empty(self) -> None:
        """Remove all files that wait, to free their space.

        Raises:
            OSError: some files are left.
        """
        with self._lock:
            while self._waiting:
                with contextlib.suppress(FileNotFoundError):  # somebody removed it
                    self._files.unlink(self._waiting[-1])
                self._waiting.pop()

    def take_back(self, path: Path) -> None:
        """Take back a file from here that did not become a segment. It is whole and still has its old
        name."""
        with self._lock:
            self._waiting.append(path)
            self._unsynced = True

    def sync_names(self) -> None:
        """On return the old names of adopted files are gone for good."""
        with self._lock:
            self._sync_names()

    def _sync_names(self) -> None:
        if self._unsynced:
            self._files.sync_directory(self._directory)
            self._unsynced = False

    def _waiting_max(self) -> int:
        share = self._files.total_bytes(self._directory) // WAITING_SHARE
        return min(self._segments_max, share // self._segment_bytes)

    def _fit(self, path: Path) -> bool:
        file = self._files.open(path)
        try:
            if file.links() > 1 or file.length() < self._segment_bytes:
                return False
            if file.length() > self._segment_bytes:
                file.truncate(self._segment_bytes)
            return True
        finally:
            file.close()

    def _has_space(self) -> bool:
        """Whether the disk has space for another segment beside the space kept for hard state."""
        return self._files.free_bytes(self._directory) >= self._segment_bytes + self._low_space_bytes

    def take(self) -> tuple[File, Path] | None:
        """Return an open recycled file and its current path; None if none waits.

        Raises:
            OSError: the file stays in the pool, unless somebody removed it.
        """
        with self._lock:
            if not self._waiting:
                return None
            self._sync_names()
            path = self._waiting[-1]
            try:
                file = self._files.open(path)
            except FileNotFoundError:
                self._waiting.pop()
                raise
            self._waiting.pop()
            self.recycled += 1
            return file, path

    def fresh(self) -> tuple[File, Path]:
        """Return a new file and its path. The file has the full length, is filled with zeros, and is synced.

        Raises:
            OSError: too little space beside what is kept for hard state, or the disk failed.
        """
        if not self._has_space():
            raise OSError(
                errno.ENOSPC,
                "too little free space for another segment; drop tables or grow the volume",
                str(self._directory),
            )
        with self._lock:
            self._number += 1
            path = self._directory / prepared_name(self._number)
        file = self._files.create(path)
        try:
            write_zeros(file, self._segment_bytes)
        except OSError:
            file.close()
            self._files.unlink(path)
            raise
        return file, path

    def make(self, sequence: int) -> Ready:
        """A segment in place, made from a recycled file or a new one.

        Raises:
            OSError: no space, or the disk failed.
        """
        taken = self.take()
        file, path = taken if taken is not None else self.fresh()
        header = SegmentHeader(
            self._node_id, sequence, new_segment_id(), self._segment_bytes, taken is not None
        )
        try:
            write_header(file, header)
        except OSError:
            file.close()
            self._files.unlink(path)  # its blocks cannot be trusted
            raise
        place = self._directory / segment_name(sequence)
        named = False
        try:
            self._files.rename(path, place)
            named = True
            self._files.sync_directory(self._directory)
        except OSError:
            file.close()
            if named:
                self._files.rename(place, path)  # if this fails, the next segment replaces the file
            self.take_back(path)
            raise
        return Ready(file, place, header)
