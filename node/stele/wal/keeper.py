"""Makes the next segment ready, in a thread of its own, and watches the free space. Started and owned by log.py.

Invariant: what fails here is no failure of the log: appends overrun the full segment meanwhile.
"""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from stele.wal.files import File, Files
from stele.wal.format import SegmentHeader
from stele.wal.options import LogOptions
from stele.wal.segment import Ready, make_ready, prepared_name, write_zeros

if TYPE_CHECKING:
    from stele.wal.log import Log

_log = structlog.get_logger("stele.wal")


class Pool:
    """Files that may become segments: collected ones, whose blocks are written already. Not thread-safe by itself."""

    def __init__(self, files: Files, directory: Path, options: LogOptions) -> None:
        self._files = files
        self._directory = directory
        self._segment_bytes = options.segment_bytes
        self._segments_max = options.pool_segments_max
        self._low_space_bytes = options.low_space_bytes
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: list[Path] = []
        self.recycled = 0

    def adopt(self, path: Path) -> None:
        """Take a file over whose content nobody needs, or remove it if it does not fit."""
        with self._lock:
            if len(self._waiting) < self._segments_max and self._fit(path):
                self._number += 1
                new = self._directory / prepared_name(self._number)
                if new != path:
                    self._files.rename(path, new)
                self._waiting.append(new)
            else:
                self._files.unlink(path)
            # The old name must be gone before the bytes below it change.
            self._files.sync_directory(self._directory)

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

    def take(self) -> tuple[File, Path] | None:
        """A recycled file, open, with the name it has now."""
        with self._lock:
            if not self._waiting:
                return None
            path = self._waiting.pop()
            self.recycled += 1
            return self._files.open(path), path

    def fresh(self) -> tuple[File, Path]:
        """A new file of the full length, written with zeros and synced.

        Raises:
            OSError: no space for it above what is kept free for hard state.
        """
        if self._files.free_bytes(self._directory) < self._segment_bytes + self._low_space_bytes:
            raise OSError(errno.ENOSPC, "too little free space for another segment", str(self._directory))
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


def make_next(log: Log, sequence: int) -> Ready:
    """A segment in place, from the pool or new.

    Raises:
        OSError: no space, or a disk that fails.
    """
    taken = log.pool.take()
    file, path = taken if taken is not None else log.pool.fresh()
    try:
        header = SegmentHeader(
            log.node_id, sequence, log.new_segment_id(), log.options.segment_bytes, taken is not None
        )
        return make_ready(log.files, log.directory, header, path, file)
    except OSError:
        file.close()
        raise


class Keeper:
    """The thread."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="stele-wal-keeper", daemon=True)
        self._failing = False

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """A segment was taken: make another."""
        self._wake.set()

    def stop(self) -> None:
        """End and wait."""
        self._stop = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop:
            try:
                self._log.refresh_space()
                sequence = self._log.wanted_sequence()
                if sequence is not None:
                    self._log.offer_next(make_next(self._log, sequence))
                    self._log.stats.segments_prepared += 1
                self._failing = False
            except OSError as exc:
                if not self._failing:
                    _log.warning("segment not prepared; appends overrun the last one", error=str(exc))
                self._failing = True
            self._wake.wait(self._log.options.keeper_interval_ms / 1000)
            self._wake.clear()
